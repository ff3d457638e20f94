#include <algorithm>

#include "bits.h"
#include "fake_quantize_runs.h"
#include "half_tiles.h"
#include "qsim/fake_quantize.h"

namespace qsim::cpu {

namespace {

template <Rounding rounding, class T, class GridOf>
QSIM_HD void pass_in_range(const T* grad, const T* x, T* dx, std::int64_t n, GridOf grids) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const Grid<T> grid = grids[i];
    const T passed = grad[i];
    dx[i] = in_range(quotient<rounding>(x[i], grid.scale), grid) ? passed : T(0);
  }
}

template <Rounding rounding, class T>
void recompute_range(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end,
                     const Grids<arithmetic_t<T>>& grids, const Layout& layout) {
  for_each_run(layout, grids, begin, end, kLongestRun<T>, [&](std::int64_t at, std::int64_t n, auto grid) {
    arithmetic_t<T> buffers[2][kBuffer<T>];
    const auto* gradients = load_tile(grad + at, n, buffers[0]);
    const auto* from = load_tile(x + at, n, buffers[1]);
    auto* to = result_tile(dx + at, buffers[1]);
    pass_in_range<rounding>(gradients, from, to, n, grid);
    store_tile(to, n, dx + at);
  });
}

template <class T>
void recompute(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end, Grids<arithmetic_t<T>> grids,
               const Layout& layout, Rounding rounding) {
  const auto range =
      rounding == Rounding::divide ? recompute_range<Rounding::divide, T> : recompute_range<Rounding::reciprocal, T>;
  range(grad, x, dx, begin, end, grids, layout);
}

template <Rounding rounding, class T>
QSIM_HD void learn(T grad, T x, T& dx, Grid<T> grid, T& scale_sum, T& zero_point_sum) {
  const T exact = quotient<rounding>(x, grid.scale);
  scale_sum += scale_term(grad, x, exact, grid);
  zero_point_sum += zero_point_term(grad, x, exact, grid);
  dx = in_range(exact, grid) ? grad : T(0);
}

// A run of one parameter: kLanes sums in the arithmetic type, whatever the vector width, so that every level gives the
// same bits; at most kSumRun elements, so that a lane adds at most 64 terms before float64 takes over.
constexpr int kLanes = 32;
constexpr std::int64_t kSumRun = 64 * kLanes;

template <class T>
double sum_of_lanes(const T* lanes) {
  static_assert(kLanes == 32);
  double sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = static_cast<double>(lanes[i]) + static_cast<double>(lanes[i + 16]);
  for (int i = 0; i < 8; ++i) sums[i] += sums[i + 8];
  for (int i = 0; i < 4; ++i) sums[i] += sums[i + 4];
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

template <class T>
struct LaneSums {
  T scale[kLanes] = {}, zero_point[kLanes] = {};
};

// Out of line: inlined into several loops the lanes would not stay in registers.
template <Rounding rounding, class T>
[[gnu::noinline]] void learn_run(const T* grad, const T* x, T* dx, std::int64_t n, Grid<T> grid, LaneSums<T>& sums) {
  T scale_lanes[kLanes] = {}, zero_point_lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    QSIM_INDEPENDENT
    for (int j = 0; j < kLanes; ++j) {
      learn<rounding>(grad[i + j], x[i + j], dx[i + j], grid, scale_lanes[j], zero_point_lanes[j]);
    }
  }
  QSIM_INDEPENDENT
  for (int j = 0; j < static_cast<int>(n - i); ++j) {
    learn<rounding>(grad[i + j], x[i + j], dx[i + j], grid, scale_lanes[j], zero_point_lanes[j]);
  }
  for (int j = 0; j < kLanes; ++j) {
    sums.scale[j] += scale_lanes[j];
    sums.zero_point[j] += zero_point_lanes[j];
  }
}

template <Rounding rounding, class T>
void learn_runs(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end, std::int64_t start,
                std::int64_t parameter, const Grids<arithmetic_t<T>>& grids, const Layout& layout, PartialSums sums) {
  using A = arithmetic_t<T>;
  runs_of_one(layout, grids, start, parameter, begin, end,
              [&](std::int64_t at, std::int64_t count, OneGrid<A> grid, std::int64_t column) {
                for (const std::int64_t stop = at + count; at < stop;) {
                  LaneSums<A> lanes;
                  for (const std::int64_t last = std::min(at + kSumRun, stop); at < last;) {
                    const std::int64_t n = std::min(last - at, std::min(kLongestRun<T>, kSumRun));
                    A buffers[2][kBuffer<T>];
                    const A* gradients = load_tile(grad + at, n, buffers[0]);
                    const A* from = load_tile(x + at, n, buffers[1]);
                    A* to = result_tile(dx + at, buffers[1]);
                    learn_run<rounding>(gradients, from, to, n, grid.grid, lanes);
                    store_tile(to, n, dx + at);
                    at += n;
                  }
                  sums.scale[column] += sum_of_lanes(lanes.scale);
                  sums.zero_point[column] += sum_of_lanes(lanes.zero_point);
                }
              });
}

// Rows with a parameter per element: sums per column, in the arithmetic type for kRows rows at a time.
template <Rounding rounding, class T>
void learn_table(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end, std::int64_t parameter,
                 const Grids<arithmetic_t<T>>& grids, std::int64_t width, PartialSums sums) {
  using A = arithmetic_t<T>;
  constexpr std::int64_t kRows = 32, kColumns = kTile;
  A buffers[2][kBuffer<T>];
  A scale_sums[kColumns], zero_point_sums[kColumns];
  for (std::int64_t rows = begin; rows < end; rows += kRows * width) {
    const std::int64_t rows_end = std::min(end, rows + kRows * width);
    for (std::int64_t column = 0; column < width; column += kColumns) {
      const std::int64_t columns = std::min(kColumns, width - column);
      std::fill_n(scale_sums, columns, A(0));
      std::fill_n(zero_point_sums, columns, A(0));
      const GridPerElement<A> grid = from(grids, parameter + column);
      for (std::int64_t at = rows + column; at < rows_end; at += width) {
        const std::int64_t n = std::min(columns, rows_end - at);
        const A* gradients = load_tile(grad + at, n, buffers[0]);
        const A* elements = load_tile(x + at, n, buffers[1]);
        A* to = result_tile(dx + at, buffers[1]);
        QSIM_INDEPENDENT
        for (std::int64_t j = 0; j < n; ++j) {
          learn<rounding>(gradients[j], elements[j], to[j], grid[j], scale_sums[j], zero_point_sums[j]);
        }
        store_tile(to, n, dx + at);
      }
      for (std::int64_t j = 0; j < columns; ++j) {
        sums.scale[column + j] += static_cast<double>(scale_sums[j]);
        sums.zero_point[column + j] += static_cast<double>(zero_point_sums[j]);
      }
    }
  }
}

template <Rounding rounding, class T>
void learnable_slices(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end,
                      const Grids<arithmetic_t<T>>& grids, const Layout& layout, Slices slices, PartialSums sums) {
  const std::int64_t segments = (layout.outer + layout.segment - 1) / layout.segment;
  std::int64_t segment = begin / slices.per_segment, part = begin % slices.per_segment;
  std::int64_t outer_end = (segment / segments + 1) * layout.outer;
  std::int64_t start = outer_end - layout.outer + segment % segments * layout.segment;
  for (std::int64_t slice = begin; slice < end; ++slice) {
    const std::int64_t stop = std::min(start + layout.segment, outer_end);
    const std::int64_t from = start + part * slices.length, to = std::min(from + slices.length, stop);
    const PartialSums own = {sums.scale + slice * layout.width, sums.zero_point + slice * layout.width};
    if (layout.run == 1 && layout.width > 1) {
      learn_table<rounding>(grad, x, dx, from, to, segment * layout.width, grids, layout.width, own);
    } else {
      learn_runs<rounding>(grad, x, dx, from, to, start, segment * layout.width, grids, layout, own);
    }
    if (++part < slices.per_segment) continue;
    part = 0;
    ++segment;
    start = stop;
    if (start == outer_end) outer_end += layout.outer;
  }
}

template <class T>
void learnable(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end, Grids<arithmetic_t<T>> grids,
               const Layout& layout, Rounding rounding, Slices slices, PartialSums sums) {
  const auto run =
      rounding == Rounding::divide ? learnable_slices<Rounding::divide, T> : learnable_slices<Rounding::reciprocal, T>;
  run(grad, x, dx, begin, end, grids, layout, slices, sums);
}

template <class T>
void fold(PartialSums sums, Slices slices, std::int64_t n, std::int64_t width, std::int64_t run, std::int64_t rows,
          const T* scale, double grad_factor, T* dscale, T* dzero_point) {
  for (std::int64_t parameter = 0; parameter < n; ++parameter) {
    double scale_sum = 0, zero_point_sum = 0;
    const std::int64_t segment = parameter / width, column = parameter % width;
    for (std::int64_t row = 0; row < slices.per_segment * rows; ++row) {
      const std::int64_t at = ((segment * slices.per_segment * rows + row) * width + column) * run;
      for (std::int64_t i = at; i < at + run; ++i) {
        scale_sum += sums.scale[i];
        zero_point_sum += sums.zero_point[i];
      }
    }
    dscale[parameter] = static_cast<T>(scale_sum * grad_factor);
    dzero_point[parameter] = static_cast<T>(zero_point_sum * -static_cast<double>(scale[parameter]) * grad_factor);
  }
}

}  // namespace

namespace QSIM_LEVEL {
const FakeQuantizeBackwardKernels fake_quantize_backward_kernels = {
    {recompute<float>, learnable<float>},
    {recompute<double>, learnable<double>},
    {recompute<Float16>, learnable<Float16>},
    {recompute<BFloat16>, learnable<BFloat16>},
    fold<float>,
    fold<double>,
    keep_where_set<std::uint16_t>,
    keep_where_set<std::uint32_t>,
    keep_where_set<std::uint64_t>,
};
}

}  // namespace qsim::cpu
