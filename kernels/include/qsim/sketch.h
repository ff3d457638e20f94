// The sketch: a histogram whose bins are the leading 14 bits of a float32 (sign, exponent, 5 bits of mantissa).
//
// No range needs to be known beforehand and counting is exact integer addition, so batches, threads and ranks merge in
// any order, bit for bit. A bin is at most 1/32 of its value wide. NaN and infinities are not counted; zeros of either
// sign share bin 0 with the subnormals below 2^-131, and the two bins around zero count as zero.
//
// Beside it the OR of the bits that bins leave out (`low_bits`) tells on which lattice the values lie: those that were
// bfloat16 have four places in a bin, those of float8_e4m3fn one. It merges by OR, as exactly.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "qsim/number.h"
#include "qsim/portability.h"

namespace qsim {

inline constexpr int kSketchShift = 18;
inline constexpr int kSketchBins = 1 << (32 - kSketchShift);
inline constexpr int kSketchSide = kSketchBins / 2;  // bins of one sign, ascending magnitude; positive numbers first
inline constexpr int kNonFiniteBins = 1 << (23 - kSketchShift);  // the last of either side: where Inf and NaN would be
inline constexpr std::uint32_t kNegativeZero = 0x80000000u;
inline constexpr std::uint32_t kLowBits = (1u << kSketchShift) - 1;

// What observing extends.
struct Sketch {
  std::int64_t* counts;  // kSketchBins
  std::int32_t* low_bits;
};

QSIM_HD std::uint32_t word_of(float x) { return static_cast<std::uint32_t>(bits_of(x)); }
QSIM_HD float float_of(std::uint32_t word) { return number_of<float>(static_cast<std::int32_t>(word)); }

// Of a finite number's bits.
QSIM_HD int sketch_bin(std::uint32_t bits) {
  return static_cast<int>(bits == kNegativeZero ? 0 : bits >> kSketchShift);
}

QSIM_HD int magnitude_bin(double magnitude) {  // within one side: magnitude >= 0
  return static_cast<int>(word_of(magnitude <= FLT_MAX ? static_cast<float>(magnitude) : INFINITY) >> kSketchShift);
}

QSIM_HD double sketch_edge(int bin) {  // the smallest magnitude in the bin
  return float_of(static_cast<std::uint32_t>(bin) << kSketchShift);
}

// One sign of a sketch whose values all have magnitudes in [near, far]; without values: far = 0.
struct SketchSideView {
  const std::int64_t* counts;
  double near, far;

  QSIM_HD int first_bin() const {
    const int bin = magnitude_bin(near);
    return bin > 1 ? bin : 1;
  }
  QSIM_HD int last_bin() const { return magnitude_bin(far); }  // less than first_bin() without values
  QSIM_HD double from(int bin) const {
    const double edge = sketch_edge(bin);
    return edge > near ? edge : near;
  }
  QSIM_HD double to(int bin) const {
    const double edge = sketch_edge(bin + 1);
    return edge < far ? edge : far;
  }
};

struct SketchView {
  SketchSideView below, above;
  std::int64_t zeros;
  double spacing;  // of the lattice that values lie on, as a share of a bin
  bool has_finer;  // known: some value is no multiple of its bin's width
};

constexpr std::uint32_t kUnknownBits = ~std::uint32_t{0};  // in place of low_bits

QSIM_HD double lattice_spacing(std::uint32_t low_bits) {
  const std::uint32_t bits = low_bits & kLowBits, lowest = bits & (~bits + 1);
  return bits == 0 ? 1.0 : static_cast<double>(lowest) / (1u << kSketchShift);
}

QSIM_HD SketchView view_sketch(const std::int64_t* sketch, std::uint32_t low_bits, double lowest, double highest) {
  return {{sketch + kSketchSide, highest < 0 ? -highest : 0.0, lowest < 0 ? -lowest : 0.0},
          {sketch, lowest > 0 ? lowest : 0.0, highest > 0 ? highest : 0.0},
          sketch[0] + sketch[kSketchSide],
          lattice_spacing(low_bits),
          low_bits != kUnknownBits && (low_bits & kLowBits) != 0};
}

}  // namespace qsim
