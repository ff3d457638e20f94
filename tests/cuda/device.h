// Device memory, inputs and comparisons for the tests of the CUDA kernels. The same source runs on a GPU and on the
// emulation: only the headers of the CUDA runtime differ.
#pragma once

#include <cuda_runtime_api.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "qsim/element.h"
#include "qsim/finite_range.h"

inline void require(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// More elements than one grid of any kernel takes at a time, which is 16 blocks of 2048 for each multiprocessor at
// most.
inline std::int64_t beyond_the_grid() {
  int device = 0, multiprocessors = 0;
  require(cudaGetDevice(&device));
  require(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return std::int64_t{multiprocessors} * 16 * 2048 + 4099;
}

// A copy of host values on the device that begins `offset` elements behind an aligned address and ends where its memory
// does.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values, std::size_t offset = 0) : size_(values.size()), offset_(offset) {
    require(cudaMalloc(&memory_, (offset + size_) * sizeof(T) + (offset + size_ == 0)));
    require(cudaMemcpy(data(), values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  explicit DeviceArray(std::size_t n, std::size_t offset = 0) : DeviceArray(std::vector<T>(n), offset) {}
  ~DeviceArray() { static_cast<void>(cudaFree(memory_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return static_cast<T*>(memory_) + offset_; }

  std::vector<T> host() const {
    std::vector<T> values(size_);
    require(cudaMemcpy(values.data(), data(), size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  void* memory_ = nullptr;
  std::size_t size_, offset_;
};

template <class T>
constexpr qsim::Element kElementOf = std::is_same_v<T, float>            ? qsim::Element::f32
                                     : std::is_same_v<T, qsim::Float16>  ? qsim::Element::f16
                                     : std::is_same_v<T, qsim::BFloat16> ? qsim::Element::bf16
                                                                         : qsim::Element::f64;

// The entry for T of a table of CPU kernels.
template <class T, class Kernels>
const auto& of_type(const Kernels& kernels) {
  if constexpr (std::is_same_v<T, float>) {
    return kernels.f32;
  } else if constexpr (std::is_same_v<T, double>) {
    return kernels.f64;
  } else if constexpr (std::is_same_v<T, qsim::Float16>) {
    return kernels.f16;
  } else {
    return kernels.bf16;
  }
}

inline bool is_nan(float x) { return x != x; }
inline bool is_nan(double x) { return x != x; }
inline bool is_nan(qsim::Float16 x) { return (x.bits & 0x7fff) > 0x7c00; }
inline bool is_nan(qsim::BFloat16 x) { return (x.bits & 0x7fff) > 0x7f80; }
template <class T>
  requires std::is_integral_v<T>
bool is_nan(T) {
  return false;
}

// How many elements differ in their bits; the payload of a NaN is its own affair.
template <class T>
std::size_t differences(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) throw std::invalid_argument("two sizes");
  std::size_t count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    count += !(is_nan(a[i]) && is_nan(b[i])) && std::memcmp(&a[i], &b[i], sizeof(T)) != 0;
  }
  return count;
}

// The nearest element (towards zero for bfloat16).
template <class T>
T element(double x) {
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(x);
  } else if constexpr (std::is_same_v<T, qsim::Float16>) {
    return {std::bit_cast<std::uint16_t>(static_cast<_Float16>(x))};
  } else {
    return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(x)) >> 16)};
  }
}

// Integers, or numbers around 0 and any bits at all: NaN, infinities, subnormals, zeros of both signs, huge.
template <class T>
std::vector<T> sample(std::int64_t n, double any = 0.25, unsigned seed = 1) {
  std::mt19937_64 random(seed + static_cast<unsigned>(n));
  std::normal_distribution<double> normal(0, 3);
  std::uniform_real_distribution<double> uniform;
  std::vector<T> x(n);
  for (T& value : x) {
    const std::uint64_t bits = random();
    if (std::is_integral_v<T> || uniform(random) < any) {
      std::memcpy(&value, &bits, sizeof(T));
      if (bits % 16 == 0) std::memset(static_cast<void*>(&value), 0, sizeof(T));
    } else if constexpr (!std::is_integral_v<T>) {
      value = element<T>(normal(random));
    }
  }
  return x;
}
