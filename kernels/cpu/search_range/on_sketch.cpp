// The range that a grid should cover, from a sketch. The bindings call it through search_range_kernels(): one sketch at
// a time, on any thread.
#include "qsim/search_range.h"

#include "qsim/search_range/percentile.h"
#include "qsim/search_range/sketch_cost.h"
#include "search_range/candidates.h"

namespace qsim::cpu {

namespace {

union Workspace {
  SketchDensity density;
  EntropyHistogram histogram;
};

Range least_cost(SketchDensity& density, const SketchView& sketch, Range observed, const RangeSearch& search) {
  if (is_empty(observed)) return observed;  // all zeros
  const density::Lattice lattice = density::find_lattice(sketch, observed, search.grid, Alone());
  density.unit = lattice.unit;
  lay_out(density.below, sketch.below, lattice, Alone());
  lay_out(density.above, sketch.above, lattice, Alone());
  const CandidateEncodings<float> encodings({observed, search.grid});
  return least_cost(encodings, density.unit, density.mass(), [&](int i, double limit) {
    return cost_of(density, encodings[i], search.grid, search.gamma, limit);
  });
}

Range least_divergence(EntropyHistogram& histogram, const SketchView& sketch, Range observed,
                       const RangeSearch& search) {
  const double largest = larger(sketch.below.far, sketch.above.far);
  const std::int64_t levels = entropy_levels(observed, search.grid);
  if (levels >= kEntropyBins || !(largest > 0)) return observed;
  clear(histogram, Alone());
  add_sketch(histogram, sketch, largest, Alone());
  return clipped_at(observed, entropy_threshold(histogram, largest, static_cast<int>(levels)));
}

void run(float lowest, float highest, const std::int64_t* sketch, std::uint32_t low_bits, const RangeSearch& search,
         void* workspace, float* low, float* high) {
  Range range{INFINITY, -INFINITY};
  if (lowest <= highest) {
    const SketchView view = view_sketch(sketch, low_bits, lowest, highest);
    const Range observed{smaller(lowest, 0), larger(highest, 0)};
    auto& space = *static_cast<Workspace*>(workspace);
    range = by_method(
        search.method, [&] { return Range{lowest, highest}; },
        [&] { return sketch_percentile(view, search.percentile, Alone()); },
        [&] { return least_cost(space.density, view, observed, search); },
        [&] { return least_divergence(space.histogram, view, observed, search); });
  }
  *low = static_cast<float>(range.low);
  *high = static_cast<float>(range.high);
}

}  // namespace

namespace QSIM_LEVEL {
const SearchRangeKernels search_range_kernels = {sizeof(Workspace), run};
}

}  // namespace qsim::cpu
