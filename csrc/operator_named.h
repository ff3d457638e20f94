// An operator that is called from C++, of qsim or of torch, through the dispatcher: "qsim::fake_quantize".
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace qsim {

template <class Signature>
c10::TypedOperatorHandle<Signature> operator_named(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).template typed<Signature>();
}

}  // namespace qsim
