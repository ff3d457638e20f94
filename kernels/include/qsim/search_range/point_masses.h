// Masses at points of one sign, in ascending order of magnitude, and what quantizing them costs: the part of a sketch's
// distribution whose values are known to lie on a lattice, and its exact ends.
#pragma once

#include "qsim/half_even.h"
#include "qsim/search_range.h"
#include "qsim/search_range/sums.h"
#include "qsim/sketch.h"

namespace qsim {

constexpr int kSketchSums = 16;  // lanes of a sum over points or knots

// Mass and its first and second moment, to expand the squared distance to any point.
struct Moments {
  double mass, first, second;

  QSIM_HD Moments operator+(const Moments& more) const {
    return {mass + more.mass, first + more.first, second + more.second};
  }
};

struct PointMasses {
  // Two ends, and in each of an octave's 32 bins at most 8 points, as far down as 16 of them in a step of a grid of
  // 2^32: 29 octaves. Or 32, 2^-16 of the observed range apart or more: 7 octaves.
  static constexpr int kMost = 8192;

  double at[kMost], mass[kMost];
  double head[kMost + 1];                    // second moment of the points before
  Moments beyond[kMost + 1];                 // of the point and those after it
  std::uint16_t points_before[kSketchSide];  // before the start of the bin, up to last_bin
  int points, last_bin;

  // The first point beyond x.
  QSIM_HD int find(double x) const {
    const int bin = magnitude_bin(x);
    int i = bin > last_bin ? points : points_before[bin];
    while (i < points && at[i] <= x) ++i;
    return i;
  }

  // Once all points are there.
  template <class Team>
  QSIM_HD void sum_moments(const Team& team) {
    sums_before<double, kMost + 1>(
        points + 1, [&](int i) { return i < points ? mass[i] * (at[i] * at[i]) : 0.0; },
        [&](int i, double before) { head[i] = before; }, team);
    sums_before<Moments, kMost + 1>(  // from the last point to the first
        points + 1,
        [&](int place) {
          const int i = points - 1 - place;
          return i < 0 ? Moments{} : Moments{mass[i], mass[i] * at[i], mass[i] * (at[i] * at[i])};
        },
        [&](int place, const Moments& after) { beyond[points - place] = after; }, team);
  }

  // The squared error of points from `first` on, which become `end`.
  QSIM_HD double saturated(int first, double end) const {
    const Moments& m = beyond[first];
    return larger(m.second - end * (2 * m.first - end * m.mass), 0);
  }

  // The squared error of points before `last`, which become the nearest multiples of the scale.
  template <class SumInLanes>
  QSIM_HD double rounded(int last, double scale, SumInLanes sum) const {
    int first = find(scale / 2);
    if (first > last) first = last;
    const double inverse = 1 / scale;
    return head[first] + scale * scale * sum(first, last, [&](int i) {
                           const double t = at[i] * inverse, w = t - round_half_even(t);
                           return mass[i] * (w * w);
                         });
  }
};

}  // namespace qsim
