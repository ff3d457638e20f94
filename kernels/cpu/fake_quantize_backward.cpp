#include <cstdint>
#include <type_traits>

#include "bits.h"
#include "fake_quantize_lanes.h"
#include "fake_quantize_rules.h"
#include "qsim/fake_quantize.h"

namespace qsim::cpu {

namespace {

template <Rounding rounding, class A>
QSIM_HD bool is_in_range(ByContract<rounding>, A x, const Entry<A>& grid) {
  return in_range(ByContract<rounding>::quotient(x, grid), grid);
}
QSIM_HD bool is_in_range(ByThresholds, float x, const Entry<float>& grid) {
  return grid.lowest <= x && x <= grid.highest;
}

template <class Rule, class T, class GridOf>
QSIM_INLINE void pass_vector(const T* grad, const T* x, T* dx, const GridOf& grids) {
  using A = arithmetic_t<T>;
  A elements[kElements<A>];
  flag_t<A> inside[kElements<A>];
  store_as(elements, load_arithmetic(x));
  for (int j = 0; j < kElements<A>; ++j) inside[j] = is_in_range(Rule{}, elements[j], grids[j]) ? -1 : 0;
  store_where(load_as<mask_t<A>>(inside), grad, dx);
}

template <class Rule, class T, class GridOf>
void pass_few(const T* grad, const T* x, T* dx, std::int64_t n, const GridOf& grids) {
  for (std::int64_t i = 0; i < n; ++i) {
    const T padded[kElements<arithmetic_t<T>>] = {x[i]};
    dx[i] = is_in_range(Rule{}, load_arithmetic(padded)[0], grids[i]) ? grad[i] : T{};
  }
}

// The last vector overlaps the one before.
template <class Rule, class T, class GridOf>
QSIM_HD void pass_run(const T* grad, const T* x, T* dx, std::int64_t n, const GridOf& grids) {
  constexpr std::int64_t kStep = kElements<arithmetic_t<T>>;
  if (n < kStep) return pass_few<Rule>(grad, x, dx, n, grids);
  std::int64_t i = 0;
  for (; i + kStep <= n; i += kStep) pass_vector<Rule>(grad + i, x + i, dx + i, grids.after(i));
  if (i == n) return;
  i = n - kStep;
  pass_vector<Rule>(grad + i, x + i, dx + i, grids.after(i));
}

template <class Rule, class T>
void pass_range(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end,
                const Grids<arithmetic_t<T>>& grids, const Layout& layout) {
  for_each_run(layout, grids, begin, end, INT64_MAX, [&](std::int64_t at, std::int64_t n, auto grid) {
    pass_run<Rule>(grad + at, x + at, dx + at, n, grid);
  });
}

template <class T>
void pass_in_range(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end, Grids<arithmetic_t<T>> grids,
                   const Layout& layout, Rounding rounding) {
  if (rounding == Rounding::reciprocal) {
    return pass_range<ByContract<Rounding::reciprocal>>(grad, x, dx, begin, end, grids, layout);
  }
  if constexpr (std::is_same_v<arithmetic_t<T>, float>) {
    if (grids.regular) return pass_range<ByThresholds>(grad, x, dx, begin, end, grids, layout);
  }
  pass_range<ByContract<Rounding::divide>>(grad, x, dx, begin, end, grids, layout);
}

}  // namespace

namespace QSIM_LEVEL {
const FakeQuantizeBackwardKernels fake_quantize_backward_kernels = {
    pass_in_range<float>,          pass_in_range<double>,         pass_in_range<Float16>,
    pass_in_range<BFloat16>,       keep_where_set<std::uint16_t>, keep_where_set<std::uint32_t>,
    keep_where_set<std::uint64_t>,
};
}

}  // namespace qsim::cpu
