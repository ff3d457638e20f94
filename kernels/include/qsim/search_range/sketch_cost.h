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
template <class Team>
QSIM_HD double lattice_unit(const SketchView& sketch, double at_least, const Team& team) {
  constexpr std::int64_t kEvidence = 32;
  const SketchSideView sides[] = {sketch.below, sketch.above};
  double unit = INFINITY;
  for (const SketchSideView& side : sides) {
    if (side.far > 0) unit = smaller(unit, lowest_set_bit(side.far));
    if (side.near > 0) unit = smaller(unit, lowest_set_bit(side.near));
  }
  for (const SketchSideView& side : sides) {
    for (int bin = side.last_bin() - team.rank(); bin >= side.first_bin() && unit >= at_least; bin -= Team::kSize) {
      if (side.counts[bin] > 0) unit = smaller(unit, lowest_set_bit(sketch_edge(bin)));
    }
  }
  unit = team.least(unit);
  if (!(unit >= at_least)) return 0;
  if (sketch.has_finer) {
    const int below = sketch.below.last_bin(), above = sketch.above.last_bin(), widest = below > above ? below : above;
    if ((sketch_edge(widest + 1) - sketch_edge(widest)) * sketch.spacing < unit) return 0;
  }
  std::int64_t evidence = 0;
  for (const SketchSideView& side : sides) {
    for (int bin = side.first_bin() + team.rank(); bin <= side.last_bin() && sketch_edge(bin) < 32 * unit;
         bin += Team::kSize) {
      evidence += side.counts[bin];
    }
  }
  return team.sum(evidence) >= kEvidence ? unit : 0.0;
}

// What a bin adds to its side.
struct BinContent {
  double from, to, even;        // a mass spread evenly over [from, to]; 0: none
  double density;               // of it
  double first, spacing, each;  // masses on multiples of `spacing`, the first-th and those after it
  int multiples;
  double near, far;  // the exact end of the side, where a value lies; 0: none

  QSIM_HD double end() const { return even > 0 ? to : 0.0; }
  QSIM_HD int points() const { return (near > 0) + multiples + (far > 0); }
};

// Empty where `bin` is not one of the side's, which are first .. last.
QSIM_HD BinContent content_of(const SketchSideView& sketch, int bin, int first, int last, Lattice lattice) {
  BinContent content{};
  if (bin < first || bin > last || sketch.counts[bin] == 0) return content;
  auto mass = static_cast<double>(sketch.counts[bin]);
  if (bin == first && sketch.near > 0) content.near = sketch.near, --mass;
  if (bin == last && mass > 0) content.far = sketch.far, --mass;
  if (!(mass > 0)) return content;
  const double from = sketch.from(bin), to = sketch.to(bin), width = sketch_edge(bin + 1) - sketch_edge(bin);
  if (lattice.shows(width)) {
    content.spacing = lattice.spacing(width);
    content.first = ceil(from / content.spacing);
    const double end = bin == last ? floor(to / content.spacing) + 1 : ceil(to / content.spacing);
    content.multiples = end > content.first ? static_cast<int>(end - content.first) : 0;
    content.each = mass / (end - content.first);
  } else if (from < to) {
    content.from = from, content.to = to, content.even = mass, content.density = mass / (to - from);
  } else {
    content.first = 1, content.spacing = from, content.each = mass, content.multiples = 1;
  }
  return content;
}

// Into the places behind the knots and points of the bins before. A bin that continues its neighbour shares a knot with
// it, at which the neighbour has its density fall to nothing.
QSIM_HD void put(DensitySide& side, const BinContent& content, bool continues, int knot, int point) {
  PointMasses& points = side.points;
  if (content.even > 0) {
    if (!continues) {
      side.knot[knot] = content.from;
      side.fall[knot] = -content.density;
      side.mass_before[knot++] = 0;
    }
    side.knot[knot] = content.to;
    side.fall[knot] = content.density;
    side.mass_before[knot] = content.even;
  }
  const auto put_point = [&](double at, double mass) {
    points.at[point] = at;
    points.mass[point++] = mass;
  };
  if (content.near > 0) put_point(content.near, 1);
  for (int i = 0; i < content.multiples; ++i) put_point((content.first + i) * content.spacing, content.each);
  if (content.far > 0) put_point(content.far, 1);
}

// One behind the last where none is. Most bins of a side are before it: those of small numbers.
template <class Team>
QSIM_HD int first_occupied(const SketchSideView& sketch, const Team& team) {
  const int last = sketch.last_bin();
  int bin = sketch.first_bin() + team.rank();
  if constexpr (Team::kSize == 1) {  // many at once
    constexpr int kAtOnce = 16;
    const auto are_empty = [&] {
      std::int64_t any = 0;
      for (int i = 0; i < kAtOnce; ++i) any |= sketch.counts[bin + i];
      return any == 0;
    };
    while (bin + kAtOnce <= last && are_empty()) bin += kAtOnce;
  }
  while (bin <= last && sketch.counts[bin] == 0) bin += Team::kSize;
  return static_cast<int>(team.least(bin <= last ? bin : last + 1));
}

template <class Team>
QSIM_HD void fill(DensitySide& side, const SketchSideView& sketch, Lattice lattice, const Team& team) {
  PointMasses& points = side.points;
  const int first = sketch.first_bin(), last = sketch.last_bin(), occupied = first_occupied(sketch, team);
  for (int bin = team.rank(); bin < occupied; bin += Team::kSize) side.knots_before[bin] = 0;
  for (int bin = team.rank(); bin < occupied; bin += Team::kSize) points.points_before[bin] = 0;
  constexpr int kOfKnots = 16;  // both counts fit into halves of a word
  std::uint32_t done = 0;
  double end = 0;  // of what the bin before spreads
  for (int tile = occupied; tile <= last; tile += Team::kSize) {
    const int bin = tile + team.rank();
    if constexpr (Team::kSize > 1) end = content_of(sketch, bin - 1, first, last, lattice).end();
    const BinContent here = content_of(sketch, bin, first, last, lattice);
    const bool continues = here.even > 0 && here.from == end;
    end = here.end();
    const auto knots = static_cast<std::uint32_t>(here.even > 0 ? 2 - continues : 0);
    std::uint32_t all;
    const std::uint32_t before =
        done + team.sum_before(knots << kOfKnots | static_cast<std::uint32_t>(here.points()), all);
    const auto knot = static_cast<std::uint16_t>(before >> kOfKnots), point = static_cast<std::uint16_t>(before);
    if (bin <= last) side.knots_before[bin] = knot, points.points_before[bin] = point;
    put(side, here, continues, knot, point);
    team.wait();
    if (continues) side.fall[knot - 1] -= here.density;
    done += all;
  }
  if (team.rank() == 0) {
    side.knots = static_cast<int>(done >> kOfKnots);
    points.points = static_cast<int>(done & ((1u << kOfKnots) - 1));
    side.last_bin = points.last_bin = last;
  }
  team.wait();
}

template <class Team>
QSIM_HD void sum_moments(DensitySide& side, const Team& team) {
  constexpr int kMostPlaces = DensitySide::kMaxKnots + 1;
  const int knots = side.knots;
  sums_before<double, kMostPlaces>(
      knots + 1, [&](int i) { return i < knots ? side.fall[i] * (side.knot[i] * side.knot[i] * side.knot[i]) : 0.0; },
      [&](int i, double before) { side.head[i] = before; }, team);
  sums_before<Moments, kMostPlaces>(  // from the last knot, with nothing beyond, to the first
      knots + 1,
      [&](int place) {
        const int i = knots - place;  // the mass between knot i - 1 and knot i
        if (i <= 0 || i == knots) return Moments{};
        const double mass = side.mass_before[i], from = side.knot[i - 1], to = side.knot[i];
        return Moments{mass, mass * ((from + to) / 2), mass * ((from * from + from * to + to * to) / 3)};
      },
      [&](int place, const Moments& after) { side.beyond[knots - place] = after; }, team);
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
template <class SumInLanes>
QSIM_HD double rounded(const DensitySide& side, Cut at, SumInLanes sum) {
  const double scale = at.scale;
  const int bin = magnitude_bin(scale / 2);
  int knot = bin > side.last_bin ? side.knots : side.knots_before[bin];
  if (knot > at.knot) knot = at.knot;
  const double inverse = 1 / scale;
  const double falls = sum(knot, at.knot, [&](int i) {
    const double t = side.knot[i] * inverse, f = round_half_even(t), w = t - f;
    return side.fall[i] * (f + 4 * (w * w * w));
  });
  return side.head[knot] / 3 + scale * scale * scale / 12 * (falls + at.density * (at.steps + 0.5)) +
         side.points.rounded(at.point, scale, sum);
}

template <class Team>
QSIM_HD Lattice find_lattice(const SketchView& sketch, Range observed, QuantGrid grid, const Team& team) {
  const double step = choose_qparams<double>(observed.low, observed.high, grid, 0).scale;
  return {lattice_unit(sketch, step / kSpan, team), sketch.spacing, step,
          larger(step, (observed.high - observed.low) * 0x1p-16)};
}

template <class Team>
QSIM_HD void lay_out(DensitySide& side, const SketchSideView& sketch, Lattice lattice, const Team& team) {
  fill(side, sketch, lattice, team);
  sum_moments(side, team);
  side.points.sum_moments(team);
}

}  // namespace density

// What an encoding costs on one side: of values beyond the end of the grid, and of those before it.
struct SideCost {
  double saturated, rounded;
};

QSIM_HD double cost_of(SideCost below, SideCost above, double gamma) {
  return gamma * (below.saturated + above.saturated) + below.rounded + above.rounded;
}

QSIM_HD double steps_below(QuantParams<float> params, QuantGrid grid) {
  return static_cast<double>(params.zero_point) - grid.quant_min;
}
QSIM_HD double steps_above(QuantParams<float> params, QuantGrid grid) {
  return static_cast<double>(grid.quant_max) - params.zero_point;
}

// The cost of an encoding, or anything above `limit` when it is above.
QSIM_HD double cost_of(const SketchDensity& density, QuantParams<float> params, QuantGrid grid, double gamma,
                       double limit) {
  const LanesInTurn<kSketchSums> sum;
  const density::Cut bottom = density::cut(density.below, params.scale, steps_below(params, grid));
  const density::Cut top = density::cut(density.above, params.scale, steps_above(params, grid));
  SideCost below{density::saturated(density.below, bottom), 0}, above{density::saturated(density.above, top), 0};
  if (const double beyond = cost_of(below, above, gamma); beyond > limit) return beyond;
  below.rounded = density::rounded(density.below, bottom, sum);
  above.rounded = density::rounded(density.above, top, sum);
  return cost_of(below, above, gamma);
}

}  // namespace qsim
