// Joining a range to the state in global memory: minimum, maximum and integer sums, so the order of threads is
// invisible.
#pragma once

#include <cstdint>

#include "qsim/finite_range.h"

namespace qsim::cuda {

inline constexpr unsigned kWholeWarp = 0xffffffffu;

// Floats order like their bits as signed integers when positive, like their bits as unsigned integers, reversed, when
// negative: a negative candidate wins over every positive float by being the larger unsigned integer.
__device__ __forceinline__ void atomic_min(float* to, float x) {
  if (x >= 0) {
    atomicMin(reinterpret_cast<int*>(to), __float_as_int(x));
  } else {
    atomicMax(reinterpret_cast<unsigned*>(to), __float_as_uint(x));
  }
}

__device__ __forceinline__ void atomic_max(float* to, float x) {
  if (x >= 0) {
    atomicMax(reinterpret_cast<int*>(to), __float_as_int(x));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(to), __float_as_uint(x));
  }
}

// Most calls find nothing new and leave without an atomic.
__device__ __forceinline__ void join(FiniteRange range, float* lowest, float* highest) {
  if (range.lowest < *static_cast<volatile float*>(lowest)) atomic_min(lowest, range.lowest);
  if (range.highest > *static_cast<volatile float*>(highest)) atomic_max(highest, range.highest);
}

__device__ __forceinline__ void add(std::int64_t* to, std::int64_t n) {
  if (n != 0) atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(n));
}

__device__ __forceinline__ std::int64_t warp_sum(std::int64_t n) {
  for (int step = 16; step > 0; step /= 2) n += __shfl_xor_sync(kWholeWarp, n, step);
  return n;
}

// counts: elements, NaNs, +infs, -infs. Called by whole warps; one that met finite elements only pays a vote.
__device__ __forceinline__ void join(NonFinite found, std::int64_t* counts) {
  if (!__any_sync(kWholeWarp, (found.nans | found.positive_infs | found.negative_infs) != 0)) return;
  found = {warp_sum(found.nans), warp_sum(found.positive_infs), warp_sum(found.negative_infs)};
  if (threadIdx.x % 32 != 0) return;
  add(counts + 1, found.nans);
  add(counts + 2, found.positive_infs);
  add(counts + 3, found.negative_infs);
}

__device__ __forceinline__ FiniteRange warp_range(FiniteRange range) {
  for (int step = 16; step > 0; step /= 2) {
    range.merge({__shfl_xor_sync(kWholeWarp, range.lowest, step), __shfl_xor_sync(kWholeWarp, range.highest, step)});
  }
  return range;
}

// Called by whole warps.
__device__ __forceinline__ void join(unsigned bits, std::int32_t* to) {
  for (int step = 16; step > 0; step /= 2) bits |= __shfl_xor_sync(kWholeWarp, bits, step);
  const int all = static_cast<int>(bits);
  if (threadIdx.x % 32 == 0 && (all & ~*static_cast<volatile std::int32_t*>(to)) != 0) atomicOr(to, all);
}

}  // namespace qsim::cuda
