// Gradient norms and their clipping: a block for each chunk, all gradients of a table in one launch.
#include "elements.cuh"
#include "qsim/cuda/clip_grad.h"
#include "range_state.cuh"

namespace qsim::cuda {

namespace {

__device__ __forceinline__ double power_of(double x, double p) {
  x = fabs(x);
  return p == 2 ? x * x : p == 1 || p == INFINITY ? x : pow(x, p);
}

template <class F>
__device__ void with_chunk(const GradTable& table, F f) {
  const int g = owner_of(blockIdx.x, table.first_chunk, table.grads);  // this block has a chunk of that gradient
  const std::int64_t first = (blockIdx.x - table.first_chunk[g]) * kGradChunk;
  const int n = static_cast<int>(min(kGradChunk, table.size[g] - first));
  switch (static_cast<Element>(table.element[g])) {
    case Element::f32:
      return f(static_cast<float*>(table.data[g]) + first, n, g);
    case Element::f16:
      return f(static_cast<__half*>(table.data[g]) + first, n, g);
    case Element::bf16:
      return f(static_cast<__nv_bfloat16*>(table.data[g]) + first, n, g);
    case Element::f64:
      return f(static_cast<double*>(table.data[g]) + first, n, g);
  }
}

// Thread t takes packs t, t + kThreads, ... whatever the address: alignment decides how they are loaded, never what is
// added to what.
template <class T, class F>
__device__ __forceinline__ void for_each_pack(T* x, int n, F f) {
  constexpr int kSize = Pack<T>::kSize;
  const bool whole = aligned(x);
#pragma unroll 4
  for (int i = threadIdx.x * kSize; i < n; i += kThreads * kSize) {
    const int size = min(kSize, n - i);
    Pack<T> pack{};
    if (whole && size == kSize) {
      pack = *reinterpret_cast<const Pack<T>*>(x + i);
    } else {
      for (int j = 0; j < size; ++j) pack.of[j] = x[i + j];
    }
    f(pack, size, i, whole && size == kSize);
  }
}

// Of all threads of a block; valid in thread 0.
__device__ double join_block(double power, double p) {
  return reduce_block(power, [p](double a, double b) { return join_powers(a, b, p); });
}

__global__ void sum_chunks(__grid_constant__ const GradTable table, double p, double* power, std::int64_t* nonfinite) {
  double sum = 0;
  int others = 0;
  with_chunk(table, [&](auto* x, int n, int g) {
    for_each_pack(x, n, [&](const auto& pack, int, int, bool) {  // padded by zeros, which add nothing
#pragma unroll
      for (int j = 0; j < pack.kSize; ++j) {
        const auto e = widened(pack.of[j]);
        const bool finite = is_finite(e);
        if (finite) sum = join_powers(sum, power_of(e, p), p);
        others += !finite;
      }
    });
    if (__any_sync(kWholeWarp, others != 0)) {
      const int met = sum_of_warp(others);
      if (threadIdx.x % 32 == 0) add(nonfinite + g, met);
    }
  });
  sum = join_block(sum, p);
  if (threadIdx.x == 0) power[blockIdx.x] = sum;
}

// A block for each gradient.
__global__ void join_chunks(__grid_constant__ const GradTable table, double p, const double* power, double* powers) {
  double sum = 0;
  const int end = table.first_chunk[blockIdx.x + 1];
  for (int i = table.first_chunk[blockIdx.x] + threadIdx.x; i < end; i += kThreads) sum = join_powers(sum, power[i], p);
  sum = join_block(sum, p);
  if (threadIdx.x == 0) powers[blockIdx.x] = sum;
}

__global__ void plan(const double* powers, const std::int64_t* counts, int n, double p, double max_norm,
                     NonFinitePolicy policy, GradScaling* plan, void* total_norm, bool wide_norm) {
  GradSum total;
  for (int i = threadIdx.x; i < n; i += kGradLanes) {
    total.power = join_powers(total.power, powers[i], p);
    total.nonfinite += counts[i];
  }
  total.power = join_halves(total.power, [p](double a, double b) { return join_powers(a, b, p); });
  total.nonfinite = sum_of_warp(total.nonfinite);
  if (threadIdx.x != 0) return;
  *plan = grad_scaling(total, p, max_norm, policy);
  if (wide_norm) {
    *static_cast<double*>(total_norm) = plan->total_norm;
  } else {
    *static_cast<float*>(total_norm) = static_cast<float>(plan->total_norm);
  }
}

__global__ void scale_chunks(__grid_constant__ const GradTable table, const GradScaling* plan) {
  const GradScaling scaling = *plan;
  if (scaling.action == GradScaling::keep) return;
  with_chunk(table, [&](auto* x, int n, int) {
    for_each_pack(x, n, [&](auto& pack, int size, int i, bool whole) {
#pragma unroll
      for (int j = 0; j < pack.kSize; ++j) {
        const auto e = widened(pack.of[j]);
        const auto factor = static_cast<decltype(widened(pack.of[j]))>(scaling.coefficient);
        const bool clear = scaling.action == GradScaling::clear || !is_finite(e);
        round_to(clear ? 0 : e * factor, pack.of[j]);
      }
      if (whole) {
        *reinterpret_cast<std::remove_reference_t<decltype(pack)>*>(x + i) = pack;
      } else {
        for (int j = 0; j < size; ++j) x[i + j] = pack.of[j];
      }
    });
  });
}

LaunchShape one_block_per_chunk(const GradTable& table) {
  return {static_cast<unsigned>(table.first_chunk[table.grads]), kThreads};
}

}  // namespace

cudaError_t sum_grads(const GradTable& table, double p, double* power, std::int64_t* nonfinite, cudaStream_t stream) {
  if (table.first_chunk[table.grads] == 0) return cudaSuccess;
  return launch(sum_chunks, one_block_per_chunk(table), stream, table, p, power, nonfinite);
}

cudaError_t join_grad_sums(const GradTable& table, double p, const double* power, double* powers, cudaStream_t stream) {
  return launch(join_chunks, {static_cast<unsigned>(table.grads), kThreads}, stream, table, p, power, powers);
}

cudaError_t plan_scaling(const double* powers, const std::int64_t* counts, int n, double p, double max_norm,
                         NonFinitePolicy policy, GradScaling* scaling, void* total_norm, bool wide_norm,
                         cudaStream_t stream) {
  return launch(plan, {1, kGradLanes}, stream, powers, counts, n, p, max_norm, policy, scaling, total_norm, wide_norm);
}

cudaError_t scale_grads(const GradTable& table, const GradScaling* scaling, cudaStream_t stream) {
  if (table.first_chunk[table.grads] == 0) return cudaSuccess;
  return launch(scale_chunks, one_block_per_chunk(table), stream, table, scaling);
}

}  // namespace qsim::cuda
