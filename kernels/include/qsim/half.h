// The 16-bit float formats as the kernels store them. All arithmetic on them is float32.
#pragma once

#include <cstdint>

namespace qsim {

struct Float16 {  // IEEE binary16
  std::uint16_t bits;
};
struct BFloat16 {  // the upper half of a float32
  std::uint16_t bits;
};

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

}  // namespace qsim
