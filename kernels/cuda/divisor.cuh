// Division of 31 bits by what the host knows before the launch: a product and a shift instead of some twenty
// instructions (Granlund and Montgomery 1994, "Division by invariant integers using multiplication", section 4).
#pragma once

#include <bit>
#include <cstdint>

namespace qsim::cuda {

struct Divisor {
  unsigned of;
  // 2^(31 + log2) / of, rounded up, for log2 = ceil(log2(of)): off by less than `of`, which 31 bits do not notice.
  explicit Divisor(unsigned divisor) : of(divisor), shift(static_cast<unsigned>(std::bit_width(divisor - 1)) - 1) {
    if (of > 1) multiplier = static_cast<unsigned>(((std::uint64_t{1} << (32 + shift)) + of - 1) / of);
  }

  __device__ __forceinline__ unsigned quotient(unsigned x) const {
    return of == 1 ? x : static_cast<unsigned>(std::uint64_t{x} * multiplier >> 32) >> shift;
  }
  __device__ __forceinline__ unsigned rest(unsigned x) const { return x - quotient(x) * of; }

 private:
  unsigned shift, multiplier = 0;
};

}  // namespace qsim::cuda
