#include <torch/library.h>

#include <string>

// With a scale x / scale is rounded and multiplied by it again; axis and block_size as for fake_quantize.
// counts: elements, NaNs, Infs, overflows, underflows, subnormals. squares: sums of squared error and squared signal.
// The operators with a mask exist for the Autograd kernel.
TORCH_LIBRARY_FRAGMENT(qsim, m) {
  const std::string rounding = "*, bool? saturate=None, Tensor? scale=None, int? axis=None, int? block_size=None";
  const std::string options = "str format, " + rounding;
  const std::string state = "str format, Tensor(a!) counts, Tensor(b!)? squares=None, " + rounding;
  const auto def = [&](const std::string& schema) { m.def(schema.c_str()); };
  def("round_to_format(Tensor x, " + options + ") -> Tensor");
  def("round_to_format.out(Tensor x, " + options + ", Tensor(a!) out) -> Tensor(a!)");
  def("round_to_format_(Tensor(a!) x, " + options + ") -> Tensor(a!)");
  def("round_to_format_with_mask(Tensor x, " + options + ") -> (Tensor y, Tensor mask)");
  def("round_to_format_with_mask_(Tensor(a!) x, " + options + ") -> Tensor mask");
  def("round_to_format_counted(Tensor x, " + state + ") -> Tensor");
  def("count_format_(Tensor x, " + state + ") -> ()");
}
