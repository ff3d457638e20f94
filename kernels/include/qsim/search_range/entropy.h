// The threshold on magnitudes whose clipped and coarsened histogram stays closest to the original: least
// Kullback-Leibler divergence, as TensorRT's entropy calibrator (Migacz, "8-bit inference with TensorRT", GTC 2017).
//
// 2048 linear bins over (0, largest magnitude]; exact zeros are left out, they are exact under every threshold. The
// reference distribution of a threshold is the histogram up to it with the mass beyond added to its last bin; the
// coarsened one spreads each of `levels` groups evenly over the group's occupied bins. 128 levels at 8 bits. A
// threshold whose last bin is empty has an infinite divergence. Ties, to 1e-9: the largest threshold, so that few
// values, which no grouping changes, keep their range.
#pragma once

#include "qsim/search_range.h"
#include "qsim/sketch.h"

namespace qsim {

constexpr int kEntropyBins = 2048;
constexpr double kEntropyTie = 1e-9;

struct EntropyHistogram {
  double count[kEntropyBins + 1];  // the last element only rounds prefix sums up to their length
  double mass_before[kEntropyBins + 1];
  double occupied_before[kEntropyBins + 1];
  double entropy_before[kEntropyBins + 1];  // sum of count * log(count)
  double divergence[kEntropyBins + 1];      // of the threshold after that many bins
};

QSIM_HD int entropy_bin(double x, double largest) {
  return static_cast<int>(smaller(fabs(x) / largest * kEntropyBins, kEntropyBins - 1));
}

// Mass spread evenly over magnitudes [from, to], a part of (0, largest].
QSIM_HD void add_even(EntropyHistogram& histogram, double from, double to, double mass, double largest) {
  const double start = from / largest * kEntropyBins, end = to / largest * kEntropyBins;
  int bin = entropy_bin(from, largest);
  if (end <= bin + 1 || bin == kEntropyBins - 1) {
    histogram.count[bin] += mass;
    return;
  }
  const double density = mass / (end - start);
  histogram.count[bin] += density * (bin + 1 - start);
  for (++bin; bin < kEntropyBins && bin < end; ++bin) histogram.count[bin] += density * (smaller(end, bin + 1) - bin);
}

QSIM_HD void add_sketch(EntropyHistogram& histogram, const SketchView& sketch, double largest) {
  const SketchSideView sides[] = {sketch.below, sketch.above};
  for (const SketchSideView& side : sides) {
    for (int bin = side.first_bin(); bin <= side.last_bin(); ++bin) {
      const auto mass = static_cast<double>(side.counts[bin]);
      if (mass > 0) add_even(histogram, side.from(bin), side.to(bin), mass, largest);
    }
  }
}

QSIM_HD void sum_prefixes(EntropyHistogram& histogram) {
  double mass = 0, occupied = 0, entropy = 0;
  for (int bin = 0; bin <= kEntropyBins; ++bin) {
    histogram.mass_before[bin] = mass;
    histogram.occupied_before[bin] = occupied;
    histogram.entropy_before[bin] = entropy;
    const double count = bin < kEntropyBins ? histogram.count[bin] : 0.0;
    if (count > 0) {
      mass += count;
      occupied += 1;
      entropy += count * log(count);
    }
  }
}

// What the bins [start, end) of one level take off a threshold's divergence, but for what all levels share.
QSIM_HD double level_term(const EntropyHistogram& histogram, int start, int end) {
  const double mass = histogram.mass_before[end] - histogram.mass_before[start];
  if (!(mass > 0)) return 0;
  return mass * log(mass / (histogram.occupied_before[end] - histogram.occupied_before[start]));
}

// Of the threshold after `bins` bins; at least `levels` of them. term(start, end) is level_term.
template <class Term>
QSIM_HD double divergence(const EntropyHistogram& histogram, int bins, int levels, Term term) {
  const double last = histogram.count[bins - 1], total = histogram.mass_before[kEntropyBins];
  if (!(last > 0)) return INFINITY;
  const double within = histogram.mass_before[bins], beyond = total - within, clipped = last + beyond;
  // sum p log p, times the total; the last level's reference has what lies beyond on top of its own mass
  double sum = histogram.entropy_before[bins - 1] + clipped * log(clipped) - total * log(total / within);
  int start = 0, remainder = 0;  // of level * bins / levels
  const int whole = bins / levels, part = bins % levels;
  for (int level = 0; level < levels; ++level) {
    int end = start + whole;
    remainder += part;
    if (remainder >= levels) remainder -= levels, ++end;
    if (end == bins) {
      const double mass = within - histogram.mass_before[start];
      sum -= beyond * log(mass / (histogram.occupied_before[end] - histogram.occupied_before[start]));
    }
    sum -= term(start, end);
    start = end;
  }
  return sum / total;
}

// How many levels the magnitudes share: half of the grid's, or all of them for one sign on an asymmetric grid.
QSIM_HD std::int64_t entropy_levels(Range observed, QuantGrid grid) {
  const auto levels = static_cast<std::int64_t>(grid_steps(grid)) + 1;
  const bool one_sided = !(observed.low < 0 && observed.high > 0);
  return !grid.symmetric && one_sided ? levels : (levels + 1) / 2;
}

// The threshold of least divergence, once that of every threshold from `levels` bins on is known.
QSIM_HD double least_divergence(const EntropyHistogram& histogram, double largest, int levels) {
  int best = kEntropyBins;
  double least = INFINITY;
  for (int bins = kEntropyBins; bins >= levels; --bins) {
    if (histogram.divergence[bins] < least - kEntropyTie) {
      least = histogram.divergence[bins];
      best = bins;
    }
  }
  return largest / kEntropyBins * best;
}

QSIM_HD Range clipped_at(Range observed, double threshold) {
  return {larger(observed.low, -threshold), smaller(observed.high, threshold)};
}

}  // namespace qsim
