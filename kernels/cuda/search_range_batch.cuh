// Some ranges of a table cut into slices, what the blocks that have them find together, and which slice a block has.
#pragma once

#include "entropy.cuh"
#include "qsim/search_range/percentile.h"
#include "search_range_data.cuh"

namespace qsim::cuda {

namespace {

constexpr int kMostCandidates = RangeCandidates<double>::kMost;
constexpr int kRanks = 4;  // of the values that a percentile's two ends lie between

// What the blocks of a range find together.
struct Survey {
  unsigned long long lowest, highest;  // keys of finite values
  unsigned long long finite;
  unsigned long long unit;  // bits of a positive number, which order like it

  template <class T>
  __device__ FiniteValues<T> values() const {
    if (finite == 0) return {INFINITY, -INFINITY, 0};
    return {value_of(lowest, T{}), value_of(highest, T{}), static_cast<std::int64_t>(finite)};
  }
};

// Radix selection of all ranks at once (qsim::value_at_rank).
struct Selection {
  unsigned long long found[kRanks];
  std::int64_t rank[kRanks];
  unsigned long long counts[kRanks][kDigits];  // of ranks with the same digits so far the first has them

  __device__ int same_as(int k) const {
    int first = 0;
    while (found[first] != found[k]) ++first;
    return first;
  }
};

__device__ inline void find_ranks(std::int64_t finite, double percentile, std::int64_t (&rank)[kRanks]) {
  int k = 0;
  data_percentile(finite, percentile, [&](std::int64_t wanted) {  // asks for the next one where that matters
    rank[k++] = wanted;
    return 0.0;
  });
  for (; k < kRanks; ++k) rank[k] = rank[k - 1];
}

// Some ranges of a table, the slices of which are the items of a launch.
struct Batch {
  DataTable table;
  std::int64_t first_item[DataTable::kMost + 1];
  int slices[DataTable::kMost];  // of each range of a tensor
  std::int64_t first, count;     // ranges
  RangeSearch search;            // without its grid
  Survey* surveys;
  void* of_method;  // Selection or EntropySearch for each range, or the costs of all candidates for each item

  std::int64_t item_of(std::int64_t range) const {
    int t = 0;
    while (t + 1 < table.tensors && table.first_range[t + 1] <= range) ++t;
    return first_item[t] + (range - table.first_range[t]) * slices[t];
  }
  std::int64_t items() const { return item_of(first + count) - item_of(first); }

  __device__ RangeSearch search_of(RangePlace place) const {
    return {table.grid[place.tensor], search.method, search.percentile, search.gamma};
  }
  __device__ std::int64_t slot(RangePlace place) const { return table.first_range[place.tensor] + place.i - first; }
  __device__ Selection& selection(std::int64_t slot) const { return static_cast<Selection*>(of_method)[slot]; }
  __device__ EntropySearch& entropy(std::int64_t slot) const { return static_cast<EntropySearch*>(of_method)[slot]; }
  // Of all candidates on one slice.
  __device__ double* errors(RangePlace place, std::int64_t slice) const {
    const RangePlace begin = place_of(table, first);
    const std::int64_t before = first_item[begin.tensor] + begin.i * slices[begin.tensor];
    const std::int64_t item = first_item[place.tensor] + place.i * slices[place.tensor] + slice - before;
    return static_cast<double*>(of_method) + item * kMostCandidates;
  }
};

// The slice that a block has, of `blocks_each` that have it.
template <class T>
struct Slice {
  RangePlace place;
  std::int64_t index;
  Values<T> values;  // none where the range is shorter than the tensor's longest

  __device__ Slice(const Batch& batch, unsigned blocks_each) {
    const RangePlace begin = place_of(batch.table, batch.first);
    const std::int64_t item =
        batch.first_item[begin.tensor] + begin.i * batch.slices[begin.tensor] + blockIdx.x / blocks_each;
    const int tensor = owner_of(item, batch.first_item, batch.table.tensors);
    const std::int64_t of_tensor = item - batch.first_item[tensor];
    place = {tensor, of_tensor / batch.slices[tensor]};
    index = of_tensor % batch.slices[tensor];
    const Values<T> all = values_of<T>(batch.table, place);
    const std::int64_t segment = cost_segment(all.n), start = index * segment;
    values = {all.x + start, min(max(all.n - start, std::int64_t{0}), segment)};
  }
};

}  // namespace

}  // namespace qsim::cuda
