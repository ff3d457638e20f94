// Quantize and dequantize: the two halves of fake-quantize, with the integers between them stored
// (docs/numerics.md, section 1). One after the other they give the bits of fake-quantize, except for NaN.
#pragma once

#include "qsim/fake_quantize.h"

namespace qsim {

enum class Integer { i8, u8, i16, u16 };  // the storage types of ONNX QuantizeLinear; 4 bits are packed by int4.h

// Integers hold no NaN: it becomes quant_min, as ONNX Runtime stores it.
template <class T>
QSIM_HD T nearest_integer(T quotient, Grid<T> grid, T quant_min) {
  const T above = nearest_steps(quotient, grid) - grid.low;
  return (above > T(0) ? above : T(0)) + quant_min;
}

// The inverse: steps from the zero point. The grid begins at the same quant_min.
template <class T>
QSIM_HD T steps_of(T integer, Grid<T> grid, T quant_min) {
  return integer - quant_min + grid.low;
}

namespace cpu {

// Elements [begin, end) in memory order. An integer is stored by its low bits, whatever its sign. The grids of
// dequantization span all of the storage type.
template <class T>
struct Quantize {
  using A = arithmetic_t<T>;
  void (*to_8)(const T* x, std::uint8_t* q, std::int64_t begin, std::int64_t end, Grids<A> grids, const Layout& layout,
               A quant_min, Rounding rounding);
  void (*to_16)(const T* x, std::uint16_t* q, std::int64_t begin, std::int64_t end, Grids<A> grids,
                const Layout& layout, A quant_min, Rounding rounding);
  void (*from_i8)(const std::int8_t* q, T* y, std::int64_t begin, std::int64_t end, Grids<A> grids,
                  const Layout& layout);
  void (*from_u8)(const std::uint8_t* q, T* y, std::int64_t begin, std::int64_t end, Grids<A> grids,
                  const Layout& layout);
  void (*from_i16)(const std::int16_t* q, T* y, std::int64_t begin, std::int64_t end, Grids<A> grids,
                   const Layout& layout);
  void (*from_u16)(const std::uint16_t* q, T* y, std::int64_t begin, std::int64_t end, Grids<A> grids,
                   const Layout& layout);
};

struct QuantizeKernels : PerElement<Quantize> {};
QSIM_LEVEL_TABLES(QuantizeKernels, quantize_kernels)

}  // namespace cpu
}  // namespace qsim
