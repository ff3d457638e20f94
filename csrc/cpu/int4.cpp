#include "int4.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "qsim/int4.h"

namespace qsim {
namespace {

using at::Tensor;

constexpr std::int64_t kGrain = 32768;  // bytes of the packed tensor

// Calls run(first byte, first integer, integers) for the parts of n integers.
template <class Run>
void in_parallel_bytes(std::int64_t n, Run run) {
  at::parallel_for(0, (n + 1) / 2, kGrain, [&](std::int64_t begin, std::int64_t end) {
    run(begin, 2 * begin, std::min(2 * end, n) - 2 * begin);
  });
}

Tensor pack_int4_cpu(const Tensor& q) {
  const Tensor packed = empty_packed(q), from = q.contiguous();
  const auto* integers = static_cast<const std::uint8_t*>(from.const_data_ptr());
  auto* bytes = packed.mutable_data_ptr<std::uint8_t>();
  const auto& kernels = cpu::int4_kernels();
  in_parallel_bytes(q.numel(), [&](std::int64_t byte, std::int64_t first, std::int64_t n) {
    kernels.pack(integers + first, n, bytes + byte);
  });
  return packed;
}

Tensor unpack_int4_cpu(const Tensor& packed, at::IntArrayRef shape, std::optional<at::ScalarType> dtype) {
  const Tensor q = empty_unpacked(packed, c10::fromIntArrayRefSlow(shape), dtype), from = packed.contiguous();
  const auto* bytes = from.const_data_ptr<std::uint8_t>();
  auto* integers = static_cast<std::uint8_t*>(q.mutable_data_ptr());
  const auto& kernels = cpu::int4_kernels();
  const auto unpack = q.scalar_type() == at::kChar ? kernels.unpack_signed : kernels.unpack_unsigned;
  in_parallel_bytes(q.numel(), [&](std::int64_t byte, std::int64_t first, std::int64_t n) {
    unpack(bytes + byte, n, integers + first);
  });
  return q;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) {
  m.impl("pack_int4", pack_int4_cpu);
  m.impl("unpack_int4", unpack_int4_cpu);
}
}  // namespace qsim
