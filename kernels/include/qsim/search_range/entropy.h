// The threshold on magnitudes whose clipped and coarsened histogram stays closest to the original: least
// Kullback-Leibler divergence, as TensorRT's entropy calibrator (Migacz, "8-bit inference with TensorRT", GTC 2017).
//
// 2048 linear bins over (0, largest magnitude]; exact zeros are left out, they are exact under every threshold. The
// reference distribution of a threshold is the histogram up to it with the mass beyond added to its last bin; the
// coarsened one spreads each of `levels` groups evenly over the group's occupied bins. 128 levels at 8 bits. A
// threshold whose last bin is empty has an infinite divergence. Of those within 1e-9 of the least the largest threshold
// is taken, so that few values, which no grouping changes, keep their range.
#pragma once

#include "qsim/search_range.h"
#include "qsim/search_range/sums.h"
#include "qsim/sketch.h"

namespace qsim {

constexpr int kEntropyBins = 2048;
constexpr int kEntropySums = 8;  // lanes of a sum over levels
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

template <class Team>
QSIM_HD void clear(EntropyHistogram& histogram, const Team& team) {
  for (int bin = team.rank(); bin <= kEntropyBins; bin += Team::kSize) histogram.count[bin] = 0;
  team.wait();
}

// A bin of a sketch, spread evenly over the bins of a histogram: it begins in `bin` and is wholly in it, or has
// `density` in each that it covers.
struct BinOfSketch {
  double start, end, density;
  int bin;
  bool whole;

  QSIM_HD BinOfSketch(const SketchSideView& side, int of, double mass, double largest)
      : start(side.from(of) / largest * kEntropyBins),
        end(side.to(of) / largest * kEntropyBins),
        density(mass / (end - start)),
        bin(entropy_bin(side.from(of), largest)),
        whole(end <= bin + 1 || bin == kEntropyBins - 1) {}
};

// The bins of a side, which follow each other, so that at most two share one of the histogram: the one that ends in it
// is added first.
template <class Team>
QSIM_HD void add_side(EntropyHistogram& histogram, const SketchSideView& side, double largest, const Team& team) {
  const auto for_each_bin = [&](auto add) {
    for (int of = side.first_bin() + team.rank(); of <= side.last_bin(); of += Team::kSize) {
      const auto mass = static_cast<double>(side.counts[of]);
      if (mass > 0) add(BinOfSketch(side, of, mass, largest), mass);
    }
    team.wait();
  };
  for_each_bin([&](const BinOfSketch& here, double) {
    if (here.whole) return;
    for (int bin = here.bin + 1; bin < kEntropyBins && bin < here.end; ++bin) {
      histogram.count[bin] += here.density * (smaller(here.end, bin + 1) - bin);
    }
  });
  for_each_bin([&](const BinOfSketch& here, double) {
    if (!here.whole) histogram.count[here.bin] += here.density * (here.bin + 1 - here.start);
  });
}

// The histogram is clear. Whole bins come first: their counts are whole numbers, of which any order is exact.
template <class Team>
QSIM_HD void add_sketch(EntropyHistogram& histogram, const SketchView& sketch, double largest, const Team& team) {
  const SketchSideView sides[] = {sketch.below, sketch.above};
  for (const SketchSideView& side : sides) {
    for (int of = side.first_bin() + team.rank(); of <= side.last_bin(); of += Team::kSize) {
      const auto mass = static_cast<double>(side.counts[of]);
      if (!(mass > 0)) continue;
      const BinOfSketch here(side, of, mass, largest);
      if (here.whole) team.add(&histogram.count[here.bin], mass);
    }
  }
  team.wait();
  for (const SketchSideView& side : sides) add_side(histogram, side, largest, team);
}

// All of what comes before a bin.
struct EntropyPrefix {
  double mass, occupied, entropy;

  QSIM_HD EntropyPrefix operator+(const EntropyPrefix& more) const {
    return {mass + more.mass, occupied + more.occupied, entropy + more.entropy};
  }
};

template <class Team>
QSIM_HD void sum_prefixes(EntropyHistogram& histogram, const Team& team) {
  for (int bin = team.rank(); bin <= kEntropyBins; bin += Team::kSize) {  // summed in its place
    const double count = histogram.count[bin];
    histogram.entropy_before[bin] = count > 0 ? count * log(count) : 0.0;
  }
  team.wait();
  sums_before<EntropyPrefix, kEntropyBins + 1>(
      kEntropyBins + 1,
      [&](int bin) {
        const double count = histogram.count[bin];
        return count > 0 ? EntropyPrefix{count, 1, histogram.entropy_before[bin]} : EntropyPrefix{};
      },
      [&](int bin, const EntropyPrefix& before) {
        histogram.mass_before[bin] = before.mass;
        histogram.occupied_before[bin] = before.occupied;
        histogram.entropy_before[bin] = before.entropy;
      },
      team);
}

// What the bins [start, end) of one level take off a threshold's divergence, but for what all levels share.
QSIM_HD double level_term(const EntropyHistogram& histogram, int start, int end) {
  const double mass = histogram.mass_before[end] - histogram.mass_before[start];
  if (!(mass > 0)) return 0;
  return mass * log(mass / (histogram.occupied_before[end] - histogram.occupied_before[start]));
}

// Where a level of a threshold starts; where it ends the next one does.
QSIM_HD int level_start(int level, int bins, int levels) { return level * bins / levels; }

// Whether the threshold after `bins` bins has a divergence.
QSIM_HD bool is_threshold(const EntropyHistogram& histogram, int bins) { return histogram.count[bins - 1] > 0; }

// Of the threshold after `bins` bins; at least `levels` of them. sum: of term(level), which is its level_term.
template <class SumInLanes, class Term>
QSIM_HD double divergence(const EntropyHistogram& histogram, int bins, int levels, SumInLanes sum, Term term) {
  const double last = histogram.count[bins - 1], total = histogram.mass_before[kEntropyBins];
  const double within = histogram.mass_before[bins], beyond = total - within, clipped = last + beyond;
  // The last level's reference has what lies beyond on top of its own mass.
  const int start = level_start(levels - 1, bins, levels);
  const double of_last = within - histogram.mass_before[start];
  const double occupied = histogram.occupied_before[bins] - histogram.occupied_before[start];
  // sum p log p, times the total
  const double reference = histogram.entropy_before[bins - 1] + clipped * log(clipped) - total * log(total / within);
  return (reference - beyond * log(of_last / occupied) - sum(0, levels, term)) / total;
}

// How many levels the magnitudes share: half of the grid's, or all of them for one sign on an asymmetric grid.
QSIM_HD std::int64_t entropy_levels(Range observed, QuantGrid grid) {
  const auto levels = static_cast<std::int64_t>(grid_steps(grid)) + 1;
  const bool one_sided = !(observed.low < 0 && observed.high > 0);
  return !grid.symmetric && one_sided ? levels : (levels + 1) / 2;
}

// The threshold of least divergence, once that of every threshold from `levels` bins on is known.
template <class Team>
QSIM_HD double least_divergence(const EntropyHistogram& histogram, double largest, int levels, const Team& team) {
  double least = INFINITY;
  for (int bins = levels + team.rank(); bins <= kEntropyBins; bins += Team::kSize) {
    least = smaller(least, histogram.divergence[bins]);
  }
  least = team.least(least) + kEntropyTie;
  double most = 0;
  for (int bins = levels + team.rank(); bins <= kEntropyBins; bins += Team::kSize) {
    if (histogram.divergence[bins] <= least) most = bins;
  }
  return largest / kEntropyBins * -team.least(-most);
}

QSIM_HD Range clipped_at(Range observed, double threshold) {
  return {larger(observed.low, -threshold), smaller(observed.high, threshold)};
}

}  // namespace qsim
