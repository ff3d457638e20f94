// Searches on sketches of any data: the same range at every level, finite and ordered.
#include "observe_case.h"
#include "qsim/sketch.h"
#include "search_case.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const qsim::RangeSearch search = fuzz::range_search(input);
  auto x = fuzz::observed_elements<float>(input, input.between(0, 200));
  const std::uint32_t mask = ~0u << input.between(0, 20);  // values with few mantissa bits
  for (float& e : x) e = std::bit_cast<float>(std::bit_cast<std::uint32_t>(e) & mask);
  fuzz::Observed seen(1);
  std::vector<std::int64_t> sketch(qsim::kSketchBins);
  const bool many = input.flip(), known = input.flip();
  std::uint32_t low_bits = known ? 0 : qsim::kUnknownBits;
  for (float e : x) {
    seen.add(e, 0);
    if (std::isfinite(e)) {
      low_bits |= std::bit_cast<std::uint32_t>(e) & qsim::kLowBits;
      sketch[e == 0 ? 0 : std::bit_cast<std::uint32_t>(e) >> 18] += many ? 1 + static_cast<int>(input.bits(2)) : 1;
    }
  }
  const float lowest = seen.lowest[0], highest = seen.highest[0];
  float first_low = 0, first_high = 0;
  for (qsim::cpu::Level level : fuzz::runnable_levels()) {
    const auto& kernels = qsim::cpu::search_range_kernels(level);
    std::vector<double> workspace(kernels.workspace_bytes / sizeof(double) + 1);
    float low, high;
    kernels.run(lowest, highest, sketch.data(), low_bits, search, workspace.data(), &low, &high);
    if (level == qsim::cpu::Level::baseline) first_low = low, first_high = high;
    fuzz::require_same(low, first_low, level, "low", 0);
    fuzz::require_same(high, first_high, level, "high", 0);
    fuzz::require(fuzz::sane(low, high, lowest <= highest), level, "a range is finite and ordered");
  }
  return 0;
}
