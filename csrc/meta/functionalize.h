// Mutation while a graph is captured: torch.compile turns it into values, and does so by itself only for operators that
// do not return what they mutate. The others compute a value and write it through.
#pragma once

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

namespace qsim {

inline at::Tensor unwrapped(const at::Tensor& x) {
  namespace functional = at::functionalization::impl;
  if (!functional::isFunctionalTensor(x)) return x;
  functional::sync(x);
  return functional::from_functional_tensor(x);
}

// compute() gives, from unwrapped tensors, what `out` becomes.
template <class Compute>
at::Tensor& write_through(at::Tensor& out, const Compute& compute) {
  namespace functional = at::functionalization::impl;
  TORCH_CHECK(functional::isFunctionalTensor(out),
              "qsim: cannot trace a mutation of a tensor that is not part of the graph");
  at::Tensor y;
  {
    const at::AutoDispatchSkipFunctionalize guard;
    y = compute();
  }
  functional::replace_(out, y);
  functional::commit_update(out);
  functional::sync(out);
  return out;
}

}  // namespace qsim
