#include "search_range_slices.cuh"

#include <algorithm>

#include "entropy.cuh"
#include "qsim/search_range/percentile.h"
#include "search_range_batch.cuh"

namespace qsim::cuda {

namespace {

constexpr int kCandidatesEach = 32;  // of a block that judges: four to a warp
constexpr unsigned kParts = (kMostCandidates + kCandidatesEach - 1) / kCandidatesEach;

// ---- What every method begins with: ends and number of the finite values.

__global__ void __launch_bounds__(kThreads) begin(__grid_constant__ const Batch batch) {
  const std::int64_t slot = blockIdx.x;
  if (threadIdx.x == 0) {
    batch.surveys[slot] = {~0ull, 0, 0, static_cast<unsigned long long>(bits_of(static_cast<double>(INFINITY)))};
  }
  if (batch.search.method == RangeMethod::percentile) {
    Selection& selection = batch.selection(slot);
    if (threadIdx.x < kRanks) selection.found[threadIdx.x] = 0;
    for (auto& counts : selection.counts) counts[threadIdx.x] = 0;
  } else if (needs_histogram(batch.search.method)) {
    clear(batch.entropy(slot).histogram, BlockTeam());
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) survey(__grid_constant__ const Batch batch) {
  const Slice<T> slice(batch, 1);
  const auto found = finite_values(slice.values);
  if (threadIdx.x != 0 || found.count == 0) return;
  Survey& of = batch.surveys[batch.slot(slice.place)];
  atomicMin(&of.lowest, static_cast<unsigned long long>(order_key(found.lowest)));
  atomicMax(&of.highest, static_cast<unsigned long long>(order_key(found.highest)));
  atomicAdd(&of.finite, static_cast<unsigned long long>(found.count));
}

template <class A>
__global__ void __launch_bounds__(kThreads) take_observed(__grid_constant__ const Batch batch) {
  const auto found = batch.surveys[blockIdx.x].template values<A>();
  store_range<A>(batch.table, place_of(batch.table, batch.first + blockIdx.x), {found.lowest, found.highest});
}

// ---- Least cost: each block judges some candidates on a slice, then one adds up the slices.

constexpr int kBlocksEach = 3;  // of a multiprocessor: for more of them the compiler spills registers on sm_80

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksEach) judge(__grid_constant__ const Batch batch) {
  using A = computed_t<T>;
  const Slice<T> slice(batch, kParts);
  const int part = static_cast<int>(blockIdx.x % kParts), lane = static_cast<int>(threadIdx.x % 32);
  Survey& survey = batch.surveys[batch.slot(slice.place)];
  const RangeSearch search = batch.search_of(slice.place);
  const RangeCandidates<A> candidates{survey.template values<A>().with_zero(), search.grid};
  if (slice.values.n == 0 || survey.finite == 0 || is_empty(candidates.observed)) return;
  if (part == 0) {
    const double unit = dividing_unit(slice.values, covering_step(candidates.observed, search.grid));
    if (threadIdx.x == 0) atomicMin(&survey.unit, static_cast<unsigned long long>(bits_of(unit)));
  }
  const QuantParams<A> encodings = encoding_of(candidates, part * kCandidatesEach + lane);
  double* const errors = batch.errors(slice.place, slice.index) + part * kCandidatesEach;
  for (int k = static_cast<int>(threadIdx.x / 32); k < kCandidatesEach; k += kWarps) {
    const QuantParams<A> params{__shfl_sync(kWholeWarp, encodings.scale, k),
                                __shfl_sync(kWholeWarp, encodings.zero_point, k)};
    if (params.scale == 0) continue;
    const StepError<A> error = step_error(params, search);
    const double sum = error_of_segment(0, slice.values.n, 0, 1, INFINITY, [&](std::int64_t i, int n) {
      return chunk_error(slice.values.x + i, n, error);
    });
    if (lane == 0) errors[k] = sum;
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads) settle(__grid_constant__ const Batch batch) {
  const Survey& survey = batch.surveys[blockIdx.x];
  const RangePlace place = place_of(batch.table, batch.first + blockIdx.x);
  const auto found = survey.template values<A>();
  const RangeCandidates<A> candidates{found.with_zero(), batch.table.grid[place.tensor]};
  Range range = found.count == 0 ? Range{INFINITY, -INFINITY} : candidates.observed;
  if (found.count > 0 && !is_empty(candidates.observed)) {
    const std::int64_t n = length_of(batch.table, place), segment = cost_segment(n);
    const double* const errors = batch.errors(place, 0);
    const Judged best = cheapest_of(candidates, [&](int i) -> double {
      const double scale = encoding_of(candidates, i).scale;
      if (scale == 0) return INFINITY;
      double sum = 0;
      for (std::int64_t slice = 0; slice * segment < n; ++slice) sum += errors[slice * kMostCandidates + i];
      return sum * (scale * scale);
    });
    const double covering = covering_step(candidates.observed, candidates.grid);
    const double unit = number_of<double>(static_cast<std::int64_t>(survey.unit));
    range = best.settled(candidates, lattice_unit(unit, covering), static_cast<double>(found.count));
  }
  store_range<A>(batch.table, place, range);
}

// ---- Percentile: digit by digit, the values that the two ends lie between.

template <class T>
__global__ void __launch_bounds__(kThreads) count_digits(__grid_constant__ const Batch batch, int shift) {
  const Slice<T> slice(batch, 1);
  Selection& selection = batch.selection(batch.slot(slice.place));
  __shared__ unsigned counts[kRanks][kDigits];
  unsigned long long found[kRanks];
  bool counted[kRanks];
#pragma unroll
  for (int k = 0; k < kRanks; ++k) {
    counts[k][threadIdx.x] = 0;
    found[k] = selection.found[k];
    counted[k] = selection.same_as(k) == k;
  }
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < slice.values.n; i += kThreads) {
    const auto value = widened(slice.values.x[i]);
    if (!is_finite(value)) continue;
    const std::uint64_t key = order_key(value) >> shift;
#pragma unroll
    for (int k = 0; k < kRanks; ++k) {
      if (counted[k] && key / kDigits == found[k]) atomicAdd(&counts[k][key % kDigits], 1u);
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kRanks; ++k) {
    const unsigned mine = counts[k][threadIdx.x];
    if (mine != 0) atomicAdd(&selection.counts[k][threadIdx.x], static_cast<unsigned long long>(mine));
  }
}

// A thread has one digit, and clears its counts for the next round.
__global__ void __launch_bounds__(kThreads) pick_digits(__grid_constant__ const Batch batch, bool is_first) {
  const auto finite = static_cast<std::int64_t>(batch.surveys[blockIdx.x].finite);
  if (finite == 0) return;
  Selection& selection = batch.selection(blockIdx.x);
  if (is_first && threadIdx.x == 0) find_ranks(finite, batch.search.percentile, selection.rank);
  __syncthreads();
  std::int64_t rank[kRanks], mine[kRanks], before[kRanks], all;
  unsigned long long found[kRanks];
#pragma unroll
  for (int k = 0; k < kRanks; ++k) {
    rank[k] = selection.rank[k];
    found[k] = selection.found[k];
    mine[k] = static_cast<std::int64_t>(selection.counts[selection.same_as(k)][threadIdx.x]);
    before[k] = sum_of_threads_before(mine[k], all);
  }
  __syncthreads();  // all of it has been read
#pragma unroll
  for (int k = 0; k < kRanks; ++k) {
    selection.counts[k][threadIdx.x] = 0;
    if (before[k] <= rank[k] && rank[k] < before[k] + mine[k]) {
      selection.found[k] = found[k] * kDigits + threadIdx.x;
      selection.rank[k] = rank[k] - before[k];
    }
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads) take_selected(__grid_constant__ const Batch batch) {
  const auto finite = static_cast<std::int64_t>(batch.surveys[blockIdx.x].finite);
  Range range{INFINITY, -INFINITY};
  if (finite > 0) {
    int k = 0;
    range = data_percentile(finite, batch.search.percentile, [&](std::int64_t) {
      return value_of(batch.selection(blockIdx.x).found[k++], A{});  // as find_ranks was asked
    });
  }
  store_range<A>(batch.table, place_of(batch.table, batch.first + blockIdx.x), range);
}

// ---- Entropy: the histogram, then as on a sketch.

template <class T>
__global__ void __launch_bounds__(kThreads) count_magnitudes(__grid_constant__ const Batch batch) {
  const Slice<T> slice(batch, 1);
  const std::int64_t slot = batch.slot(slice.place);
  const Range observed = batch.surveys[slot].template values<computed_t<T>>().with_zero();
  const double largest = larger(-observed.low, observed.high);
  if (!(largest > 0) || entropy_levels(observed, batch.table.grid[slice.place.tensor]) >= kEntropyBins) return;
  __shared__ unsigned counts[kEntropyBins];
  for (int bin = static_cast<int>(threadIdx.x); bin < kEntropyBins; bin += kThreads) counts[bin] = 0;
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < slice.values.n; i += kThreads) {
    const auto value = widened(slice.values.x[i]);
    if (value != 0 && is_finite(value)) atomicAdd(&counts[entropy_bin(value, largest)], 1u);
  }
  __syncthreads();
  double* const to = batch.entropy(slot).histogram.count;
  for (int bin = static_cast<int>(threadIdx.x); bin < kEntropyBins; bin += kThreads) {
    if (counts[bin] != 0) atomicAdd(to + bin, static_cast<double>(counts[bin]));  // whole numbers: exact in any order
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads) sum_counts(__grid_constant__ const Batch batch) {
  const RangePlace place = place_of(batch.table, batch.first + blockIdx.x);
  const Range observed = batch.surveys[blockIdx.x].template values<A>().with_zero();
  EntropySearch& search = batch.entropy(blockIdx.x);
  const double largest = larger(-observed.low, observed.high);
  if (begin_search(search, observed, largest, batch.table.grid[place.tensor])) {
    sum_prefixes(search.histogram, BlockTeam());
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads) take_clipped(__grid_constant__ const Batch batch) {
  const auto found = batch.surveys[blockIdx.x].template values<A>();
  Range range = clipped(found.with_zero(), batch.entropy(blockIdx.x));
  if (found.count == 0) range = {INFINITY, -INFINITY};
  store_range<A>(batch.table, place_of(batch.table, batch.first + blockIdx.x), range);
}

// ---- The launches.

std::int64_t slices_of(std::int64_t n) { return (n + cost_segment(n) - 1) / cost_segment(n); }

Batch batch_of(const DataTable& table, const RangeSearch& search) {
  Batch batch{};
  batch.table = table;
  batch.search = search;
  batch.first_item[0] = 0;
  for (int t = 0; t < table.tensors; ++t) {
    const std::int64_t last_block = table.length[t] % table.block[t];  // the shorter one may have more slices
    const std::int64_t slices = std::max({slices_of(longest_range(table, t)), slices_of(last_block), std::int64_t{1}});
    batch.slices[t] = static_cast<int>(slices);
    batch.first_item[t + 1] = batch.first_item[t] + slices * (table.first_range[t + 1] - table.first_range[t]);
  }
  batch.first = 0;
  // Histograms are 80 KB each. The other methods come here with few ranges for each tensor.
  const std::int64_t all = table.first_range[table.tensors];
  batch.count = needs_histogram(search.method) ? std::min(all, 4 * multiprocessors()) : all;
  return batch;
}

std::size_t bytes_of_surveys(const Batch& batch) {
  return (batch.count * sizeof(Survey) + alignof(EntropySearch) - 1) / alignof(EntropySearch) * alignof(EntropySearch);
}

template <class T>
cudaError_t search_batch(const Batch& batch, cudaStream_t stream) {
  const LaunchShape by_range{static_cast<unsigned>(batch.count), kThreads};
  const LaunchShape by_item{static_cast<unsigned>(batch.items()), kThreads};
  const auto each_range = [&](auto kernel) { return launch(kernel, by_range, stream, batch); };
  const auto each_item = [&](auto kernel) { return launch(kernel, by_item, stream, batch); };
  const auto least_cost = [&] {
    return launch_in_turn([&] { return launch(judge<T>, {by_item.blocks.x * kParts, kThreads}, stream, batch); },
                          [&] { return each_range(settle<computed_t<T>>); });
  };
  const auto percentile = [&] {
    constexpr int kFirstShift = 8 * sizeof(computed_t<T>) - 8;
    cudaError_t status = cudaSuccess;
    for (int shift = kFirstShift; shift >= 0 && status == cudaSuccess; shift -= 8) {
      status = launch_in_turn([&] { return launch(count_digits<T>, by_item, stream, batch, shift); },
                              [&] { return launch(pick_digits, by_range, stream, batch, shift == kFirstShift); });
    }
    return status != cudaSuccess ? status : each_range(take_selected<computed_t<T>>);
  };
  const auto least_divergence = [&] {
    auto* searches = static_cast<EntropySearch*>(batch.of_method);
    return launch_in_turn([&] { return each_item(count_magnitudes<T>); },
                          [&] { return each_range(sum_counts<computed_t<T>>); },
                          [&] { return find_divergences(searches, batch.count, stream); },
                          [&] { return each_range(take_clipped<computed_t<T>>); });
  };
  return launch_in_turn([&] { return each_range(begin); }, [&] { return each_item(survey<T>); },
                        [&] {
                          return by_method(
                              batch.search.method, [&] { return each_range(take_observed<computed_t<T>>); }, percentile,
                              least_cost, least_divergence);
                        });
}

}  // namespace

bool is_sliced(const DataTable& table, int tensor, RangeMethod method) {
  const std::int64_t ranges = table.first_range[tensor + 1] - table.first_range[tensor];
  return needs_histogram(method) || (ranges < multiprocessors() && slices_of(longest_range(table, tensor)) > 1);
}

std::size_t slices_workspace_bytes(const DataTable& table, RangeMethod method) {
  RangeSearch search{};
  search.method = method;
  const Batch batch = batch_of(table, search);
  const auto ranges = static_cast<std::size_t>(batch.count);
  const std::size_t of_method = by_method(
      method, [] { return std::size_t{0}; }, [&] { return ranges * sizeof(Selection); },
      [&] { return static_cast<std::size_t>(batch.items()) * kMostCandidates * sizeof(double); },
      [&] { return ranges * sizeof(EntropySearch); });
  return bytes_of_surveys(batch) + of_method;
}

cudaError_t search_slices(const DataTable& table, Element element, const RangeSearch& search, void* workspace,
                          cudaStream_t stream) {
  Batch batch = batch_of(table, search);
  const std::int64_t all = table.first_range[table.tensors], each = batch.count;
  batch.surveys = static_cast<Survey*>(workspace);
  batch.of_method = static_cast<char*>(workspace) + bytes_of_surveys(batch);
  cudaError_t status = cudaSuccess;
  for (; batch.first < all && status == cudaSuccess; batch.first += each) {
    batch.count = std::min(each, all - batch.first);
    status = with_element(element, [&](auto zero) { return search_batch<decltype(zero)>(batch, stream); });
  }
  return status;
}

}  // namespace qsim::cuda
