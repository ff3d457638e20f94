// Any range search.
#pragma once

#include "input.h"
#include "qsim/search_range.h"

namespace fuzz {

inline qsim::RangeSearch range_search(Input& input) {
  using qsim::RangeMethod;
  const int bits = input.pick({2, 4, 8, 8, 16}), bottom = input.flip() ? 0 : -(1 << (bits - 1));
  const auto method = qsim::kAll<RangeMethod>[input.bits(1) % qsim::kAll<RangeMethod>.size()];
  return {{bottom, bottom + (1 << bits) - 1, input.flip()},
          method,
          input.pick({100.0, 99.99, 90.0, 1.0}),
          method == RangeMethod::mse ? 1.0 : 3.0};
}

template <class T>
bool sane(T low, T high, bool seen) {
  if (!seen) return low == INFINITY && high == -INFINITY;
  return std::isfinite(low) && std::isfinite(high) && low <= high;
}

}  // namespace fuzz
