// cub::BlockReduce, in CUB's order: each warp, then the warps in turn. Only thread 0 gets the result. As with CUB, the
// storage may be used again after a barrier.
#pragma once

#include "../warp/warp_reduce.cuh"

namespace cub {

template <class T, int threads>
class BlockReduce {
  static constexpr int kWarps = threads / 32;
  static_assert(threads % 32 == 0);

 public:
  struct TempStorage {
    typename WarpReduce<T>::TempStorage within[kWarps];
    T warps[kWarps];
  };

  explicit BlockReduce(TempStorage& storage) : storage_(storage) {}

  template <class Join>
  T Reduce(T mine, Join join, emulation::Where where = emulation::Where::current()) {
    const unsigned warp = threadIdx.x / 32;
    mine = WarpReduce<T>(storage_.within[warp]).Reduce(mine, join, where);
    if (threadIdx.x % 32 == 0) storage_.warps[warp] = mine;
    __syncthreads(where);
    for (int i = 1; threadIdx.x == 0 && i < kWarps; ++i) mine = join(mine, storage_.warps[i]);
    return mine;
  }

 private:
  TempStorage& storage_;
};

}  // namespace cub
