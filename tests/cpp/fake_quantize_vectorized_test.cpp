// The loops of fake-quantize. With regular grids they are written with vectors: what could fail here is a call or a
// stray scalar part. The others rely on the compiler.
#include <cstdint>

#include "qsim/fake_quantize.h"
#include "vectorized_loops.h"

using namespace vectorized;
using qsim::Grid;
using qsim::Layout;
using qsim::Rounding;
using qsim::cpu::Grids;

namespace {

// Kept from the optimizer: constants would be folded into the scalar loops.
template <class T>
Grids<T> grids(bool regular) {
  static std::vector<T> scale(kSize, T(0.7)), inverse(kSize, T(1) / T(0.7)), low(kSize, T(-8)), high(kSize, T(7)),
      lowest(kSize, T(-5.6)), highest(kSize, T(4.9));
  return {scale.data(), inverse.data(), low.data(), high.data(), lowest.data(), highest.data(), regular};
}

template <class T>
Grid<T> grid() {
  const Grids<T> all = grids<T>(false);
  return {*all.scale, *all.low, *all.high};
}

Layout per_tensor(std::int64_t n) { return {n, n, 1, n}; }
Layout channels_last(std::int64_t n) { return {n, n, 64, 1}; }
// Rows are taken four at a time at some levels: sizes whose difference is what whole groups take.
constexpr int kRows = 16 * 64;
Layout blocks(std::int64_t n) { return {n, 32, 1, 1}; }

template <class T>
void quantize_each(int n) {
  const auto grid = ::grid<qsim::arithmetic_t<T>>();
  const T* x = memory<T>(0);
  T* y = memory<T>(1);
  for (int i = 0; i < n; ++i) {
    round_to(y[i], qsim::dequantize(qsim::nearest_steps(widened(x[i]) / grid.scale, grid), grid.scale));
  }
}

template <class T>
void pass_each(int n) {
  const auto grid = ::grid<qsim::arithmetic_t<T>>();
  const T *grad = memory<T>(0), *x = memory<T>(1);
  T* dx = memory<T>(2);
  for (int i = 0; i < n; ++i) {
    round_to(dx[i], qsim::in_range(widened(x[i]) / grid.scale, grid) ? widened(grad[i]) : 0);
  }
}

template <class T>
void learn_each(int n) {
  using A = qsim::arithmetic_t<T>;
  const auto grid = ::grid<A>();
  const T *grad = memory<T>(0), *x = memory<T>(1);
  T* dx = memory<T>(2);
  A scale_sum = 0, zero_point_sum = 0;
  for (int i = 0; i < n; ++i) {
    const A passed = widened(grad[i]), value = widened(x[i]), exact = value / grid.scale;
    scale_sum += qsim::scale_term(passed, value, exact, grid);
    zero_point_sum += qsim::zero_point_term(passed, value, exact, grid);
    round_to(dx[i], qsim::in_range(exact, grid) ? passed : A(0));
  }
  round_to(dx[0], scale_sum + zero_point_sum);
}

// Of: picks the kernels of T from a table.
template <class T, class Of>
void add_fake_quantize(std::vector<Loop>& loops, const std::string& where, Layout (*layout)(std::int64_t), bool regular,
                       Of of) {
  using A = qsim::arithmetic_t<T>;
  const int size = layout == channels_last ? kRows : kSize;
  loops.push_back({"forward, " + where, kLanes<T>,
                   [=](Level level, int n) {
                     of(qsim::cpu::fake_quantize_kernels(level))
                         .forward(memory<T>(0), memory<T>(1), 0, n, grids<A>(regular), layout(n), Rounding::divide);
                   },
                   quantize_each<T>, size});
  // 64-bit flags are collected one by one; rows of 64 are short beside what beginning one costs.
  const double with_mask = sizeof(A) == 8 || layout == channels_last ? 0.25 : 0.4;
  loops.push_back({"forward with mask, " + where, kLanes<T>,
                   [=](Level level, int n) {
                     static std::uint8_t mask[kSize / 8];
                     of(qsim::cpu::fake_quantize_kernels(level))
                         .with_mask(memory<T>(0), memory<T>(1), mask, 0, n, grids<A>(regular), layout(n),
                                    Rounding::divide);
                   },
                   quantize_each<T>, kSize, with_mask});
  loops.push_back({"backward from x, " + where, kLanes<T>,
                   [=](Level level, int n) {
                     of(qsim::cpu::fake_quantize_backward_kernels(level))(memory<T>(0), memory<T>(1), memory<T>(2), 0,
                                                                          n, grids<A>(regular), layout(n),
                                                                          Rounding::divide);
                   },
                   pass_each<T>});
  loops.push_back({"learnable backward, " + where, kLanes<T>,
                   [=](Level level, int n) {
                     static double scale[kSize], zero_point[kSize];
                     const Layout of_n = layout(n);
                     const std::int64_t slices = of_n.outer / of_n.segment;
                     of(qsim::cpu::fake_quantize_learnable_kernels(level))(
                         memory<T>(0), memory<T>(1), memory<T>(2), 0, slices, grids<A>(regular), of_n, Rounding::divide,
                         {of_n.segment, 1}, {scale, zero_point});
                   },
                   learn_each<T>, kSize, layout == blocks ? 0.25 : 0.4});  // each block's sums are folded
}

template <class U, class Kernel>
void add_backward_from_bits(std::vector<Loop>& loops, const std::string& type, Kernel kernel) {
  static std::uint8_t mask[kSize / 8];
  static U grad[kSize], dx[kSize];
  loops.push_back(
      {"backward from bits, " + type, 16 / sizeof(U),
       [=](Level level, int n) { (qsim::cpu::fake_quantize_backward_kernels(level).*kernel)(grad, mask, dx, 0, n); },
       [](int n) {
         for (int i = 0; i < n; ++i) dx[i] = mask[i / 8] >> i % 8 & 1 ? grad[i] : U(0);
       }});
}

}  // namespace

TEST_CASE("fake-quantize is vectorised") {
  const auto f32 = [](const auto& table) { return table.f32; };
  std::vector<Loop> loops;
  add_fake_quantize<float>(loops, "float32", per_tensor, true, f32);
  add_fake_quantize<float>(loops, "float32, channels last", channels_last, true, f32);
  add_fake_quantize<float>(loops, "float32, blocks", blocks, true, f32);
  add_fake_quantize<float>(loops, "float32, irregular", per_tensor, false, f32);
  add_fake_quantize<float>(loops, "float32, channels last, irregular", channels_last, false, f32);
  for (const bool regular : {true, false}) {
    const std::string suffix = regular ? "" : ", irregular";
    add_fake_quantize<Float16>(loops, "float16" + suffix, per_tensor, regular, [](auto& table) { return table.f16; });
    add_fake_quantize<BFloat16>(loops, "bfloat16" + suffix, per_tensor, regular,
                                [](auto& table) { return table.bf16; });
  }
  add_fake_quantize<double>(loops, "float64", per_tensor, false, [](auto& table) { return table.f64; });
  check(loops);
}

TEST_CASE("the backward pass from bits is vectorised") {
  using Kernels = qsim::cpu::FakeQuantizeBackwardKernels;
  std::vector<Loop> loops;
  add_backward_from_bits<std::uint16_t>(loops, "16 bits", &Kernels::masked_16);
  add_backward_from_bits<std::uint32_t>(loops, "32 bits", &Kernels::masked_32);
  add_backward_from_bits<std::uint64_t>(loops, "64 bits", &Kernels::masked_64);
  check(loops);
}
