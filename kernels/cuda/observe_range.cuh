// The kernels that find ranges, and what may follow in the same launch. `After` says
//   wanted()                whether to observe at all, read on the device
//   range_of_block(r, i)    what to do with range i, which one thread has whole: the only call for it
//   all_joined()            called by every thread of every block, when its ranges are in lowest and highest
#pragma once

#include <algorithm>

#include "divisor.cuh"
#include "elements.cuh"
#include "range_state.cuh"

namespace qsim::cuda {

namespace {

constexpr std::int64_t kShortRow = 256;  // elements of a range that a team reads sooner than a warp does
constexpr std::int64_t kShortest = 1024, kLongest = 1 << 20;  // elements of a row that one warp reads at a time

__device__ __forceinline__ void count_elements(std::int64_t n, std::int64_t* counts) {
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) add(counts, n);
}

// The range of what visit(f) calls f with. Three instructions an element while all are finite; what is not turns 0 * e
// into NaN, and then all are visited once more and counted.
template <class Visit>
__device__ __forceinline__ FiniteRange range_of_visited(NonFinite& found, Visit visit) {
  FiniteRange range;
  float mark = 0;
  visit([&](float e) {
    range.lowest = fminf(range.lowest, e);
    range.highest = fmaxf(range.highest, e);
    mark = fmaf(e, 0.f, mark);
  });
  if (mark != 0) {
    range = {};
    visit([&](float e) { qsim::observe(e, range, found); });
  }
  return {range.lowest + 0.f, range.highest + 0.f};
}

// A warp takes one segment of a row at a time.
template <class T, class After>
__global__ void observe_rows(const T* x, std::int64_t rows, std::int64_t ranges, std::int64_t inner, int segment,
                             float* lowest, float* highest, std::int64_t* counts, After after) {
  if (!after.wanted()) return;
  count_elements(rows * inner, counts);
  const int lane = threadIdx.x % 32;
  const std::int64_t segments = (inner + segment - 1) / segment, items = rows * segments;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * kWarps;
  NonFinite found;
  for (std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; item < items;
       item += warps) {
    const std::int64_t row = item / segments, first = item % segments * segment;
    const int n = static_cast<int>(min(static_cast<std::int64_t>(segment), inner - first));
    const FiniteRange range = range_of_warp(
        range_of_visited(found, [&](auto see) { for_each_element(x + row * inner + first, n, lane, 32, see); }));
    if (lane == 0) join(range, lowest + row % ranges, highest + row % ranges);
  }
  join(found, counts);
  after.all_joined();
}

// Short rows, many of them: the matrix [outer, ranges * inner] by columns, so that neighbouring threads read
// neighbours. A narrow matrix is widened: `width` is a multiple of `period` = ranges * inner.
template <class T, class After>
__global__ void observe_columns(const T* x, std::int64_t n, std::int64_t width, std::int64_t period, std::int64_t inner,
                                float* lowest, float* highest, std::int64_t* counts, After after) {
  if (!after.wanted()) return;
  count_elements(n, counts);
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  NonFinite found;
  if (column < width) {
    const std::int64_t step = width * gridDim.y;
    const FiniteRange range = range_of_visited(found, [&](auto see) {
#pragma unroll 4
      for (std::int64_t i = blockIdx.y * width + column; i < n; i += step) see(as_float(x[i]));
    });
    const std::int64_t r = column % period / inner;
    join(range, lowest + r, highest + r);
  }
  join(found, counts);
  after.all_joined();
}

// One thread for each range of a block; neighbours along `inner` read neighbours.
template <class T, class After>
__global__ void observe_block_rows(const T* x, std::int64_t outer, std::int64_t size, std::int64_t inner,
                                   std::int64_t block, std::int64_t* counts, After after) {
  if (!after.wanted()) return;
  count_elements(outer * size * inner, counts);
  const std::int64_t blocks = (size + block - 1) / block, ranges = outer * blocks * inner;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  NonFinite found;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < ranges; i += threads) {
    const std::int64_t line = i / inner, first = line % blocks * block;
    const T* from = x + (line / blocks * size + first) * inner + i % inner;
    const std::int64_t n = min(block, size - first);
    const FiniteRange range = range_of_visited(found, [&](auto see) {
#pragma unroll 4
      for (std::int64_t j = 0; j < n; ++j) see(as_float(from[j * inner]));
    });
    after.range_of_block(range, i);
  }
  join(found, counts);
}

// Some neighbours in a warp, which read a row together: the fewer, the less of what each row costs them all, and the
// less they read at once.
struct Team {
  unsigned log2;

  explicit Team(std::int64_t row) : log2(row < 12 ? 0 : row < 24 ? 1 : row <= 64 ? 2 : 3) {}
  int in_a_block() const { return kThreads >> log2; }

  __device__ __forceinline__ unsigned lanes() const { return 1u << log2; }
};

struct Row {
  std::int64_t first;  // element
  unsigned n;
};

// Rows of few elements, a team to each: `row_of(i)` is row i, taken(range, i) gets its range, in one thread. Warps stay
// together: those of the last rows are whole.
template <class T, class RowOf, class Taken>
__device__ __forceinline__ void observe_by_teams(const T* x, unsigned rows, Team team, NonFinite& found, RowOf row_of,
                                                 Taken taken) {
  const unsigned rank = threadIdx.x % team.lanes(), teams = gridDim.x * kThreads >> team.log2;
  for (unsigned of_warp = (blockIdx.x * kThreads + threadIdx.x / 32 * 32) >> team.log2; of_warp < rows;
       of_warp += teams) {
    const unsigned i = of_warp + (threadIdx.x % 32 >> team.log2);
    FiniteRange range;
    if (i < rows) {
      const Row row = row_of(i);
      range = range_of_visited(found, [&](auto see) {
#pragma unroll 4
        for (unsigned j = rank; j < row.n; j += team.lanes()) see(as_float(x[row.first + j]));
      });
    }
    range = range_of_team(range, team.lanes());
    if (rank == 0 && i < rows) taken(range, i);
  }
}

// Row i is of range i % ranges.
template <class T, class After>
__global__ void __launch_bounds__(kThreads)
    observe_short_rows(const T* x, unsigned rows, Team team, Divisor ranges, unsigned inner, float* lowest,
                       float* highest, std::int64_t* counts, After after) {
  if (!after.wanted()) return;
  count_elements(std::int64_t{rows} * inner, counts);
  NonFinite found;
  observe_by_teams(
      x, rows, team, found, [&](unsigned i) { return Row{std::int64_t{i} * inner, inner}; },
      [&](FiniteRange range, unsigned i) {
        const unsigned r = ranges.rest(i);
        join(range, lowest + r, highest + r);
      });
  join(found, counts);
  after.all_joined();
}

// Blocks of adjacent elements; the last of a line of `size` elements may be short.
template <class T, class After>
__global__ void __launch_bounds__(kThreads)
    observe_adjacent(const T* x, unsigned ranges, Team team, Divisor blocks, std::int64_t size, std::int64_t block,
                     std::int64_t* counts, After after) {
  if (!after.wanted()) return;
  count_elements(ranges / blocks.of * size, counts);
  const bool whole = blocks.of * block == size;  // then there is nothing to divide
  NonFinite found;
  observe_by_teams(
      x, ranges, team, found,
      [&](unsigned i) {
        if (whole) return Row{i * block, static_cast<unsigned>(block)};
        const unsigned line = blocks.quotient(i);
        const std::int64_t first = (i - line * blocks.of) * block;
        return Row{line * size + first, static_cast<unsigned>(min(block, size - first))};
      },
      [&](FiniteRange range, unsigned i) { after.range_of_block(range, i); });
  join(found, counts);
}

template <class After>
cudaError_t launch_adjacent(const void* x, Element element, std::int64_t outer, std::int64_t size, std::int64_t block,
                            std::int64_t* counts, After after, cudaStream_t stream) {
  const std::int64_t blocks = (size + block - 1) / block, ranges = outer * blocks;
  return with_element(element, [&](auto type) {
    using T = decltype(type);
    const Team team(std::min(size, block));
    const LaunchShape shape{blocks_for(ranges, team.in_a_block()), kThreads};
    return launch(observe_adjacent<T, After>, shape, stream, static_cast<const T*>(x), static_cast<unsigned>(ranges),
                  team, Divisor(static_cast<unsigned>(blocks)), size, block, counts, after);
  });
}

template <class After>
cudaError_t launch_ranges(const void* x, Element element, std::int64_t outer, std::int64_t ranges, std::int64_t inner,
                          float* lowest, float* highest, std::int64_t* counts, After after, cudaStream_t stream) {
  const std::int64_t n = outer * ranges * inner;
  if (n == 0) return cudaSuccess;
  if (ranges == 1) inner = n, outer = 1;
  const std::int64_t rows = outer * ranges;
  if (outer == 1 && ranges > 1 && inner <= kShortRow && rows <= INT32_MAX) {
    return launch_adjacent(x, element, 1, n, inner, counts, after, stream);
  }
  if (inner < 32 && outer > 32) {
    const std::int64_t period = ranges * inner, width = period < kThreads ? kThreads / period * period : period;
    const unsigned across = static_cast<unsigned>((width + kThreads - 1) / kThreads);
    const std::int64_t deep = std::clamp<std::int64_t>(n / width / 32, 1, full_grid());
    const dim3 grid(across, static_cast<unsigned>(deep));
    return with_element(element, [&](auto type) {
      using T = decltype(type);
      return launch(observe_columns<T, After>, {grid, kThreads}, stream, static_cast<const T*>(x), n, width, period,
                    inner, lowest, highest, counts, after);
    });
  }
  if (inner <= kShortRow && rows <= INT32_MAX) {
    return with_element(element, [&](auto type) {
      using T = decltype(type);
      const Team team(inner);
      return launch(observe_short_rows<T, After>, {blocks_for(rows, team.in_a_block()), kThreads}, stream,
                    static_cast<const T*>(x), static_cast<unsigned>(rows), team, Divisor(static_cast<unsigned>(ranges)),
                    static_cast<unsigned>(inner), lowest, highest, counts, after);
    });
  }
  // Segments as long as leaves work for every warp.
  const std::int64_t fair = n / (full_grid() * kWarps) / kShortest * kShortest;
  const int segment = static_cast<int>(std::clamp(fair, kShortest, kLongest));
  const std::int64_t items = rows * ((inner + segment - 1) / segment);
  return with_element(element, [&](auto type) {
    using T = decltype(type);
    return launch(observe_rows<T, After>, {blocks_for(items, kWarps), kThreads}, stream, static_cast<const T*>(x), rows,
                  ranges, inner, segment, lowest, highest, counts, after);
  });
}

template <class After>
cudaError_t launch_blocks(const void* x, Element element, std::int64_t outer, std::int64_t size, std::int64_t inner,
                          std::int64_t block, std::int64_t* counts, After after, cudaStream_t stream) {
  const std::int64_t ranges = outer * ((size + block - 1) / block) * inner;
  if (ranges == 0) return cudaSuccess;
  if (inner == 1 && ranges <= INT32_MAX && block <= INT32_MAX) {
    return launch_adjacent(x, element, outer, size, block, counts, after, stream);
  }
  return with_element(element, [&](auto type) {
    using T = decltype(type);
    return launch(observe_block_rows<T, After>, {blocks_for(ranges, kThreads), kThreads}, stream,
                  static_cast<const T*>(x), outer, size, inner, block, counts, after);
  });
}

}  // namespace

}  // namespace qsim::cuda
