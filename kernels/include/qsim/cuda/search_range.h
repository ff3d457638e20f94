// CUDA entry points of the range searches: device pointers, stream-ordered, no synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include "qsim/search_range.h"

namespace qsim::cuda {

// Device memory that the launches for `count` ranges work in; whatever it holds before.
std::size_t search_range_workspace_bytes(std::int64_t count);

// One range per sketch of kSketchBins counters. Nothing seen: (+Inf, -Inf).
// low_bits: one per sketch; null: unknown.
cudaError_t search_range(const float* lowest, const float* highest, const std::int64_t* sketch,
                         const std::int32_t* low_bits, std::int64_t count, const RangeSearch& search, void* workspace,
                         float* low, float* high, cudaStream_t stream);

// Some tensors of one element type, passed to a kernel by value: the same launches for all of them. One range per block
// of `block` values (the last of a row may be short) in rows of `length`; tensor t owns the ranges [first_range[t],
// first_range[t + 1]).
struct DataTable {
  static constexpr int kMost = 48;  // with what goes beside them: a kernel takes 4 KB of arguments on every device
  const void* data[kMost];
  std::int64_t length[kMost], block[kMost], first_range[kMost + 1];
  void *low[kMost], *high[kMost];  // float64 for f64, else float32
  QuantGrid grid[kMost];
  int tensors;
};

std::size_t search_range_data_workspace_bytes(const DataTable& table, RangeMethod method);

// Values that are not finite are skipped. No finite one: (+Inf, -Inf). `search` without its grid, which the table has.
cudaError_t search_range_data(const DataTable& table, Element element, const RangeSearch& search, void* workspace,
                              cudaStream_t stream);

}  // namespace qsim::cuda
