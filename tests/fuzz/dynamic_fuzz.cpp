// Groups with the scales of their own ranges, against one element at a time after docs/numerics.md, section 9: each
// range by comparisons, powers of two by logarithms of float64, elements by the formulas of sections 1 and 7.
#include "qsim/dynamic.h"

#include <algorithm>

#include "observe_case.h"

namespace {

using qsim::BlockScaleRule;
using qsim::GroupRule;
using qsim::QuantParams;
using qsim::cpu::Level;

struct Group {
  double lowest = INFINITY, highest = -INFINITY;

  template <class T>
  Group(const T* x, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      const auto e = static_cast<double>(static_cast<float>(fuzz::widened(x[i])));
      if (!std::isfinite(e)) continue;
      lowest = std::min(lowest, e);
      highest = std::max(highest, e);
    }
  }
  double magnitude() const { return std::max(-lowest, highest); }
};

// `floor` of section 9.
double power_of_two(const Group& group, int top) {
  if (group.lowest > group.highest) return NAN;
  if (group.magnitude() == 0) return 1;
  return std::ldexp(1, std::clamp(std::ilogb(group.magnitude()) - top, -127, 127));
}

QuantParams<float> spread(const Group& group, qsim::QuantGrid grid) {
  return qsim::choose_qparams<float>(group.lowest, group.highest, grid, 0);
}

template <class T>
T on_grid(T x, QuantParams<float> params, qsim::QuantGrid grid) {
  using A = fuzz::arithmetic_t<T>;
  const double low = grid.quant_min - static_cast<double>(params.zero_point);
  const double high = grid.quant_max - static_cast<double>(params.zero_point);
  const A scale = params.scale, steps = std::nearbyint(static_cast<A>(fuzz::widened(x)) / scale);
  const A kept = std::isnan(steps) ? steps : static_cast<A>(std::clamp(static_cast<double>(steps), low, high));
  const T y = fuzz::narrowed<T>(kept * scale);
  return fuzz::widened(y) == 0 ? T{} : y;  // +0.0
}

// E2M1: multiples of half the power of two below the number, of 1 / 2 at least, up to 6.
template <class T>
T to_e2m1(T x, double scale) {
  using A = fuzz::arithmetic_t<T>;
  const A quotient = static_cast<A>(fuzz::widened(x)) / static_cast<A>(scale), magnitude = std::fabs(quotient);
  if (std::isnan(quotient)) return fuzz::narrowed<T>(quotient);
  const A unit = magnitude < 2 ? A(0.5) : magnitude < 4 ? A(1) : A(2);
  const A nearest = magnitude >= 6 ? A(6) : std::nearbyint(magnitude / unit) * unit;
  return fuzz::narrowed<T>(std::copysign(nearest, quotient) * static_cast<A>(scale));
}

template <class T, class Of>
void check(fuzz::Input& input, Of of) {
  using A = fuzz::arithmetic_t<T>;
  const std::int64_t rows = input.between(0, 6), length = input.between(1, input.flip() ? 40 : 300);
  const std::int64_t group = input.flip() ? length : input.between(1, static_cast<int>(length));
  const auto x = fuzz::observed_elements<T>(input, rows * length);
  const qsim::QuantGrid grids[] = {{-128, 127, false}, {-127, 127, true}, {0, 255, false}, {-8, 7, true}};
  const BlockScaleRule blocks{qsim::ScaleFormat::e8m0, qsim::ScaleRounding::floor, {1, 2, 6, 1}, {}};
  const GroupRule integers{input.pick(grids), 0, nullptr, 1}, powers{{}, 0, &blocks, 1};
  std::vector<T> on_grids(x.size()), in_format(x.size());
  for (std::int64_t at = 0; at < rows * length;) {
    const std::int64_t n = std::min(group, length - at % length);
    const Group found(x.data() + at, n);
    const auto params = spread(found, integers.grid);
    const double power = power_of_two(found, 2);
    for (const std::int64_t end = at + n; at < end; ++at) {
      const auto i = static_cast<std::size_t>(at);
      on_grids[i] = on_grid(x[i], params, integers.grid);
      in_format[i] = to_e2m1(x[i], power);
    }
  }
  const auto format = qsim::format_in<A>(qsim::FloatFormat::float4_e2m1fn, true);
  for (Level level : fuzz::runnable_levels()) {
    std::vector<T> quantized(x.size()), in_place = x, rounded(x.size());
    const auto quantize = of(qsim::cpu::fake_quantize_dynamic_kernels(level));
    quantize(x.data(), quantized.data(), 0, rows, {length, group}, integers, qsim::Rounding::divide);
    quantize(in_place.data(), in_place.data(), 0, rows, {length, group}, integers, qsim::Rounding::divide);
    of(qsim::cpu::round_to_format_dynamic_kernels(level))(x.data(), rounded.data(), 0, rows, {length, group}, powers,
                                                          format);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const auto e = static_cast<std::int64_t>(i);
      fuzz::require_same(quantized[i], on_grids[i], level, "quantized", e);
      fuzz::require_same(in_place[i], on_grids[i], level, "quantized in place", e);
      fuzz::require_same(rounded[i], in_format[i], level, "rounded", e);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  fuzz::with_element_type(input, [&](auto type, auto of) { check<decltype(type)>(input, of); });
  return 0;
}
