// Joining a range to the state in global memory: minimum, maximum and integer sums, so the order of threads is
// invisible.
#pragma once

#include <cstdint>

#include "qsim/finite_range.h"
#include "reduce.cuh"

namespace qsim::cuda {

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

// counts: elements, NaNs, +infs, -infs. Called by whole warps; one that met finite elements only pays a vote.
__device__ __forceinline__ void join(NonFinite found, std::int64_t* counts) {
  if (!__any_sync(kWholeWarp, (found.nans | found.positive_infs | found.negative_infs) != 0)) return;
  found = {sum_of_warp(found.nans), sum_of_warp(found.positive_infs), sum_of_warp(found.negative_infs)};
  if (threadIdx.x % 32 != 0) return;
  add(counts + 1, found.nans);
  add(counts + 2, found.positive_infs);
  add(counts + 3, found.negative_infs);
}

// Of a warp; valid in its first lane.
__device__ __forceinline__ FiniteRange range_of_warp(FiniteRange range) {
  return reduce_warp(range, [](FiniteRange a, FiniteRange b) {
    a.merge(b);
    return a;
  });
}

// Of every `lanes` neighbours of a warp, a power of two; valid in the first of them. Called by whole warps. Zeros are
// +0.0 already.
__device__ __forceinline__ FiniteRange range_of_team(FiniteRange range, unsigned lanes) {
  for (unsigned half = lanes / 2; half > 0; half /= 2) {
    range.lowest = fminf(range.lowest, __shfl_down_sync(kWholeWarp, range.lowest, half));
    range.highest = fmaxf(range.highest, __shfl_down_sync(kWholeWarp, range.highest, half));
  }
  return range;
}

// Called by whole warps.
__device__ __forceinline__ void join(unsigned bits, std::int32_t* to) {
  const auto all = static_cast<int>(reduce_warp(bits, [](unsigned a, unsigned b) { return a | b; }));
  if (threadIdx.x % 32 == 0 && (all & ~*static_cast<volatile std::int32_t*>(to)) != 0) atomicOr(to, all);
}

}  // namespace qsim::cuda
