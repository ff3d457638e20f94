#include "qsim/round_to_format.h"

#include <algorithm>
#include <type_traits>

#include "bits.h"
#include "float_registers.h"
#include "format_counts.h"
#include "squared_sums.h"

namespace qsim::cpu {

namespace {

template <bool upper_half, class T>
void round_run(const T* x, T* y, std::int64_t n, const FormatIn<arithmetic_t<T>>& in) {
  const auto format = in_every_lane<register_t<T>>(in);
  for_each_register(x, n, [&](std::int64_t i, auto v, std::int64_t size) QSIM_INLINE_LAMBDA {
    store_first(y + i, round_to_format<upper_half>(v, format), size);
  });
}

template <class T>
void plain(const T* x, T* y, std::int64_t n, const FormatIn<arithmetic_t<T>>& format) {
  const auto run = format.upper_half ? round_run<true, T> : round_run<false, T>;
  run(x, y, n, format);
}

// 32 elements at a time: the flags stay in registers.
template <bool upper_half, class T>
void mask_run(const T* x, T* y, std::uint8_t* mask, std::int64_t n, const FormatIn<arithmetic_t<T>>& in) {
  const auto format = in_every_lane<register_t<T>>(in);
  const auto round = [&](const T* from, T* to) QSIM_INLINE_LAMBDA {
    flag_t<arithmetic_t<T>> flags[32];
    for (std::int64_t i = 0; i < 32; i += kLanes<T>) {
      const auto v = load_register(from + i);
      store_as(flags + i, in_format(v, format));
      store_register(to + i, round_to_format<upper_half>(v, format));
    }
    return signs_of_32(flags);
  };
  BitWriter bits(mask);
  const std::int64_t whole = n - n % 32, rest = n - whole;
  for (std::int64_t i = 0; i < whole; i += 32) bits.push(round(x + i, y + i), 32);
  if (rest > 0) {
    T from[32] = {}, to[32];
    std::copy_n(x + whole, rest, from);
    bits.push(round(from, to) & ((1u << rest) - 1), static_cast<int>(rest));
    std::copy_n(to, rest, y + whole);
  }
  bits.finish();
}

template <class T>
void with_mask(const T* x, T* y, std::uint8_t* mask, std::int64_t n, const FormatIn<arithmetic_t<T>>& format) {
  const auto run = format.upper_half ? mask_run<true, T> : mask_run<false, T>;
  run(x, y, mask, n, format);
}

// y is written, and the sums of squares taken, where wanted.
template <bool upper_half, bool rounds, bool sums, class T>
void count_blocks(const T* x, T* y, std::int64_t n, const FormatIn<arithmetic_t<T>>& in, FormatCounts& counts,
                  SquaredSums* squares) {
  using A = arithmetic_t<T>;
  using N = register_t<T>;
  constexpr bool kConverted = !std::is_same_v<T, A>;
  const auto format = in_every_lane<N>(in);
  FormatCounter<T> counter(in);
  for (std::int64_t at = 0; at < n; at += kBlock) {
    const std::int64_t size = std::min(kBlock, n - at);
    [[maybe_unused]] A elements[sums && kConverted ? kBlock : 1], errors[sums ? kBlock : 1];
    const auto round = [&](std::int64_t i, N v, std::int64_t lanes) QSIM_INLINE_LAMBDA {
      if constexpr (rounds || sums) {
        const N nearest = round_to_format<upper_half>(v, format);
        if constexpr (rounds) store_first(y + at + i, nearest, lanes);
        if constexpr (sums) store_as(errors + i, v - nearest);
        if constexpr (sums && kConverted) store_as(elements + i, v);
      }
    };
    counter.start();
    if (counter.expects_small()) {
      for_each_register(x + at, size, [&](std::int64_t i, N v, std::int64_t lanes) QSIM_INLINE_LAMBDA {
        counter.count(v);
        round(i, v, lanes);
      });
    } else {
      for_each_register(x + at, size, [&](std::int64_t i, N v, std::int64_t lanes) QSIM_INLINE_LAMBDA {
        counter.look(v);
        round(i, v, lanes);
      });
    }
    counter.finish(x + at, size, counts);
    if constexpr (sums && kConverted) squares->merge(squares_of(elements, errors, size));
    if constexpr (sums && !kConverted) squares->merge(squares_of(x + at, errors, size));
  }
}

template <bool upper_half, class T>
void count_as_wanted(const T* x, T* y, std::int64_t n, const FormatIn<arithmetic_t<T>>& format, FormatCounts& counts,
                     SquaredSums* squares) {
  const auto run = squares == nullptr ? count_blocks<upper_half, true, false, T>
                   : y == nullptr     ? count_blocks<upper_half, false, true, T>
                                      : count_blocks<upper_half, true, true, T>;
  run(x, y, n, format, counts, squares);
}

template <class T>
void counted(const T* x, T* y, std::int64_t n, const FormatIn<arithmetic_t<T>>& format, FormatCounts& counts,
             SquaredSums* squares) {
  const auto run = y == nullptr && squares == nullptr ? count_blocks<false, false, false, T>
                   : format.upper_half                ? count_as_wanted<true, T>
                                                      : count_as_wanted<false, T>;
  run(x, y, n, format, counts, squares);
}

}  // namespace

namespace QSIM_LEVEL {
const RoundToFormatKernels round_to_format_kernels = {
    {plain<float>, with_mask<float>, counted<float>},
    {plain<double>, with_mask<double>, counted<double>},
    {plain<Float16>, with_mask<Float16>, counted<Float16>},
    {plain<BFloat16>, with_mask<BFloat16>, counted<BFloat16>},
};
}

}  // namespace qsim::cpu
