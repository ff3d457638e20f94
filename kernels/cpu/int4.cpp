// Packing of 4-bit integers. The bindings call it through int4_kernels(): even numbers of integers on any thread.
#include "qsim/int4.h"

#include "vector/registers.h"

namespace qsim::cpu {

namespace {

void pack(const std::uint8_t* q, std::int64_t n, std::uint8_t* packed) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n / 2; ++i) packed[i] = pack_int4(q[2 * i], q[2 * i + 1]);
  if (n % 2 != 0) packed[n / 2] = pack_int4(q[n - 1], 0);
}

template <class Extend>
QSIM_INLINE void unpack(const std::uint8_t* packed, std::int64_t n, std::uint8_t* q, Extend extend) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n / 2; ++i) {
    q[2 * i] = extend(packed[i] & 15u);
    q[2 * i + 1] = extend(packed[i] >> 4);
  }
  if (n % 2 != 0) q[n - 1] = extend(packed[n / 2] & 15u);
}

void unpack_signed(const std::uint8_t* packed, std::int64_t n, std::uint8_t* q) {
  unpack(packed, n, q, [](unsigned half) { return sign_extended(half); });
}

void unpack_unsigned(const std::uint8_t* packed, std::int64_t n, std::uint8_t* q) {
  unpack(packed, n, q, [](unsigned half) { return static_cast<std::uint8_t>(half); });
}

}  // namespace

namespace QSIM_LEVEL {
const Int4Kernels int4_kernels = {pack, unpack_signed, unpack_unsigned};
}

}  // namespace qsim::cpu
