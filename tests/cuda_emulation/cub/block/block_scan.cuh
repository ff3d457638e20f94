// cub::BlockScan: sums of what the threads before hold, and of what all hold. As with CUB, the storage may be used
// again after a barrier.
#pragma once

#include "../../cuda_runtime.h"

namespace cub {

template <class T, int threads>
class BlockScan {
 public:
  struct TempStorage {
    T of[threads];
  };

  explicit BlockScan(TempStorage& storage) : storage_(storage) {}

  void ExclusiveSum(T mine, T& before, T& all, emulation::Where where = emulation::Where::current()) {
    storage_.of[threadIdx.x] = mine;
    __syncthreads(where);
    before = T{};
    for (unsigned i = 0; i < threadIdx.x; ++i) before += storage_.of[i];
    all = before;
    for (unsigned i = threadIdx.x; i < threads; ++i) all += storage_.of[i];
  }

 private:
  TempStorage& storage_;
};

}  // namespace cub
