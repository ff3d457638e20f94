// The cost of an encoding on a sketch (methods mse and tf_enhanced): the distribution that the sketch stands for, and
// what quantizing it costs, in closed form.
//
// One value sits at each exact end of the observed range; the rest of a bin is spread evenly over it, or, where the
// values are known to be multiples of something that is not much finer than a step, over those multiples. Two signs
// tell: the bits that no value has (`low_bits`: values that were bfloat16), and bins that stay empty (integers: every
// value is a multiple of one power of two).
//
// The density is constant between knots, so the cost is the sum over knots of fall * H(knot): H integrates the squared
// error from zero, and `fall` is by how much the density drops at the knot. One evaluation per knot, no special case
// for a bin that the end of the grid cuts. Cancellation: a bin is at least 1/64 of its magnitude wide, so terms exceed
// the cost by less than 2^7 and float64 leaves 2^-43 of mass * scale^2 / 12 on grids of up to 2^16 steps; of a bin that
// exact ends clip to the width of neighbouring floats, 2^-29.
#pragma once

#include "qsim/search_range/point_masses.h"

namespace qsim {

struct DensitySide {
  static constexpr int kMaxKnots = kSketchSide;  // a run of occupied bins has one knot more, and an empty bin beside it

  double knot[kMaxKnots];                   // ascending magnitudes
  double fall[kMaxKnots];                   // of the density, at the knot
  double mass_before[kMaxKnots];            // between the previous knot and this one
  double head[kMaxKnots + 1];               // sum of fall * knot^3 before the knot
  Moments beyond[kMaxKnots + 1];            // of the mass beyond the knot
  std::uint16_t knots_before[kSketchSide];  // before the start of the bin, up to last_bin
  int knots, last_bin;
  PointMasses points;
};

struct SketchDensity {
  DensitySide below, above;
  double unit;  // every value is a multiple of this power of two; 0: not so

  QSIM_HD double mass() const { return mass_of(below) + mass_of(above); }  // without exact zeros

 private:
  QSIM_HD static double mass_of(const DensitySide& side) { return side.beyond[0].mass + side.points.beyond[0].mass; }
};

namespace density {

constexpr double kLatticePoints = 8;  // more in a bin are as good as evenly spread, unless steps are finer still:
constexpr double kCoarsePoints = 32;  // then these are worth summing (float16 on a grid of 16 bits)
constexpr double kSpan = 16;          // of more multiples in a step none suits them better than its neighbours do

QSIM_HD void add_even(DensitySide& side, double from, double to, double mass) {
  const double density = mass / (to - from);
  if (side.knots > 0 && from == side.knot[side.knots - 1]) {
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

// On the multiples first * spacing .. last * spacing.
QSIM_HD void add_multiples(PointMasses& points, double first, double last, double spacing, double mass) {
  const double each = mass / (last - first + 1);
  for (double i = first; i <= last; ++i) points.add(i * spacing, each);
}

// What the values of a side are multiples of.
struct Lattice {
  double unit;    // all of them; 0: unknown
  double share;   // those in a bin, as a share of its width
  double step;    // of the grid that covers everything: the step chosen is seldom much finer
  double coarse;  // no finer than a step; PointMasses has room down to here

  QSIM_HD double spacing(double width) const { return larger(unit, width * share); }
  QSIM_HD bool shows(double width) const {
    const double by = spacing(width);
    if (by == INFINITY) return false;  // the last finite bin ends at Inf
    return width <= kLatticePoints * by ? by >= step / kSpan : width <= kCoarsePoints * by && by >= coarse;
  }
};

// The power of two that divides every value, or 0 when it is less than `at_least` or shows too little evidence: values
// in bins narrower than the unit, of which other data would leave none empty. A value that is no multiple of its bin's
// width refutes it where even the widest bin is cut finer than the unit: linspace(-1, 1, 64) lies beyond each k / 64.
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
  if (sketch.has_finer) {
    const int below = sketch.below.last_bin(), above = sketch.above.last_bin(), widest = below > above ? below : above;
    if ((sketch_edge(widest + 1) - sketch_edge(widest)) * sketch.spacing < unit) return 0;
  }
  std::int64_t evidence = 0;
  for (const SketchSideView& side : sides) {
    for (int bin = side.first_bin(); bin <= side.last_bin() && sketch_edge(bin) < 32 * unit; ++bin) {
      evidence += side.counts[bin];
    }
  }
  return evidence >= kEvidence ? unit : 0.0;
}

QSIM_HD void fill(DensitySide& side, const SketchSideView& sketch, Lattice lattice) {
  PointMasses& points = side.points;
  side.knots = points.points = 0;
  const int first = sketch.first_bin(), last = side.last_bin = points.last_bin = sketch.last_bin();
  for (int bin = 0; bin < first && bin <= last; ++bin) side.knots_before[bin] = points.points_before[bin] = 0;
  for (int bin = first; bin <= last; ++bin) {
    side.knots_before[bin] = static_cast<std::uint16_t>(side.knots);
    points.points_before[bin] = static_cast<std::uint16_t>(points.points);
    if (sketch.counts[bin] == 0) continue;
    auto mass = static_cast<double>(sketch.counts[bin]);
    if (bin == first && sketch.near > 0) {
      points.add(sketch.near, 1);
      --mass;
    }
    const bool holds_end = bin == last && mass > 0;
    if (holds_end) --mass;
    if (mass > 0) {
      const double from = sketch.from(bin), to = sketch.to(bin), width = sketch_edge(bin + 1) - sketch_edge(bin);
      if (lattice.shows(width)) {
        const double spacing = lattice.spacing(width);
        add_multiples(points, ceil(from / spacing), bin == last ? floor(to / spacing) : ceil(to / spacing) - 1, spacing,
                      mass);
      } else if (from < to) {
        add_even(side, from, to, mass);
      } else {
        points.add(from, mass);
      }
    }
    if (holds_end) points.add(sketch.far, 1);
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

// Where a side of the density stops to round to numbers of the grid: half a step beyond the grid's last one.
struct Cut {
  double scale, steps;  // the last number is their product
  int knot;             // the first at or beyond the cut
  double density;       // just below that knot
  int point;            // the first beyond the cut

  QSIM_HD double end() const { return scale * steps; }
};

QSIM_HD Cut cut(const DensitySide& side, double scale, double steps) {
  const double at = scale * (steps + 0.5);
  const int bin = magnitude_bin(at);
  int knot = bin > side.last_bin ? side.knots : side.knots_before[bin];
  while (knot < side.knots && side.knot[knot] < at) ++knot;
  const bool inside = 0 < knot && knot < side.knots;
  return {scale, steps, knot, inside ? side.mass_before[knot] / (side.knot[knot] - side.knot[knot - 1]) : 0.0,
          side.points.find(at)};
}

// The squared error of what lies beyond the cut and becomes the last number.
QSIM_HD double saturated(const DensitySide& side, Cut at) {
  const double end = at.end(), points = side.points.saturated(at.point, end);
  if (at.knot == side.knots) return points;
  const Moments& m = side.beyond[at.knot];
  const double part = side.knot[at.knot] - end, half = at.scale / 2;
  return points + larger(m.second - end * (2 * m.first - end * m.mass), 0) +
         at.density * larger(part * part * part - half * half * half, 0) / 3;
}

// The squared error of what lies below the cut. With t = x / scale, f = round_half_even(t), w = t - f:
// H = scale^3 (f / 12 + w^3 / 3), constant from the cut on; below scale / 2 it is x^3 / 3.
QSIM_HD double rounded(const DensitySide& side, Cut at) {
  const double scale = at.scale;
  const int bin = magnitude_bin(scale / 2);
  int knot = bin > side.last_bin ? side.knots : side.knots_before[bin];
  if (knot > at.knot) knot = at.knot;
  const double inverse = 1 / scale;
  const double sum = sum_in_lanes(knot, at.knot, [&](int i) {
    const double t = side.knot[i] * inverse, f = round_half_even(t), w = t - f;
    return side.fall[i] * (f + 4 * (w * w * w));
  });
  return side.head[knot] / 3 + scale * scale * scale / 12 * (sum + at.density * (at.steps + 0.5)) +
         side.points.rounded(at.point, scale);
}

QSIM_HD Lattice find_lattice(const SketchView& sketch, Range observed, QuantGrid grid) {
  const double step = choose_qparams<double>(observed.low, observed.high, grid, 0).scale;
  return {lattice_unit(sketch, step / kSpan), sketch.spacing, step,
          larger(step, (observed.high - observed.low) * 0x1p-16)};
}

QSIM_HD void lay_out(DensitySide& side, const SketchSideView& sketch, Lattice lattice) {
  fill(side, sketch, lattice);
  sum_moments(side);
  side.points.sum_moments();
}

}  // namespace density

QSIM_HD void fill(SketchDensity& density, const SketchView& sketch, Range observed, QuantGrid grid) {
  const density::Lattice lattice = density::find_lattice(sketch, observed, grid);
  density.unit = lattice.unit;
  density::lay_out(density.below, sketch.below, lattice);
  density::lay_out(density.above, sketch.above, lattice);
}

// The cost of an encoding, or anything above `limit` when it is above.
QSIM_HD double cost_of(const SketchDensity& density, QuantParams<float> params, QuantGrid grid, double gamma,
                       double limit) {
  const double scale = params.scale;
  const double below = static_cast<double>(params.zero_point) - grid.quant_min;
  const double above = static_cast<double>(grid.quant_max) - params.zero_point;
  const density::Cut bottom = density::cut(density.below, scale, below);
  const density::Cut top = density::cut(density.above, scale, above);
  const double beyond = gamma * (density::saturated(density.below, bottom) + density::saturated(density.above, top));
  if (beyond > limit) return beyond;
  return beyond + density::rounded(density.below, bottom) + density::rounded(density.above, top);
}

}  // namespace qsim
