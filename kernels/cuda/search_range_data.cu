// One block per range, where there are many; few long ones are cut into slices (search_range_slices.cu). Sums are those
// of the CPU, so the same bits come out, but for the logarithms of the entropy method.
#include "qsim/cuda/search_range.h"

#include "qsim/search_range/percentile.h"
#include "search_range_data.cuh"
#include "search_range_slices.cuh"

namespace qsim::cuda {

namespace {

// Values of which one chunk is all there is: a thread has all lanes of a candidate's sum.
template <class T>
__device__ Judged cheapest_for_few(Values<T> of, const RangeCandidates<computed_t<T>>& candidates,
                                   const RangeSearch& search) {
  using A = computed_t<T>;
  static_assert(kCostChunk == kThreads);
  __shared__ A values[kCostChunk];
  __syncthreads();
  values[threadIdx.x] = threadIdx.x < of.n ? finite_or_zero(widened(of.x[threadIdx.x])) : A{0};  // 0: no error
  __syncthreads();
  return cheapest_of(candidates, [&](int i) -> double {
    const QuantParams<A> params = encoding_of(candidates, i);
    if (params.scale == 0) return INFINITY;
    const StepError<A> error = step_error(params, search);
    const double scale = params.scale;
    A lanes[kDataSums] = {};
    for (int j = 0; j < of.n; j += kDataSums) {
#pragma unroll
      for (int lane = 0; lane < kDataSums; ++lane) lanes[lane] += error.of(values[j + lane]);
    }
    return sum_of_lanes(lanes) * (scale * scale);
  });
}

// A warp judges every eighth candidate, its largest first, as on the CPU: those are good, and most others are given up
// when they cost more than the best that any warp has found. Each lane makes the encoding of one of the next 32.
template <class T>
__device__ Judged cheapest_for_many(Values<T> of, const RangeCandidates<computed_t<T>>& candidates,
                                    const RangeSearch& search) {
  using A = computed_t<T>;
  __shared__ unsigned long long limit;  // as bits, which order like the costs
  __syncthreads();
  if (threadIdx.x == 0) limit = static_cast<unsigned long long>(bits_of(static_cast<double>(INFINITY)));
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x % 32),
            last = candidates.count() - 1 - static_cast<int>(threadIdx.x / 32);
  Judged best;
  QuantParams<A> encodings{0, 0};
  for (int turn = 0; last - turn * kWarps >= 0; ++turn) {
    if (turn % 32 == 0) encodings = encoding_of(candidates, last - (turn + lane) * kWarps);
    const QuantParams<A> params{__shfl_sync(kWholeWarp, encodings.scale, turn % 32),
                                __shfl_sync(kWholeWarp, encodings.zero_point, turn % 32)};
    if (params.scale == 0) continue;
    const unsigned long long known = __shfl_sync(kWholeWarp, *static_cast<volatile unsigned long long*>(&limit), 0);
    const StepError<A> error = step_error(params, search);
    const double cost =
        cost_of_values(of.n, params.scale, number_of<double>(static_cast<std::int64_t>(known)),
                       [&](std::int64_t i, int values) { return chunk_error(of.x + i, values, error); });
    if (!(cost <= best.cost)) continue;
    best = {cost, last - turn * kWarps};
    if (lane == 0) atomicMin(&limit, static_cast<unsigned long long>(bits_of(cost)));
  }
  return cheapest(best);
}

template <class T>
__device__ Range least_cost(Values<T> of, const FiniteValues<computed_t<T>>& found, const RangeSearch& search) {
  const RangeCandidates<computed_t<T>> candidates{found.with_zero(), search.grid};
  if (is_empty(candidates.observed)) return candidates.observed;  // all zeros
  const double covering = covering_step(candidates.observed, search.grid);
  const double unit = lattice_unit(dividing_unit(of, covering), covering);
  const Judged best =
      of.n <= kCostChunk ? cheapest_for_few(of, candidates, search) : cheapest_for_many(of, candidates, search);
  return best.settled(candidates, unit, static_cast<double>(found.count));
}

// The digit in bits [shift, shift + 8) of the key with `rank` finite ones before it, among those that begin with the
// digits found so far; `rank` becomes its rank among those that have that digit too. A thread counts one digit.
template <class T>
__device__ int digit_at_rank(Values<T> of, std::uint64_t found, int shift, std::int64_t& rank) {
  static_assert(kDigits == kThreads);
  __shared__ unsigned long long counts[kDigits];
  __shared__ std::int64_t rank_of_digit;
  __shared__ int digit;
  __syncthreads();
  counts[threadIdx.x] = 0;
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < of.n; i += kThreads) {
    const auto value = widened(of.x[i]);
    const std::uint64_t key = order_key(value) >> shift;
    if (is_finite(value) && key / kDigits == found) atomicAdd(counts + key % kDigits, 1ull);
  }
  __syncthreads();
  std::int64_t all;
  const auto mine = static_cast<std::int64_t>(counts[threadIdx.x]), before = sum_of_threads_before(mine, all);
  if (before <= rank && rank < before + mine) {
    digit = static_cast<int>(threadIdx.x);
    rank_of_digit = rank - before;
  }
  __syncthreads();
  rank = rank_of_digit;
  return digit;
}

template <class T>
__device__ Range percentile_range(Values<T> of, std::int64_t finite, double percentile) {
  return data_percentile(finite, percentile, [&](std::int64_t rank) {
    return value_at_rank<computed_t<T>>(rank, [&](std::uint64_t found, int shift, std::int64_t& left) {
      return digit_at_rank(of, found, shift, left);
    });
  });
}

template <class T>
__device__ Range choose_range(Values<T> of, const RangeSearch& search) {
  const auto found = finite_values(of);
  const Range seen{found.lowest, found.highest};
  if (found.count == 0) return seen;
  const auto as_seen = [&] { return seen; };
  return by_method(
      search.method, as_seen, [&] { return percentile_range(of, found.count, search.percentile); },
      [&] { return least_cost(of, found, search); }, as_seen);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    run(__grid_constant__ const DataTable table, __grid_constant__ const RangeSearch search) {
  for (std::int64_t range = blockIdx.x; range < table.first_range[table.tensors]; range += gridDim.x) {
    const RangePlace place = place_of(table, range);
    const RangeSearch here{table.grid[place.tensor], search.method, search.percentile, search.gamma};
    store_range<computed_t<T>>(table, place, choose_range(values_of<T>(table, place), here));
  }
}

// The tensors of `table` whose ranges go by slices, or those whose do not.
DataTable part_of(const DataTable& table, RangeMethod method, bool sliced) {
  DataTable part;
  part.tensors = 0;
  part.first_range[0] = 0;
  for (int from = 0; from < table.tensors; ++from) {
    if (is_sliced(table, from, method) != sliced) continue;
    const int to = part.tensors++;
    part.data[to] = table.data[from];
    part.length[to] = table.length[from];
    part.block[to] = table.block[from];
    part.low[to] = table.low[from];
    part.high[to] = table.high[from];
    part.grid[to] = table.grid[from];
    part.first_range[to + 1] = part.first_range[to] + table.first_range[from + 1] - table.first_range[from];
  }
  return part;
}

cudaError_t search_whole(const DataTable& table, Element element, const RangeSearch& search, cudaStream_t stream) {
  const std::int64_t count = table.first_range[table.tensors];
  if (count == 0) return cudaSuccess;
  const LaunchShape shape{static_cast<unsigned>(std::min<std::int64_t>(count, 65535)), kThreads};
  return with_element(element, [&](auto zero) { return launch(run<decltype(zero)>, shape, stream, table, search); });
}

}  // namespace

std::size_t search_range_data_workspace_bytes(const DataTable& table, RangeMethod method) {
  return slices_workspace_bytes(part_of(table, method, true), method);
}

cudaError_t search_range_data(const DataTable& table, Element element, const RangeSearch& search, void* workspace,
                              cudaStream_t stream) {
  return launch_in_turn(
      [&] { return search_whole(part_of(table, search.method, false), element, search, stream); },
      [&] { return search_slices(part_of(table, search.method, true), element, search, workspace, stream); });
}

}  // namespace qsim::cuda
