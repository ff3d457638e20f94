// Two 4-bit integers to a byte and back.
#include "input.h"
#include "qsim/int4.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const auto n = static_cast<std::size_t>(input.between(0, 700));
  std::vector<std::uint8_t> q(n);
  for (auto& one : q) one = static_cast<std::uint8_t>(input.bits(1));
  for (qsim::cpu::Level level : fuzz::runnable_levels()) {
    const auto& kernels = qsim::cpu::int4_kernels(level);
    const auto count = static_cast<std::int64_t>(n);
    std::vector<std::uint8_t> packed((n + 1) / 2, 0xaa), positive(n), any(n);
    kernels.pack(q.data(), count, packed.data());
    kernels.unpack_unsigned(packed.data(), count, positive.data());
    kernels.unpack_signed(packed.data(), count, any.data());
    for (std::size_t i = 0; i < n; ++i) {
      const int low = q[i] % 16, value = low < 8 ? low : low - 16;
      fuzz::require((i % 2 == 0 ? packed[i / 2] % 16 : packed[i / 2] / 16) == low, level, "packed");
      fuzz::require(positive[i] == low, level, "unsigned");
      fuzz::require(static_cast<std::int8_t>(any[i]) == value, level, "signed");
    }
    fuzz::require(n % 2 == 0 || packed.back() < 16, level, "the last half is 0");
  }
  return 0;
}
