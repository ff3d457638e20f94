// What nvcc puts in front of every .cu file: CUDA's words and device functions as ordinary C++.
//
// Every thread of a block is a fiber; a collective (barrier, shuffle, ballot) suspends it until the others have come.
// Stricter than hardware: participants of a collective must be at the same line.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <source_location>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Blocks that run at the same time do so on operating-system threads of their own. Starts with what the block before
// left there, as on a device.
#define __shared__ thread_local

extern constinit thread_local uint3 threadIdx, blockIdx;
extern constinit thread_local dim3 blockDim, gridDim;

namespace emulation {

using Where = std::source_location;

struct Gathered {
  std::uint64_t value;  // of the source lane
  unsigned ballot;      // lanes with a value other than zero
};

void barrier(Where where);
// Waits for the lanes of `mask`; `source` is the lane whose value is wanted.
Gathered gather(const char* name, unsigned mask, std::uint64_t value, int source, Where where);
int lane();

template <class T>
T shuffle(const char* name, unsigned mask, T x, int source, Where where) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  bits = gather(name, mask, bits, source, where).value;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace emulation

inline void __syncthreads(emulation::Where where = emulation::Where::current()) { emulation::barrier(where); }
inline void __syncwarp(unsigned mask = ~0u, emulation::Where where = emulation::Where::current()) {
  emulation::gather("__syncwarp", mask, 0, emulation::lane(), where);
}

// A source outside the segment of `width` lanes means the lane itself.
template <class T>
T __shfl_sync(unsigned mask, T x, int source, int width = 32, emulation::Where where = emulation::Where::current()) {
  const int first = emulation::lane() / width * width;
  return emulation::shuffle("__shfl_sync", mask, x, first + (source & (width - 1)), where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int by, int width = 32, emulation::Where where = emulation::Where::current()) {
  const int lane = emulation::lane(), end = lane / width * width + width, source = lane ^ by;
  return emulation::shuffle("__shfl_xor_sync", mask, x, source < end ? source : lane, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, int by, int width = 32, emulation::Where where = emulation::Where::current()) {
  const int lane = emulation::lane(), end = lane / width * width + width, source = lane + by;
  return emulation::shuffle("__shfl_down_sync", mask, x, source < end ? source : lane, where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, int by, int width = 32, emulation::Where where = emulation::Where::current()) {
  const int lane = emulation::lane(), first = lane / width * width, source = lane - by;
  return emulation::shuffle("__shfl_up_sync", mask, x, source >= first ? source : lane, where);
}

inline unsigned __ballot_sync(unsigned mask, int flag, emulation::Where where = emulation::Where::current()) {
  return emulation::gather("__ballot_sync", mask, flag != 0, emulation::lane(), where).ballot;
}
inline int __any_sync(unsigned mask, int flag, emulation::Where where = emulation::Where::current()) {
  return emulation::gather("__any_sync", mask, flag != 0, emulation::lane(), where).ballot != 0;
}
inline int __all_sync(unsigned mask, int flag, emulation::Where where = emulation::Where::current()) {
  return emulation::gather("__all_sync", mask, flag == 0, emulation::lane(), where).ballot == 0;
}

// There are no caches to go past.
template <class T>
T __ldcg(const T* from) {
  return *from;
}

template <class T>
T atomicAdd(T* to, T x) {
  return std::atomic_ref<T>(*to).fetch_add(x);
}
template <class T>
T atomicExch(T* to, T x) {
  return std::atomic_ref<T>(*to).exchange(x);
}
template <class T>
T atomicCAS(T* to, T expected, T x) {
  std::atomic_ref<T>(*to).compare_exchange_strong(expected, x);
  return expected;
}
template <class T>
T atomicOr(T* to, T x) {
  return std::atomic_ref<T>(*to).fetch_or(x);
}
template <class T>
T atomicMin(T* to, T x) {
  T old = std::atomic_ref<T>(*to).load();
  while (x < old && !std::atomic_ref<T>(*to).compare_exchange_weak(old, x)) {
  }
  return old;
}
template <class T>
T atomicMax(T* to, T x) {
  T old = std::atomic_ref<T>(*to).load();
  while (x > old && !std::atomic_ref<T>(*to).compare_exchange_weak(old, x)) {
  }
  return old;
}
// Back to 0 after `last`: the arrival counter of a last-block reduction.
inline unsigned atomicInc(unsigned* to, unsigned last) {
  unsigned old = std::atomic_ref<unsigned>(*to).load();
  while (!std::atomic_ref<unsigned>(*to).compare_exchange_weak(old, old >= last ? 0 : old + 1)) {
  }
  return old;
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
