// The element types of inputs, what they are computed in, and tables with a kernel for each.
//
// A new type of 16 bits has its line in each declaration below; its load and its rounding are in
// kernels/cpu/vector/registers.h and half_even.h, and in kernels/cuda/elements.cuh. All else is written for any of
// them.
#pragma once

#include <array>
#include <cstdint>

namespace qsim {

struct Float16 {  // IEEE binary16
  std::uint16_t bits;
};
struct BFloat16 {  // the upper half of a float32
  std::uint16_t bits;
};

enum class Element { f32, f16, bf16, f64 };

// All arithmetic on the 16-bit types is float32.
template <class T>
struct Arithmetic {
  using type = T;
};
template <>
struct Arithmetic<Float16> {
  using type = float;
};
template <>
struct Arithmetic<BFloat16> {
  using type = float;
};
template <class T>
using arithmetic_t = typename Arithmetic<T>::type;

// Kernels with typed pointers, by name. per_element makes such a table of of.operator()<T>().
template <template <class> class Kernel>
struct PerElement {
  Kernel<float> f32;
  Kernel<double> f64;
  Kernel<Float16> f16;
  Kernel<BFloat16> bf16;
};
template <template <class> class Kernel, class Of>
consteval PerElement<Kernel> per_element(Of of) {
  return {of.template operator()<float>(), of.template operator()<double>(), of.template operator()<Float16>(),
          of.template operator()<BFloat16>()};
}

// Kernels of one signature, by Element.
template <class Function>
using ByElement = std::array<Function, 4>;
template <class Function, class Of>
consteval ByElement<Function> by_element(Of of) {
  return {of.template operator()<float>(), of.template operator()<Float16>(), of.template operator()<BFloat16>(),
          of.template operator()<double>()};
}

}  // namespace qsim
