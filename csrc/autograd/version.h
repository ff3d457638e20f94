// Version counters of what an operator mutates: autograd then refuses a backward that would read the changed tensor.
//
// The kernels that call this sit at the ADInplaceOrView key, which inference mode keeps for ordinary tensors: a state
// made outside of it is counted there too.
#pragma once

#include <ATen/core/Tensor.h>

namespace qsim {

inline void bump_versions(at::TensorList mutated) {
  for (const at::Tensor& tensor : mutated) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace qsim
