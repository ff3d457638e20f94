#include <torch/library.h>

#include <string>

#include "schema/tags.h"

// With a scale x / scale is rounded and multiplied by it again; axis and block_size as for fake_quantize.
// counts: elements, NaNs, Infs, overflows, underflows, subnormals. squares: sums of squared error and squared signal.
// The operators with a mask exist for the Autograd kernel.
TORCH_LIBRARY_FRAGMENT(qsim, m) {
  const std::string rounding = "*, bool? saturate=None, Tensor? scale=None, int? axis=None, int? block_size=None";
  const std::string options = "str format, " + rounding;
  const std::string state = "str format, Tensor(a!) counts, Tensor(b!)? squares=None, " + rounding;
  const auto def = [&](const std::string& schema, const auto& tags) { m.def(schema.c_str(), tags); };
  def("round_to_format(Tensor x, " + options + ") -> Tensor", qsim::kAnyLayout);
  def("round_to_format.out(Tensor x, " + options + ", Tensor(a!) out) -> Tensor(a!)", qsim::kAnyLayout);
  def("round_to_format_(Tensor(a!) x, " + options + ") -> Tensor(a!)", qsim::kAnyLayout);
  def("round_to_format_with_mask(Tensor x, " + options + ") -> (Tensor y, Tensor mask)", qsim::kExactLayout);
  def("round_to_format_with_mask_(Tensor(a!) x, " + options + ") -> Tensor mask", qsim::kExactLayout);
  def("round_to_format_counted(Tensor x, " + state + ") -> Tensor", qsim::kExactLayout);
  def("count_format_(Tensor x, " + state + ") -> ()", qsim::kExactLayout);
}
