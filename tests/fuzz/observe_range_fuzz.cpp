// Finite ranges and counts of every layout against one element at a time.
#include "observe_case.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const bool columns = input.flip();
  const std::int64_t inner = columns ? input.between(1, 4) : input.between(1, 200);
  const std::int64_t ranges = input.between(1, columns ? 40 : 6), outer = input.between(0, columns ? 40 : 5);
  fuzz::with_element(input, [&](auto type, int index) {
    const auto x = fuzz::observed_elements<decltype(type)>(input, outer * ranges * inner);
    const bool seen_before = input.flip();
    fuzz::Observed start(ranges);
    for (std::int64_t r = 0; seen_before && r < ranges; ++r) start.add(input.near_steps(1.f), r);
    fuzz::Observed expected = start;
    for (std::size_t e = 0; e < x.size(); ++e) expected.add(x[e], static_cast<std::int64_t>(e) / inner % ranges);
    for (qsim::cpu::Level level : fuzz::runnable_levels()) {
      fuzz::Observed got = start;
      qsim::cpu::observe_range_kernels(level).of[index](x.data(), outer, ranges, inner, got.lowest.data(),
                                                        got.highest.data(), got.counts);
      got.require_same_as(expected, level);
    }
  });
  return 0;
}
