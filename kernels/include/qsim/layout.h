// Which elements share parameters, in memory order: per tensor, per channel of any axis, per block.
#pragma once

#include <cstdint>

namespace qsim {

// Element e lies in segment (e % outer) / segment of repetition e / outer; inside it, the parameters take turns every
// `run` elements. The last segment of a repetition may be short.
//
//   per tensor               {n, n, 1, n}
//   per channel, outermost   {n, n / C, 1, n / C}
//   per channel, elsewhere   {n, n, C, inner}
//   per block                {length * inner, block * inner, inner, 1}
struct Layout {
  std::int64_t outer, segment, width, run;
};

// Sums over what shares a parameter are cut into slices at fixed places: slice s of a segment covers its elements
// [s * length, (s + 1) * length) and owns `width` partial sums of each kind. `length` holds whole rows (width * run).
struct Slices {
  std::int64_t length, per_segment;
};

}  // namespace qsim
