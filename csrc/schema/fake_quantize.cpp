#include <torch/library.h>

#include <string>

#include "schema/tags.h"

// The backward operators exist for the Autograd kernel, and on their own for whoever writes a custom backward.
TORCH_LIBRARY_FRAGMENT(qsim, m) {
  const std::string grid = "Tensor scale, Tensor zero_point, int quant_min, int quant_max, *, ";
  const std::string options = "int? axis=None, int? block_size=None, str rounding=\"divide\"";
  const std::string factor = ", float grad_factor=1.0";
  const auto def = [&](const std::string& schema, const auto& tags) { m.def(schema.c_str(), tags); };
  def("fake_quantize(Tensor x, " + grid + options + factor + ") -> Tensor", qsim::kAnyLayout);
  def("fake_quantize.out(Tensor x, " + grid + options + factor + ", Tensor(a!) out) -> Tensor(a!)", qsim::kAnyLayout);
  def("fake_quantize_(Tensor(a!) x, " + grid + options + factor + ") -> Tensor(a!)", qsim::kAnyLayout);
  def("fake_quantize_with_mask(Tensor x, " + grid + options + ") -> (Tensor y, Tensor mask)", qsim::kExactLayout);
  def("fake_quantize_with_mask_(Tensor(a!) x, " + grid + options + ") -> Tensor mask", qsim::kExactLayout);
  // strides: those of y, when grad may be laid out differently.
  def("fake_quantize_mask_backward(Tensor grad, Tensor mask, *, SymInt[]? strides=None) -> Tensor", qsim::kExactLayout);
  def("fake_quantize_backward(Tensor grad, Tensor x, " + grid + options + ") -> Tensor", qsim::kAnyLayout);
  // dzero_point of an int32 zero point is 0: it cannot be learned.
  def("fake_quantize_learnable_backward(Tensor grad, Tensor x, " + grid + options + factor +
          ") -> (Tensor dx, Tensor dscale, Tensor dzero_point)",
      qsim::kExactLayout);
}
