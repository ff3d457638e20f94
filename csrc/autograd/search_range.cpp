#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

// A range is a choice among candidates: no gradient flows to what it was chosen from.
TORCH_LIBRARY_IMPL(qsim, Autograd, m) {
  m.impl("search_range", torch::autograd::autogradNotImplementedFallback());
  m.impl("search_range_data", torch::autograd::autogradNotImplementedFallback());
  m.impl("search_range_weights", torch::autograd::autogradNotImplementedFallback());
}
