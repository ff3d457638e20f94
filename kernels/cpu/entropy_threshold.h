// The entropy method's threshold, for the CPU kernels of both range searches.
#pragma once

#include "qsim/entropy_range.h"

namespace qsim::cpu {
namespace {

// From the counts. Neighbouring thresholds cut most of their levels alike (a level of a length starts at a bin for some
// seven thresholds of 8 bits), so each term is kept until the length changes.
double entropy_threshold(EntropyHistogram& histogram, double largest, int levels) {
  sum_prefixes(histogram);
  struct {
    int end;
    double value;
  } kept[2][kEntropyBins] = {};  // by whether the level is one of the longer ones
  for (int bins = levels; bins <= kEntropyBins; ++bins) {
    histogram.divergence[bins] = divergence(histogram, bins, levels, [&](int start, int end) {
      auto& term = kept[(end - start) & 1][start];
      if (term.end != end) term = {end, level_term(histogram, start, end)};
      return term.value;
    });
  }
  return least_divergence(histogram, largest, levels);
}

}  // namespace
}  // namespace qsim::cpu
