// The bits of a mask are in the memory order of a dense tensor. Where x, quantized in place, is not dense, the kernels
// make them in the order of empty_like(x).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/DimVector.h>

#include <algorithm>
#include <utility>

namespace qsim {

inline at::Tensor mask_layout(const at::Tensor& x) { return x.is_non_overlapping_and_dense() ? x : at::empty_like(x); }

// The strides of a tensor in whose memory a mask is made. While sizes are symbols they are written as products of these
// where it is contiguous: a graph that asks the tensor gets those of the copy that Inductor makes of it for who reads
// it.
inline c10::SymDimVector mask_strides(const at::Tensor& layout) {
  const auto given = layout.sym_strides();
  c10::SymDimVector strides(given.begin(), given.end());
  if (std::none_of(given.begin(), given.end(), [](const c10::SymInt& stride) { return stride.is_symbolic(); })) {
    return strides;
  }
  const bool channels_first = layout.is_contiguous();
  const int64_t dims = layout.dim();
  if (!channels_first && !(dims == 4 && layout.is_contiguous(at::MemoryFormat::ChannelsLast)) &&
      !(dims == 5 && layout.is_contiguous(at::MemoryFormat::ChannelsLast3d))) {
    return strides;
  }
  const auto sizes = layout.sym_sizes();
  c10::SymInt step = 1;
  const auto place = [&](int64_t dim) { strides[dim] = std::exchange(step, step * sizes[dim]); };
  if (!channels_first) place(1);
  for (int64_t dim = dims - 1; dim >= 0; --dim) {
    if (channels_first || dim != 1) place(dim);
  }
  return strides;
}

}  // namespace qsim
