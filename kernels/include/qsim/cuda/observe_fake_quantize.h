// CUDA entry points of running ranges: device pointers, stream-ordered, no synchronisation, no allocation, capturable.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "qsim/observe_fake_quantize.h"

namespace qsim::cuda {

// `observing`: the switch, on the device; where it is off nothing changes.
struct Running {
  const std::uint8_t* observing;
  RunningRule rule;
  RunningRanges ranges;
  std::int64_t* counts;  // elements, NaNs, +infs, -infs
};

// Bytes of device memory for a launch of `ranges` ranges; whatever it holds before.
constexpr std::size_t follow_ranges_workspace_bytes(std::int64_t ranges) {
  return sizeof(float) * (2 * static_cast<std::size_t>(ranges) + 1);
}

// x is a contiguous [outer, ranges, inner]; element (o, r, i) belongs to range r. Not empty.
cudaError_t follow_ranges(const void* x, Element element, std::int64_t outer, std::int64_t ranges, std::int64_t inner,
                          const Running& running, void* workspace, cudaStream_t stream);

// x is a contiguous [outer, size, inner] whose middle axis is cut into blocks: ranges are [outer, ceil(size / block),
// inner].
cudaError_t follow_blocks(const void* x, Element element, std::int64_t outer, std::int64_t size, std::int64_t inner,
                          std::int64_t block, const Running& running, cudaStream_t stream);

}  // namespace qsim::cuda
