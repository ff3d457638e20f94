#include "empty_result.h"
#include "fake_quantize_grids.h"
#include "fake_quantize_operators.h"

namespace qsim {
namespace {

using at::Tensor;

void run_forward(const Tensor& x, const Tensor& y, const Tensor& scale, const Tensor& zero_point,
                 const FakeQuantizeOptions& options) {
  for_element_type(x.scalar_type(), cpu::fake_quantize_kernels(), [&](auto element, const auto& kernels) {
    using T = decltype(element);
    using A = arithmetic_t<T>;
    const GridTable<A> table(x, scale, zero_point, options, typename GridTable<A>::ForValues());
    const T* from = data<T>(x);
    T* to = mutable_data<T>(y);
    in_parallel(x.numel(), [&](std::int64_t begin, std::int64_t end) {
      table.for_grids(begin, end, [&](std::int64_t offset, std::int64_t first, std::int64_t last, const auto& grids) {
        kernels.forward(from + offset, to + offset, first, last, grids, table.layout, options.rounding);
      });
    });
  });
}

void run_with_mask(const Tensor& x, const Tensor& y, const Tensor& mask, const Tensor& scale, const Tensor& zero_point,
                   const FakeQuantizeOptions& options) {
  for_element_type(x.scalar_type(), cpu::fake_quantize_kernels(), [&](auto element, const auto& kernels) {
    using T = decltype(element);
    const GridTable<arithmetic_t<T>> table(x, scale, zero_point, options);
    const T* from = data<T>(x);
    T* to = mutable_data<T>(y);
    auto* bits = mask.mutable_data_ptr<std::uint8_t>();
    in_parallel(x.numel(), [&](std::int64_t begin, std::int64_t end) {
      kernels.with_mask(from, to, bits, begin, end, table.grids, table.layout, options.rounding);
    });
  });
}

struct Cpu {
  static Tensor empty(const Tensor& x) { return empty_result(x); }
  static Tensor mask(const Tensor& x) { return empty_bits(x); }

  static void run(const Tensor& x, const Tensor& y, const Tensor& mask, const Tensor& scale, const Tensor& zero_point,
                  const FakeQuantizeOptions& options) {
    if (x.numel() == 0) return;
    const KeepSubnormals guard;
    if (mask.defined()) {
      run_with_mask(x, y, mask, scale, zero_point, options);
    } else {
      run_forward(x, y, scale, zero_point, options);
    }
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) { FakeQuantizeOperators<Cpu>::implement(m); }
}  // namespace qsim
