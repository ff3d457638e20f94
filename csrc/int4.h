// What the CPU, CUDA and Meta kernels of pack_int4 and unpack_int4 check and allocate alike.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace qsim {

inline at::Tensor empty_packed(const at::Tensor& q) {
  TORCH_CHECK_TYPE(q.scalar_type() == at::kChar || q.scalar_type() == at::kByte, "qsim::pack_int4: q is ",
                   q.scalar_type(), "; expected int8 or uint8 that hold 4-bit integers");
  return at::empty_symint({(q.sym_numel() + 1) / 2}, q.options().dtype(at::kByte));
}

inline at::Tensor empty_unpacked(const at::Tensor& packed, c10::SymIntArrayRef shape,
                                 std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = dtype.value_or(at::kChar);
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte, "qsim::unpack_int4: packed is ", packed.scalar_type(),
                   "; expected uint8");
  TORCH_CHECK_TYPE(type == at::kChar || type == at::kByte, "qsim::unpack_int4: dtype is ", type,
                   "; expected int8 for signed and uint8 for unsigned integers");
  const at::Tensor q = at::empty_symint(shape, packed.options().dtype(type));
  TORCH_CHECK_VALUE(packed.sym_numel() == (q.sym_numel() + 1) / 2, "qsim::unpack_int4: packed has ", packed.sym_numel(),
                    " bytes; expected ", (q.sym_numel() + 1) / 2, " for shape ", shape, ", two integers to a byte");
  return q;
}

}  // namespace qsim
