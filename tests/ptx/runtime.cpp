// The part of libcudart that our kernels and their tests call, on this machine: what nvcc put into an object registers
// itself here with its PTX, and a launch runs that. Linked in place of libcudart.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "runtime.h"

namespace {

constexpr unsigned kFatBinary = 0xBA55ED50;
constexpr std::uint16_t kPtx = 1;
constexpr std::size_t kSharedLimit = 227 * 1024, kSharedWithoutAsking = 48 * 1024;  // of a block, sm_90

// What `-fatbin` makes, as far as nvcc -no-compress goes: an entry for each real and each virtual architecture.
struct FatHeader {
  std::uint32_t magic;
  std::uint16_t version, header_bytes;
  std::uint64_t bytes;
};
struct FatEntry {
  std::uint16_t kind, version;
  std::uint32_t header_bytes;
  std::uint64_t bytes;
  std::uint32_t compressed_bytes, unused;
  std::uint16_t minor, major;
  std::uint32_t architecture;
};
struct FatWrapper {
  std::uint32_t magic, version;
  const void* data;
  void* file;
};

std::string_view ptx_of(const FatWrapper& wrapper) {
  const auto* at = static_cast<const char*>(wrapper.data);
  FatHeader header;
  std::memcpy(&header, at, sizeof header);
  at += header.header_bytes;
  for (const char* end = at + header.bytes; header.magic == kFatBinary && at < end;) {
    FatEntry entry;
    std::memcpy(&entry, at, sizeof entry);
    at += entry.header_bytes;
    if (entry.kind == kPtx && entry.architecture == QSIM_PTX_ARCHITECTURE && entry.compressed_bytes == 0) {
      return {at, entry.bytes};
    }
    at += entry.bytes;
  }
  std::fprintf(stderr, "ptx: compile for the virtual architecture %d, with -no-compress\n", QSIM_PTX_ARCHITECTURE);
  std::abort();
}

struct Registered {
  ptx::Module* module;
  std::string name;
  std::size_t dynamic_shared = kSharedWithoutAsking;
  std::uint64_t instructions = 0;  // that its threads ran
};

struct Device {
  std::unordered_map<const void*, Registered> functions;  // by the address of the host's stub
  ptx::Memory memory;
  ptx::Work work{0, 0};  // since somebody asked
  const bool descending = std::getenv("QSIM_EMULATION_ORDER") != nullptr &&
                          std::strcmp(std::getenv("QSIM_EMULATION_ORDER"), "descending") == 0;
};

Device& device() {
  static Device the;
  return the;
}

// Kernels that count elements by 32 bits have a twin that counts by 64, for tensors larger than any test: mangled, the
// same name with `l` where the other has `j`.
Registered* twin_of(const Registered& narrow) {
  std::string name = narrow.name;
  for (std::size_t at = 0; (at = name.find("jE", at)) != name.npos; ++at) name[at] = 'l';
  if (name == narrow.name) return nullptr;
  for (auto& [stub, function] : device().functions) {
    if (function.name == name) return &function;
  }
  return nullptr;
}

void run(Registered& function, const ptx::Grid& grid, const std::vector<std::byte>& parameters) {
  Device& on = device();
  const ptx::Work work =
      ptx::run_grid(function.module->kernel(function.name), grid, parameters, on.memory, on.descending);
  function.instructions += work.instructions;
  on.work = {on.work.instructions + work.instructions, on.work.longest + work.longest};
}

}  // namespace

std::vector<std::string> ptx::never_launched() {
  std::vector<std::string> names;
  for (const auto& [stub, function] : device().functions) {
    if (function.instructions == 0) names.push_back(function.name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

ptx::Work ptx::work_since_last_call() { return std::exchange(device().work, {0, 0}); }

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  return reinterpret_cast<void**>(new ptx::Module(ptx_of(*static_cast<FatWrapper*>(wrapper))));
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** module) { delete reinterpret_cast<ptx::Module*>(module); }
void __cudaRegisterFunction(void** module, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  device().functions[stub] = {reinterpret_cast<ptx::Module*>(module), name};
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }

// What the body of a stub calls, for <<<>>>: our launches go by cudaLaunchKernelExC.
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, std::size_t*, void*) { return cudaErrorNotSupported; }
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, std::size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub, void** arguments) {
  const auto found = device().functions.find(stub);
  if (found == device().functions.end()) return cudaErrorInvalidDeviceFunction;
  const ptx::Kernel& kernel = found->second.module->kernel(found->second.name);
  const dim3 grid = config->gridDim, block = config->blockDim;
  if (grid.x == 0 || grid.y == 0 || grid.z != 1 || grid.y > 65535 || block.x == 0 || block.y != 1 || block.z != 1 ||
      block.x > static_cast<unsigned>(kernel.most_threads) || config->dynamicSmemBytes > found->second.dynamic_shared ||
      kernel.shared_bytes + config->dynamicSmemBytes > kSharedLimit) {
    return cudaErrorInvalidConfiguration;
  }
  std::vector<std::byte> parameters(kernel.parameter_bytes);
  for (std::size_t i = 0; i < kernel.parameters.size(); ++i) {
    std::memcpy(parameters.data() + kernel.parameters[i].offset, arguments[i], kernel.parameters[i].bytes);
  }
  const ptx::Grid shape{grid.x, grid.y, block.x, config->dynamicSmemBytes};
  if (Registered* twin = twin_of(found->second)) {
    const std::vector<std::byte> before = device().memory.contents();
    run(*twin, shape, parameters);
    const std::vector<std::byte> expected = device().memory.contents();
    device().memory.restore(before);
    run(found->second, shape, parameters);
    if (device().memory.contents() != expected) throw std::runtime_error(twin->name + ": not the bits of its twin");
  } else {
    run(found->second, shape, parameters);
  }
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* stub, cudaFuncAttribute attribute, int value) {
  const auto found = device().functions.find(stub);
  if (found == device().functions.end()) return cudaErrorInvalidDeviceFunction;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<std::size_t>(value) > kSharedLimit) {
    return cudaErrorInvalidValue;
  }
  found->second.dynamic_shared = static_cast<std::size_t>(value);
  return cudaSuccess;
}

// A small device, so that grids are full soon.
cudaError_t cudaGetDevice(int* ordinal) {
  *ordinal = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = 4;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** to, std::size_t bytes) {
  *to = device().memory.allocate(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  device().memory.free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t status) { return status == cudaSuccess ? "no error" : "refused"; }

}  // extern "C"
