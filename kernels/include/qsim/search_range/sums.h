// Sums of floats whose order does not depend on who adds: the same bits for every team and vector width.
#pragma once

#include "qsim/search_range/team.h"

namespace qsim {

// ---- The sums of the terms before each of many places: in runs, and to each run the sum of the runs before it.

constexpr int kRun = 32;

// Of one run. store(i, sum of the terms before i) once term(i) has been read; `before` is the sum of the runs before.
// Returns the run's own sum.
template <class Sum, class Term, class Store>
QSIM_HD Sum sum_run(int run, int places, Sum before, Term term, Store store) {
  const int begin = run * kRun, end = begin + kRun < places ? begin + kRun : places;
  Sum within{};
  for (int i = begin; i < end; ++i) {
    const Sum here = term(i);
    store(i, before + within);
    within = within + here;
  }
  return within;
}

template <class Sum, int kMostPlaces, class Term, class Store, class Team>
QSIM_HD void sums_before(int places, Term term, Store store, const Team& team) {
  const int runs = (places + kRun - 1) / kRun;
  Sum sum{};
  if constexpr (Team::kSize == 1) {
    for (int run = 0; run < runs; ++run) sum = sum + sum_run(run, places, sum, term, store);
  } else {
    Sum* const before = team.template scratch<Sum, (kMostPlaces + kRun - 1) / kRun>();
    for (int run = team.rank(); run < runs; run += Team::kSize) {
      before[run] = sum_run(run, places, Sum{}, term, [](int, const Sum&) {});
    }
    team.wait();
    if (team.rank() == 0) {
      for (int run = 0; run < runs; ++run) {
        const Sum of_run = before[run];
        before[run] = sum;
        sum = sum + of_run;
      }
    }
    team.wait();
    for (int run = team.rank(); run < runs; run += Team::kSize) sum_run(run, places, before[run], term, store);
    team.wait();
  }
}

// ---- One sum: term i goes to lane i % lanes, and the halves of the lanes are joined until one is left.

// Leaves halves of the sum behind.
template <class T, int kLanes>
QSIM_HD T sum_of_lanes(T (&lanes)[kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// By one thread. A warp has its own way to the same bits.
template <int kLanes>
struct LanesInTurn {
  // The sum of term(i) over begin <= i < end, asked for in this order.
  template <class Term>
  QSIM_HD double operator()(int begin, int end, Term term) const {
    double lanes[kLanes] = {};
    int i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if (i + lane < end) lanes[lane] += term(i + lane);
    }
    return sum_of_lanes(lanes);
  }
};

}  // namespace qsim
