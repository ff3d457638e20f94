// The part of the CUDA runtime's host interface that our kernels and their tests use, on a machine without CUDA: device
// memory is host memory, a launch runs the kernel before it returns, errors are those a device would report.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

struct CUstream_st;
using cudaStream_t = CUstream_st*;

struct uint3 {
  unsigned x = 0, y = 0, z = 0;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace emulation {

// Runs the kernel's body once for every thread. Throws std::runtime_error where a device would hang or worse.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, const std::function<void()>& body);
cudaError_t allow_shared_memory(const void* kernel, int bytes);

}  // namespace emulation

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= 4096, "a kernel takes 4 KB of arguments");
  const std::tuple<Parameters...> passed{std::forward<Arguments>(arguments)...};
  return emulation::launch(*config, reinterpret_cast<const void*>(kernel), [&] { std::apply(kernel, passed); });
}

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int value) {
  return emulation::allow_shared_memory(reinterpret_cast<const void*>(kernel), value);
}

// A small device, so that grids are full soon.
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 4;
  return cudaSuccess;
}

inline cudaError_t cudaMalloc(void** to, std::size_t bytes) {
  *to = std::malloc(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t status) { return status == cudaSuccess ? "no error" : "refused"; }
