// Two 4-bit integers to a byte, as ONNX stores them: the first in the low half. With an odd count the last high half
// is 0.
#pragma once

#include <cstdint>

#include "qsim/level.h"
#include "qsim/portability.h"

namespace qsim {

// Only the low four bits of the integers count, so signed and unsigned ones are packed alike.
QSIM_HD std::uint8_t pack_int4(unsigned first, unsigned second) {
  return static_cast<std::uint8_t>((first & 15) | (second & 15) << 4);
}

// half: 0 .. 15. The bits of an int8 with the value of a signed 4-bit integer.
QSIM_HD std::uint8_t sign_extended(unsigned half) { return static_cast<std::uint8_t>((half ^ 8) - 8); }

namespace cpu {

// n: 4-bit integers, (n + 1) / 2 bytes of `packed`.
struct Int4Kernels {
  void (*pack)(const std::uint8_t* q, std::int64_t n, std::uint8_t* packed);
  void (*unpack_signed)(const std::uint8_t* packed, std::int64_t n, std::uint8_t* q);
  void (*unpack_unsigned)(const std::uint8_t* packed, std::int64_t n, std::uint8_t* q);
};
QSIM_LEVEL_TABLES(Int4Kernels, int4_kernels)

}  // namespace cpu
}  // namespace qsim
