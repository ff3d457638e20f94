// How errors call what they got.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <string>

namespace qsim {

inline const char* described(at::ScalarType type) {
  return type == at::ScalarType::Undefined ? "None" : c10::toString(type);
}

// "Float of shape [2, 3] on cpu". Python's None arrives as an undefined tensor, which has neither shape nor device.
inline std::string described(const at::Tensor& x) {
  if (!x.defined()) return "None";
  return c10::str(x.scalar_type(), " of shape ", x.sym_sizes(), " on ", x.device());
}

}  // namespace qsim
