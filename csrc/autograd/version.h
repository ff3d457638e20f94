// Version counters of what an operator mutates: autograd then refuses a backward that would read the changed tensor.
//
// The kernels that call this sit at the ADInplaceOrView key, which inference mode keeps for ordinary tensors: a state
// made outside of it is counted there too.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <vector>

namespace qsim {

// Before anything is written. Inference tensors count no versions; torch's own operators refuse them as well.
inline void check_version(const at::Tensor& mutated) {
  TORCH_CHECK(!mutated.defined() || !mutated.is_inference() || c10::InferenceMode::is_enabled(),
              "qsim: got an inference tensor to write to outside of inference mode; pass its clone()");
}
inline void check_versions(at::TensorList mutated) {
  for (const at::Tensor& tensor : mutated) check_version(tensor);
}

inline void bump_version(const at::Tensor& mutated) { mutated.unsafeGetTensorImpl()->bump_version(); }
inline void bump_versions(at::TensorList mutated) {
  for (const at::Tensor& tensor : mutated) bump_version(tensor);
}

// Of several tensors, which a list would copy.
template <class... Tensors>
void check_versions(const at::Tensor& first, const Tensors&... rest) {
  check_version(first);
  (check_version(rest), ...);
}
template <class... Tensors>
void bump_versions(const at::Tensor& first, const Tensors&... rest) {
  bump_version(first);
  (bump_version(rest), ...);
}

// The kernel of an operator with tensors that are written. As torch's autogradNotImplementedInplaceOrViewFallback,
// which refuses an inference tensor only after it was written.
inline void versioned(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  std::vector<at::Tensor> mutated;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& given = torch::jit::peek(*stack, i, arguments.size());
    const bool written = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    if (written && given.isTensor()) mutated.push_back(given.toTensor());
  }
  check_versions(mutated);
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  bump_versions(mutated);
}

}  // namespace qsim
