// What rounding to a format does to the elements of a block: counts, in registers, and sums of squared error and
// signal.
//
// Most blocks hold nothing but zeros and numbers that stay normal. Two extremes say so, at half the cost of counting;
// other blocks are read once more, from the first-level cache. Called by round_to_format.cpp.
#pragma once

#include <algorithm>
#include <limits>

#include "round_to_format/scales.h"
#include "vector/sums.h"

namespace qsim::cpu {
namespace {

constexpr std::int64_t kCountedBlock = 1024;  // elements

QSIM_INLINE void count_below(Longs& counts, Longs x, Longs bound) { counts = x < bound ? counts + 1 : counts; }
QSIM_INLINE void count_below(Ints& counts, Ints x, Ints bound) {
#if defined(__AVX512F__)  // two instructions; g++ 12 makes three of the form below
  const auto below = _mm512_cmplt_epi32_mask((__m512i)x, (__m512i)bound);
  counts = (Ints)_mm512_mask_add_epi32((__m512i)counts, below, (__m512i)counts, _mm512_set1_epi32(1));
#else
  counts = x < bound ? counts + 1 : counts;
#endif
}

template <class Bits>
QSIM_INLINE std::int64_t total_of(Bits lanes) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < sizeof lanes / sizeof lanes[0]; ++i) sum += lanes[i];
  return sum;
}

template <class T>
class FormatCounter {
  using A = arithmetic_t<T>;
  using N = register_t<T>;
  using Bits = bits_t<N>;
  typedef std::make_unsigned_t<bits_t<A>> Unsigned __attribute__((vector_size(sizeof(N))));
  static constexpr auto kFirst = std::numeric_limits<bits_t<A>>::min(), kLast = std::numeric_limits<bits_t<A>>::max();

 public:
  QSIM_INLINE explicit FormatCounter(const FormatIn<A>& format)
      : format_(in_every_lane<N>(format)),
        above_vanishing_(Bits{} + (kFirst + format.vanishing)),
        normal_(Bits{} + (kFirst + (format.normal - 1))) {}

  // Whether the next block should better be counted at once: this one had small numbers.
  bool expects_small() const { return expects_small_; }

  QSIM_INLINE void start() {
    largest_ = small_ = vanishing_ = Bits{};
    first_ = Bits{} + kLast;
  }
  QSIM_INLINE void look(N quotient) {
    const Bits order = order_of(quotient);
    first_ = order < first_ ? order : first_;
  }
  QSIM_INLINE void count(N quotient) {
    const Bits order = order_of(quotient);
    count_below(vanishing_, order, above_vanishing_);
    count_below(small_, order, normal_);
  }
  // All elements of the block have been looked at, or counted. again(f) calls f(x, quotient, elements) for each of its
  // registers; what is beyond the elements is padding: zeros.
  template <class Again>
  QSIM_INLINE void finish(FormatCounts& counts, const Again& again) {
    if (!expects_small_ && any((Ints)(first_ < normal_))) count_small(again);
    const std::int64_t small = total_of(small_), vanishing = total_of(vanishing_);
    expects_small_ = small > 0;
    counts.underflows += vanishing;
    counts.subnormals += small - vanishing;
    if (any((Ints)(largest_ >= format_.overflow))) count_large(counts, again);
  }

 private:
  // Magnitudes in their order, but for 0, which comes last: no small number.
  QSIM_INLINE Bits order_of(N quotient) {
    const Bits magnitude = magnitude_of(quotient, format_);
    largest_ = magnitude > largest_ ? magnitude : largest_;
    return (Bits)((Unsigned)magnitude + (static_cast<std::make_unsigned_t<bits_t<A>>>(kFirst) - 1));
  }

  template <class Again>
  [[gnu::noinline]] void count_small(const Again& again) {
    again([&](N, N quotient, std::int64_t) QSIM_INLINE_LAMBDA { count(quotient); });
  }

  template <class Again>
  [[gnu::noinline]] void count_large(FormatCounts& counts, const Again& again) {
    Bits in_format{}, finite{}, numbers{};
    std::int64_t all = 0;      // with the padding
    std::int64_t padding = 0;  // that seems to overflow: 0 / 0 where the scale is 0
    again([&](N x, N quotient, std::int64_t elements) QSIM_INLINE_LAMBDA {
      const Bits magnitude = magnitude_of(x, format_), scaled = magnitude_of(quotient, format_);
      for (std::int64_t i = elements; i < kElements<T>; ++i) padding += scaled[i] >= format_.overflow[i];
      count_below(in_format, scaled, format_.overflow);
      count_below(finite, magnitude, format_.infinity);
      count_below(numbers, magnitude, format_.infinity + 1);
      all += kElements<T>;
    });
    const std::int64_t finites = total_of(finite), no_nans = total_of(numbers);
    counts.overflows += finites - total_of(in_format) - padding;
    counts.infs += no_nans - finites;
    counts.nans += all - no_nans;
  }

  const FormatIn<N> format_;
  const Bits above_vanishing_, normal_;
  Bits largest_, first_, small_, vanishing_;
  bool expects_small_ = false;
};

QSIM_INLINE Doubles add_square(Doubles sum, Doubles x, double) { return sum + x * x; }
QSIM_INLINE Doubles add_square(Doubles sum, Doubles x, float) {  // the square of a float32 is exact
  return Number<Doubles>::multiply_add(x, x, sum);
}

template <bool finite_only, class A>
SquaredSums sum_squares(const A* x, const A* errors, std::int64_t n) {
  Sixteen error, signal;
  const auto add = [&](const Sixteen& elements, const Sixteen& deviations) QSIM_INLINE_LAMBDA {
    for (int j = 0; j < Sixteen::kRegisters; ++j) {
      Doubles e = deviations.part[j], s = elements.part[j];
      if constexpr (finite_only) {
        const Longs finite = e - e == 0;
        e = (Doubles)((Longs)e & finite);
        s = (Doubles)((Longs)s & finite);
      }
      error.part[j] = add_square(error.part[j], e, A{});
      signal.part[j] = add_square(signal.part[j], s, A{});
    }
  };
  for_each_sixteen(n, add, x, errors);
  SquaredSums sums;
  for (int i = 0; i < Sixteen::kCount; ++i) sums.merge({error[i], signal[i]});
  return sums;
}

// errors: x minus its rounded value. Elements that are not finite before or after rounding show in the sum, and are
// left out then.
template <class A>
SquaredSums squares_of(const A* x, const A* errors, std::int64_t n) {
  const SquaredSums optimistic = sum_squares<false>(x, errors, n);
  return optimistic.error - optimistic.error == 0 ? optimistic : sum_squares<true>(x, errors, n);
}

}  // namespace
}  // namespace qsim::cpu
