// Eight elements to a thread: loaded, computed and stored together.
#pragma once

#include <cstdint>

#include "launch.cuh"

namespace qsim::cuda {

inline constexpr int kOctet = 8;  // elements of a thread: one byte of a mask, 16 bytes of 16-bit elements
inline constexpr std::int64_t kOctetsPerBlock = kThreads * kOctet;  // elements

inline LaunchShape shape_for(std::int64_t n) { return {blocks_for(n, kOctetsPerBlock), kThreads}; }

// What is moved at once: 16 bytes, or an octet where that is less.
template <class T>
struct alignas(16 / sizeof(T) < kOctet ? 16 : kOctet * sizeof(T)) Chunk {
  static constexpr int kSize = 16 / sizeof(T) < kOctet ? 16 / sizeof(T) : kOctet;
  T of[kSize];
};

// Elements [at, at + count) of x, chunk by chunk where all 8 exist and the address allows.
template <class T>
__device__ __forceinline__ void load_octet(const T* x, std::int64_t at, int count, bool packs, T (&to)[kOctet]) {
  constexpr int kSize = Chunk<T>::kSize;
  if (packs && count == kOctet) {
#pragma unroll
    for (int i = 0; i < kOctet / kSize; ++i) {
      const auto chunk = reinterpret_cast<const Chunk<T>*>(x + at)[i];
#pragma unroll
      for (int j = 0; j < kSize; ++j) to[i * kSize + j] = chunk.of[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) to[i] = i < count ? x[at + i] : T{};
  }
}

template <class T>
__device__ __forceinline__ void store_octet(const T (&from)[kOctet], std::int64_t at, int count, bool packs, T* y) {
  constexpr int kSize = Chunk<T>::kSize;
  if (packs && count == kOctet) {
#pragma unroll
    for (int i = 0; i < kOctet / kSize; ++i) {
      Chunk<T> chunk;
#pragma unroll
      for (int j = 0; j < kSize; ++j) chunk.of[j] = from[i * kSize + j];
      reinterpret_cast<Chunk<T>*>(y + at)[i] = chunk;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (i < count) y[at + i] = from[i];
    }
  }
}

// Whether 32 bits count n elements and the octets beyond them.
inline bool is_small(std::int64_t n) { return n < INT32_MAX - 2 * kOctet; }

template <class... T>
bool all_aligned(const T*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
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

// Calls f(i) for the elements i < count of an octet, with the cursor at each; it starts at the first.
template <class Cursor, class F>
__device__ __forceinline__ void follow(Cursor& cursor, int count, F f) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    if (i >= count) break;
    if (i > 0) cursor.advance();
    f(i);
  }
}

}  // namespace qsim::cuda
