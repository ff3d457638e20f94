// What the blocks of both range searches do alike: agree on the cheapest candidate, find the entropy threshold.
#pragma once

#include <algorithm>
#include <climits>

#include "qsim/search_range.h"
#include "qsim/search_range/entropy.h"
#include "reduce.cuh"

namespace qsim::cuda {

// Blocks of a search that needs memory of its own for each of them.
inline std::int64_t blocks_with_workspace(std::int64_t searches) { return std::min(searches, multiprocessors()); }

struct Judged {
  double cost = INFINITY;
  int candidate = INT_MAX;  // none

  template <class T>
  __device__ Range settled(const RangeCandidates<T>& candidates, double unit, double mass) const {
    return qsim::settled(candidates, candidate < candidates.count() ? candidate : -1, cost, unit, mass);
  }
};

// The first of the cheapest candidates that the threads found.
__device__ inline Judged cheapest(Judged mine) {
  return reduce_block_for_all(mine, [](Judged a, Judged b) {
    return b.cost < a.cost || (b.cost == a.cost && b.candidate < a.candidate) ? b : a;
  });
}

// From the counts, by the whole block; the threshold is thread 0's.
__device__ inline double block_entropy_threshold(EntropyHistogram& histogram, double largest, int levels) {
  __syncthreads();
  if (threadIdx.x == 0) sum_prefixes(histogram);
  __syncthreads();
  for (int bins = levels + static_cast<int>(threadIdx.x); bins <= kEntropyBins; bins += kThreads) {
    histogram.divergence[bins] =
        divergence(histogram, bins, levels, [&](int start, int end) { return level_term(histogram, start, end); });
  }
  __syncthreads();
  return threadIdx.x == 0 ? least_divergence(histogram, largest, levels) : 0.0;
}

}  // namespace qsim::cuda
