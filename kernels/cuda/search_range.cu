// One block per sketch: its two sides are laid out by one thread each, in the order of the CPU, and the candidates are
// judged by one thread each. The same bits as the CPU, but for the logarithms of the entropy method.
#include "qsim/cuda/search_range.h"

#include "launch.cuh"
#include "qsim/search_range/entropy.h"
#include "qsim/search_range/percentile.h"
#include "qsim/search_range/sketch_cost.h"
#include "search_range_block.cuh"

namespace qsim::cuda {

namespace {

union Workspace {
  SketchDensity density;
  EntropyHistogram histogram;
};

__device__ Range least_cost(SketchDensity& density, const SketchView& sketch, Range observed,
                            const RangeSearch& search) {
  if (is_empty(observed)) return observed;  // all zeros
  const density::Lattice lattice = density::find_lattice(sketch, observed, search.grid);
  if (threadIdx.x == 0) {
    density.unit = lattice.unit;
    density::lay_out(density.below, sketch.below, lattice);
  } else if (threadIdx.x == 32) {  // another warp
    density::lay_out(density.above, sketch.above, lattice);
  }
  __syncthreads();
  const RangeCandidates<float> candidates{observed, search.grid};
  Judged best;
  for (int i = static_cast<int>(threadIdx.x); i < candidates.count(); i += kThreads) {
    const Range range = candidates.at(i);
    if (is_empty(range)) continue;
    const QuantParams<float> params = choose_qparams<float>(range.low, range.high, search.grid, 0);
    const double cost = cost_of(density, params, search.grid, search.gamma, best.cost);
    if (cost < best.cost) best = {cost, i};
  }
  return cheapest(best).settled(candidates, density.unit, density.mass());
}

__device__ Range least_divergence(EntropyHistogram& histogram, const SketchView& sketch, Range observed,
                                  const RangeSearch& search) {
  const double largest = larger(sketch.below.far, sketch.above.far);
  const std::int64_t levels = entropy_levels(observed, search.grid);
  if (levels >= kEntropyBins || !(largest > 0)) return observed;
  for (int bin = static_cast<int>(threadIdx.x); bin <= kEntropyBins; bin += kThreads) histogram.count[bin] = 0;
  __syncthreads();
  if (threadIdx.x == 0) add_sketch(histogram, sketch, largest);
  return clipped_at(observed, block_entropy_threshold(histogram, largest, static_cast<int>(levels)));
}

__device__ Range choose_range(const SketchView& sketch, Range seen, const RangeSearch& search, Workspace& space) {
  const Range observed{smaller(seen.low, 0), larger(seen.high, 0)};
  return range_by(
      search.method, seen, [&] { return threadIdx.x == 0 ? sketch_percentile(sketch, search.percentile) : seen; },
      [&] { return least_cost(space.density, sketch, observed, search); },
      [&] { return least_divergence(space.histogram, sketch, observed, search); });
}

__global__ void __launch_bounds__(kThreads)
    run(const float* lowest, const float* highest, const std::int64_t* sketches, const std::int32_t* low_bits,
        std::int64_t count, RangeSearch search, Workspace* workspace, float* low, float* high) {
  for (std::int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    __syncthreads();  // the previous sketch's workspace is no longer read
    Range range{INFINITY, -INFINITY};
    if (lowest[i] <= highest[i]) {
      const Range seen{lowest[i], highest[i]};
      const std::uint32_t lattice = low_bits ? static_cast<std::uint32_t>(low_bits[i]) : kUnknownBits;
      range = choose_range(view_sketch(sketches + i * kSketchBins, lattice, seen.low, seen.high), seen, search,
                           workspace[blockIdx.x]);
    }
    if (threadIdx.x == 0) {
      low[i] = static_cast<float>(range.low);
      high[i] = static_cast<float>(range.high);
    }
  }
}

}  // namespace

std::size_t search_range_workspace_bytes(std::int64_t count) {
  return blocks_with_workspace(count) * sizeof(Workspace);
}

cudaError_t search_range(const float* lowest, const float* highest, const std::int64_t* sketch,
                         const std::int32_t* low_bits, std::int64_t count, const RangeSearch& search, void* workspace,
                         float* low, float* high, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return launch(run, {static_cast<unsigned>(blocks_with_workspace(count)), kThreads}, stream, lowest, highest, sketch,
                low_bits, count, search, static_cast<Workspace*>(workspace), low, high);
}

}  // namespace qsim::cuda
