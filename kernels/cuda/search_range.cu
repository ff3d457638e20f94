// Sketches are laid out by one block each; then every candidate or threshold is judged by a warp of its own. The same
// bits as the CPU, but for the logarithms of the entropy method.
#include "qsim/cuda/search_range.h"

#include <algorithm>

#include "entropy.cuh"
#include "qsim/search_range/percentile.h"
#include "qsim/search_range/sketch_cost.h"
#include "team.cuh"

namespace qsim::cuda {

namespace {

using Candidates = RangeCandidates<float>;

struct CostSearch {
  SketchDensity density;
  double cost[Candidates::kMost];
};

// What was observed, and where the ranges go.
struct Sketches {
  const float *lowest, *highest;
  const std::int64_t* counts;
  const std::int32_t* low_bits;
  float *low, *high;

  __device__ bool is_empty(std::int64_t i) const { return !(lowest[i] <= highest[i]); }
  __device__ SketchView view(std::int64_t i) const {
    const std::uint32_t bits = low_bits ? static_cast<std::uint32_t>(low_bits[i]) : kUnknownBits;
    return view_sketch(counts + i * kSketchBins, bits, lowest[i], highest[i]);
  }
  __device__ Range with_zero(std::int64_t i) const { return {smaller(lowest[i], 0), larger(highest[i], 0)}; }
  // By thread 0.
  __device__ void store(std::int64_t i, Range range) const {
    if (is_empty(i)) range = {INFINITY, -INFINITY};
    if (threadIdx.x == 0) low[i] = static_cast<float>(range.low), high[i] = static_cast<float>(range.high);
  }

  Sketches from(std::int64_t first) const {
    return {lowest + first, highest + first, counts + first * kSketchBins, low_bits ? low_bits + first : nullptr,
            low + first,    high + first};
  }
};

__global__ void __launch_bounds__(kThreads) choose(Sketches sketches, RangeMethod method, double percentile) {
  const std::int64_t i = blockIdx.x;
  Range range{sketches.lowest[i], sketches.highest[i]};
  if (method == RangeMethod::percentile && !sketches.is_empty(i)) {
    range = sketch_percentile(sketches.view(i), percentile, BlockTeam());
  }
  sketches.store(i, range);
}

// Whether the candidates of a sketch have to be judged: not those of zeros.
__device__ bool is_judged(const Sketches& sketches, std::int64_t i) {
  return !sketches.is_empty(i) && !is_empty(sketches.with_zero(i));
}

// Two blocks to a sketch: one has the values below zero, the other those above.
__global__ void __launch_bounds__(kThreads) lay_out(Sketches sketches, QuantGrid grid, CostSearch* searches) {
  const std::int64_t i = blockIdx.x / 2;
  if (!is_judged(sketches, i)) return;
  const BlockTeam team;
  const SketchView sketch = sketches.view(i);
  const density::Lattice lattice = density::find_lattice(sketch, sketches.with_zero(i), grid, team);
  SketchDensity& density = searches[i].density;
  if (blockIdx.x % 2 == 0) {
    if (threadIdx.x == 0) density.unit = lattice.unit;
    density::lay_out(density.below, sketch.below, lattice, team);
  } else {
    density::lay_out(density.above, sketch.above, lattice, team);
  }
}

unsigned blocks_to_judge(QuantGrid grid) {
  return static_cast<unsigned>((Candidates{{}, grid}.count() + kWarps - 1) / kWarps);
}

// One half of a warp has the values below zero, the other those above.
__global__ void __launch_bounds__(kThreads)
    judge(Sketches sketches, QuantGrid grid, double gamma, unsigned blocks_each, CostSearch* searches) {
  const std::int64_t i = blockIdx.x / blocks_each;
  const int candidate = static_cast<int>(blockIdx.x % blocks_each * kWarps + threadIdx.x / 32);
  const Candidates candidates{sketches.with_zero(i), grid};
  if (candidate >= candidates.count() || !is_judged(sketches, i)) return;
  const QuantParams<float> params = encoding_of(candidates, candidate);
  double cost = INFINITY;
  if (params.scale != 0) {
    static_assert(kSketchSums == 16, "a lane of the sum is a lane of half a warp");
    const bool is_above = threadIdx.x % 32 >= kSketchSums;
    const DensitySide& side = is_above ? searches[i].density.above : searches[i].density.below;
    const density::Cut cut =
        density::cut(side, params.scale, is_above ? steps_above(params, grid) : steps_below(params, grid));
    const SideCost mine{density::saturated(side, cut), density::rounded(side, cut, LanesOfWarp<kSketchSums>())};
    const SideCost other{__shfl_xor_sync(kWholeWarp, mine.saturated, kSketchSums),
                         __shfl_xor_sync(kWholeWarp, mine.rounded, kSketchSums)};
    cost = is_above ? cost_of(other, mine, gamma) : cost_of(mine, other, gamma);
  }
  if (threadIdx.x % 32 == 0) searches[i].cost[candidate] = cost;
}

__global__ void __launch_bounds__(kThreads) settle(Sketches sketches, QuantGrid grid, const CostSearch* searches) {
  const std::int64_t i = blockIdx.x;
  const CostSearch& search = searches[i];
  Range range = sketches.with_zero(i);
  if (is_judged(sketches, i)) {
    const Candidates candidates{range, grid};
    const Judged best = cheapest_of(candidates, [&](int candidate) { return search.cost[candidate]; });
    range = best.settled(candidates, search.density.unit, search.density.mass());
  }
  sketches.store(i, range);
}

__global__ void __launch_bounds__(kThreads)
    fill_histograms(Sketches sketches, QuantGrid grid, EntropySearch* searches) {
  const std::int64_t i = blockIdx.x;
  const SketchView sketch = sketches.view(i);
  const double largest = sketches.is_empty(i) ? 0 : larger(sketch.below.far, sketch.above.far);
  if (!begin_search(searches[i], sketches.with_zero(i), largest, grid)) return;
  EntropyHistogram& histogram = searches[i].histogram;
  const BlockTeam team;
  clear(histogram, team);
  add_sketch(histogram, sketch, largest, team);
  sum_prefixes(histogram, team);
}

__global__ void __launch_bounds__(kThreads) clip(Sketches sketches, const EntropySearch* searches) {
  const std::int64_t i = blockIdx.x;
  sketches.store(i, clipped(sketches.with_zero(i), searches[i]));
}

// Sketches that are searched at a time: enough to fill the device, and the workspace has room for no more.
std::int64_t batch_of(std::int64_t count) { return std::min(count, multiprocessors()); }

cudaError_t search_costs(const Sketches& sketches, std::int64_t count, const RangeSearch& search, void* workspace,
                         cudaStream_t stream) {
  auto* searches = static_cast<CostSearch*>(workspace);
  const auto blocks = static_cast<unsigned>(count), each = blocks_to_judge(search.grid);
  return launch_in_turn(
      [&] { return launch(lay_out, {2 * blocks, kThreads}, stream, sketches, search.grid, searches); },
      [&] {
        return launch(judge, {blocks * each, kThreads}, stream, sketches, search.grid, search.gamma, each, searches);
      },
      [&] { return launch(settle, {blocks, kThreads}, stream, sketches, search.grid, searches); });
}

cudaError_t search_divergences(const Sketches& sketches, std::int64_t count, const RangeSearch& search, void* workspace,
                               cudaStream_t stream) {
  auto* searches = static_cast<EntropySearch*>(workspace);
  const LaunchShape shape{static_cast<unsigned>(count), kThreads};
  return launch_in_turn([&] { return launch(fill_histograms, shape, stream, sketches, search.grid, searches); },
                        [&] { return find_divergences(searches, count, stream); },
                        [&] { return launch(clip, shape, stream, sketches, searches); });
}

}  // namespace

std::size_t search_range_workspace_bytes(std::int64_t count) {
  return batch_of(count) * std::max(sizeof(CostSearch), sizeof(EntropySearch));
}

cudaError_t search_range(const float* lowest, const float* highest, const std::int64_t* sketch,
                         const std::int32_t* low_bits, std::int64_t count, const RangeSearch& search, void* workspace,
                         float* low, float* high, cudaStream_t stream) {
  const Sketches all{lowest, highest, sketch, low_bits, low, high};
  const auto choose_all = [&] {
    return launch(choose, {static_cast<unsigned>(count), kThreads}, stream, all, search.method, search.percentile);
  };
  const auto in_batches = [&](auto search_batch) {
    cudaError_t status = cudaSuccess;
    for (std::int64_t first = 0; first < count && status == cudaSuccess; first += batch_of(count)) {
      status = search_batch(all.from(first), std::min(batch_of(count), count - first), search, workspace, stream);
    }
    return status;
  };
  if (count == 0) return cudaSuccess;
  return by_method(
      search.method, choose_all, choose_all, [&] { return in_batches(search_costs); },
      [&] { return in_batches(search_divergences); });
}

}  // namespace qsim::cuda
