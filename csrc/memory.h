// Who shares memory with whom. Kernels read and write through raw pointers in an order of their own: what they write
// must not lie anywhere twice, and nothing else that they read or write may lie there.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace qsim {

// From the first byte of a tensor to the end of its last. Empty for one without elements and one without memory (meta).
struct Extent {
  std::uintptr_t begin = 0, end = 0;

  bool meets(const Extent& other) const { return begin < other.end && other.begin < end; }
};

inline Extent extent_of(const at::Tensor& x) {
  if (!x.defined() || x.is_meta() || x.numel() == 0) return {};
  std::int64_t last = x.numel() - 1;
  if (!x.is_non_overlapping_and_dense()) {
    const at::IntArrayRef sizes = x.sizes(), strides = x.strides();
    last = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(x.const_data_ptr());
  return {begin, begin + static_cast<std::uintptr_t>((last + 1) * x.element_size())};
}

// Calls visit(address) for every byte of every element, for an element as often as x has it.
template <class Visit>
void for_each_byte(const at::Tensor& x, Visit visit) {
  const auto start = reinterpret_cast<std::uintptr_t>(x.const_data_ptr());
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    std::int64_t rest = i, offset = 0;
    for (std::int64_t d = x.dim() - 1; d >= 0; --d) {
      offset += rest % x.size(d) * x.stride(d);
      rest /= x.size(d);
    }
    for (std::int64_t byte = 0; byte < x.element_size(); ++byte) {
      visit(start + static_cast<std::uintptr_t>(offset * x.element_size() + byte));
    }
  }
}

// Strides and sizes of the dimensions along which there is anything to step to, the smallest stride first.
inline c10::SmallVector<std::pair<std::int64_t, std::int64_t>, 6> steps_of(at::IntArrayRef sizes,
                                                                           at::IntArrayRef strides) {
  c10::SmallVector<std::pair<std::int64_t, std::int64_t>, 6> steps;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1) steps.emplace_back(strides[i], sizes[i]);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

// Whether elements fill memory, without gaps or overlaps.
inline bool fills_memory(at::IntArrayRef sizes, at::IntArrayRef strides) {
  if (sizes.size() != strides.size()) return false;
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return true;
  std::int64_t inside = 1;
  for (const auto& [stride, size] : steps_of(sizes, strides)) {
    if (stride != inside) return false;
    inside *= size;
  }
  return true;
}

// Whether two elements of x share memory. Looks at each only where the strides leave it open.
inline bool overlaps_itself(const at::Tensor& x) {
  if (!x.defined() || x.is_non_overlapping_and_dense() || x.is_meta() || x.numel() == 0) return false;
  std::int64_t inside = 1;  // elements from the first to the last along the dimensions seen
  bool apart = true;
  for (const auto& [stride, size] : steps_of(x.sizes(), x.strides())) {
    if (stride == 0) return true;
    apart = apart && stride >= inside;
    inside += (size - 1) * stride;
  }
  if (apart) return false;
  const Extent extent = extent_of(x);
  std::vector<bool> seen(extent.end - extent.begin);
  bool twice = false;
  for_each_byte(x, [&](std::uintptr_t byte) {
    twice = twice || seen[byte - extent.begin];
    seen[byte - extent.begin] = true;
  });
  return twice;
}

// Whether an element of a and one of b share memory. Looks at each only where they have gaps and lie among one another.
inline bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const Extent of_a = extent_of(a), of_b = extent_of(b);
  if (!of_a.meets(of_b)) return false;
  if (a.is_non_overlapping_and_dense() && b.is_non_overlapping_and_dense()) return true;
  std::vector<bool> in_a(of_a.end - of_a.begin);
  for_each_byte(a, [&](std::uintptr_t byte) { in_a[byte - of_a.begin] = true; });
  bool shared = false;
  for_each_byte(b, [&](std::uintptr_t byte) {
    shared = shared || (byte >= of_a.begin && byte < of_a.end && in_a[byte - of_a.begin]);
  });
  return shared;
}

struct NamedTensor {
  const char* name;
  const at::Tensor& tensor;
};

// Raises unless what is written lies nowhere twice, and nothing else lies there. Tensors may be undefined.
template <std::size_t Written, std::size_t Read>
void check_memory(const char* op, const NamedTensor (&written)[Written], const NamedTensor (&read)[Read]) {
  Extent extents[Written + Read];
  const auto named = [&](std::size_t i) -> const NamedTensor& { return i < Written ? written[i] : read[i - Written]; };
  for (std::size_t i = 0; i < Written + Read; ++i) extents[i] = extent_of(named(i).tensor);
  for (std::size_t i = 0; i < Written; ++i) {
    const at::Tensor& x = written[i].tensor;
    TORCH_CHECK_VALUE(!x.defined() || x.is_non_overlapping_and_dense() || !overlaps_itself(x), op, ": ",
                      written[i].name, " is written, but with shape ", x.sizes(), " and strides ", x.strides(),
                      " several of its elements share memory; pass ", written[i].name, ".clone()");
    for (std::size_t j = i + 1; j < Written + Read; ++j) {
      TORCH_CHECK_VALUE(!extents[i].meets(extents[j]) || !overlap(x, named(j).tensor), op, ": ", written[i].name,
                        " is written and shares memory with ", named(j).name, "; pass ", named(j).name, ".clone()");
    }
  }
}

}  // namespace qsim
