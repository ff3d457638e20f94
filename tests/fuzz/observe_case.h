// What observers should find, one element at a time, after docs/numerics.md, section 3.
#pragma once

#include "input.h"
#include "qsim/finite_range.h"

namespace fuzz {

struct Observed {
  explicit Observed(std::int64_t ranges)
      : lowest(static_cast<std::size_t>(ranges), INFINITY), highest(static_cast<std::size_t>(ranges), -INFINITY) {}

  template <class T>
  void add(T element, std::int64_t range) {
    const auto x = static_cast<float>(widened(element));
    const auto r = static_cast<std::size_t>(range);
    if (std::isnan(x)) {
      ++counts.nans;
    } else if (std::isinf(x)) {
      ++(x > 0 ? counts.positive_infs : counts.negative_infs);
    } else {
      const float stored = x == 0 ? 0 : x;
      lowest[r] = std::min(lowest[r], stored);
      highest[r] = std::max(highest[r], stored);
    }
  }

  void require_same_as(const Observed& expected, qsim::cpu::Level level) const {
    for (std::size_t r = 0; r < lowest.size(); ++r) {
      require_same(lowest[r], expected.lowest[r], level, "lowest", static_cast<std::int64_t>(r));
      require_same(highest[r], expected.highest[r], level, "highest", static_cast<std::int64_t>(r));
    }
    require(counts.nans == expected.counts.nans, level, "count of NaN");
    require(counts.positive_infs == expected.counts.positive_infs, level, "count of +Inf");
    require(counts.negative_infs == expected.counts.negative_infs, level, "count of -Inf");
  }

  std::vector<float> lowest, highest;
  qsim::NonFinite counts;
};

// Mostly finite data, or every bit pattern.
template <class T>
std::vector<T> observed_elements(Input& input, std::int64_t n) {
  if (input.flip()) return input.elements<T>(n, input.positive<arithmetic_t<T>>());
  std::vector<T> x(static_cast<std::size_t>(n));
  const bool finite = input.flip();
  for (T& e : x) {
    do {
      const std::uint64_t bits = input.bits(sizeof(T));
      std::memcpy(&e, &bits, sizeof e);
    } while (finite && !std::isfinite(widened(e)));
  }
  return x;
}

// Calls target(T{}, index) for one of the four element types.
template <class Target>
void with_element(Input& input, Target target) {
  using qsim::Element;
  switch (input.bits(1) % 4) {
    case 0:
      return target(float{}, static_cast<int>(Element::f32));
    case 1:
      return target(Float16{}, static_cast<int>(Element::f16));
    case 2:
      return target(BFloat16{}, static_cast<int>(Element::bf16));
    default:
      return target(double{}, static_cast<int>(Element::f64));
  }
}

}  // namespace fuzz
