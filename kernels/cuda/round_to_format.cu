#include "elements.cuh"
#include "octets.cuh"
#include "qsim/cuda/round_to_format.h"
#include "range_state.cuh"

namespace qsim::cuda {

namespace {

// Type of an element as the host names it, and what it is computed in.
template <class T>
struct Named {
  using type = T;
};
template <>
struct Named<__half> {
  using type = Float16;
};
template <>
struct Named<__nv_bfloat16> {
  using type = BFloat16;
};
template <class T>
using computed_t = arithmetic_t<typename Named<T>::type>;

template <bool upper_half, class T>
__global__ void __launch_bounds__(kThreads)
    round_all(const __grid_constant__ FormatIn<computed_t<T>> format, const T* x, T* y, std::uint8_t* mask,
              std::int64_t n, bool packs) {
  for_each_octet(n, [&](std::int64_t at, int count) {
    T elements[kOctet];
    load_octet(x, at, count, packs, elements);
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const auto e = widened(elements[i]);
      bits |= (i < count && in_format(e, format) ? 1u : 0u) << i;
      narrow(round_to_format<upper_half>(e, format), elements[i]);
    }
    store_octet(elements, at, count, packs, y);
    if (mask != nullptr) mask[at / kOctet] = static_cast<std::uint8_t>(bits);
  });
}

__device__ __forceinline__ SquaredSums shuffled_down(SquaredSums sums, int step) {
  return {__shfl_down_sync(kWholeWarp, sums.error, step), __shfl_down_sync(kWholeWarp, sums.signal, step)};
}

// Of all threads of a block, in a fixed order; valid in thread 0.
__device__ SquaredSums sum_of_block(SquaredSums sums) {
  __shared__ SquaredSums warps[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) sums.merge(shuffled_down(sums, step));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sums;
  __syncthreads();
  for (int warp = 1; threadIdx.x == 0 && warp < kThreads / 32; ++warp) sums.merge(warps[warp]);
  return sums;
}

__device__ __forceinline__ void add_of_warp(std::int64_t* to, std::int64_t of_thread) {
  const unsigned sum = __reduce_add_sync(kWholeWarp, static_cast<unsigned>(of_thread));
  if (threadIdx.x % 32 == 0) add(to, sum);
}

template <bool upper_half, class T>
__global__ void __launch_bounds__(kThreads)
    count_all(const __grid_constant__ FormatIn<computed_t<T>> format, const T* x, T* y, std::int64_t n, bool packs,
              std::int64_t* counts, SquaredSums* partial) {
  FormatCounts found;
  SquaredSums sums;
  for_each_octet(n, [&](std::int64_t at, int count) {
    T elements[kOctet];
    load_octet(x, at, count, packs, elements);  // padded by zeros, which no count and no sum notices
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const auto e = widened(elements[i]), nearest = round_to_format<upper_half>(e, format), error = e - nearest;
      qsim::count(e, format, found);
      if (partial != nullptr && error - error == 0) {
        sums.merge({static_cast<double>(error) * error, static_cast<double>(e) * e});
      }
      narrow(nearest, elements[i]);
    }
    if (y != nullptr) store_octet(elements, at, count, packs, y);
  });
  if (blockIdx.x == 0 && threadIdx.x == 0) add(counts, n);
  add_of_warp(counts + 1, found.nans);
  add_of_warp(counts + 2, found.infs);
  add_of_warp(counts + 3, found.overflows);
  add_of_warp(counts + 4, found.underflows);
  add_of_warp(counts + 5, found.subnormals);
  if (partial == nullptr) return;
  sums = sum_of_block(sums);
  if (threadIdx.x == 0) partial[blockIdx.x] = sums;
}

__global__ void __launch_bounds__(kThreads) join_squares(const SquaredSums* partial, int n, double* squares) {
  SquaredSums sums;
  for (int i = threadIdx.x; i < n; i += kThreads) sums.merge(partial[i]);
  sums = sum_of_block(sums);
  if (threadIdx.x != 0) return;
  squares[0] += sums.error;
  squares[1] += sums.signal;
}

// run(T{}, format, whether it is the upper half of T's arithmetic type).
template <class F>
cudaError_t with_format(const RoundToFormatCall& call, F run) {
  return with_element(call.element, [&](auto type) {
    using T = decltype(type);
    const auto format = format_in<typename Named<T>::type>(call.format, call.saturate);
    if constexpr (sizeof(computed_t<T>) == 4) {
      if (format.upper_half) return run(type, format, std::true_type{});
    }
    return run(type, format, std::false_type{});
  });
}

}  // namespace

cudaError_t round_to_format(const RoundToFormatCall& call, const void* x, void* y, std::uint8_t* mask,
                            cudaStream_t stream) {
  if (call.n == 0) return cudaSuccess;
  return with_format(call, [&](auto type, const auto& format, auto upper_half) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(y);
    return launch(round_all<decltype(upper_half)::value, T>, shape_for(call.n), stream, format, from, to, mask, call.n,
                  all_aligned(from, to));
  });
}

int format_partials(std::int64_t n) { return static_cast<int>(shape_for(n).blocks.x); }

cudaError_t count_format(const RoundToFormatCall& call, const void* x, void* y, std::int64_t* counts, double* squares,
                         SquaredSums* partial, cudaStream_t stream) {
  if (call.n == 0) return cudaSuccess;
  const cudaError_t status = with_format(call, [&](auto type, const auto& format, auto upper_half) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(y);
    return launch(count_all<decltype(upper_half)::value, T>, shape_for(call.n), stream, format, from, to, call.n,
                  all_aligned(from, to), counts, squares == nullptr ? nullptr : partial);
  });
  if (squares == nullptr || status != cudaSuccess) return status;
  return launch(join_squares, {1, kThreads}, stream, partial, format_partials(call.n), squares);
}

}  // namespace qsim::cuda
