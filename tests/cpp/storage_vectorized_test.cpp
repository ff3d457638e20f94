// Integers, 4-bit packing and float formats.
#include <cstdint>
#include <limits>

#include "qsim/int4.h"
#include "qsim/quantize.h"
#include "qsim/round_to_format.h"
#include "vectorized_loops.h"

using namespace vectorized;
using qsim::FloatFormat;
using qsim::FormatIn;
using qsim::Grid;
using qsim::Layout;
using qsim::Rounding;
using qsim::cpu::Grids;

namespace {

Layout per_tensor(std::int64_t n) { return {n, n, 1, n}; }

// Kept from the optimizer: constants would be folded into the scalar loops.
template <class A>
Grids<A> grids() {
  static A scale = A(0.7), inverse = A(1) / A(0.7), low = -8, high = 7, lowest = A(-5.6), highest = A(4.9);
  return {&scale, &inverse, &low, &high, &lowest, &highest, sizeof(A) == 4};
}

template <class T, class Q>
void quantize_each(int n) {
  using A = qsim::arithmetic_t<T>;
  const Grid<A> grid = {*grids<A>().scale, *grids<A>().low, *grids<A>().high};
  const T* x = memory<T>(0);
  Q* q = memory<Q>(1);
  for (int i = 0; i < n; ++i) {
    q[i] = static_cast<Q>(static_cast<int>(qsim::nearest_integer(widened(x[i]) / grid.scale, grid, A(-8))));
  }
}

template <class T, class Q>
void dequantize_each(int n) {
  using A = qsim::arithmetic_t<T>;
  const Grid<A> grid = {*grids<A>().scale, *grids<A>().low, *grids<A>().high};
  const Q* q = memory<Q>(0);
  T* y = memory<T>(1);
  for (int i = 0; i < n; ++i) {
    const A steps = qsim::steps_of(static_cast<A>(q[i]), grid, A(std::numeric_limits<Q>::min()));
    round_to(y[i], qsim::dequantize(steps, grid.scale));
  }
}

template <class T, class Of>
void add_integers(std::vector<Loop>& loops, const std::string& type, Of of) {
  using A = qsim::arithmetic_t<T>;
  loops.push_back({"quantize to 8 bits, " + type, kLanes<T>,
                   [=](Level level, int n) {
                     of(qsim::cpu::quantize_kernels(level))
                         .to_8(memory<T>(0), memory<std::uint8_t>(1), 0, n, grids<A>(), per_tensor(n), A(-8),
                               Rounding::divide);
                   },
                   quantize_each<T, std::int8_t>});
  loops.push_back({"quantize to 16 bits, " + type, kLanes<T>,
                   [=](Level level, int n) {
                     of(qsim::cpu::quantize_kernels(level))
                         .to_16(memory<T>(0), memory<std::uint16_t>(1), 0, n, grids<A>(), per_tensor(n), A(-8),
                                Rounding::divide);
                   },
                   quantize_each<T, std::int16_t>});
  loops.push_back({"dequantize int8, " + type, kLanes<T>,
                   [=](Level level, int n) {
                     of(qsim::cpu::quantize_kernels(level))
                         .from_i8(memory<std::int8_t>(0), memory<T>(1), 0, n, grids<A>(), per_tensor(n));
                   },
                   dequantize_each<T, std::int8_t>});
  loops.push_back({"dequantize uint16, " + type, kLanes<T>,
                   [=](Level level, int n) {
                     of(qsim::cpu::quantize_kernels(level))
                         .from_u16(memory<std::uint16_t>(0), memory<T>(1), 0, n, grids<A>(), per_tensor(n));
                   },
                   dequantize_each<T, std::uint16_t>});
}

void pack_each(int n) {
  const std::uint8_t* q = memory<std::uint8_t>(0);
  std::uint8_t* packed = memory<std::uint8_t>(1);
  for (int i = 0; i < n / 2; ++i) packed[i] = qsim::pack_int4(q[2 * i], q[2 * i + 1]);
}

void unpack_each(int n) {
  const std::uint8_t* packed = memory<std::uint8_t>(0);
  std::uint8_t* q = memory<std::uint8_t>(1);
  for (int i = 0; i < n; ++i) q[i] = qsim::sign_extended(packed[i / 2] >> i % 2 * 4 & 15u);
}

template <class T>
const FormatIn<qsim::arithmetic_t<T>>& format() {
  static auto format = qsim::format_in<T>(FloatFormat::float8_e4m3fn, true);
  return format;
}

template <class T>
void round_each(int n) {
  const auto in = format<T>();
  const T* x = memory<T>(0);
  T* y = memory<T>(1);
  for (int i = 0; i < n; ++i) round_to(y[i], qsim::round_to_format<false>(widened(x[i]), in));
}

template <class T>
void count_each(int n) {
  const auto in = format<T>();
  const T* x = memory<T>(0);
  T* y = memory<T>(1);
  static qsim::FormatCounts counts;
  for (int i = 0; i < n; ++i) {
    qsim::count(widened(x[i]), widened(x[i]), in, counts);
    round_to(y[i], qsim::round_to_format<false>(widened(x[i]), in));
  }
}

template <class T, class Of>
void add_rounding(std::vector<Loop>& loops, const std::string& type, Of of) {
  loops.push_back(
      {"float format, " + type, kLanes<T>,
       [=](Level level, int n) {
         of(qsim::cpu::round_to_format_kernels(level)).plain(memory<T>(0), memory<T>(1), 0, n, {}, format<T>());
       },
       round_each<T>});
  loops.push_back({"float format with mask, " + type, kLanes<T>,
                   [=](Level level, int n) {
                     static std::uint8_t mask[kSize / 8];
                     of(qsim::cpu::round_to_format_kernels(level))
                         .with_mask(memory<T>(0), memory<T>(1), mask, 0, n, {}, format<T>());
                   },
                   round_each<T>, kSize, sizeof(T) == 8 ? 0.25 : 0.4});  // 64-bit flags are collected one by one
  loops.push_back({"float format, counted, " + type, kLanes<T>,
                   [=](Level level, int n) {
                     qsim::FormatCounts counts;
                     of(qsim::cpu::round_to_format_kernels(level))
                         .counted(memory<T>(0), memory<T>(1), 0, n, {}, format<T>(), counts, nullptr);
                   },
                   count_each<T>});
}

}  // namespace

TEST_CASE("quantize and dequantize are vectorised") {
  std::vector<Loop> loops;
  add_integers<float>(loops, "float32", [](auto& table) { return table.f32; });
  add_integers<double>(loops, "float64", [](auto& table) { return table.f64; });
  add_integers<Float16>(loops, "float16", [](auto& table) { return table.f16; });
  add_integers<BFloat16>(loops, "bfloat16", [](auto& table) { return table.bf16; });
  check(loops);
}

TEST_CASE("4-bit packing is vectorised") {
  check({{"pack", 16,
          [](Level level, int n) {
            qsim::cpu::int4_kernels(level).pack(memory<std::uint8_t>(0), n, memory<std::uint8_t>(1));
          },
          pack_each, kMemory},
         {"unpack", 16,
          [](Level level, int n) {
            qsim::cpu::int4_kernels(level).unpack_signed(memory<std::uint8_t>(0), n, memory<std::uint8_t>(1));
          },
          unpack_each, kMemory}});
}

TEST_CASE("rounding to float formats is vectorised") {
  std::vector<Loop> loops;
  add_rounding<float>(loops, "float32", [](auto& table) { return table.f32; });
  add_rounding<double>(loops, "float64", [](auto& table) { return table.f64; });
  add_rounding<Float16>(loops, "float16", [](auto& table) { return table.f16; });
  add_rounding<BFloat16>(loops, "bfloat16", [](auto& table) { return table.bf16; });
  check(loops);
}
