// Rounding to float formats, alone, with a mask, or with counts and squared sums. The bindings call it through
// round_to_format_kernels(): ranges of elements on any thread.
#include "qsim/round_to_format.h"

#include <algorithm>
#include <type_traits>

#include "round_to_format/counts.h"
#include "round_to_format/scales.h"
#include "vector/masks.h"

namespace qsim::cpu {

namespace {

// 32 elements at a time: the flags stay in registers.
template <bool upper_half, class T, class Scales>
QSIM_INLINE void mask_run(const T* x, T* y, std::int64_t n, Scales scales, const FormatIn<register_t<T>>& format,
                          BitWriter& to) {
  const auto round = [&](const T* from, T* into, std::int64_t at, std::int64_t count) QSIM_INLINE_LAMBDA {
    bits_t<arithmetic_t<T>> flags[32];
    for (std::int64_t i = 0; i < 32; i += kElements<T>) {
      const auto scale = scales.at(at + i, count - i);
      const auto quotient = divided(load_arithmetic(from + i), scale);
      store_as(flags + i, in_format(quotient, format));
      store_rounded(into + i, round_scaled<upper_half>(quotient, scale, format), scale);
    }
    return signs_of_32(flags);
  };
  BitWriter bits = to;
  const std::int64_t whole = n - n % 32, rest = n - whole;
  for (std::int64_t i = 0; i < whole; i += 32) bits.push(round(x + i, y + i, i, 32), 32);
  if (rest > 0) {
    T from[32] = {}, into[32];
    std::copy_n(x + whole, rest, from);
    bits.push(round(from, into, whole, rest) & ((1u << rest) - 1), static_cast<int>(rest));
    std::copy_n(into, rest, y + whole);
  }
  to = bits;
}

// The elements of a block: calls f(i, elements from x + begin + i on, quotients, scales, how many), register by
// register.
template <class T, class Walk>
struct Block {
  const T* x;
  std::int64_t begin, end;
  const Walk& walk;

  template <class F>
  QSIM_INLINE void for_each(F f) const {
    walk(begin, end, [&](std::int64_t first, std::int64_t n, auto scales) QSIM_INLINE_LAMBDA {
      for_each_register(x + first, n, [&](std::int64_t i, register_t<T> v, std::int64_t lanes) QSIM_INLINE_LAMBDA {
        const auto scale = scales.at(i, lanes);
        f(first - begin + i, v, divided(v, scale), scale, lanes);
      });
    });
  }
  // Of FormatCounter: one for all that is done with a block on its first reading.
  template <class F>
  QSIM_INLINE void operator()(F f) const {
    for_each([&](std::int64_t, register_t<T> v, register_t<T> quotient, auto, std::int64_t lanes)
                 QSIM_INLINE_LAMBDA { f(v, quotient, lanes); });
  }
};

// y is written, and the sums of squares taken, where wanted.
template <bool upper_half, bool rounds, bool sums, class T, class Walk>
void count_blocks(const T* x, T* y, std::int64_t begin, std::int64_t end, const Walk& walk,
                  const FormatIn<arithmetic_t<T>>& in, FormatCounts& counts, SquaredSums* squares) {
  using A = arithmetic_t<T>;
  using N = register_t<T>;
  constexpr bool kConverted = !std::is_same_v<T, A>;
  constexpr std::int64_t kRoom = kCountedBlock + kElements<T>;  // the last register of a run may reach beyond the block
  const auto format = in_every_lane<N>(in);
  FormatCounter<T> counter(in);
  for (std::int64_t at = begin; at < end; at += kCountedBlock) {
    const std::int64_t size = std::min(kCountedBlock, end - at);
    [[maybe_unused]] A elements[sums && kConverted ? kRoom : 1], errors[sums ? kRoom : 1];
    const Block<T, Walk> block{x, at, at + size, walk};
    const auto round = [&](std::int64_t i, N v, N quotient, auto scale, std::int64_t lanes) QSIM_INLINE_LAMBDA {
      if constexpr (rounds || sums) {
        const N result = round_scaled<upper_half>(quotient, scale, format);
        if constexpr (rounds) store_first(y + at + i, result, lanes, scale);
        if constexpr (sums) store_as(errors + i, v - result);
        if constexpr (sums && kConverted) store_as(elements + i, v);
      }
    };
    counter.start();
    if (counter.expects_small()) {
      block.for_each([&](std::int64_t i, N v, N quotient, auto scale, std::int64_t lanes) QSIM_INLINE_LAMBDA {
        counter.count(quotient);
        round(i, v, quotient, scale, lanes);
      });
    } else {
      block.for_each([&](std::int64_t i, N v, N quotient, auto scale, std::int64_t lanes) QSIM_INLINE_LAMBDA {
        counter.look(quotient);
        round(i, v, quotient, scale, lanes);
      });
    }
    counter.finish(counts, block);
    if constexpr (sums && kConverted) squares->merge(squares_of(elements, errors, size));
    if constexpr (sums && !kConverted) squares->merge(squares_of(x + at, errors, size));
  }
}

// run(whether the format is the upper half of T's arithmetic type, walk)
template <class T, class Run>
QSIM_INLINE void for_kind_of(const FormatScales<arithmetic_t<T>>& scales, const FormatIn<arithmetic_t<T>>& format,
                             Run run) {
  const auto with = [&](auto walk) QSIM_INLINE_LAMBDA {
    if constexpr (sizeof(arithmetic_t<T>) == sizeof(float)) {  // no format is the upper half of a float64
      if (format.upper_half) return run(std::true_type(), walk);
    }
    run(std::false_type(), walk);
  };
  scales.scale == nullptr ? with(OneRun()) : with(ScaledRuns<T>{scales});
}

template <class T>
void plain(const T* x, T* y, std::int64_t begin, std::int64_t end, const FormatScales<arithmetic_t<T>>& scales,
           const FormatIn<arithmetic_t<T>>& in) {
  const auto format = in_every_lane<register_t<T>>(in);
  for_kind_of<T>(scales, in, [&](auto upper_half, const auto& walk) QSIM_INLINE_LAMBDA {
    walk(begin, end, [&](std::int64_t at, std::int64_t n, auto run) QSIM_INLINE_LAMBDA {
      round_run<decltype(upper_half)::value>(x + at, y + at, n, run, format);
    });
  });
}

template <class T>
void with_mask(const T* x, T* y, std::uint8_t* mask, std::int64_t begin, std::int64_t end,
               const FormatScales<arithmetic_t<T>>& scales, const FormatIn<arithmetic_t<T>>& in) {
  const auto format = in_every_lane<register_t<T>>(in);
  BitWriter bits(mask + begin / 8);
  for_kind_of<T>(scales, in, [&](auto upper_half, const auto& walk) QSIM_INLINE_LAMBDA {
    walk(begin, end, [&](std::int64_t at, std::int64_t n, auto run) QSIM_INLINE_LAMBDA {
      mask_run<decltype(upper_half)::value>(x + at, y + at, n, run, format, bits);
    });
  });
  bits.finish();
}

template <class T>
void counted(const T* x, T* y, std::int64_t begin, std::int64_t end, const FormatScales<arithmetic_t<T>>& scales,
             const FormatIn<arithmetic_t<T>>& format, FormatCounts& counts, SquaredSums* squares) {
  for_kind_of<T>(scales, format, [&](auto upper_half, const auto& walk) QSIM_INLINE_LAMBDA {
    constexpr bool kUpperHalf = decltype(upper_half)::value;
    using Walk = std::remove_cvref_t<decltype(walk)>;
    const auto run = y == nullptr && squares == nullptr ? count_blocks<false, false, false, T, Walk>
                     : squares == nullptr               ? count_blocks<kUpperHalf, true, false, T, Walk>
                     : y == nullptr                     ? count_blocks<kUpperHalf, false, true, T, Walk>
                                                        : count_blocks<kUpperHalf, true, true, T, Walk>;
    run(x, y, begin, end, walk, format, counts, squares);
  });
}

}  // namespace

namespace QSIM_LEVEL {
const RoundToFormatKernels round_to_format_kernels = {
    per_element<RoundToFormat>([]<class T>() { return RoundToFormat<T>{plain<T>, with_mask<T>, counted<T>}; })};
}  // namespace QSIM_LEVEL

}  // namespace qsim::cpu
