// The straight-through gradient: it passes where the element was in range, found out from x again or read from the mask
// that the forward pass kept. The bindings call it through fake_quantize_backward_kernels().
#include <cstdint>
#include <type_traits>

#include "fake_quantize/grids.h"
#include "vector/masks.h"

namespace qsim::cpu {

namespace {

template <Rounding rounding, class A>
QSIM_INLINE bool is_in_range(ByContract<rounding>, A x, const PreparedGrid<A>& grid) {
  return in_range(ByContract<rounding>::quotient(x, grid), grid);
}
QSIM_INLINE bool is_in_range(ByThresholds, float x, const PreparedGrid<float>& grid) {
  return grid.lowest <= x && x <= grid.highest;
}

template <class Rule, class T, class GridOf>
QSIM_INLINE void pass_register(const T* grad, const T* x, T* dx, const GridOf& grids) {
  using A = arithmetic_t<T>;
  A elements[kElements<A>];
  bits_t<A> inside[kElements<A>];
  store_as(elements, load_arithmetic(x));
  for (int j = 0; j < kElements<A>; ++j) inside[j] = is_in_range(Rule{}, elements[j], grids[j]) ? -1 : 0;
  store_where(load_as<mask_t<A>>(inside), grad, dx);
}

template <class Rule, class T, class GridOf>
void pass_few(const T* grad, const T* x, T* dx, std::int64_t n, const GridOf& grids) {
  for (std::int64_t i = 0; i < n; ++i) {
    const T padded[kElements<T>] = {x[i]};
    dx[i] = is_in_range(Rule{}, load_arithmetic(padded)[0], grids[i]) ? grad[i] : T{};
  }
}

// The last register overlaps the one before.
template <class Rule, class T, class GridOf>
QSIM_INLINE void pass_run(const T* grad, const T* x, T* dx, std::int64_t n, const GridOf& grids) {
  if (n < kElements<T>) return pass_few<Rule>(grad, x, dx, n, grids);
  std::int64_t i = 0;
  for (; i + kElements<T> <= n; i += kElements<T>) pass_register<Rule>(grad + i, x + i, dx + i, grids.after(i));
  if (i == n) return;
  i = n - kElements<T>;
  pass_register<Rule>(grad + i, x + i, dx + i, grids.after(i));
}

template <class Rule, class T>
void pass_range(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end,
                const Grids<arithmetic_t<T>>& grids, const Layout& layout) {
  for_each_run(layout, GridTable(grids), begin, end, INT64_MAX, [&](std::int64_t at, std::int64_t n, auto grid) {
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

// dx = grad where the bit is set, +0.0 elsewhere. U is as wide as an element: only bits are moved. begin is a multiple
// of 8.
template <class U>
void keep_where_set(const U* grad, const std::uint8_t* mask, U* dx, std::int64_t begin, std::int64_t end) {
  constexpr int kMostBytes = 16 * int{sizeof(U)};  // at most 16 lanes: an element has room for its bit
  constexpr int kBytes = kRegisterBytes < kMostBytes ? kRegisterBytes : kMostBytes;
  constexpr int kPerPart = kBytes / int{sizeof(U)}, kPerTurn = kPerPart < 8 ? 8 : kPerPart;
  typedef U Part __attribute__((vector_size(kBytes)));
  Part bit[kPerTurn / kPerPart];
  for (int j = 0; j < kPerTurn; ++j) bit[j / kPerPart][j % kPerPart] = static_cast<U>(1u << j);
  std::int64_t i = begin;
  for (; i + kPerTurn <= end; i += kPerTurn) {
    std::uint16_t word = 0;
    std::memcpy(&word, mask + i / 8, kPerTurn / 8);
    const Part words = Part{} + static_cast<U>(word);
    for (int part = 0; part < kPerTurn / kPerPart; ++part) {
      Part values;
      std::memcpy(&values, grad + i + part * kPerPart, kBytes);
      values &= reinterpret_cast<Part>((words & bit[part]) == bit[part]);
      std::memcpy(dx + i + part * kPerPart, &values, kBytes);
    }
  }
  for (; i < end; ++i) dx[i] = mask[i / 8] >> i % 8 & 1 ? grad[i] : U(0);
}

}  // namespace

namespace QSIM_LEVEL {
const FakeQuantizeBackwardKernels fake_quantize_backward_kernels = {
    per_element<FakeQuantizeBackward>([]<class T>() { return pass_in_range<T>; }),
    keep_where_set<std::uint16_t>,
    keep_where_set<std::uint32_t>,
    keep_where_set<std::uint64_t>,
};
}  // namespace QSIM_LEVEL

}  // namespace qsim::cpu
