#include "clip_grad.h"

#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "launch.h"
#include "qsim/cuda/clip_grad.h"

namespace qsim {
namespace {

std::vector<at::Tensor> dense_grads(at::TensorList grads) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& grad : grads) found.push_back(dense(grad));
  return found;
}

// f(table, first gradient, first chunk) for every GradTable::kMost gradients. Returns the number of all chunks.
template <class F>
int for_each_table(const std::vector<at::Tensor>& grads, const F& f) {
  constexpr std::size_t kMost = cuda::GradTable::kMost;
  std::int64_t chunks = 0;
  for (std::size_t begin = 0; begin < grads.size(); begin += kMost) {
    cuda::GradTable table;
    table.grads = static_cast<int>(std::min(kMost, grads.size() - begin));
    table.first_chunk[0] = 0;
    for (int g = 0; g < table.grads; ++g) {
      const at::Tensor& grad = grads[begin + g];
      table.data[g] = grad.data_ptr();
      table.size[g] = grad.numel();
      table.element[g] = static_cast<std::uint8_t>(element_of(grad));
      const std::int64_t end = table.first_chunk[g] + (grad.numel() + kGradChunk - 1) / kGradChunk;
      TORCH_CHECK_VALUE(chunks + end <= INT32_MAX, "qsim: more than 2^45 gradient elements in one call");
      table.first_chunk[g + 1] = static_cast<int>(end);
    }
    f(table, begin, static_cast<int>(chunks));
    chunks += table.first_chunk[table.grads];
  }
  return static_cast<int>(chunks);
}

std::tuple<at::Tensor, at::Tensor> grad_power_sum_cuda(at::TensorList grads, double norm_type) {
  check_grads(grads, norm_type);
  const c10::cuda::CUDAGuard guard(grads[0].device());
  const std::vector<at::Tensor> sources = dense_grads(grads);
  auto [powers, nonfinite] = empty_sums(grads);
  nonfinite.zero_();
  const int chunks = for_each_table(sources, [](const auto&, std::size_t, int) {});
  const at::Tensor of_chunks = at::empty({chunks}, powers.options());
  for_each_table(sources, [&, &powers = powers, &nonfinite = nonfinite](const cuda::GradTable& table,
                                                                        std::size_t first_grad, int first_chunk) {
    auto* chunk = of_chunks.mutable_data_ptr<double>() + first_chunk;
    check_launch(cuda::sum_grads(table, norm_type, chunk, nonfinite.mutable_data_ptr<std::int64_t>() + first_grad,
                                 current_stream()));
    check_launch(cuda::join_grad_sums(table, norm_type, chunk, powers.mutable_data_ptr<double>() + first_grad,
                                      current_stream()));
  });
  return {powers, nonfinite};
}

at::Tensor scale_grad_cuda(at::TensorList grads, const at::Tensor& powers, const at::Tensor& counts, double max_norm,
                           double norm_type, std::string_view nonfinite) {
  check_grads(grads, norm_type);
  check_scaling(grads, powers, counts, max_norm);
  const c10::cuda::CUDAGuard guard(grads[0].device());
  at::Tensor norm = empty_norm(grads);
  const at::Tensor plan = at::empty({sizeof(GradScaling)}, norm.options().dtype(at::kByte));
  auto* scaling = static_cast<GradScaling*>(plan.mutable_data_ptr());
  check_launch(cuda::plan_scaling(powers.const_data_ptr<double>(), counts.const_data_ptr<std::int64_t>(),
                                  static_cast<int>(counts.numel()), norm_type, max_norm, policy_of(nonfinite), scaling,
                                  norm.mutable_data_ptr(), norm.scalar_type() == at::kDouble, current_stream()));
  const std::vector<at::Tensor> targets = dense_grads(grads);
  for_each_table(targets, [&](const cuda::GradTable& table, std::size_t, int) {
    check_launch(cuda::scale_grads(table, scaling, current_stream()));
  });
  for (std::size_t g = 0; g < grads.size(); ++g) {
    if (!targets[g].is_same(grads[g])) grads[g].copy_(targets[g]);
  }
  return norm;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) {
  m.impl("grad_power_sum", grad_power_sum_cuda);
  m.impl("scale_grad_", scale_grad_cuda);
}
}  // namespace qsim
