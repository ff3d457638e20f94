// The entropy method's divergences, once the histogram is there: the part that sketches and data share.
#pragma once

#include "qsim/search_range/entropy.h"
#include "team.cuh"

namespace qsim::cuda {

struct EntropySearch {
  EntropyHistogram histogram;
  double largest;  // magnitude
  int levels;      // 0: there is nothing to search, all of the range is kept
};

// Of every threshold of `count` searches whose prefixes are summed.
cudaError_t find_divergences(EntropySearch* searches, std::int64_t count, cudaStream_t stream);

// Whether there is something to search, and for how many levels; by every thread of a block.
__device__ inline bool begin_search(EntropySearch& search, Range observed, double largest, QuantGrid grid) {
  const std::int64_t levels = entropy_levels(observed, grid);
  const bool wanted = levels < kEntropyBins && largest > 0;
  if (threadIdx.x == 0) {
    search.largest = largest;
    search.levels = wanted ? static_cast<int>(levels) : 0;
  }
  return wanted;
}

// By every thread of a block.
__device__ inline Range clipped(Range observed, const EntropySearch& search) {
  if (search.levels == 0) return observed;
  return clipped_at(observed, least_divergence(search.histogram, search.largest, search.levels, BlockTeam()));
}

}  // namespace qsim::cuda
