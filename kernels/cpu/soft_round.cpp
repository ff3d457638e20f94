// A step of rounding that is learned, and the errors behind it, in one pass over a row.
#include "qsim/soft_round.h"

#include "vector/registers.h"

namespace qsim::cpu {

namespace {

template <std::int64_t stride>
void soft_round_row(const SoftRow& row, const SoftRounding& how) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < row.columns; ++i) qsim::soft_round(row, i, i * stride, how);
}

void soft_round(const SoftRow& row, const SoftRounding& how) {
  row.stride == 0 ? soft_round_row<0>(row, how) : soft_round_row<1>(row, how);
}

}  // namespace

namespace QSIM_LEVEL {
const SoftRoundKernels soft_round_kernels = {soft_round};
}

}  // namespace qsim::cpu
