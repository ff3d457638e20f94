// Sums over what shares a parameter, kept in lanes: whatever the width of a register, a line of 64 bytes of float32 or
// float64 is added to as many sums, in the same order, so that every level gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "float_vector.h"
#include "qsim/half.h"

namespace qsim::cpu {
namespace {

constexpr int kLineBytes = 64, kParts = kLineBytes / kVectorBytes;  // registers of a line
template <class A>
constexpr int kLanes = kLineBytes / int{sizeof(A)};

template <class A, int bytes>
struct VectorOf {
  typedef A type __attribute__((vector_size(bytes)));
};
template <class A>
using vector_t = typename VectorOf<A, kVectorBytes>::type;
template <class A>
constexpr int kElements = kVectorBytes / int{sizeof(A)};  // of a register
template <class A>
using mask_t = decltype(vector_t<A>{} == vector_t<A>{});  // lanes of -1 or 0

// 0, 1, 2, ...
template <class A>
QSIM_INLINE mask_t<A> lane_numbers() {
  mask_t<A> numbers;
  for (int i = 0; i < kElements<A>; ++i) numbers[i] = i;
  return numbers;
}

// Elements in their arithmetic type.
QSIM_INLINE vector_t<double> load_arithmetic(const double* from) { return load_as<vector_t<double>>(from); }
template <class T>
QSIM_INLINE Floats load_arithmetic(const T* from) {
  return load(from);
}

// to = from where the mask is set, +0.0 elsewhere: bits that were not computed with.
QSIM_INLINE void store_where(mask_t<float> mask, const float* from, float* to) {
  store_as(to, load_as<mask_t<float>>(from) & mask);
}
QSIM_INLINE void store_where(mask_t<double> mask, const double* from, double* to) {
  store_as(to, load_as<mask_t<double>>(from) & mask);
}
template <class Half>
QSIM_INLINE void store_where(mask_t<float> mask, const Half* from, Half* to) {
  store_as(to, (Shorts)(load_as<Shorts>(from) & narrow((Words)mask >> 16)));
}

// By halves: lane i meets lane i + 8, then i + 4, ...
template <class A, int bytes = kLineBytes>
QSIM_INLINE A sum_of_lanes(const void* lanes) {
  typename VectorOf<A, bytes / 2>::type halves[2];
  std::memcpy(halves, lanes, bytes);
  halves[0] += halves[1];
  if constexpr (bytes / 2 == sizeof(A)) {
    return halves[0][0];
  } else {
    return sum_of_lanes<A, bytes / 2>(halves);
  }
}

}  // namespace
}  // namespace qsim::cpu
