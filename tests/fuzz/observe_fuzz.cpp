// Range, counts and sketch, counted directly and through scratch, against one element at a time.
#include <memory>

#include "observe_case.h"
#include "qsim/observe.h"

namespace {

using Counts = std::vector<std::int64_t>;

template <class T>
void check(fuzz::Input& input, int index) {
  static const auto scratch = std::make_unique<qsim::cpu::SketchScratch>();
  const int n = input.between(0, input.flip() ? 64 : 2500);
  const auto x = fuzz::observed_elements<T>(input, n);
  fuzz::Observed expected(1);
  Counts bins(qsim::kSketchBins);
  std::int32_t bits = 0;
  for (T e : x) {
    const auto value = static_cast<float>(fuzz::widened(e));
    expected.add(e, 0);
    if (!std::isfinite(value)) continue;
    ++bins[value == 0 ? 0 : std::bit_cast<std::uint32_t>(value) >> 18];
    bits |= std::bit_cast<std::int32_t>(value) & 0x3ffff;
  }
  for (qsim::cpu::Level level : fuzz::runnable_levels()) {
    const auto& kernels = qsim::cpu::observe_kernels(level);
    for (bool direct : {true, false}) {
      Counts sketch(qsim::kSketchBins);
      std::int32_t low_bits = 0;
      const qsim::Sketch state{sketch.data(), &low_bits};
      qsim::FiniteRange range;
      fuzz::Observed got(1);
      if (direct) {
        kernels.directly[index](x.data(), n, range, got.counts, state);
      } else {
        kernels.count[index](x.data(), n, range, got.counts, *scratch);
        kernels.flush(*scratch, range, state);
      }
      got.lowest[0] = range.lowest, got.highest[0] = range.highest;
      got.require_same_as(expected, level);
      fuzz::require(sketch == bins, level, direct ? "sketch, directly" : "sketch through scratch");
      fuzz::require(low_bits == bits, level, "low bits");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  fuzz::with_element(input, [&](auto type, int index) { check<decltype(type)>(input, index); });
  return 0;
}
