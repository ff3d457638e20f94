// Masses at points of one sign, in ascending order of magnitude, and what quantizing them costs: the part of a sketch's
// distribution whose values are known to lie on a lattice, and its exact ends.
#pragma once

#include "qsim/half_even.h"
#include "qsim/search_range.h"
#include "qsim/sketch.h"

namespace qsim {

constexpr int kSketchSums = 16;  // partial sums over points and knots: the same order at every vector width

// Mass and its first and second moment, to expand the squared distance to any point.
struct Moments {
  double mass, first, second;
};

// The sum of term(i) over begin <= i < end.
template <class Term>
QSIM_HD double sum_in_lanes(int begin, int end, Term term) {
  double lanes[kSketchSums] = {};
  int i = begin;
  for (; i + kSketchSums <= end; i += kSketchSums) {
    for (int lane = 0; lane < kSketchSums; ++lane) lanes[lane] += term(i + lane);
  }
  for (int lane = 0; lane < kSketchSums; ++lane) {
    if (i + lane < end) lanes[lane] += term(i + lane);
  }
  for (int half = kSketchSums / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

struct PointMasses {
  // Two ends, and in each of an octave's 32 bins at most 8 points, as far down as 16 of them in a step of a grid of
  // 2^32: 29 octaves. Or 32, 2^-16 of the observed range apart or more: 7 octaves.
  static constexpr int kMost = 8192;

  double at[kMost], mass[kMost];
  double head[kMost + 1];                    // second moment of the points before
  Moments beyond[kMost + 1];                 // of the point and those after it
  std::uint16_t points_before[kSketchSide];  // before the start of the bin, up to last_bin
  int points, last_bin;

  QSIM_HD void add(double x, double mass_there) {
    at[points] = x;
    mass[points++] = mass_there;
  }

  // The first point beyond x.
  QSIM_HD int find(double x) const {
    const int bin = magnitude_bin(x);
    int i = bin > last_bin ? points : points_before[bin];
    while (i < points && at[i] <= x) ++i;
    return i;
  }

  // Once all points are there.
  QSIM_HD void sum_moments() {
    double sum = 0;
    for (int i = 0; i < points; ++i) {
      head[i] = sum;
      sum += mass[i] * (at[i] * at[i]);
    }
    head[points] = sum;
    Moments tail{0, 0, 0};
    beyond[points] = tail;
    for (int i = points - 1; i >= 0; --i) {
      tail.mass += mass[i];
      tail.first += mass[i] * at[i];
      tail.second += mass[i] * (at[i] * at[i]);
      beyond[i] = tail;
    }
  }

  // The squared error of points from `first` on, which become `end`.
  QSIM_HD double saturated(int first, double end) const {
    const Moments& m = beyond[first];
    return larger(m.second - end * (2 * m.first - end * m.mass), 0);
  }

  // The squared error of points before `last`, which become the nearest multiples of the scale.
  QSIM_HD double rounded(int last, double scale) const {
    int first = find(scale / 2);
    if (first > last) first = last;
    const double inverse = 1 / scale;
    return head[first] + scale * scale * sum_in_lanes(first, last, [&](int i) {
                           const double t = at[i] * inverse, w = t - round_half_even(t);
                           return mass[i] * (w * w);
                         });
  }
};

}  // namespace qsim
