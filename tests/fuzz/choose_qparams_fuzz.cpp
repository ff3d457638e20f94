// Scale and zero point against the scalar twin.
#include "choose_qparams_case.h"

namespace {

template <class T, class Of>
void check(fuzz::Input& input, Of of) {
  const T scale = input.positive<T>();
  const qsim::QuantGrid grid = fuzz::any_grid(input);
  const double min_scale = input.pick({0.0, 1.19e-7, 1e-3});
  std::vector<T> low(7), high(7);
  for (std::size_t i = 0; i < low.size(); ++i) {
    low[i] = input.near_steps(scale), high[i] = input.near_steps(scale);
    if (input.bits(1) % 8 && low[i] > high[i]) std::swap(low[i], high[i]);
  }
  for (qsim::cpu::Level level : fuzz::runnable_levels()) {
    std::vector<T> scales(low.size());
    std::vector<std::int32_t> zero_points(low.size());
    of(qsim::cpu::choose_qparams_kernels(level))(low.data(), high.data(), static_cast<std::int64_t>(low.size()), grid,
                                                 min_scale, scales.data(), zero_points.data());
    for (std::size_t i = 0; i < low.size(); ++i) {
      const auto params = fuzz::expected_qparams<T>(low[i], high[i], grid, min_scale);
      fuzz::require_same(scales[i], params.scale, level, "scale", static_cast<std::int64_t>(i));
      fuzz::require(zero_points[i] == params.zero_point, level, "zero point");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  if (input.flip()) {
    check<float>(input, [](auto& kernels) { return kernels.f32; });
  } else {
    check<double>(input, [](auto& kernels) { return kernels.f64; });
  }
  return 0;
}
