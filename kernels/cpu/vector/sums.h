// Sums whose order is the same at every register width, so that every level gives the same bits: as many partial sums
// side by side as the widest register has lanes, or sixteen, and one fixed way to add those up.
#pragma once

#include "registers.h"

namespace qsim::cpu {
namespace {

// A line is 64 bytes of elements in the type they are computed in, and as many partial sums: element i of a run joins
// sum i % kLine<A>.
constexpr int kLineBytes = 64, kLineRegisters = kLineBytes / kRegisterBytes;
template <class A>
constexpr int kLine = kLineBytes / int{sizeof(A)};

// Of a line, by halves: sum i meets sum i + 8, then i + 4, ...
template <class A, int bytes = kLineBytes>
QSIM_INLINE A sum_of_line(const void* line) {
  typename VectorOf<A, bytes / 2>::type halves[2];
  std::memcpy(halves, line, bytes);
  halves[0] += halves[1];
  if constexpr (bytes / 2 == sizeof(A)) {
    return halves[0][0];
  } else {
    return sum_of_line<A, bytes / 2>(halves);
  }
}

// Sixteen neighbours, or their partial sums, in float64: element i of an array joins sum i % 16.
struct Sixteen {
  static constexpr int kCount = 16, kRegisters = kCount / kDoubles;

  Doubles part[kRegisters]{};

  QSIM_INLINE double operator[](int i) const { return part[i / kDoubles][i % kDoubles]; }
};

QSIM_INLINE Sixteen load_sixteen(const double* x) {
  Sixteen loaded;
  for (int j = 0; j < Sixteen::kRegisters; ++j) loaded.part[j] = load_as<Doubles>(x + j * kDoubles);
  return loaded;
}

QSIM_INLINE Sixteen load_sixteen(const float* x) {
  Sixteen loaded;
  for (int j = 0; j < Sixteen::kRegisters; ++j) loaded.part[j] = widen(load_as<HalfFloats>(x + j * kDoubles));
  return loaded;
}

template <class Half>
QSIM_INLINE Sixteen load_sixteen(const Half* x) {
  float floats[Sixteen::kCount];
  for (int i = 0; i < Sixteen::kCount; i += kFloats) store(floats + i, load(x + i));
  return load_sixteen(floats);
}

// Calls add(sixteen of x, sixteen of y ...) for every sixteen of n elements of each array; what is left is padded with
// zeros, which must add nothing.
template <class Add, class... T>
QSIM_INLINE void for_each_sixteen(std::int64_t n, Add add, const T*... x) {
  const std::int64_t whole = n - n % Sixteen::kCount;
  for (std::int64_t i = 0; i < whole; i += Sixteen::kCount) add(load_sixteen(x + i)...);
  if (whole == n) return;
  const auto padded = [&](const auto* from) QSIM_INLINE_LAMBDA {
    std::remove_cvref_t<decltype(*from)> rest[Sixteen::kCount] = {};
    std::memcpy(rest, from + whole, static_cast<std::size_t>(n - whole) * sizeof *from);
    return load_sixteen(rest);
  };
  add(padded(x)...);
}

}  // namespace
}  // namespace qsim::cpu
