// Joining what was observed to the state tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "qsim/finite_range.h"

namespace qsim {

inline constexpr std::int64_t kGrain = 32768;  // elements below which a second thread costs more than it gains

inline void add_counts(const at::Tensor& counts, std::int64_t elements, NonFinite found) {
  auto* to = counts.mutable_data_ptr<std::int64_t>();
  to[0] += elements;
  to[1] += found.nans;
  to[2] += found.positive_infs;
  to[3] += found.negative_infs;
}

inline void extend_range(const at::Tensor& lowest, const at::Tensor& highest, FiniteRange found) {
  auto &low = *lowest.mutable_data_ptr<float>(), &high = *highest.mutable_data_ptr<float>();
  found.merge({low, high});
  low = found.lowest;
  high = found.highest;
}

}  // namespace qsim
