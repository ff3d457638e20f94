#include "clip_grad.h"

#include <c10/util/MaybeOwned.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "cpu/observe_state.h"
#include "cpu/subnormals.h"

namespace qsim {
namespace {

using DenseGrads = std::vector<c10::MaybeOwned<at::Tensor>>;

struct Chunk {
  std::size_t grad;
  char* data;
  std::int64_t elements;
  int element;
};

// The gradients in pieces of kGradChunk, in order. `data` is written only by callers that own it.
std::vector<Chunk> chunks_of(const DenseGrads& grads) {
  std::vector<Chunk> chunks;
  chunks.reserve(grads.size());
  for (std::size_t g = 0; g < grads.size(); ++g) {
    const at::Tensor& grad = *grads[g];
    const std::int64_t n = grad.numel();
    char* data = static_cast<char*>(grad.data_ptr());
    const int element = static_cast<int>(element_of(grad));
    for (std::int64_t i = 0; i < n; i += kGradChunk) {
      chunks.push_back({g, data + i * grad.element_size(), std::min(kGradChunk, n - i), element});
    }
  }
  return chunks;
}

template <class F>
void for_each(const std::vector<Chunk>& chunks, const F& f) {
  std::int64_t elements = 0;
  for (const Chunk& chunk : chunks) elements += chunk.elements;
  const auto n = static_cast<std::int64_t>(chunks.size());
  parallel_for(0, n, elements > kGrain ? 1 : n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) f(chunks[i], i);
  });
}

DenseGrads dense_grads(at::TensorList grads) {
  DenseGrads found;
  found.reserve(grads.size());
  for (const at::Tensor& grad : grads) {
    const bool is_dense = grad.is_non_overlapping_and_dense();
    found.push_back(is_dense ? DenseGrads::value_type::borrowed(grad) : DenseGrads::value_type::owned(dense(grad)));
  }
  return found;
}

std::tuple<at::Tensor, at::Tensor> grad_power_sum_cpu(at::TensorList grads, double norm_type) {
  const KeepSubnormals guard;
  check_grads(grads, norm_type);
  const DenseGrads sources = dense_grads(grads);
  const std::vector<Chunk> chunks = chunks_of(sources);
  const auto& kernels = cpu::clip_grad_kernels();
  std::vector<GradSum> sums(chunks.size());
  for_each(chunks, [&](const Chunk& chunk, std::int64_t i) {
    sums[i] = kernels.sum[chunk.element](chunk.data, chunk.elements, norm_type);
  });
  auto [powers, nonfinite] = empty_sums(grads);
  auto* power = powers.mutable_data_ptr<double>();
  auto* count = nonfinite.mutable_data_ptr<std::int64_t>();
  std::fill_n(power, grads.size(), 0);
  std::fill_n(count, grads.size(), 0);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    power[chunks[i].grad] = join_powers(power[chunks[i].grad], sums[i].power, norm_type);
    count[chunks[i].grad] += sums[i].nonfinite;
  }
  return {powers, nonfinite};
}

// Of all gradients, in the order in which a warp joins them.
GradSum joint(const at::Tensor& powers, const at::Tensor& counts, double norm_type) {
  GradSum lanes[kGradLanes];
  for (std::int64_t i = 0; i < counts.numel(); ++i) {
    GradSum& lane = lanes[i % kGradLanes];
    lane.power = join_powers(lane.power, powers.const_data_ptr<double>()[i], norm_type);
    lane.nonfinite += counts.const_data_ptr<std::int64_t>()[i];
  }
  for (int step = kGradLanes / 2; step > 0; step /= 2) {
    for (int l = 0; l < step; ++l) {
      lanes[l].power = join_powers(lanes[l].power, lanes[l + step].power, norm_type);
      lanes[l].nonfinite += lanes[l + step].nonfinite;
    }
  }
  return lanes[0];
}

at::Tensor scale_grad_cpu(at::TensorList grads, const at::Tensor& powers, const at::Tensor& counts, double max_norm,
                          double norm_type, std::string_view nonfinite) {
  const KeepSubnormals guard;
  check_grads(grads, norm_type);
  check_scaling(grads, powers, counts, max_norm);
  const GradScaling scaling = grad_scaling(joint(powers, counts, norm_type), norm_type, max_norm, policy_of(nonfinite));
  at::Tensor norm = empty_norm(grads);
  if (norm.scalar_type() == at::kDouble) {
    *norm.mutable_data_ptr<double>() = scaling.total_norm;
  } else {
    *norm.mutable_data_ptr<float>() = static_cast<float>(scaling.total_norm);  // beyond float32: Inf
  }
  if (scaling.action == GradScaling::clear) {
    for (const at::Tensor& grad : grads) grad.zero_();
  } else if (scaling.action != GradScaling::keep) {
    const DenseGrads targets = dense_grads(grads);
    const auto& kernels = cpu::clip_grad_kernels();
    for_each(chunks_of(targets), [&](const Chunk& chunk, std::int64_t) {
      kernels.scale[chunk.element](chunk.data, chunk.elements, scaling.coefficient,
                                   scaling.action == GradScaling::scale_finite);
    });
    for (std::size_t g = 0; g < grads.size(); ++g) {
      if (!targets[g]->is_same(grads[g])) grads[g].copy_(*targets[g]);
    }
  }
  return norm;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) {
  m.impl("grad_power_sum", grad_power_sum_cpu);
  m.impl("scale_grad_", scale_grad_cpu);
}
}  // namespace qsim
