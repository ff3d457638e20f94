// Gradients of the input against the scalar twin, bit for bit; gradients of scale and zero point equal at every level
// and within rounding of sums in float64.
#include "fake_quantize_case.h"

namespace {

using qsim::arithmetic_t;
using qsim::Layout;
using qsim::cpu::Level;

struct Sums {
  double scale = 0, zero_point = 0, scale_magnitude = 0, zero_point_magnitude = 0;
};

template <class T>
Sums expected_sums(const fuzz::FakeQuantizeCase<T>& call, const std::vector<T>& grad, std::int64_t parameter) {
  using A = arithmetic_t<T>;
  Sums sums;
  for (std::int64_t e = 0; e < call.n; ++e) {
    const auto i = static_cast<std::size_t>(e);
    const A x = fuzz::widened(call.x[i]), g = fuzz::widened(grad[i]);
    if (fuzz::parameter_of(e, call.layout) != parameter || std::isnan(x)) continue;
    const auto by = call.encoding(e);
    const A exact = call.quotient(x, by.scale);
    const double level = call.level_of(x, by), clamped = std::clamp<double>(level, call.quant_min, call.quant_max);
    const A slope = call.inside(e) ? std::nearbyint(exact) - exact : static_cast<A>(clamped - by.zero_point);
    const A term = g * slope, other = call.inside(e) ? A(0) : g;
    sums.scale += term, sums.scale_magnitude += std::fabs(term);
    sums.zero_point += other, sums.zero_point_magnitude += std::fabs(other);
  }
  return sums;
}

// Whether a sum of terms in A, times `factor`, is what float64 gives. One that may overflow on the way is anything.
template <class A>
bool near(A got, double sum, double magnitude, double factor) {
  if (!(magnitude <= std::numeric_limits<A>::max() / 4)) return true;
  const double expected = sum * factor, largest = std::numeric_limits<A>::max();
  if (std::fabs(expected) >= largest * (1 - 1e-5)) return true;
  return std::fabs(got - expected) <= 1e-5 * magnitude * std::fabs(factor) + std::numeric_limits<A>::min();
}

template <class T, class Of>
void check(fuzz::Input& input, Of of) {
  using A = arithmetic_t<T>;
  fuzz::FakeQuantizeCase<T> call(input);
  const auto grad = input.elements<T>(call.n, A(1));
  const std::int64_t n = call.n, cut = input.between(0, static_cast<int>(n));
  const auto parameters = static_cast<std::int64_t>(call.scales.size());
  const Layout layout = call.kernel_layout();
  const std::int64_t row = layout.width == 1 ? 1 : layout.width * layout.run;
  const std::int64_t length = row * input.between(1, static_cast<int>((layout.segment + row - 1) / row));
  const qsim::Slices slices = {length, (layout.segment + length - 1) / length};
  const std::int64_t segments = (layout.outer + layout.segment - 1) / layout.segment * (n / layout.outer);
  const std::int64_t all = segments * slices.per_segment, split = input.between(0, static_cast<int>(all));
  const double factor = input.pick({1.0, 0.25});
  const bool learns_zero_point = input.flip();
  std::vector<A> first_scale, first_zero_point;
  for (Level level : fuzz::runnable_levels()) {
    const auto backward = of(qsim::cpu::fake_quantize_backward_kernels(level));
    const auto& learnable_table = qsim::cpu::fake_quantize_learnable_kernels(level);
    const auto& prepare = fuzz::prepare(qsim::cpu::fake_quantize_kernels(level), A{});
    const auto grids = call.grids(prepare, qsim::cpu::Bounds::of_range);
    std::vector<T> dx(call.x.size()), learned_dx(call.x.size());
    std::vector<double> sums(static_cast<std::size_t>(2 * all * layout.width));
    const qsim::cpu::PartialSums partial = {sums.data(),
                                            learns_zero_point ? sums.data() + all * layout.width : nullptr};
    for (auto [begin, end] : {std::pair{std::int64_t{0}, cut}, {cut, n}}) {
      if (begin == end) continue;
      backward(grad.data(), call.x.data(), dx.data(), begin, end, grids, layout, call.rounding);
    }
    for (auto [begin, end] : {std::pair{std::int64_t{0}, split}, {split, all}}) {
      if (begin == end) continue;
      of(learnable_table)(grad.data(), call.x.data(), learned_dx.data(), begin, end, grids, layout, call.rounding,
                          slices, partial.from(begin * layout.width));
    }
    for (std::int64_t e = 0; e < n; ++e) {
      const auto i = static_cast<std::size_t>(e);
      const T expected = call.inside(e) ? grad[i] : T{};
      fuzz::require_same(dx[i], expected, level, "backward from x", e);
      fuzz::require_same(learned_dx[i], expected, level, "learnable backward", e);
    }
    std::vector<A> dscale(call.scales.size()), dzero_point(call.scales.size());
    const auto& fold = [&]() -> auto& {
      if constexpr (sizeof(A) == 4) {
        return learnable_table.fold_f32;
      } else {
        return learnable_table.fold_f64;
      }
    }();
    const std::int64_t rows = std::max<std::int64_t>(call.rows, 1), run = call.rows ? call.layout.run : 1;
    fold(partial, slices, parameters, call.rows ? parameters : layout.width, run, rows, call.scales.data(), factor,
         dscale.data(), dzero_point.data());
    if (first_scale.empty()) first_scale = dscale, first_zero_point = dzero_point;
    for (std::int64_t p = 0; p < parameters; ++p) {
      const auto i = static_cast<std::size_t>(p);
      fuzz::require_same(dscale[i], first_scale[i], level, "d scale", p);
      fuzz::require_same(dzero_point[i], first_zero_point[i], level, "d zero point", p);
      if (level != Level::baseline) continue;
      const Sums expected = expected_sums(call, grad, p);
      const double scale = -static_cast<double>(call.scales[i]);
      fuzz::require(near(dscale[i], expected.scale, expected.scale_magnitude, factor), level, "d scale");
      if (!learns_zero_point) continue;  // not written: still zero
      fuzz::require(near(dzero_point[i], expected.zero_point, expected.zero_point_magnitude, scale * factor), level,
                    "d zero point");
    }
  }
}

template <class U>
void check_masked(fuzz::Input& input,
                  void (*qsim::cpu::FakeQuantizeBackwardKernels::*masked)(const U*, const std::uint8_t*, U*,
                                                                          std::int64_t, std::int64_t)) {
  const int n = input.between(1, 300), cut = input.between(0, n / 8) * 8;
  std::vector<U> grad(static_cast<std::size_t>(n));
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(n + 7) / 8);
  for (U& g : grad) g = static_cast<U>(input.bits(sizeof(U)));
  for (auto& byte : mask) byte = static_cast<std::uint8_t>(input.bits(1));
  for (Level level : fuzz::runnable_levels()) {
    std::vector<U> dx(grad.size());
    const auto kernel = qsim::cpu::fake_quantize_backward_kernels(level).*masked;
    kernel(grad.data(), mask.data(), dx.data(), 0, cut);
    kernel(grad.data(), mask.data(), dx.data(), cut, n);
    for (std::size_t i = 0; i < grad.size(); ++i) {
      fuzz::require(dx[i] == (mask[i / 8] >> i % 8 & 1 ? grad[i] : 0), level, "backward from bits");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using Kernels = qsim::cpu::FakeQuantizeBackwardKernels;
  fuzz::Input input(data, size);
  switch (input.bits(1) % 8) {
    case 0:
      check_masked(input, &Kernels::masked_16);
      break;
    case 1:
      check_masked(input, &Kernels::masked_32);
      break;
    case 2:
      check_masked(input, &Kernels::masked_64);
      break;
    default:
      fuzz::with_element_type(input, [&](auto type, auto of) { check<decltype(type)>(input, of); });
  }
  return 0;
}
