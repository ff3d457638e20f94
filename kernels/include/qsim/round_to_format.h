// Rounding to a narrower float format, kept in the type of the input (docs/numerics.md, section 7): of x itself, or of
// x / scale, which is multiplied by the scale again.
//
// Magnitudes are handled as bits, which order like the numbers: comparisons see subnormals whatever the processor's
// flush-to-zero mode, and the addition that rounds meets only such subnormals as become 0 anyway.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <type_traits>

#include "qsim/element.h"
#include "qsim/enumerated.h"
#include "qsim/half_even.h"
#include "qsim/layout.h"
#include "qsim/level.h"
#include "qsim/number.h"
#include "qsim/portability.h"

namespace qsim {

enum class FloatFormat { float16, bfloat16, float8_e4m3fn, float8_e5m2, float6_e3m2fn, float6_e2m3fn, float4_e2m1fn };

// IEEE 754-2019, table 3.5; Micikevicius et al. 2022, "FP8 Formats for Deep Learning", table 1; OCP Microscaling
// Formats (MX) Specification v1.0, section 5.3. The last three have neither Inf nor NaN.
struct FormatShape {
  std::string_view name;  // as torch, ONNX and ml_dtypes call it
  int mantissa, least_exponent, top_exponent;
  double largest;
  bool infinite;
  bool scaled;  // numbers are stored over a scale, and saturate unless told otherwise, as ONNX QuantizeLinear
};
constexpr FormatShape shape_of(FloatFormat format) {
  switch (format) {
    case FloatFormat::float16:
      return {"float16", 10, -14, 15, 65504, true, false};
    case FloatFormat::bfloat16:
      return {"bfloat16", 7, -126, 127, 0x1.fep127, true, false};
    case FloatFormat::float8_e4m3fn:
      return {"float8_e4m3fn", 3, -6, 8, 448, false, true};
    case FloatFormat::float8_e5m2:
      return {"float8_e5m2", 2, -14, 15, 57344, true, true};
    case FloatFormat::float6_e3m2fn:
      return {"float6_e3m2fn", 2, -2, 4, 28, false, true};
    case FloatFormat::float6_e2m3fn:
      return {"float6_e2m3fn", 3, 0, 2, 7.5, false, true};
    case FloatFormat::float4_e2m1fn:
      return {"float4_e2m1fn", 1, 0, 2, 6, false, true};
  }
  return {};
}
constexpr std::string_view name_of(FloatFormat format) { return shape_of(format).name; }

// A format as N sees it: magnitudes as bits, but for `lift` and `overflowing`.
template <class N>
struct FormatIn {
  bits_t<N> magnitude;        // all bits but the sign
  bits_t<N> infinity;         // also the bits of an exponent
  bits_t<N> smallest_normal;  // below it the distance between neighbours stays
  bits_t<N> overflow;         // the first that rounds beyond the largest number
  bits_t<N> beyond;           // what it becomes
  bits_t<N> normal;           // the first that rounds to a normal number
  bits_t<N> vanishing;        // the last that rounds to zero
  N overflowing;              // `overflow` as a number
  N lift;                     // takes a power of two to the one whose last place is the distance between neighbours
  bool upper_half;            // the format is the upper half of N: bfloat16 in float32
};

// At compile time only: where flush-to-zero is on, converting the numbers below would lose subnormals.
template <class A>
consteval FormatIn<A> describe(FloatFormat format, bool saturate) {
  const auto power_of_two = [](int exponent) {
    double power = 1;
    for (; exponent > 0; --exponent) power *= 2;
    for (; exponent < 0; ++exponent) power /= 2;
    return power;
  };
  const auto bits = [](double x) { return std::bit_cast<bits_t<A>>(static_cast<A>(x)); };
  const FormatShape shape = shape_of(format);
  const double smallest_normal = power_of_two(shape.least_exponent);
  const double half_smallest = power_of_two(shape.least_exponent - shape.mantissa - 1);
  const double half_step = power_of_two(shape.top_exponent - shape.mantissa - 1);
  const bool largest_is_odd = static_cast<std::int64_t>(shape.largest / half_step) / 2 % 2 == 1;  // a tie leaves it
  constexpr int kMantissa = Number<A>::kMantissa;
  const A infinity = std::numeric_limits<A>::infinity(), nan = std::numeric_limits<A>::quiet_NaN();
  const bits_t<A> overflow = bits(shape.largest + half_step) + (largest_is_odd ? 0 : 1);
  return {.magnitude = std::numeric_limits<bits_t<A>>::max(),
          .infinity = std::bit_cast<bits_t<A>>(infinity),
          .smallest_normal = bits(smallest_normal),
          .overflow = overflow,
          .beyond = saturate ? bits(shape.largest) : std::bit_cast<bits_t<A>>(shape.infinite ? infinity : nan),
          .normal = bits(smallest_normal - half_smallest),
          .vanishing = bits(half_smallest),
          .overflowing = std::bit_cast<A>(overflow),
          .lift = static_cast<A>(power_of_two(kMantissa - shape.mantissa)),
          .upper_half = shape.mantissa + 16 == kMantissa};
}

template <class A>
consteval auto describe_all(bool saturate) {
  std::array<FormatIn<A>, kAll<FloatFormat>.size()> all{};
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = describe<A>(kAll<FloatFormat>[i], saturate);
  return all;
}

// T: an element type; its arithmetic type where results are scaled. What overflows becomes a number that T has: of the
// saturated numbers only float16's 65504 is missing in one, bfloat16, whose next below is 65280.
template <class T>
inline FormatIn<arithmetic_t<T>> format_in(FloatFormat format, bool saturate) {
  using A = arithmetic_t<T>;
  static constexpr auto kPlain = describe_all<A>(false), kSaturating = describe_all<A>(true);
  FormatIn<A> found = (saturate ? kSaturating : kPlain)[static_cast<std::size_t>(format)];
  if constexpr (std::is_same_v<T, BFloat16>) found.beyond &= ~0xffff;
  return found;
}

// The scale of what is rounded as it is.
struct Unscaled {};

template <class N>
QSIM_HD N divided(N x, Unscaled) {
  return x;
}
template <class N>
QSIM_HD N divided(N x, N scale) {
  return x / scale;
}
template <class N>
QSIM_HD N multiplied(N x, Unscaled) {
  return x;
}
template <class N>
QSIM_HD N multiplied(N x, N scale) {
  return x * scale;
}

template <class N>
QSIM_HD bits_t<N> magnitude_of(N x, const FormatIn<N>& format) {
  return bits_of(x) & format.magnitude;
}

// `upper_half` must be the format's.
template <bool upper_half, class N>
QSIM_HD N round_to_format(N x, const FormatIn<N>& format) {
  using Bits = bits_t<N>;
  const Bits magnitude = magnitude_of(x, format);
  Bits rounded;
  if constexpr (upper_half) {
    const Bits known = magnitude < format.beyond ? magnitude : format.beyond;
    const Bits nearest = round_upper_half(known) & ~0xffff;
    rounded = magnitude > format.infinity ? magnitude : nearest;
  } else {
    // Adding a number whose last place is the distance between neighbours rounds to them, half to even; subtracting it
    // again is exact. NaN passes: the comparison does not hold.
    const Bits exponent = magnitude & format.infinity;
    const N power = number_of<N>(exponent > format.smallest_normal ? exponent : format.smallest_normal);
    const N lifted = Number<N>::multiply_add(power, format.lift, number_of<N>(magnitude));
    const N nearest = Number<N>::multiply_add(-power, format.lift, lifted);
    rounded = number_of<N>(magnitude) >= format.overflowing ? format.beyond : bits_of(nearest);
  }
  return number_of<N>(rounded | (bits_of(x) & ~format.magnitude));
}

// Straight-through: the gradient passes where the result is a number of the format. NaN and Inf are not.
template <class N>
QSIM_HD auto in_format(N x, const FormatIn<N>& format) {
  return magnitude_of(x, format) < format.overflow;
}

// Elements by what rounding does to them. Additive. Only NaN, Inf and finite are said of x, all else of x / scale.
struct FormatCounts {
  std::int64_t nans = 0, infs = 0;
  std::int64_t overflows = 0;   // finite, but beyond the largest number once rounded
  std::int64_t underflows = 0;  // not zero, but zero once rounded
  std::int64_t subnormals = 0;  // subnormal once rounded, and not zero

  QSIM_HD void merge(FormatCounts other) {
    nans += other.nans;
    infs += other.infs;
    overflows += other.overflows;
    underflows += other.underflows;
    subnormals += other.subnormals;
  }
};

template <class A>
QSIM_HD void count(A x, A quotient, const FormatIn<A>& format, FormatCounts& counts) {
  const bits_t<A> given = magnitude_of(x, format), magnitude = magnitude_of(quotient, format);
  counts.nans += given > format.infinity;
  counts.infs += given == format.infinity;
  counts.overflows += magnitude >= format.overflow && given < format.infinity;
  counts.underflows += magnitude > 0 && magnitude <= format.vanishing;
  counts.subnormals += magnitude > format.vanishing && magnitude < format.normal;
}

// Sums of squares in float64 over the elements that are finite before and after rounding. Their quotient is the
// signal-to-noise ratio.
struct SquaredSums {
  double error = 0, signal = 0;

  QSIM_HD void merge(SquaredSums other) {
    error += other.error;
    signal += other.signal;
  }
};

namespace cpu {

// The scales that elements share as `layout` says, in memory order; null: none is scaled.
template <class A>
struct FormatScales {
  const A* scale = nullptr;
  Layout layout = {};
};

// Elements [begin, end) in memory order; y may be x unless they are counted.
template <class T>
struct RoundToFormat {
  using Format = FormatIn<arithmetic_t<T>>;
  using Scales = FormatScales<arithmetic_t<T>>;
  void (*plain)(const T* x, T* y, std::int64_t begin, std::int64_t end, const Scales& scales, const Format& format);
  // Bit e % 8 of byte e / 8 says whether element e is in the format; bits past the end are 0. begin is a multiple of 8.
  void (*with_mask)(const T* x, T* y, std::uint8_t* mask, std::int64_t begin, std::int64_t end, const Scales& scales,
                    const Format& format);
  // y and squares may be null: not wanted. The order of the sums depends on end - begin alone.
  void (*counted)(const T* x, T* y, std::int64_t begin, std::int64_t end, const Scales& scales, const Format& format,
                  FormatCounts& counts, SquaredSums* squares);
};

struct RoundToFormatKernels : PerElement<RoundToFormat> {};
QSIM_LEVEL_TABLES(RoundToFormatKernels, round_to_format_kernels)

}  // namespace cpu
}  // namespace qsim
