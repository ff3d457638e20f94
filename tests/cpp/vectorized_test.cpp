// A loop that lost its vector instructions, or that calls a function for each element, fails here: instructions per
// element are counted at every level and compared with a loop over the functors compiled without vectorization. Counts
// depend neither on the machine's speed nor on its load.
#include <bit>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "instruction_count.h"
#include "levels.h"
#include "qsim/clip_grad.h"
#include "qsim/fake_quantize.h"
#include "qsim/finite_range.h"
#include "qsim/search_range.h"

using qsim::BFloat16;
using qsim::Float16;
using qsim::Grid;
using qsim::Layout;
using qsim::Rounding;
using qsim::cpu::Grids;
using qsim::cpu::Level;

namespace {

constexpr int kSize = 512, kColumnSize = 2048;

// Finite values in and out of the range of the grid below, the same for every type.
template <class T>
T* memory(int which) {
  static std::vector<T> arrays[3];
  auto& array = arrays[which];
  if (!array.empty()) return array.data();
  array.resize(kColumnSize);
  for (int i = 0; i < kColumnSize; ++i) {
    if constexpr (std::is_class_v<T>) {
      array[i].bits = static_cast<std::uint16_t>(0x3c00 + i % 31 * 32);
    } else {
      array[i] = static_cast<T>(i % 31) - T(14);
    }
  }
  return array.data();
}

// Kept from the optimizer: constants would be folded into the scalar loops.
template <class T>
Grids<T> grids() {
  static std::vector<T> scale(kSize, T(0.7)), low(kSize, T(-8)), high(kSize, T(7));
  return {scale.data(), low.data(), high.data()};
}

template <class T>
Grid<T> grid() {
  return {*grids<T>().scale, *grids<T>().low, *grids<T>().high};
}

Layout per_tensor(std::int64_t n) { return {n, n, 1, n}; }
Layout channels_last(std::int64_t n) { return {n, n, 64, 1}; }

// A kernel, and a loop over functors that does the same one element at a time.
struct Loop {
  std::string name;
  int lanes;  // elements in 16 bytes of the type that is computed in
  std::function<void(Level, int n)> kernel;
  std::function<void(int n)> scalar;
  int size = kSize;
  double least = 0.4;  // efficiency: 1 where a vector takes as many instructions as an element of the scalar loop
};

// 16-bit elements as scalar code converts them; of the numbers above.
float widened(BFloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }
float widened(Float16 x) {
  const float magnitude = std::bit_cast<float>((x.bits & 0x7fffu) << 13) * 0x1p112f;
  const std::uint32_t exponent = magnitude >= 0x1p16f ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | exponent | (x.bits & 0x8000u) << 16);
}
float widened(float x) { return x; }
double widened(double x) { return x; }

void round_to(BFloat16& to, float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  to.bits = static_cast<std::uint16_t>(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0);
}
void round_to(Float16& to, float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & 0x7fffffff;
  const std::uint32_t rounded =
      magnitude < 0x38800000   ? std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f)
      : magnitude < 0x47800000 ? (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13
                               : 0x7c00;
  to.bits = static_cast<std::uint16_t>(rounded | (bits >> 16 & 0x8000));
}
void round_to(float& to, float x) { to = x; }
void round_to(double& to, double x) { to = x; }

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

template <class T>
void observe_each(int n) {
  const T* x = memory<T>(0);
  qsim::FiniteRange range;
  qsim::NonFinite counts;
  for (int i = 0; i < n; ++i) qsim::observe(static_cast<float>(widened(x[i])), range, counts);
  memory<float>(1)[0] = range.lowest + range.highest;
}

template <class T>
void square_each(int n) {
  const T* x = memory<T>(0);
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += double{widened(x[i])} * widened(x[i]);
  memory<double>(1)[0] = sum;
}

template <class T>
void scale_each(int n) {
  const auto scale = grid<qsim::arithmetic_t<T>>().scale;
  T* x = memory<T>(1);
  for (int i = 0; i < n; ++i) round_to(x[i], widened(x[i]) * scale);
}

template <class T, class Forward, class Backward>
void add_fake_quantize(std::vector<Loop>& loops, const std::string& where, Layout (*layout)(std::int64_t),
                       Forward forward, Backward backward) {
  using A = qsim::arithmetic_t<T>;
  constexpr int kLanes = 16 / sizeof(A);
  loops.push_back({"forward, " + where, kLanes,
                   [=](Level level, int n) {
                     (qsim::cpu::fake_quantize_kernels(level).*forward)
                         .forward(memory<T>(0), memory<T>(1), 0, n, grids<A>(), layout(n), Rounding::divide);
                   },
                   quantize_each<T>});
  loops.push_back({"forward with mask, " + where, kLanes,
                   [=](Level level, int n) {
                     static std::uint8_t mask[kSize / 8];
                     (qsim::cpu::fake_quantize_kernels(level).*forward)
                         .with_mask(memory<T>(0), memory<T>(1), mask, 0, n, grids<A>(), layout(n), Rounding::divide);
                   },
                   quantize_each<T>, kSize, sizeof(A) == 8 ? 0.25 : 0.4});  // 64-bit flags are collected one by one
  loops.push_back({"backward from x, " + where, kLanes,
                   [=](Level level, int n) {
                     (qsim::cpu::fake_quantize_backward_kernels(level).*backward)
                         .recompute(memory<T>(0), memory<T>(1), memory<T>(2), 0, n, grids<A>(), layout(n),
                                    Rounding::divide);
                   },
                   pass_each<T>});
  loops.push_back({"learnable backward, " + where, kLanes,
                   [=](Level level, int n) {
                     static double scale[kSize], zero_point[kSize];
                     (qsim::cpu::fake_quantize_backward_kernels(level).*backward)
                         .learnable(memory<T>(0), memory<T>(1), memory<T>(2), 0, 1, grids<A>(), layout(n),
                                    Rounding::divide, {n, 1}, {scale, zero_point});
                   },
                   learn_each<T>});
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

template <class T>
void add_reductions(std::vector<Loop>& loops, const std::string& type, qsim::Element element) {
  const int which = static_cast<int>(element);
  const auto range = [which](Level level, std::int64_t outer, std::int64_t ranges) {
    static float lowest[kColumnSize], highest[kColumnSize];
    qsim::NonFinite counts;
    qsim::cpu::observe_range_kernels(level).of[which](memory<T>(0), outer, ranges, 1, lowest, highest, counts);
  };
  loops.push_back({"range, per tensor, " + type, 4, [=](Level level, int n) { range(level, n, 1); }, observe_each<T>});
  loops.push_back({"range, per column, " + type, 4, [=](Level level, int n) { range(level, 16, n / 16); },
                   observe_each<T>, kColumnSize});
  loops.push_back({"gradient norm, " + type, 2,  // summed in float64
                   [=](Level level, int n) { qsim::cpu::clip_grad_kernels(level).sum[which](memory<T>(0), n, 2); },
                   square_each<T>});
  loops.push_back(
      {"gradient scaling, " + type, 16 / sizeof(qsim::arithmetic_t<T>),
       [=](Level level, int n) { qsim::cpu::clip_grad_kernels(level).scale[which](memory<T>(1), n, 0.7, false); },
       scale_each<T>});
}

std::vector<Loop> all_loops() {
  using Forward = qsim::cpu::FakeQuantizeKernels;
  using Backward = qsim::cpu::FakeQuantizeBackwardKernels;
  using qsim::Element;
  std::vector<Loop> loops;
  add_fake_quantize<float>(loops, "float32", per_tensor, &Forward::f32, &Backward::f32);
  add_fake_quantize<float>(loops, "float32, channels last", channels_last, &Forward::f32, &Backward::f32);
  add_fake_quantize<double>(loops, "float64", per_tensor, &Forward::f64, &Backward::f64);
  add_fake_quantize<Float16>(loops, "float16", per_tensor, &Forward::f16, &Backward::f16);
  add_fake_quantize<BFloat16>(loops, "bfloat16", per_tensor, &Forward::bf16, &Backward::bf16);
  add_backward_from_bits<std::uint16_t>(loops, "16 bits", &Backward::masked_16);
  add_backward_from_bits<std::uint32_t>(loops, "32 bits", &Backward::masked_32);
  add_backward_from_bits<std::uint64_t>(loops, "64 bits", &Backward::masked_64);
  add_reductions<float>(loops, "float32", Element::f32);
  add_reductions<double>(loops, "float64", Element::f64);
  add_reductions<Float16>(loops, "float16", Element::f16);
  add_reductions<BFloat16>(loops, "bfloat16", Element::bf16);
  return loops;
}

// The difference of two sizes leaves out what is done once.
template <class Call>
double instructions_per_element(Call call, int size) {
  call(size);  // memory is filled at the first call
  const long whole = instructions_of([&] { call(size); }), half = instructions_of([&] { call(size / 2); });
  return static_cast<double>(whole - half) / (size / 2);
}

}  // namespace

TEST_CASE("a vector takes about as many instructions as an element of the scalar loop") {
  for (const Loop& loop : all_loops()) {
    const double scalar = instructions_per_element(loop.scalar, kSize);
    for (Level level : runnable_levels()) {
      const double vector = instructions_per_element([&](int n) { loop.kernel(level, n); }, loop.size);
      const int lanes = loop.lanes << static_cast<int>(level);
      CAPTURE(loop.name, qsim::cpu::name_of(level), lanes, scalar, vector);
      CHECK(scalar / (vector * lanes) >= loop.least);
    }
  }
}
