// Eight lanes of a warp to each threshold: those of the sum over its levels. The same order as the CPU, but logarithms
// of its own.
#include "entropy.cuh"

#include "reduce.cuh"

namespace qsim::cuda {

namespace {

constexpr unsigned kBlocksEach = 64;  // of a search, which has room for all thresholds at once
static_assert(kBlocksEach * kThreads / kEntropySums == kEntropyBins);

__global__ void __launch_bounds__(kThreads) diverge(EntropySearch* searches) {
  EntropySearch& search = searches[blockIdx.x / kBlocksEach];
  EntropyHistogram& histogram = search.histogram;
  const int levels = search.levels;
  if (levels == 0) return;
  const int threshold = static_cast<int>((blockIdx.x % kBlocksEach * kThreads + threadIdx.x) / kEntropySums) + 1;
  const int bins = threshold < levels ? levels : threshold;  // some do what another does: sums are by whole warps
  const auto term = [&](int level) {
    return level_term(histogram, level_start(level, bins, levels), level_start(level + 1, bins, levels));
  };
  const double found = divergence(histogram, bins, levels, LanesOfWarp<kEntropySums>(), term);
  if (threadIdx.x % kEntropySums == 0) histogram.divergence[bins] = is_threshold(histogram, bins) ? found : INFINITY;
}

}  // namespace

cudaError_t find_divergences(EntropySearch* searches, std::int64_t count, cudaStream_t stream) {
  return launch(diverge, {static_cast<unsigned>(count) * kBlocksEach, kThreads}, stream, searches);
}

}  // namespace qsim::cuda
