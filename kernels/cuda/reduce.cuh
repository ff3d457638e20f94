// Reductions of what the threads of a warp or a block hold, by CUB. Deterministic: their order depends on the number of
// threads alone. It is not the CPU's, which matters for sums of floats only; where those must be the same bits there is
// join_halves.
//
// All threads of the warp or block call them. `join` is associative and commutative, but for rounding.
#pragma once

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_reduce.cuh>

#include "launch.cuh"

namespace qsim::cuda {

inline constexpr unsigned kWholeWarp = 0xffffffffu;
inline constexpr int kMostWarps = 32;  // of a block of any size

template <class T>
__device__ __forceinline__ auto& warp_storage() {
  __shared__ typename cub::WarpReduce<T>::TempStorage storage[kMostWarps];
  return storage[threadIdx.x / 32];
}

// Valid in the first lane.
template <class T, class Join>
__device__ __forceinline__ T reduce_warp(T mine, Join join) {
  return cub::WarpReduce<T>(warp_storage<T>()).Reduce(mine, join);
}
template <class T>
__device__ __forceinline__ T sum_of_warp(T mine) {
  return cub::WarpReduce<T>(warp_storage<T>()).Sum(mine);
}

// Of a block of kThreads; valid in thread 0.
template <class T, class Join>
__device__ __forceinline__ T reduce_block(T mine, Join join) {
  using Reduce = cub::BlockReduce<T, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  __syncthreads();  // the reduction before has been read
  return Reduce(storage).Reduce(mine, join);
}

// The same for every thread.
template <class T, class Join>
__device__ __forceinline__ T reduce_block_for_all(T mine, Join join) {
  __shared__ T result;
  const T reduced = reduce_block(mine, join);
  if (threadIdx.x == 0) result = reduced;
  __syncthreads();
  return result;
}

// What the threads before hold, summed; of a block of kThreads.
template <class T>
__device__ __forceinline__ T sum_of_threads_before(T mine) {
  using Scan = cub::BlockScan<T, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  __syncthreads();
  T before;
  Scan(storage).ExclusiveSum(mine, before);
  return before;
}

// In the order of the CPU: lane i meets lane i + 16, then i + 8, ... Valid in the first lane.
template <class T, class Join>
__device__ __forceinline__ T join_halves(T mine, Join join) {
  for (int half = 16; half > 0; half /= 2) mine = join(mine, __shfl_down_sync(kWholeWarp, mine, half));
  return mine;
}

}  // namespace qsim::cuda
