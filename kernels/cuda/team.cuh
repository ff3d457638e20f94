// The threads of a block as the team of a range search (qsim/search_range/team.h), and what the blocks of all searches
// do alike.
#pragma once

#include <climits>

#include "qsim/search_range.h"
#include "reduce.cuh"

namespace qsim::cuda {

struct BlockTeam {
  static constexpr int kSize = kThreads;

  __device__ int rank() const { return static_cast<int>(threadIdx.x); }
  __device__ void wait() const { __syncthreads(); }
  __device__ double least(double mine) const {
    return reduce_block_for_all(mine, [](double a, double b) { return smaller(a, b); });
  }
  __device__ std::int64_t sum(std::int64_t mine) const {
    return reduce_block_for_all(mine, [](std::int64_t a, std::int64_t b) { return a + b; });
  }
  template <class T>
  __device__ T sum_before(T mine, T& all) const {
    return sum_of_threads_before(mine, all);
  }
  __device__ bool first(bool here, double& value) const {
    __shared__ double found;
    const int winner = reduce_block_for_all(here ? rank() : kSize, [](int a, int b) { return a < b ? a : b; });
    if (rank() == winner) found = value;
    wait();
    if (winner < kSize) value = found;
    return winner < kSize;
  }
  __device__ void add(double* to, double amount) const { atomicAdd(to, amount); }

  // Shared memory for `count` of them; the same at each call, so what was there must have been read.
  template <class T, int count>
  __device__ T* scratch() const {
    __shared__ T memory[count];
    return memory;
  }
};

struct Judged {
  double cost = INFINITY;
  int candidate = INT_MAX;  // none

  template <class T>
  __device__ Range settled(const RangeCandidates<T>& candidates, double unit, double mass) const {
    return qsim::settled(candidates, candidate < candidates.count() ? candidate : -1, cost, unit, mass);
  }
};

// The first of the cheapest candidates that the threads of a block found.
__device__ inline Judged cheapest(Judged mine) {
  return reduce_block_for_all(mine, [](Judged a, Judged b) {
    return b.cost < a.cost || (b.cost == a.cost && b.candidate < a.candidate) ? b : a;
  });
}

// The same of candidates whose costs are known.
template <class T, class CostOf>
__device__ Judged cheapest_of(const RangeCandidates<T>& candidates, CostOf cost_of) {
  Judged best;
  for (int i = static_cast<int>(threadIdx.x); i < candidates.count(); i += kThreads) {
    const double cost = cost_of(i);
    if (cost < best.cost) best = {cost, i};
  }
  return cheapest(best);
}

// Of the candidate's range; scale 0 where that is empty.
template <class T>
__device__ QuantParams<T> encoding_of(const RangeCandidates<T>& candidates, int i) {
  if (i < 0 || i >= candidates.count()) return {0, 0};
  const Range range = candidates.at(i);
  if (is_empty(range)) return {0, 0};
  return choose_qparams<T>(range.low, range.high, candidates.grid, 0);
}

}  // namespace qsim::cuda
