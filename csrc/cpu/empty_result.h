// Fresh outputs. Those of 32 MB and more are asked to use huge pages: page faults cost such an output four times what
// copying it does. Smaller ones gain nothing: the allocator hands out memory that was touched before. Made past the
// dispatcher, which for a thousand elements takes a tenth of what the operator does.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace qsim {

// Like x, of another dtype if one is given.
inline at::Tensor empty_result(const at::Tensor& x, std::optional<at::ScalarType> dtype = std::nullopt) {
  const at::ScalarType type = dtype.value_or(x.scalar_type());
  at::Tensor result = x.is_non_overlapping_and_dense() ? at::detail::empty_strided_cpu(x.sizes(), x.strides(), type)
                                                       : at::empty_like(x, x.options().dtype(type));
#if defined(__linux__)
  constexpr std::uintptr_t kPage = 2 << 20, kLarge = 32 << 20;
  if (result.nbytes() >= kLarge) {
    const auto begin = reinterpret_cast<std::uintptr_t>(result.mutable_data_ptr());
    const std::uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = (begin + result.nbytes()) / kPage * kPage;
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // a wish: failing changes nothing
  }
#endif
  return result;
}

// For one bit for each element of x: as empty_mask (fake_quantize.h).
inline at::Tensor empty_bits(const at::Tensor& x) { return at::detail::empty_cpu({(x.numel() + 7) / 8}, at::kByte); }

}  // namespace qsim
