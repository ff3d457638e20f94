// Searches on data: the same range at every level, and none of the candidates is noticeably better.
#include <algorithm>

#include "observe_case.h"
#include "qsim/choose_qparams.h"
#include "search_case.h"

namespace {

// The squared error of the encoding that a range leads to, in units of the data. What is more than `off_the_grid` steps
// from its number weighs gamma: half a step, but for what is too close to it to be judged.
template <class T>
double cost_of(const std::vector<T>& x, qsim::Range range, const qsim::RangeSearch& search, double off_the_grid) {
  const auto params = qsim::choose_qparams<T>(range.low, range.high, search.grid, 0);
  const double scale = params.scale;
  const double low = static_cast<double>(search.grid.quant_min) - params.zero_point;
  const double high = static_cast<double>(search.grid.quant_max) - params.zero_point;
  double sum = 0;
  for (T e : x) {
    const double steps = e / scale, error = steps - std::clamp(std::nearbyint(steps), low, high);
    sum += (std::abs(error) > off_the_grid ? search.gamma : 1.0) * (error * error);
  }
  return sum * scale * scale;
}

template <class T>
void check(fuzz::Input& input, int index) {
  using A = fuzz::arithmetic_t<T>;
  const qsim::RangeSearch search = fuzz::range_search(input);
  // Rounding is judged in A: within some thousand steps of zero, ordinary scales.
  const A scale = input.pick({A(0.1), A(1), A(0.037), A(1e-6), A(77)});
  std::vector<T> x(static_cast<std::size_t>(input.between(0, 70)));
  std::vector<A> values;
  double lowest = 0, highest = 0;
  for (T& e : x) {
    e = fuzz::narrowed<T>(input.bits(1) % 32 ? static_cast<A>(input.between(-2000, 2000)) / 16 * scale : A(NAN));
    const A value = fuzz::widened(e);
    if (!std::isfinite(value)) continue;
    values.push_back(value);
    lowest = std::min<double>(lowest, value), highest = std::max<double>(highest, value);
  }
  const auto n = static_cast<std::int64_t>(x.size());
  A first_low = 0, first_high = 0;
  for (qsim::cpu::Level level : fuzz::runnable_levels()) {
    const auto& kernels = qsim::cpu::search_range_data_kernels(level);
    const std::size_t bytes = kernels.workspace_bytes(static_cast<qsim::Element>(index), n, search.method);
    std::vector<double> workspace((bytes + sizeof(double) - 1) / sizeof(double));
    A low, high;
    kernels.run[index](x.data(), n, search, workspace.data(), &low, &high);
    if (level == qsim::cpu::Level::baseline) first_low = low, first_high = high;
    fuzz::require_same(low, first_low, level, "low", 0);
    fuzz::require_same(high, first_high, level, "high", 0);
    fuzz::require(fuzz::sane(low, high, !values.empty()), level, "a range is finite and ordered");
  }
  const bool least_cost = search.method == qsim::RangeMethod::mse || search.method == qsim::RangeMethod::tf_enhanced;
  if (!least_cost || lowest == highest) return;
  const qsim::RangeCandidates<A> candidates{{lowest, highest}, search.grid};
  // Values some 2^16 steps from zero are placed to within 2^-8 of a step in float32.
  const bool fine = search.grid.quant_max - search.grid.quant_min > 255;
  const double rounding = sizeof(A) == 8 ? 1e-9 : fine ? 0.05 : 1e-3;
  double best = INFINITY;
  for (int i = 0; i < candidates.count(); ++i) {
    const qsim::Range range = candidates.at(i);
    if (range.low < range.high) best = std::min(best, cost_of(values, range, search, 0.5 - rounding));
  }
  const double chosen = cost_of(values, {first_low, first_high}, search, 0.5 + rounding);
  const double step = qsim::choose_qparams<double>(lowest, highest, search.grid, 0).scale;
  fuzz::require(chosen <= best * (1 + rounding) + rounding * rounding * static_cast<double>(x.size()) * step * step,
                qsim::cpu::Level::baseline, "a candidate is better");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  fuzz::with_element(input, [&](auto type, int index) { check<decltype(type)>(input, index); });
  return 0;
}
