#include "qsim/int4.h"

#include <random>
#include <vector>

#include "levels.h"

namespace {

std::vector<std::uint8_t> random_bytes(std::int64_t n) {
  std::mt19937 random(static_cast<unsigned>(n));
  std::vector<std::uint8_t> bytes(n);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

}  // namespace

TEST_CASE("packing takes the low four bits, the first integer in the low half") {
  for (auto level : runnable_levels()) {
    for (std::int64_t n : {0, 1, 2, 3, 31, 64, 1001}) {
      CAPTURE(qsim::cpu::name_of(level), n);
      const auto q = random_bytes(n);
      std::vector<std::uint8_t> packed((n + 1) / 2 + 1, 0xaa);
      qsim::cpu::int4_kernels(level).pack(q.data(), n, packed.data());
      int wrong = 0;
      for (std::int64_t i = 0; i < n; ++i) wrong += (packed[i / 2] >> i % 2 * 4 & 15) != (q[i] & 15);
      CHECK(wrong == 0);
      CHECK((n % 2 == 0 || packed[n / 2] >> 4 == 0));
      CHECK(packed.back() == 0xaa);  // nothing beyond the last byte
    }
  }
}

TEST_CASE("unpacking extends the sign, or not") {
  for (auto level : runnable_levels()) {
    for (std::int64_t n : {0, 1, 2, 3, 31, 64, 1001}) {
      CAPTURE(qsim::cpu::name_of(level), n);
      const auto packed = random_bytes((n + 1) / 2);
      std::vector<std::uint8_t> with_sign(n + 1, 0xaa), without_sign(n + 1, 0xaa);
      qsim::cpu::int4_kernels(level).unpack_signed(packed.data(), n, with_sign.data());
      qsim::cpu::int4_kernels(level).unpack_unsigned(packed.data(), n, without_sign.data());
      int wrong = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        const int half = packed[i / 2] >> i % 2 * 4 & 15;
        wrong += without_sign[i] != half;
        wrong += static_cast<std::int8_t>(with_sign[i]) != (half < 8 ? half : half - 16);
      }
      CHECK(wrong == 0);
      CHECK((with_sign.back() == 0xaa && without_sign.back() == 0xaa));
    }
  }
}
