#include "quantize.h"

#include <torch/library.h>

#include "empty_result.h"
#include "fake_quantize_grids.h"

namespace qsim {
namespace {

using at::Tensor;
using Axis = std::optional<std::int64_t>;

Tensor quantize_cpu(const Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                    std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding,
                    std::optional<at::ScalarType> dtype) {
  const KeepSubnormals guard;
  const auto options = check_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  const Tensor from = dense(x), q = empty_result(from, storage_type(quant_min, quant_max, dtype));
  if (x.numel() == 0) return q;
  for_element_type(x.scalar_type(), cpu::quantize_kernels(), [&](auto element, const auto& kernels) {
    using T = decltype(element);
    using A = arithmetic_t<T>;
    const GridTable<A> table(from, scale, zero_point, options, typename GridTable<A>::ForValues());
    const auto run = [&](auto integer, auto kernel) {
      const T* x_data = data<T>(from);
      auto* q_data = mutable_data<decltype(integer)>(q);
      in_parallel(x.numel(), [&](std::int64_t begin, std::int64_t end) {
        table.for_grids(begin, end, [&](std::int64_t offset, std::int64_t first, std::int64_t last, const auto& grids) {
          kernel(x_data + offset, q_data + offset, first, last, grids, table.layout, static_cast<A>(quant_min),
                 options.rounding);
        });
      });
    };
    q.element_size() == 1 ? run(std::uint8_t{}, kernels.to_8) : run(std::uint16_t{}, kernels.to_16);
  });
  return q;
}

Tensor dequantize_cpu(const Tensor& q, const Tensor& scale, const Tensor& zero_point, Axis axis, Axis block_size,
                      std::optional<at::ScalarType> dtype) {
  const KeepSubnormals guard;
  const auto options = check_dequantize(q, scale, zero_point, axis, block_size);
  const Tensor from = dense(q), y = empty_result(from, result_type(scale, dtype));
  if (q.numel() == 0) return y;
  for_element_type(y.scalar_type(), cpu::quantize_kernels(), [&](auto element, const auto& kernels) {
    using T = decltype(element);
    using Table = GridTable<arithmetic_t<T>>;
    const Table table(from, scale, zero_point, options, typename Table::ForValues());
    const auto run = [&](auto integer, auto kernel) {
      const auto* q_data = data<decltype(integer)>(from);
      T* y_data = mutable_data<T>(y);
      in_parallel(q.numel(), [&](std::int64_t begin, std::int64_t end) {
        table.for_grids(begin, end, [&](std::int64_t offset, std::int64_t first, std::int64_t last, const auto& grids) {
          kernel(q_data + offset, y_data + offset, first, last, grids, table.layout);
        });
      });
    };
    switch (integer_type(q.scalar_type())->kind) {
      case Integer::i8:
        return run(std::int8_t{}, kernels.from_i8);
      case Integer::u8:
        return run(std::uint8_t{}, kernels.from_u8);
      case Integer::i16:
        return run(std::int16_t{}, kernels.from_i16);
      case Integer::u16:
        return run(std::uint16_t{}, kernels.from_u16);
    }
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) {
  m.impl("quantize", quantize_cpu);
  m.impl("dequantize", dequantize_cpu);
}
}  // namespace qsim
