#include "qsim/int4.h"

#include <catch2/catch.hpp>

#include "device.h"
#include "qsim/cuda/int4.h"

TEST_CASE("packed 4-bit integers equal the CPU's, and come back") {
  const auto& cpu = qsim::cpu::int4_kernels();
  for (std::int64_t n : {1, 2, 7, 8, 9, 15, 16, 17, 2047, 2048, 2049, 10007}) {
    for (std::size_t offset : {0, 1}) {
      CAPTURE(n, offset);
      const std::vector<std::uint8_t> q = sample<std::uint8_t>(n);
      std::vector<std::uint8_t> packed((n + 1) / 2), integers(n);
      cpu.pack(q.data(), n, packed.data());
      const DeviceArray<std::uint8_t> from(q, offset), bytes(std::vector<std::uint8_t>(packed.size(), 0xa5), offset);
      const DeviceArray<std::uint8_t> to(n, offset);
      require(qsim::cuda::pack_int4(from.data(), n, bytes.data(), nullptr));
      CHECK(bytes.host() == packed);
      cpu.unpack_signed(packed.data(), n, integers.data());
      require(qsim::cuda::unpack_int4(bytes.data(), n, true, to.data(), nullptr));
      CHECK(to.host() == integers);
      cpu.unpack_unsigned(packed.data(), n, integers.data());
      require(qsim::cuda::unpack_int4(bytes.data(), n, false, to.data(), nullptr));
      CHECK(to.host() == integers);
    }
  }
}

TEST_CASE("no integers, no launch") {
  CHECK(qsim::cuda::pack_int4(nullptr, 0, nullptr, nullptr) == cudaSuccess);
  CHECK(qsim::cuda::unpack_int4(nullptr, 0, true, nullptr, nullptr) == cudaSuccess);
}
