// Running ranges, batch after batch, against docs/numerics.md, section 4 (`ema`).
#include "choose_qparams_case.h"
#include "qsim/observe_fake_quantize.h"

namespace {

struct Ranges {
  std::vector<float> lowest, highest, scale;
  std::vector<std::int32_t> zero_point;
};

float average(double from, double to, double weight) {
  return static_cast<float>((1 - weight) * from + weight * to) + 0.f;
}

void follow_one(Ranges& ranges, std::size_t i, float low, float high, const qsim::RunningRule& rule) {
  if (!(low <= high)) return;
  const bool first = !(ranges.lowest[i] <= ranges.highest[i]);
  ranges.lowest[i] = first ? low : average(ranges.lowest[i], low, rule.averaging);
  ranges.highest[i] = first ? high : average(ranges.highest[i], high, rule.averaging);
  const auto params = fuzz::expected_qparams<float>(ranges.lowest[i], ranges.highest[i], rule.grid, rule.min_scale);
  ranges.scale[i] = params.scale;
  ranges.zero_point[i] = params.zero_point;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const auto n = static_cast<std::size_t>(input.between(1, 20));
  const qsim::RunningRule rule = {input.pick({0.01, 0.0, 1.0, 0.5, 1.0 / 3}), fuzz::any_grid(input),
                                  input.pick({0.0, 1.19e-7, 1e-3})};
  const float unit = input.positive<float>();
  const Ranges empty = {std::vector<float>(n, INFINITY), std::vector<float>(n, -INFINITY), std::vector<float>(n, NAN),
                        std::vector<std::int32_t>(n)};
  Ranges expected = empty;
  std::vector<Ranges> got(fuzz::runnable_levels().size(), empty);
  for (int batch = input.between(1, 5); batch > 0; --batch) {
    std::vector<float> low(n, INFINITY), high(n, -INFINITY);
    for (std::size_t i = 0; i < n; ++i) {
      const float a = input.near_steps(unit), b = input.near_steps(unit);
      if (std::isfinite(a) && std::isfinite(b)) low[i] = std::min(a, b) + 0.f, high[i] = std::max(a, b) + 0.f;
      follow_one(expected, i, low[i], high[i], rule);
    }
    for (std::size_t l = 0; l < got.size(); ++l) {
      const qsim::cpu::Level level = fuzz::runnable_levels()[l];
      Ranges& own = got[l];
      qsim::cpu::running_range_kernels(level).follow(
          low.data(), high.data(), static_cast<std::int64_t>(n), rule,
          {own.lowest.data(), own.highest.data(), own.scale.data(), own.zero_point.data()});
      for (std::size_t i = 0; i < n; ++i) {
        const auto at = static_cast<std::int64_t>(i);
        fuzz::require_same(own.lowest[i], expected.lowest[i], level, "lowest", at);
        fuzz::require_same(own.highest[i], expected.highest[i], level, "highest", at);
        fuzz::require_same(own.scale[i], expected.scale[i], level, "scale", at);
        fuzz::require(own.zero_point[i] == expected.zero_point[i], level, "zero point");
      }
    }
  }
  return 0;
}
