#include <torch/library.h>

// What qsim.restoration computes by and nothing else does: no operators of namespace qsim, which models may hold. A
// grid is `step` with `low` and `high`, or with the name of a float format.
TORCH_LIBRARY_FRAGMENT(qsim_restoration, m) {
  m.def(
      "descend_(Tensor(a!) rows, Tensor(b!) pull, Tensor moments, Tensor step, Tensor low, Tensor high, int rounds, "
      "*, "
      "str? format=None) -> ()");
  m.def(
      "feed_back_(Tensor(a!) rows, Tensor target, Tensor factor, Tensor step, Tensor low, Tensor high, int begin, "
      "int end, *, str? format=None) -> Tensor");
  m.def(
      "soft_round_(Tensor(a!) variable, Tensor(b!) mean, Tensor(c!) square, Tensor(d!) errors, Tensor target, "
      "Tensor step, Tensor low, Tensor high, int at, float rate, float weight, float exponent) -> ()");
}
