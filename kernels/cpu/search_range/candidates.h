// What the searches on a sketch and on the data do alike: judge candidates, find the entropy threshold. Called by
// on_sketch.cpp and on_data.cpp.
#pragma once

#include "qsim/search_range.h"
#include "qsim/search_range/entropy.h"

namespace qsim::cpu {
namespace {

// The encodings of all candidates, in arrays: half a dozen divisions each, which one vectorised loop takes.
template <class T>
struct CandidateEncodings {
  static constexpr int kBatch = 16, kMost = (RangeCandidates<T>::kMost + kBatch - 1) / kBatch * kBatch;

  RangeCandidates<T> candidates;
  int count = candidates.count();
  T scale[kMost];  // 0: the candidate is empty
  std::int32_t zero_point[kMost];

  explicit CandidateEncodings(const RangeCandidates<T>& of) : candidates(of) {
    const bool near_ceiling = !(of.observed.high - of.observed.low < largest(T{}) / 8);
    if (of.grid.symmetric) {
      near_ceiling ? fill<true, true>() : fill<true, false>();
    } else {
      near_ceiling ? fill<false, true>() : fill<false, false>();
    }
  }

  QuantParams<T> operator[](int i) const { return {scale[i], zero_point[i]}; }

 private:
  // What the compiler knows to be the same for all candidates it lifts out of the loop.
  template <bool kSymmetric, bool kNearCeiling>
  void fill() {
    RangeCandidates<T> of = candidates;
    of.grid.symmetric = kSymmetric;
    for (int i = 0; i < count; ++i) {
      const Range range = of.at(i);
      const QuantParams<double> exact = spread(range.low, range.high, of.grid, 0);
      const auto params = kNearCeiling ? below_ceiling<T>(exact, of.grid)
                                       : QuantParams<T>{static_cast<T>(exact.scale), exact.zero_point};
      scale[i] = is_empty(range) ? 0 : params.scale;
      zero_point[i] = params.zero_point;
    }
  }
};

// The range of the cheapest candidate, the first of several. cost(i, limit) of candidate i may return anything above
// `limit` once it is above. Visits the last candidate first: the widest ranges come early, and their cost ends the
// evaluation of most others soon.
template <class T, class Cost>
Range least_cost(const CandidateEncodings<T>& encodings, double unit, double mass, Cost cost) {
  int best = -1, previous = -1;
  double best_cost = INFINITY, found = INFINITY;
  for (int i = encodings.count - 1; i >= 0; --i) {
    const QuantParams<T> params = encodings[i];
    if (params.scale == 0) continue;
    const bool repeated = previous >= 0 && params.scale == encodings.scale[previous] &&
                          params.zero_point == encodings.zero_point[previous];
    if (!repeated) found = cost(i, best_cost);
    previous = i;
    if (found <= best_cost) {
      best = i;
      best_cost = found;
    }
  }
  return settled(encodings.candidates, best, best_cost, unit, mass);
}

// The entropy method's threshold, from the counts. Neighbouring thresholds cut most of their levels alike (a level of a
// length starts at a bin for some seven thresholds of 8 bits), so each term is kept until the length changes.
double entropy_threshold(EntropyHistogram& histogram, double largest, int levels) {
  sum_prefixes(histogram, Alone());
  struct {
    int end;
    double value;
  } kept[2][kEntropyBins] = {};  // by whether the level is one of the longer ones
  for (int bins = levels; bins <= kEntropyBins; ++bins) {
    histogram.divergence[bins] = INFINITY;
    if (!is_threshold(histogram, bins)) continue;
    const int whole = bins / levels, part = bins % levels;
    int end = 0, remainder = 0;
    const auto term = [&](int) {  // asked for in order, so that level_start needs no division
      const int start = end;
      end += whole;
      remainder += part;
      if (remainder >= levels) remainder -= levels, ++end;
      auto& known = kept[(end - start) & 1][start];
      if (known.end != end) known = {end, level_term(histogram, start, end)};
      return known.value;
    };
    histogram.divergence[bins] = divergence(histogram, bins, levels, LanesInTurn<kEntropySums>(), term);
  }
  return least_divergence(histogram, largest, levels, Alone());
}

}  // namespace
}  // namespace qsim::cpu
