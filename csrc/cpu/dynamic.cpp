#include "dynamic.h"

#include <torch/library.h>

#include <algorithm>
#include <mutex>

#include "cpu/empty_result.h"
#include "cpu/fake_quantize_grids.h"
#include "elementwise.h"
#include "qsim/dynamic.h"

namespace qsim {
namespace {

using at::Tensor;

// A contiguous x as rows, where groups are neighbours and short enough to stay in the cache from the first reading to
// the second, and a thread's share of them is worth its while.
struct Grouping {
  std::int64_t rows;
  cpu::GroupedRows row;
};

std::optional<Grouping> grouping(const Tensor& x, const DynamicGroups& groups) {
  constexpr std::int64_t kLongestGroup = 1 << 18, kSmall = 1 << 15;  // bytes, and elements that one thread takes alone
  const std::int64_t n = x.numel();
  if (n == 0) return std::nullopt;
  std::int64_t length = n;
  if (groups.axis) {
    if (*groups.axis != x.dim() - 1) return std::nullopt;
    length = x.size(-1);
  } else if (n > kSmall) {
    return std::nullopt;
  }
  const std::int64_t group = std::min(groups.block_size.value_or(length), length);
  if (group * x.element_size() > kLongestGroup) return std::nullopt;
  if (length % group == 0) length = group;
  return Grouping{n / length, {length, group}};
}

// scale_of_tensor of a contiguous x, found in one reading.
float observed_scale_of_tensor(const Tensor& x, const BlockScaleRule& rule) {
  const auto observe = cpu::observe_range_kernels().of[static_cast<int>(element_of(x))];
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  FiniteRange range;
  std::mutex merging;
  in_parallel(x.numel(), [&](std::int64_t begin, std::int64_t end) {
    FiniteRange found;
    NonFinite counts;
    observe(from + begin * x.element_size(), 1, 1, end - begin, &found.lowest, &found.highest, counts);
    const std::lock_guard lock(merging);
    range.merge(found);
  });
  return scale_of_tensor(range.lowest <= range.highest ? std::max(-range.lowest, range.highest) : 0, rule);
}

GroupRule group_rule(const Tensor& x, const DynamicGroups& groups) {
  GroupRule rule{groups.grid, groups.min_scale, nullptr, 1};
  if (!groups.blocks) return rule;
  rule.blocks = &*groups.blocks;
  if (groups.blocks->format == ScaleFormat::e4m3) rule.of_tensor = observed_scale_of_tensor(x, *groups.blocks);
  return rule;
}

// run(begin, end) for rows of about kGrain elements and more.
template <class Run>
void for_rows(const Grouping& grouping, Run run) {
  constexpr std::int64_t kGrain = 1 << 15;
  parallel_for(0, grouping.rows, std::max<std::int64_t>(1, kGrain / grouping.row.length), run);
}

void quantize_rows(const Tensor& x, const Tensor& y, const Grouping& grouping, const IntegerCall& call) {
  const GroupRule rule = group_rule(x, call);
  for_element_type(x.scalar_type(), cpu::fake_quantize_dynamic_kernels(), [&](auto element, const auto& kernel) {
    using T = decltype(element);
    for_rows(grouping, [&](std::int64_t begin, std::int64_t end) {
      kernel(data<T>(x), mutable_data<T>(y), begin, end, grouping.row, rule, call.rounding);
    });
  });
}

void quantize_rows(const Tensor& x, const Tensor& y, const Grouping& grouping, const FormatCall& call) {
  const GroupRule rule = group_rule(x, call);
  for_element_type(x.scalar_type(), cpu::round_to_format_dynamic_kernels(), [&](auto element, const auto& kernel) {
    using T = decltype(element);
    const auto format = format_in<arithmetic_t<T>>(call.options.format, call.options.saturate);
    for_rows(grouping, [&](std::int64_t begin, std::int64_t end) {
      kernel(data<T>(x), mutable_data<T>(y), begin, end, grouping.row, rule, format);
    });
  });
}

template <class Call>
Tensor quantized(const Tensor& x, const Call& call) {
  const KeepSubnormals guard;
  const auto found = grouping(x, call);
  if (!found) return compose(x, call);
  const Tensor y = empty_result(x);
  if (!y.is_contiguous()) return compose(x, call);
  return fresh(x, y, [&](const Tensor& from, const Tensor& to) { quantize_rows(from, to, *found, call); });
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) {
  m.impl("fake_quantize_dynamic", integer_kernel<quantized<IntegerCall>>);
  m.impl("round_to_format_dynamic", format_kernel<quantized<FormatCall>>);
}
}  // namespace qsim
