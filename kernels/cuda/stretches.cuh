// Elements in the order in which a warp moves whole sectors, for kernels in which it does not matter to a thread where
// its elements lie: those of octets.cuh read half of a sector at a time where an element has four bytes.
//
// A warp takes a stretch of 1024 bytes at a time, a lane two chunks of it: chunk c of lane l is the (32 * c + l)-th.
#pragma once

#include "octets.cuh"
#include "reduce.cuh"

namespace qsim::cuda {

inline constexpr int kStretchChunks = 2;  // of a lane

template <class T>
inline constexpr int kLaneElements = kStretchChunks * Chunk<T>::kSize;
template <class T>
inline constexpr int kStretch = 32 * kLaneElements<T>;  // elements

// x is aligned to a chunk; `stretch` counts from it.
template <class T>
__device__ __forceinline__ void load_stretch(const T* x, unsigned stretch, T (&to)[kLaneElements<T>]) {
  const auto* chunks = reinterpret_cast<const Chunk<T>*>(x) + stretch * std::int64_t{32 * kStretchChunks};
#pragma unroll
  for (int c = 0; c < kStretchChunks; ++c) {
    const Chunk<T> chunk = chunks[32 * c + threadIdx.x % 32];
#pragma unroll
    for (int j = 0; j < Chunk<T>::kSize; ++j) to[c * Chunk<T>::kSize + j] = chunk.of[j];
  }
}

template <class T>
__device__ __forceinline__ void store_stretch(const T (&from)[kLaneElements<T>], unsigned stretch, T* y) {
  auto* chunks = reinterpret_cast<Chunk<T>*>(y) + stretch * std::int64_t{32 * kStretchChunks};
#pragma unroll
  for (int c = 0; c < kStretchChunks; ++c) {
    Chunk<T> chunk;
#pragma unroll
    for (int j = 0; j < Chunk<T>::kSize; ++j) chunk.of[j] = from[c * Chunk<T>::kSize + j];
    chunks[32 * c + threadIdx.x % 32] = chunk;
  }
}

// A bit for each element of a lane, in their order. Called by whole warps.
template <class T>
__device__ __forceinline__ void store_stretch_bits(unsigned bits, unsigned stretch, std::uint8_t* mask) {
  const unsigned lane = threadIdx.x % 32;
  std::uint8_t* const bytes = mask + stretch * std::int64_t{kStretch<T> / 8};
  if constexpr (Chunk<T>::kSize == 8) {
    bytes[lane] = static_cast<std::uint8_t>(bits);
    bytes[32 + lane] = static_cast<std::uint8_t>(bits >> 8);
  } else {
    // Half a byte to a chunk: of two neighbours the even one stores what both have of their first, the odd one of their
    // second. Here is what the other has, in the half that this one lacks.
    static_assert(Chunk<T>::kSize == 4);
    const unsigned swapped = __shfl_xor_sync(kWholeWarp, bits, 1) * 0x101 >> 4, own = lane % 2 == 0 ? 0x0f : 0xf0;
    bytes[lane / 2 + lane % 2 * 16] = static_cast<std::uint8_t>((bits & own) | (swapped & ~own));
  }
}

}  // namespace qsim::cuda
