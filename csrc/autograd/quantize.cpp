#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

// Integers have no gradient, as in torch; a gradient that is asked of dequantize is an error, not zero. Training goes
// through fake_quantize.
TORCH_LIBRARY_IMPL(qsim, Autograd, m) {
  m.impl("quantize", torch::autograd::autogradNotImplementedFallback());
  m.impl("dequantize", torch::autograd::autogradNotImplementedFallback());
}
