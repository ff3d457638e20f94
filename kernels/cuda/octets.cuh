// Loops over eight elements at a time: one byte of a bit mask, sixteen bytes of 16-bit elements.
#pragma once

#include <algorithm>
#include <cstdint>

#include "elements.cuh"

namespace qsim::cuda {

inline constexpr int kThreads = 256,
                     kOctet = 8;  // a thread takes 8 elements: one byte of a mask, 16 bytes of 16-bit elements
inline constexpr std::int64_t kMostBlocks = 132 * 16;  // the rest comes by striding

inline unsigned blocks_for(std::int64_t n) {
  constexpr std::int64_t kPerBlock = kThreads * kOctet;
  return static_cast<unsigned>(std::min(kMostBlocks, (n + kPerBlock - 1) / kPerBlock));
}

// Elements [at, at + count) of x, in 16-byte loads where all 8 exist and the address allows.
template <class T>
__device__ __forceinline__ void load_octet(const T* x, std::int64_t at, int count, bool packs, T (&to)[kOctet]) {
  if (packs && count == kOctet) {
#pragma unroll
    for (int i = 0; i < kOctet / Pack<T>::kSize; ++i) {
      const auto pack = reinterpret_cast<const Pack<T>*>(x + at)[i];
#pragma unroll
      for (int j = 0; j < Pack<T>::kSize; ++j) to[i * Pack<T>::kSize + j] = pack.of[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) to[i] = i < count ? x[at + i] : T{};
  }
}

template <class T>
__device__ __forceinline__ void store_octet(const T (&from)[kOctet], std::int64_t at, int count, bool packs, T* y) {
  if (packs && count == kOctet) {
#pragma unroll
    for (int i = 0; i < kOctet / Pack<T>::kSize; ++i) {
      Pack<T> pack;
#pragma unroll
      for (int j = 0; j < Pack<T>::kSize; ++j) pack.of[j] = from[i * Pack<T>::kSize + j];
      reinterpret_cast<Pack<T>*>(y + at)[i] = pack;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (i < count) y[at + i] = from[i];
    }
  }
}

// Calls f(first element, elements) for every octet of n elements.
template <class F>
__device__ __forceinline__ void for_each_octet(std::int64_t n, F f) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads * kOctet;
  for (std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kOctet; at < n;
       at += step) {
    f(at, static_cast<int>(min(static_cast<std::int64_t>(kOctet), n - at)));
  }
}

}  // namespace qsim::cuda
