// What the CPU, CUDA and Meta kernels of pack_int4 and unpack_int4 check and allocate alike.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/accumulate.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "described.h"

namespace qsim {

inline at::Tensor empty_packed(const at::Tensor& q) {
  TORCH_CHECK_TYPE(q.scalar_type() == at::kChar || q.scalar_type() == at::kByte, "qsim::pack_int4: q is ",
                   described(q.scalar_type()), "; expected int8 or uint8 that hold 4-bit integers");
  return at::empty_symint({(q.sym_numel() + 1) / 2}, q.options().dtype(at::kByte));
}

// Before any memory is asked for: a shape may be whatever integers the caller has.
inline c10::SymInt elements_in(c10::SymIntArrayRef shape) {
  const auto known = c10::asIntArrayRefSlowOpt(shape);
  if (!known) return c10::multiply_integers(shape);
  std::uint64_t elements = 0;
  const bool negative = std::any_of(known->begin(), known->end(), [](std::int64_t size) { return size < 0; });
  TORCH_CHECK_VALUE(!negative && !c10::safe_multiplies_u64(*known, &elements) && elements < INT64_MAX,
                    "qsim::unpack_int4: shape is ", shape,
                    "; expected lengths of 0 or more and fewer than 2^63 elements");
  return static_cast<std::int64_t>(elements);
}

inline at::Tensor empty_unpacked(const at::Tensor& packed, c10::SymIntArrayRef shape,
                                 std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = dtype.value_or(at::kChar);
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte, "qsim::unpack_int4: packed is ", described(packed.scalar_type()),
                   "; expected uint8");
  TORCH_CHECK_TYPE(type == at::kChar || type == at::kByte, "qsim::unpack_int4: dtype is ", type,
                   "; expected int8 for signed and uint8 for unsigned integers");
  const c10::SymInt bytes = (elements_in(shape) + 1) / 2;
  TORCH_CHECK_VALUE(packed.sym_numel() == bytes, "qsim::unpack_int4: packed has ", packed.sym_numel(),
                    " bytes; expected ", bytes, " for shape ", shape, ", two integers to a byte");
  return at::empty_symint(shape, packed.options().dtype(type));
}

}  // namespace qsim
