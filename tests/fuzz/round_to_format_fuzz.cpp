// Rounding to float formats, masks, counts and sums against docs/numerics.md, section 7, in float64.
#include "qsim/round_to_format.h"

#include <iterator>

#include "observe_case.h"

namespace {

using qsim::cpu::Level;

struct Shape {
  int fraction, least;  // bits; exponent of the smallest normal number
  double largest;
  bool infinite;
};
constexpr Shape kShapes[] = {{10, -14, 65504, true}, {7, -126, 0x1.fep127, true}, {3, -6, 448, false},
                             {2, -14, 57344, true},  {2, -2, 28, false},          {3, 0, 7.5, false},
                             {1, 0, 6, false}};
static_assert(std::size(kShapes) == qsim::kAll<qsim::FloatFormat>.size());

// A finite magnitude on the grid of the format, which goes on beyond its largest number.
double on_grid(double magnitude, const Shape& shape) {
  if (magnitude == 0) return 0;
  const int unit = std::max(std::ilogb(magnitude), shape.least) - shape.fraction;
  return std::ldexp(std::nearbyint(std::ldexp(magnitude, -unit)), unit);
}

template <class T>
double largest_in(const Shape& shape) {  // bfloat16 has no 65504
  return std::is_same_v<T, qsim::BFloat16> && shape.largest == 65504 ? 65280 : shape.largest;
}

struct Expected {
  double y;
  bool in_format;
};

template <class T>
Expected round(double x, const Shape& shape, bool saturate, qsim::FormatCounts& counts, qsim::SquaredSums& squares) {
  const double beyond = saturate ? largest_in<T>(shape) : shape.infinite ? INFINITY : NAN;
  counts.nans += std::isnan(x);
  counts.infs += std::isinf(x);
  if (std::isnan(x)) return {x, false};
  if (std::isinf(x)) return {std::copysign(beyond, x), false};
  const double nearest = on_grid(std::fabs(x), shape);
  const bool overflows = nearest > shape.largest;
  counts.overflows += overflows;
  counts.underflows += x != 0 && nearest == 0;
  counts.subnormals += nearest != 0 && nearest < std::ldexp(1, shape.least);
  const double y = overflows ? beyond : nearest, error = std::fabs(x) - y;
  if (std::isfinite(y)) squares.error += error * error, squares.signal += x * x;
  return {std::copysign(y, x), !overflows};
}

bool near(double got, double expected) {
  return got == expected || std::fabs(got - expected) <= 1e-6 * expected + 1e-300;
}

template <class T, class Of>
void check(fuzz::Input& input, Of of) {
  using A = fuzz::arithmetic_t<T>;
  const std::size_t format = input.bits(1) % std::size(kShapes);
  const int n = input.between(0, input.flip() ? 70 : 1500);
  const Shape shape = kShapes[format];
  const bool saturate = input.flip();
  // Steps of the format where it is subnormal, normal and about to overflow; or anything.
  const double unit =
      std::ldexp(1, input.pick({shape.least - shape.fraction, -shape.fraction, std::ilogb(shape.largest) - 6}));
  const auto x = input.flip() ? input.elements<T>(n, static_cast<A>(unit)) : fuzz::observed_elements<T>(input, n);
  std::vector<T> expected(x.size());
  std::vector<bool> in_format(x.size());
  qsim::FormatCounts counts;
  qsim::SquaredSums squares, first;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const Expected one = round<T>(fuzz::widened(x[i]), shape, saturate, counts, squares);
    expected[i] = fuzz::narrowed<T>(static_cast<A>(one.y));
    in_format[i] = one.in_format;
  }
  const auto in = qsim::format_in<T>(static_cast<qsim::FloatFormat>(format), saturate);
  for (Level level : fuzz::runnable_levels()) {
    const auto& kernels = of(qsim::cpu::round_to_format_kernels(level));
    std::vector<T> plain(x.size()), in_place = x, masked(x.size()), counted(x.size()), summed(x.size());
    std::vector<std::uint8_t> mask((x.size() + 7) / 8, 0xaa);
    qsim::FormatCounts found[4];
    qsim::SquaredSums sums, sums_alone;
    kernels.plain(x.data(), plain.data(), 0, n, {}, in);
    kernels.plain(in_place.data(), in_place.data(), 0, n, {}, in);
    kernels.with_mask(x.data(), masked.data(), mask.data(), 0, n, {}, in);
    kernels.counted(x.data(), counted.data(), 0, n, {}, in, found[0], nullptr);
    kernels.counted(x.data(), summed.data(), 0, n, {}, in, found[1], &sums);
    kernels.counted(x.data(), nullptr, 0, n, {}, in, found[2], &sums_alone);
    kernels.counted(x.data(), nullptr, 0, n, {}, in, found[3], nullptr);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const auto e = static_cast<std::int64_t>(i);
      fuzz::require_same(plain[i], expected[i], level, "rounded", e);
      fuzz::require_same(in_place[i], expected[i], level, "rounded in place", e);
      fuzz::require_same(masked[i], expected[i], level, "rounded with mask", e);
      fuzz::require_same(counted[i], expected[i], level, "rounded and counted", e);
      fuzz::require_same(summed[i], expected[i], level, "rounded, counted and summed", e);
      fuzz::require((mask[i / 8] >> i % 8 & 1) == in_format[i], level, "mask");
    }
    fuzz::require(n % 8 == 0 || mask.back() >> n % 8 == 0, level, "bits past the end of the mask");
    for (const auto& one : found) {
      fuzz::require(one.nans == counts.nans && one.infs == counts.infs, level, "counts of NaN and Inf");
      fuzz::require(one.overflows == counts.overflows, level, "overflows");
      fuzz::require(one.underflows == counts.underflows && one.subnormals == counts.subnormals, level, "small results");
    }
    if (level == Level::baseline) first = sums;
    fuzz::require_same(sums.error, first.error, level, "sum of squared errors", 0);
    fuzz::require_same(sums.signal, first.signal, level, "sum of squares", 0);
    fuzz::require_same(sums_alone.error, first.error, level, "sum of squared errors, alone", 0);
    fuzz::require(near(sums.error, squares.error) && near(sums.signal, squares.signal), level, "sums");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  fuzz::with_element_type(input, [&](auto type, auto of) { check<decltype(type)>(input, of); });
  return 0;
}
