#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <memory>
#include <tuple>

#include "empty_result.h"
#include "fake_quantize_grids.h"

namespace qsim {
namespace {

using at::Tensor;
using Axis = std::optional<std::int64_t>;

Tensor mask_backward_cpu(const Tensor& grad, const Tensor& mask, at::OptionalIntArrayRef strides) {
  check_mask(grad, mask, strides);
  const Tensor from = strides ? with_strides(grad, *strides) : dense(grad), bits = mask.contiguous();
  const Tensor dx = empty_result(from);
  const auto& kernels = cpu::fake_quantize_backward_kernels();
  const auto run = [&](auto element, auto kernel) {
    using U = decltype(element);
    in_parallel(grad.numel(), [&](std::int64_t begin, std::int64_t end) {
      kernel(data<U>(from), data<std::uint8_t>(bits), mutable_data<U>(dx), begin, end);
    });
  };
  switch (grad.element_size()) {
    case 2:
      run(std::uint16_t{}, kernels.masked_16);
      break;
    case 4:
      run(std::uint32_t{}, kernels.masked_32);
      break;
    default:
      run(std::uint64_t{}, kernels.masked_64);
  }
  return dx;
}

Tensor backward_cpu(const Tensor& grad, const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                    std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                    std::string_view rounding) {
  const KeepSubnormals guard;
  const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  check_grad(grad, x);
  const Tensor from = dense(x), gradient = with_strides(grad, from.strides()), dx = empty_result(from);
  if (x.numel() == 0) return dx;
  for_element_type(x.scalar_type(), cpu::fake_quantize_backward_kernels(), [&](auto element, auto kernel) {
    using T = decltype(element);
    const GridTable<arithmetic_t<T>> table(from, scale, zero_point, options);
    in_parallel(x.numel(), [&](std::int64_t begin, std::int64_t end) {
      kernel(data<T>(gradient), data<T>(from), mutable_data<T>(dx), begin, end, table.grids, table.layout,
             options.rounding);
    });
  });
  return dx;
}

cpu::FoldSums<float> fold_kernel(float) { return cpu::fake_quantize_learnable_kernels().fold_f32; }
cpu::FoldSums<double> fold_kernel(double) { return cpu::fake_quantize_learnable_kernels().fold_f64; }

class SumBuffer {
 public:
  SumBuffer(std::int64_t sums, bool zero_point)
      : scale_(new double[static_cast<std::size_t>(sums)]),
        zero_point_(zero_point ? new double[static_cast<std::size_t>(sums)] : nullptr) {}
  cpu::PartialSums sums() const { return {scale_.get(), zero_point_.get()}; }

 private:
  std::unique_ptr<double[]> scale_, zero_point_;
};

// learn(begin, end, sums) visits slices, fold(sums, first parameter, parameters) finishes parameters. Where a slice is
// all that its parameters have, they are finished while the sums are in the cache, and few of those exist at a time.
template <class Learn, class Fold>
void sum_slices(std::int64_t parameters, std::int64_t segments, std::int64_t width, Slices slices,
                bool learns_zero_point, Learn learn, Fold fold) {
  constexpr std::int64_t kGrain = 32768;  // elements
  const std::int64_t count = segments * slices.per_segment, grain = std::max<std::int64_t>(1, kGrain / slices.length);
  if (slices.per_segment == 1 && parameters == segments * width) {  // the table repeats no parameter
    const std::int64_t batch = std::max<std::int64_t>(1, 512 / width);
    parallel_for(0, count, grain, [&](std::int64_t begin, std::int64_t end) {
      const SumBuffer buffer(batch * width, learns_zero_point);
      for (std::int64_t stop; begin < end; begin = stop) {
        stop = std::min(end, begin + batch);
        learn(begin, stop, buffer.sums());
        fold(buffer.sums(), begin * width, (stop - begin) * width);
      }
    });
    return;
  }
  const SumBuffer buffer(count * width, learns_zero_point);
  parallel_for(0, count, grain,
               [&](std::int64_t begin, std::int64_t end) { learn(begin, end, buffer.sums().from(begin * width)); });
  fold(buffer.sums(), 0, parameters);
}

std::tuple<Tensor, Tensor, Tensor> learnable_backward_cpu(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                                          const Tensor& zero_point, std::int64_t quant_min,
                                                          std::int64_t quant_max, Axis axis, Axis block_size,
                                                          std::string_view rounding, double grad_factor) {
  const KeepSubnormals guard;
  const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  check_grad(grad, x);
  const Tensor from = dense(x), gradient = with_strides(grad, from.strides()), dx = empty_result(from);
  const Tensor ordered = in_memory_order(scale, from, options);
  const Tensor dscale = at::zeros(ordered.sizes(), ordered.options()), dzero_point = at::zeros_like(dscale);
  if (x.numel() == 0) return {dx, dscale.reshape(scale.sizes()), dzero_point.reshape(scale.sizes())};
  for_element_type(x.scalar_type(), cpu::fake_quantize_learnable_kernels(), [&](auto element, auto kernel) {
    using T = decltype(element);
    using A = arithmetic_t<T>;
    const GridTable<A> table(from, scale, zero_point, options);
    const Slices slices = slices_of(table.layout);
    const auto learn = [&](std::int64_t begin, std::int64_t end, cpu::PartialSums sums) {
      kernel(data<T>(gradient), data<T>(from), mutable_data<T>(dx), begin, end, table.grids, table.layout,
             options.rounding, slices, sums);
    };
    const auto fold = [&](cpu::PartialSums sums, std::int64_t first, std::int64_t n) {
      fold_kernel(A{})(sums, slices, n, table.width(), table.run, table.rows, data<A>(ordered) + first, grad_factor,
                       mutable_data<A>(dscale) + first, mutable_data<A>(dzero_point) + first);
    };
    const std::int64_t parameters = ordered.numel(), segments = parameters / table.width();
    sum_slices(parameters, segments, table.layout.width, slices, zero_point.is_floating_point(), learn, fold);
  });
  return {dx, from_memory_order(dscale, from, options), from_memory_order(dzero_point, from, options)};
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) {
  m.impl("fake_quantize_mask_backward", mask_backward_cpu);
  m.impl("fake_quantize_backward", backward_cpu);
  m.impl("fake_quantize_learnable_backward", learnable_backward_cpu);
}
}  // namespace qsim
