// Quantization whose scales come from the tensor itself (docs/numerics.md, section 9), of rows that are cut into groups
// of neighbours: the range of a group, its scale, and the group rounded while it lies in the cache.
//
// Bits are those of observe_range, then choose_qparams or block_scale, then fake_quantize or round_to_format: only the
// second read of x is saved.
#pragma once

#include <cstdint>

#include "qsim/block_scale.h"
#include "qsim/choose_qparams.h"
#include "qsim/element.h"
#include "qsim/fake_quantize.h"
#include "qsim/level.h"
#include "qsim/round_to_format.h"

namespace qsim {

// How a group gets its scale: as its block's elements are stored, or in float32 where `blocks` is null.
struct GroupRule {
  QuantGrid grid;
  double min_scale;
  const BlockScaleRule* blocks;
  float of_tensor;  // scale_of_tensor
};

QSIM_HD QuantParams<float> params_of_group(FiniteRange range, const GroupRule& rule) {
  if (rule.blocks != nullptr) return {block_scale(range, *rule.blocks, rule.of_tensor), 0};
  return choose_qparams<float>(range.lowest, range.highest, rule.grid, rule.min_scale);
}

namespace cpu {

// Rows of `length` elements in groups of `group`, the last of a row may be short.
struct GroupedRows {
  std::int64_t length, group;
};

// Rows [begin, end); y may be x.
template <class T>
using FakeQuantizeDynamic = void (*)(const T* x, T* y, std::int64_t begin, std::int64_t end, GroupedRows rows,
                                     const GroupRule& rule, Rounding rounding);
struct FakeQuantizeDynamicKernels : PerElement<FakeQuantizeDynamic> {};
QSIM_LEVEL_TABLES(FakeQuantizeDynamicKernels, fake_quantize_dynamic_kernels)

template <class T>
using RoundToFormatDynamic = void (*)(const T* x, T* y, std::int64_t begin, std::int64_t end, GroupedRows rows,
                                      const GroupRule& rule, const FormatIn<arithmetic_t<T>>& format);
struct RoundToFormatDynamicKernels : PerElement<RoundToFormatDynamic> {};
QSIM_LEVEL_TABLES(RoundToFormatDynamicKernels, round_to_format_dynamic_kernels)

}  // namespace cpu
}  // namespace qsim
