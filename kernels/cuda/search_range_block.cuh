// What the blocks of both range searches do alike: agree on the cheapest candidate, find the entropy threshold.
#pragma once

#include <climits>

#include "qsim/entropy_range.h"
#include "qsim/search_range.h"

namespace qsim::cuda {

constexpr int kSearchThreads = 256;
constexpr std::int64_t kSearchBlocks = 128;  // at most, each with its own workspace

template <class Value, class Combine>
__device__ Value block_reduce(Value mine, Combine combine) {  // the result is every thread's
  __shared__ Value found[kSearchThreads];
  __syncthreads();
  found[threadIdx.x] = mine;
  for (unsigned half = kSearchThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) found[threadIdx.x] = combine(found[threadIdx.x], found[threadIdx.x + half]);
  }
  __syncthreads();
  return found[0];
}

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
  return block_reduce(mine, [](Judged a, Judged b) {
    return b.cost < a.cost || (b.cost == a.cost && b.candidate < a.candidate) ? b : a;
  });
}

// From the counts, by the whole block; the threshold is thread 0's.
__device__ inline double block_entropy_threshold(EntropyHistogram& histogram, double largest, int levels) {
  __syncthreads();
  if (threadIdx.x == 0) sum_prefixes(histogram);
  __syncthreads();
  for (int bins = levels + static_cast<int>(threadIdx.x); bins <= kEntropyBins; bins += kSearchThreads) {
    histogram.divergence[bins] =
        divergence(histogram, bins, levels, [&](int start, int end) { return level_term(histogram, start, end); });
  }
  __syncthreads();
  return threadIdx.x == 0 ? least_divergence(histogram, largest, levels) : 0.0;
}

}  // namespace qsim::cuda
