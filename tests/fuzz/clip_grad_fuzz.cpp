// Norms of finite elements, equal at every level and within rounding of long double; counts and scaling exactly.
#include "observe_case.h"
#include "qsim/clip_grad.h"

namespace {

template <class T>
void check(fuzz::Input& input, int index) {
  const int n = input.between(0, 300);
  const auto x = fuzz::observed_elements<T>(input, n);
  const double p = input.pick({2.0, 1.0, double{INFINITY}, 3.0, 0.5});
  const double coefficient = input.pick({1.0, 0.5, 1.0 / 3, 1e-20, 0.0});
  long double power = 0;
  std::int64_t others = 0;
  for (T e : x) {
    const long double magnitude = std::fabs(fuzz::widened(e));
    if (!std::isfinite(magnitude)) {
      ++others;
    } else {
      power = std::isinf(p) ? std::max(power, magnitude) : power + std::pow(magnitude, static_cast<long double>(p));
    }
  }
  const bool replace = others > 0;
  double first = -1;
  for (qsim::cpu::Level level : fuzz::runnable_levels()) {
    const auto& kernels = qsim::cpu::clip_grad_kernels(level);
    const qsim::GradSum sum = kernels.sum[index](x.data(), n, p);
    if (first < 0) first = sum.power;
    fuzz::require(sum.nonfinite == others, level, "count of non-finite elements");
    fuzz::require_same(sum.power, first, level, "sum of powers", 0);
    const auto expected = static_cast<double>(power);
    fuzz::require(std::isinf(expected) || std::fabs(sum.power - expected) <= 1e-12 * expected + 1e-300, level, "norm");
    auto scaled = x;
    kernels.scale[index](scaled.data(), n, coefficient, replace);
    for (std::size_t i = 0; i < x.size(); ++i) {
      using A = fuzz::arithmetic_t<T>;
      const A value = fuzz::widened(x[i]), product = value * static_cast<A>(coefficient);
      fuzz::require_same(scaled[i], fuzz::narrowed<T>(std::isfinite(value) ? product : A(0)), level, "scaled",
                         static_cast<std::int64_t>(i));
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  fuzz::with_element(input, [&](auto type, int index) { check<decltype(type)>(input, index); });
  return 0;
}
