#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

// Ranges are observed, not learned: no gradient flows to min and max.
TORCH_LIBRARY_IMPL(qsim, Autograd, m) { m.impl("choose_qparams", torch::autograd::autogradNotImplementedFallback()); }
