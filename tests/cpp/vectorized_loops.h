// A loop that lost its vector instructions, or that calls a function for each element, fails here: instructions per
// element are counted at every level and compared with a loop over the functors compiled without vectorization. Counts
// depend neither on the machine's speed nor on its load.
#pragma once

#include <bit>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "instruction_count.h"
#include "levels.h"
#include "qsim/element.h"

namespace vectorized {

using qsim::arithmetic_t;
using qsim::BFloat16;
using qsim::Float16;
using qsim::cpu::Level;

constexpr int kSize = 256, kMemory = 2048;

// Finite values in and out of the range of small grids, the same for every type.
template <class T>
T* memory(int which) {
  static std::vector<T> arrays[3];
  auto& array = arrays[which];
  if (!array.empty()) return array.data();
  array.resize(kMemory);
  for (int i = 0; i < kMemory; ++i) {
    if constexpr (std::is_class_v<T>) {
      array[i].bits = static_cast<std::uint16_t>(0x3c00 + i % 31 * 32);
    } else {
      array[i] = static_cast<T>(i % 31 - 14);
    }
  }
  return array.data();
}

// A kernel, and a loop over functors that does the same one element at a time.
struct Loop {
  std::string name;
  int lanes;  // elements in 16 bytes of the type that is computed in
  std::function<void(Level, int n)> kernel;
  std::function<void(int n)> scalar;
  int size = kSize;
  double least = 0.4;  // efficiency: 1 where a vector takes as many instructions as an element of the scalar loop
};

template <class T>
constexpr int kLanes = 16 / sizeof(arithmetic_t<T>);

// 16-bit elements as scalar code converts them; of the numbers above.
inline float widened(BFloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }
inline float widened(Float16 x) {
  const float magnitude = std::bit_cast<float>((x.bits & 0x7fffu) << 13) * 0x1p112f;
  const std::uint32_t exponent = magnitude >= 0x1p16f ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | exponent | (x.bits & 0x8000u) << 16);
}
inline float widened(float x) { return x; }
inline double widened(double x) { return x; }

inline void round_to(BFloat16& to, float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  to.bits = static_cast<std::uint16_t>(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0);
}
inline void round_to(Float16& to, float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & 0x7fffffff;
  const std::uint32_t rounded =
      magnitude < 0x38800000   ? std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f)
      : magnitude < 0x47800000 ? (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13
                               : 0x7c00;
  to.bits = static_cast<std::uint16_t>(rounded | (bits >> 16 & 0x8000));
}
inline void round_to(float& to, float x) { to = x; }
inline void round_to(double& to, double x) { to = x; }

// The difference of two sizes leaves out what is done once.
template <class Call>
double instructions_per_element(Call call, int size) {
  call(size);  // memory is filled at the first call
  const long whole = instructions_of([&] { call(size); }), half = instructions_of([&] { call(size / 2); });
  return static_cast<double>(whole - half) / (size / 2);
}

// A vector takes about as many instructions as an element of the scalar loop.
inline void check(const std::vector<Loop>& loops) {
  for (const Loop& loop : loops) {
    const double scalar = instructions_per_element(loop.scalar, 64);
    for (Level level : runnable_levels()) {
      const double vector = instructions_per_element([&](int n) { loop.kernel(level, n); }, loop.size);
      const int lanes = loop.lanes << static_cast<int>(level);
      CAPTURE(loop.name, qsim::cpu::name_of(level), lanes, scalar, vector);
      CHECK(scalar / (vector * lanes) >= loop.least);
    }
  }
}

}  // namespace vectorized
