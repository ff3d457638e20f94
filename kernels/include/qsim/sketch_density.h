// The distribution that a sketch stands for, and what quantizing it costs, in closed form.
//
// One value sits at each exact end of the observed range; the rest of a bin is spread evenly over it. Data whose every
// value is a multiple of some power of two (integers) shows itself by the bins that stay empty: there the mass sits on
// the multiples.
//
// The density is constant between knots, so the cost is the sum over knots of fall * H(knot): H integrates the squared
// error from zero, and `fall` is by how much the density drops at the knot. One evaluation per knot, no special case
// for a bin that the end of the grid cuts. Cancellation: a bin is at least 1/64 of its magnitude wide, so terms exceed
// the cost by less than 2^7 and float64 leaves 2^-43 of mass * scale^2 / 12. A point is an interval of relative width
// 2^-28: cancellation and width each leave less than 2^-24 of that, on grids of up to 2^16 steps.
#pragma once

#include "qsim/search_range.h"
#include "qsim/sketch.h"

namespace qsim {

constexpr int kKnotLanes = 16;  // of the sum over knots: the same order at every vector width

// Mass and its first and second moment, to expand the squared distance to any point.
struct Moments {
  double mass, first, second;
};

struct DensitySide {
  // A run of occupied bins has one knot more than bins, and an empty bin beside it; the two exact ends add two each.
  // Points on multiples of a unit: at most 512 of them, and then fewer than 1000 bins that are evenly filled.
  static constexpr int kMaxKnots = kSketchSide;

  double knot[kMaxKnots];                   // ascending magnitudes
  double fall[kMaxKnots];                   // of the density, at the knot
  double mass_before[kMaxKnots];            // between the previous knot and this one
  double head[kMaxKnots + 1];               // sum of fall * knot^3 before the knot
  Moments beyond[kMaxKnots + 1];            // of the mass beyond the knot
  std::uint16_t knots_before[kSketchSide];  // before the start of the bin, up to last_bin
  int knots, last_bin;
};

struct SketchDensity {
  DensitySide below, above;
  double unit;  // every value is a multiple of this power of two; 0: not so

  QSIM_HD double mass() const { return below.beyond[0].mass + above.beyond[0].mass; }  // without exact zeros
};

namespace density {

constexpr double kPoint = 0x1p-29;    // half the relative width of a point
constexpr double kLatticePoints = 8;  // more in a bin are as good as evenly spread

QSIM_HD void add_even(DensitySide& side, double from, double to, double mass) {
  const double end = side.knots > 0 ? side.knot[side.knots - 1] : 0.0;
  from = larger(from, end);
  to = larger(to, from * (1 + kPoint));
  const double density = mass / (to - from);
  if (side.knots > 0 && from == end) {
    side.fall[side.knots - 1] -= density;
  } else {
    side.knot[side.knots] = from;
    side.fall[side.knots] = -density;
    side.mass_before[side.knots++] = 0;
  }
  side.knot[side.knots] = to;
  side.fall[side.knots] = density;
  side.mass_before[side.knots++] = mass;
}

QSIM_HD void add_point(DensitySide& side, double x, double mass) {
  add_even(side, x * (1 - kPoint), x * (1 + kPoint), mass);
}

// On the multiples first * unit .. last * unit.
QSIM_HD void add_multiples(DensitySide& side, double first, double last, double unit, double mass) {
  for (double i = first; i <= last; ++i) add_point(side, i * unit, mass / (last - first + 1));
}

// The power of two that divides every value, or 0 when it is less than `at_least` or shows too little evidence: values
// in bins narrower than the unit, of which other data would leave none empty.
QSIM_HD double lattice_unit(const SketchView& sketch, double at_least) {
  constexpr std::int64_t kEvidence = 32;
  const SketchSideView sides[] = {sketch.below, sketch.above};
  double unit = INFINITY;
  for (const SketchSideView& side : sides) {
    if (side.far > 0) unit = smaller(unit, lowest_set_bit(side.far));
    if (side.near > 0) unit = smaller(unit, lowest_set_bit(side.near));
  }
  for (const SketchSideView& side : sides) {
    for (int bin = side.last_bin(); bin >= side.first_bin() && unit >= at_least; --bin) {
      if (side.counts[bin] > 0) unit = smaller(unit, lowest_set_bit(sketch_edge(bin)));
    }
  }
  if (!(unit >= at_least)) return 0;
  std::int64_t evidence = 0;
  for (const SketchSideView& side : sides) {
    for (int bin = side.first_bin(); bin <= side.last_bin() && sketch_edge(bin) < 32 * unit; ++bin) {
      evidence += side.counts[bin];
    }
  }
  return evidence >= kEvidence ? unit : 0.0;
}

// For lattice_unit: of steps that span many multiples none suits them better than its neighbours do, and the step
// chosen is seldom much finer than the one that covers everything.
QSIM_HD double least_unit(Range observed, QuantGrid grid) {
  return choose_qparams<double>(observed.low, observed.high, grid, 0).scale / 16;
}

QSIM_HD void fill(DensitySide& side, const SketchSideView& sketch, double unit) {
  side.knots = 0;
  const int first = sketch.first_bin(), last = side.last_bin = sketch.last_bin();
  for (int bin = 0; bin < first && bin <= last; ++bin) side.knots_before[bin] = 0;
  for (int bin = first; bin <= last; ++bin) {
    side.knots_before[bin] = static_cast<std::uint16_t>(side.knots);
    if (sketch.counts[bin] == 0) continue;
    auto mass = static_cast<double>(sketch.counts[bin]);
    if (bin == first && sketch.near > 0) {
      add_point(side, sketch.near, 1);
      --mass;
    }
    const bool holds_end = bin == last && mass > 0;
    if (holds_end) --mass;
    if (mass > 0) {
      const double from = sketch.from(bin), to = sketch.to(bin);
      if (sketch_edge(bin + 1) - sketch_edge(bin) <= kLatticePoints * unit) {
        add_multiples(side, ceil(from / unit), bin == last ? floor(to / unit) : ceil(to / unit) - 1, unit, mass);
      } else {
        add_even(side, from, to, mass);
      }
    }
    if (holds_end) add_point(side, sketch.far, 1);
  }
}

QSIM_HD void sum_moments(DensitySide& side) {
  double head = 0;
  for (int i = 0; i < side.knots; ++i) {
    side.head[i] = head;
    head += side.fall[i] * (side.knot[i] * side.knot[i] * side.knot[i]);
  }
  side.head[side.knots] = head;
  Moments beyond{0, 0, 0};
  side.beyond[side.knots] = beyond;
  for (int i = side.knots - 1; i >= 0; --i) {
    side.beyond[i] = beyond;
    if (i == 0) break;
    const double mass = side.mass_before[i], from = side.knot[i - 1], to = side.knot[i];
    beyond.mass += mass;
    beyond.first += mass * ((from + to) / 2);
    beyond.second += mass * ((from * from + from * to + to * to) / 3);
  }
}

// Where a side's end of the grid cuts the density.
struct Cut {
  double end;
  int knot;        // the first at or beyond `end`
  double density;  // just below that knot
};

QSIM_HD Cut cut(const DensitySide& side, double end) {
  const int bin = magnitude_bin(end);
  int knot = bin > side.last_bin ? side.knots : side.knots_before[bin];
  while (knot < side.knots && side.knot[knot] < end) ++knot;
  const bool inside = 0 < knot && knot < side.knots;
  return {end, knot, inside ? side.mass_before[knot] / (side.knot[knot] - side.knot[knot - 1]) : 0.0};
}

// The squared error of what lies beyond the end.
QSIM_HD double saturated(const DensitySide& side, Cut at) {
  if (at.knot == side.knots) return 0;
  const Moments& m = side.beyond[at.knot];
  const double part = side.knot[at.knot] - at.end;
  return larger(m.second - at.end * (2 * m.first - at.end * m.mass), 0) + at.density * (part * part * part) / 3;
}

// The squared error of what lies below the end, which is scale * steps. With t = x / scale, f = rint(t), w = t - f:
// H = scale^3 (f / 12 + w^3 / 3), constant from the end on; below scale / 2 it is x^3 / 3.
QSIM_HD double rounded(const DensitySide& side, Cut at, double scale, double steps) {
  const int bin = magnitude_bin(scale / 2);
  int knot = bin > side.last_bin ? side.knots : side.knots_before[bin];
  if (knot > at.knot) knot = at.knot;
  const double head = side.head[knot] / 3, inverse = 1 / scale;
  double lanes[kKnotLanes] = {};
  auto add = [&](double& lane, int i) {
    const double t = side.knot[i] * inverse, f = rint(t), w = t - f;
    lane += side.fall[i] * (f + 4 * (w * w * w));
  };
  for (; knot + kKnotLanes <= at.knot; knot += kKnotLanes) {
    for (int lane = 0; lane < kKnotLanes; ++lane) add(lanes[lane], knot + lane);
  }
  for (int lane = 0; lane < kKnotLanes; ++lane) {
    if (knot + lane < at.knot) add(lanes[lane], knot + lane);
  }
  for (int half = kKnotLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return head + scale * scale * scale / 12 * (lanes[0] + at.density * steps);
}

}  // namespace density

QSIM_HD void fill(SketchDensity& density, const SketchView& sketch, Range observed, QuantGrid grid) {
  density.unit = density::lattice_unit(sketch, density::least_unit(observed, grid));
  density::fill(density.below, sketch.below, density.unit);
  density::fill(density.above, sketch.above, density.unit);
  density::sum_moments(density.below);
  density::sum_moments(density.above);
}

// The cost of an encoding, or anything above `limit` when it is above.
QSIM_HD double cost_of(const SketchDensity& density, QuantParams<float> params, QuantGrid grid, double gamma,
                       double limit) {
  const double scale = params.scale;
  const double below = static_cast<double>(params.zero_point) - grid.quant_min;
  const double above = static_cast<double>(grid.quant_max) - params.zero_point;
  const density::Cut bottom = density::cut(density.below, below * scale);
  const density::Cut top = density::cut(density.above, above * scale);
  const double beyond = gamma * (density::saturated(density.below, bottom) + density::saturated(density.above, top));
  if (beyond > limit) return beyond;
  return beyond + density::rounded(density.below, bottom, scale, below) +
         density::rounded(density.above, top, scale, above);
}

}  // namespace qsim
