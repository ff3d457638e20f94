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

// What the threads before hold, summed, and what all hold; of a block of kThreads.
template <class T>
__device__ __forceinline__ T sum_of_threads_before(T mine, T& all) {
  using Scan = cub::BlockScan<T, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  __syncthreads();
  T before;
  Scan(storage).ExclusiveSum(mine, before, all);
  return before;
}

// In the order of the CPU: lane i meets lane i + lanes / 2, then i + lanes / 4, ... The same for all of these lanes.
template <int lanes = 32, class T, class Join>
__device__ __forceinline__ T join_halves(T mine, Join join) {
#pragma unroll
  for (int half = lanes / 2; half > 0; half /= 2) mine = join(mine, __shfl_xor_sync(kWholeWarp, mine, half));
  return mine;
}
template <int lanes = 32, class T>
__device__ __forceinline__ T sum_halves(T mine) {
  return join_halves<lanes>(mine, [](T a, T b) { return a + b; });
}

// A sum by `lanes` neighbours of a warp, each group its own, with the bits of qsim::LanesInTurn. Called by whole warps.
template <int lanes>
struct LanesOfWarp {
  template <class Term>
  __device__ double operator()(int begin, int end, Term term) const {
    double mine = 0;
    for (int i = begin + static_cast<int>(threadIdx.x % lanes); i < end; i += lanes) mine += term(i);
    return sum_halves<lanes>(mine);
  }
};

}  // namespace qsim::cuda
