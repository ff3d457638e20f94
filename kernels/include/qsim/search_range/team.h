// The threads that share a search: a block of a GPU, or one thread alone. What they find does not depend on how many
// they are: sums of floats have an order of their own (sums.h), everything else is exact in any.
#pragma once

#include <cstdint>

#include "qsim/portability.h"

namespace qsim {

// A team of one. Every member of a team calls each of these.
struct Alone {
  static constexpr int kSize = 1;

  QSIM_HD int rank() const { return 0; }
  QSIM_HD void wait() const {}  // for the others, and for what they have written
  QSIM_HD double least(double mine) const { return mine; }
  QSIM_HD std::int64_t sum(std::int64_t mine) const { return mine; }

  // What those of lower rank have, summed, and what all have.
  template <class T>
  QSIM_HD T sum_before(T mine, T& all) const {
    all = mine;
    return T{};
  }

  // Whether `here` holds for any; `value` becomes that of the first of them in rank.
  QSIM_HD bool first(bool here, double& /*value*/) const { return here; }

  QSIM_HD void add(double* to, double amount) const { *to += amount; }  // whole numbers: any order is exact
};

}  // namespace qsim
