// cub::WarpReduce for whole warps, in CUB's order: neighbours first. Only the first lane gets the result, as promised;
// what the others get would show in any result that it reached.
#pragma once

#include <cstring>

#include "../../cuda_runtime.h"

namespace cub {

template <class T>
class WarpReduce {
 public:
  struct TempStorage {
    T of[32];
  };

  explicit WarpReduce(TempStorage& storage) : storage_(storage) {}

  template <class Join>
  T Reduce(T mine, Join join, emulation::Where where = emulation::Where::current()) {
    const int lane = emulation::lane();
    for (int step = 1; step < 32; step *= 2) {
      storage_.of[lane] = mine;
      __syncwarp(~0u, where);
      if (lane + step < 32) mine = join(mine, storage_.of[lane + step]);
      __syncwarp(~0u, where);
    }
    if (lane != 0) std::memset(static_cast<void*>(&mine), 0xa5, sizeof mine);
    return mine;
  }

  T Sum(T mine, emulation::Where where = emulation::Where::current()) {
    return Reduce(mine, [](T a, T b) { return a + b; }, where);
  }

 private:
  TempStorage& storage_;
};

}  // namespace cub
