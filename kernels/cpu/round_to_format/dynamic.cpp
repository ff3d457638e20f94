// Rounding to float formats with scales that the elements themselves give. The bindings call it through
// round_to_format_dynamic_kernels(): ranges of rows on any thread.
#include "observe/groups.h"
#include "round_to_format/scales.h"

namespace qsim::cpu {

namespace {

template <bool upper_half, class T>
void round_groups(const T* x, T* y, std::int64_t begin, std::int64_t end, GroupedRows rows, const GroupRule& rule,
                  const FormatIn<arithmetic_t<T>>& in) {
  using A = arithmetic_t<T>;
  const auto format = in_every_lane<register_t<T>>(in);
  for_each_group(x, begin, end, rows, rule,
                 [&](std::int64_t first, std::int64_t n, QuantParams<float> params) QSIM_INLINE_LAMBDA {
                   const OneScale<T> scale{register_t<T>{} + static_cast<A>(params.scale)};
                   round_run<upper_half>(x + first, y + first, n, scale, format);
                 });
}

template <class T>
void run(const T* x, T* y, std::int64_t begin, std::int64_t end, GroupedRows rows, const GroupRule& rule,
         const FormatIn<arithmetic_t<T>>& format) {
  if (format.upper_half) return round_groups<true>(x, y, begin, end, rows, rule, format);
  round_groups<false>(x, y, begin, end, rows, rule, format);
}

}  // namespace

namespace QSIM_LEVEL {
const RoundToFormatDynamicKernels round_to_format_dynamic_kernels = {
    per_element<RoundToFormatDynamic>([]<class T>() { return run<T>; })};
}  // namespace QSIM_LEVEL

}  // namespace qsim::cpu
