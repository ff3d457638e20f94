// Fake-quantize on grids that the elements themselves span. The bindings call it through
// fake_quantize_dynamic_kernels(): ranges of rows on any thread.
#include "fake_quantize/run.h"
#include "observe/groups.h"

namespace qsim::cpu {

namespace {

template <class T>
PreparedGrid<T> prepared(QuantParams<float> params, const GroupRule& rule) {
  const Grid<T> grid = make_grid<T>(static_cast<T>(params.scale), static_cast<T>(params.zero_point),
                                    static_cast<T>(rule.grid.quant_min), static_cast<T>(rule.grid.quant_max));
  return {grid, T(1) / grid.scale, grid.low * grid.scale, grid.high * grid.scale};
}

template <class T>
QSIM_INLINE void quantize_group(const T* x, T* y, std::int64_t n, const OneGrid<arithmetic_t<T>>& one,
                                Rounding rounding) {
  NoBits none;
  if (rounding == Rounding::reciprocal) {
    quantize_run<ByContract<Rounding::reciprocal>>(x, y, n, one, none);
    return;
  }
  if constexpr (sizeof(T) < sizeof(double)) {
    if (is_regular(one.grid)) [[likely]] {
      quantize_run<ByThresholds>(x, y, n, one, none);
      return;
    }
  }
  quantize_run<ByContract<Rounding::divide>>(x, y, n, one, none);
}

template <class T>
void run(const T* x, T* y, std::int64_t begin, std::int64_t end, GroupedRows rows, const GroupRule& rule,
         Rounding rounding) {
  for_each_group(x, begin, end, rows, rule,
                 [&](std::int64_t first, std::int64_t n, QuantParams<float> params) QSIM_INLINE_LAMBDA {
                   const OneGrid<arithmetic_t<T>> one{prepared<arithmetic_t<T>>(params, rule)};
                   quantize_group(x + first, y + first, n, one, rounding);
                 });
}

}  // namespace

namespace QSIM_LEVEL {
const FakeQuantizeDynamicKernels fake_quantize_dynamic_kernels = {
    per_element<FakeQuantizeDynamic>([]<class T>() { return run<T>; })};
}  // namespace QSIM_LEVEL

}  // namespace qsim::cpu
