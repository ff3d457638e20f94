// What both searches on the data do alike: find a range's values, look at them, store what was chosen.
#pragma once

#include "elements.cuh"
#include "qsim/cuda/search_range.h"
#include "qsim/search_range/data_cost.h"
#include "team.cuh"

namespace qsim::cuda {

inline __host__ __device__ std::int64_t longest_range(const DataTable& table, int tensor) {
  return table.block[tensor] < table.length[tensor] ? table.block[tensor] : table.length[tensor];
}

// Range i of a tensor.
struct RangePlace {
  int tensor;
  std::int64_t i;
};

__device__ inline RangePlace place_of(const DataTable& table, std::int64_t range) {
  const int tensor = owner_of(range, table.first_range, table.tensors);
  return {tensor, range - table.first_range[tensor]};
}

__device__ inline std::int64_t row_blocks(const DataTable& table, int tensor) {
  return (table.length[tensor] + table.block[tensor] - 1) / table.block[tensor];
}

__device__ inline std::int64_t length_of(const DataTable& table, RangePlace place) {
  const std::int64_t start = place.i % row_blocks(table, place.tensor) * table.block[place.tensor];
  return min(table.length[place.tensor] - start, table.block[place.tensor]);
}

template <class T>
struct Values {
  const T* x;
  std::int64_t n;
};

template <class T>
__device__ Values<T> values_of(const DataTable& table, RangePlace place) {
  const std::int64_t blocks = row_blocks(table, place.tensor), row = place.i / blocks, block = place.i % blocks;
  return {static_cast<const T*>(table.data[place.tensor]) + row * table.length[place.tensor] +
              block * table.block[place.tensor],
          length_of(table, place)};
}

// By thread 0. A: what the values are computed in.
template <class A>
__device__ void store_range(const DataTable& table, RangePlace place, Range found) {
  if (threadIdx.x != 0) return;
  static_cast<A*>(table.low[place.tensor])[place.i] = stored_end<A>(found.low);
  static_cast<A*>(table.high[place.tensor])[place.i] = stored_end<A>(found.high);
}

// Of the values of a block of threads; the same for all of them.
template <class T>
__device__ FiniteValues<computed_t<T>> finite_values(Values<T> values) {
  using Found = FiniteValues<computed_t<T>>;
  Found mine{INFINITY, -INFINITY, 0};
  for (std::int64_t i = threadIdx.x; i < values.n; i += kThreads) {
    const auto value = widened(values.x[i]);
    if (!is_finite(value)) continue;
    mine = {value < mine.lowest ? value : mine.lowest, value > mine.highest ? value : mine.highest, mine.count + 1};
  }
  return reduce_block_for_all(mine, [](Found a, Found b) {
    return Found{b.lowest < a.lowest ? b.lowest : a.lowest, b.highest > a.highest ? b.highest : a.highest,
                 a.count + b.count};
  });
}

// The power of two that divides every value; some number below `at_least` when it is less, +Inf for zeros.
template <class T>
__device__ double dividing_unit(Values<T> values, double at_least) {
  double unit = INFINITY;
  for (std::int64_t i = threadIdx.x; i < values.n && unit >= at_least; i += kThreads) {
    const auto value = widened(values.x[i]);
    if (value != 0 && is_finite(value)) unit = smaller(unit, lowest_set_bit(value));
  }
  return BlockTeam().least(unit);
}

// The step below which a unit is of no use, and what becomes of it.
__device__ inline double covering_step(Range observed, QuantGrid grid) {
  return choose_qparams<double>(observed.low, observed.high, grid, 0).scale;
}
__device__ inline double lattice_unit(double dividing, double at_least) {
  return at_least <= dividing && dividing < INFINITY ? dividing : 0.0;
}

// The error in steps of up to a chunk of values, by a warp: its lanes are those of the CPU's sum.
template <class T>
__device__ double chunk_error(const T* x, int n, const StepError<computed_t<T>>& error) {
  static_assert(kDataSums == 32, "a lane of the sum is a lane of the warp");
  const int lane = static_cast<int>(threadIdx.x % 32);
  computed_t<T> sum = 0;
  const auto add = [&](int j) { sum += error.of(finite_or_zero(widened(x[j]))); };
  if (n == kCostChunk) {
#pragma unroll
    for (int j = 0; j < kCostChunk; j += kDataSums) add(j + lane);
  } else {
    for (int j = lane; j < n; j += kDataSums) add(j);
  }
  return sum_halves(sum);
}

}  // namespace qsim::cuda
