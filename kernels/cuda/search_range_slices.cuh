// Ranges of so many values that a block for each would leave most of the device idle, and all by the entropy method,
// whose thresholds are shared by many blocks: several launches, in which each block has a slice of a range.
#pragma once

#include "qsim/cuda/search_range.h"

namespace qsim::cuda {

// Whether a tensor's ranges are few and long.
bool is_sliced(const DataTable& table, int tensor, RangeMethod method);

std::size_t slices_workspace_bytes(const DataTable& table, RangeMethod method);

cudaError_t search_slices(const DataTable& table, Element element, const RangeSearch& search, void* workspace,
                          cudaStream_t stream);

}  // namespace qsim::cuda
