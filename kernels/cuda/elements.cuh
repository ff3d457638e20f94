// Elements of any input type in the type they are computed in, sixteen bytes at a time where the address allows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "launch.cuh"
#include "qsim/element.h"

namespace qsim::cuda {

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(double x) { return static_cast<float>(x); }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// What is computed in: float32 for the 16-bit types.
__device__ __forceinline__ double widened(double x) { return x; }
template <class T>
__device__ __forceinline__ float widened(T x) {
  return as_float(x);
}
template <class T>
using computed_t = decltype(widened(T{}));

// The inverse, rounded half to even.
__device__ __forceinline__ void round_to(float x, float& to) { to = x; }
__device__ __forceinline__ void round_to(double x, double& to) { to = x; }
__device__ __forceinline__ void round_to(float x, __half& to) { to = __float2half_rn(x); }
__device__ __forceinline__ void round_to(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

// An element type as element.h names it.
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
using named_t = typename Named<T>::type;

template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T of[kSize];
};

template <class T>
__device__ __forceinline__ bool aligned(const T* x) {
  return reinterpret_cast<std::uintptr_t>(x) % sizeof(Pack<T>) == 0;
}

// Calls f(x[i]) for every i < n once, in no particular order; `rank` of `threads` threads share the work.
template <class T, class F>
__device__ __forceinline__ void for_each_element(const T* x, int n, int rank, int threads, F f) {
  constexpr int kSize = Pack<T>::kSize, kInFlight = 4;
  const int misaligned = static_cast<int>(reinterpret_cast<std::uintptr_t>(x) % sizeof(Pack<T>) / sizeof(T));
  const int head = min(n, misaligned == 0 ? 0 : kSize - misaligned), packs = (n - head) / kSize;
  const int tail = head + packs * kSize;
  if (rank < head) f(as_float(x[rank]));
  const auto* body = reinterpret_cast<const Pack<T>*>(x + head);
  const auto take = [&](const Pack<T>& pack) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) f(as_float(pack.of[j]));
  };
  int i = rank;
  // All loads before the first use: f may write, and then the compiler would not move a load up past it.
  for (; i + (kInFlight - 1) * threads < packs; i += kInFlight * threads) {
    Pack<T> loaded[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) loaded[k] = body[i + k * threads];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) take(loaded[k]);
  }
  for (; i < packs; i += threads) take(body[i]);
  if (tail + rank < n) f(as_float(x[tail + rank]));
}

// run(T{}) with the type that `element` names.
template <class F>
cudaError_t with_element(Element element, F run) {
  switch (element) {
    case Element::f32:
      return run(float{});
    case Element::f16:
      return run(__half{});
    case Element::bf16:
      return run(__nv_bfloat16{});
    case Element::f64:
      return run(double{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace qsim::cuda
