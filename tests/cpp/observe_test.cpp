#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "levels.h"
#include "qsim/observe.h"

using qsim::FiniteRange;
using qsim::NonFinite;
using qsim::Sketch;
using qsim::cpu::Level;
using qsim::cpu::SketchScratch;
using Counts = std::vector<std::int64_t>;

namespace {

struct Seen {
  Counts counts = Counts(qsim::kSketchBins);
  std::int32_t low_bits = 0;

  Sketch state() { return {counts.data(), &low_bits}; }
  bool operator==(const Seen&) const = default;
};

Seen one_by_one(const std::vector<float>& x) {
  Seen seen;
  for (float e : x) {
    std::uint32_t bits;
    std::memcpy(&bits, &e, 4);
    if (!qsim::is_finite(e)) continue;
    ++seen.counts[e == 0 ? 0 : bits >> 18];
    seen.low_bits |= bits & 0x3ffff;
  }
  return seen;
}

std::vector<float> any_bits(int n) {
  std::mt19937 generator(static_cast<unsigned>(n));
  std::vector<float> x(n);
  for (float& e : x) {
    const auto bits = static_cast<std::uint32_t>(generator());
    std::memcpy(&e, &bits, 4);
  }
  return x;
}

}  // namespace

TEST_CASE("any bits, counted directly and through scratch, which is left empty") {
  auto scratch = std::make_unique<SketchScratch>();
  const auto empty = std::make_unique<SketchScratch>();
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<std::vector<float>> inputs;
  inputs.emplace_back(1500, 1.0078125f);  // one bit of bfloat16, and NaNs and Infs that have the others
  for (std::size_t i = 0; i < inputs[0].size(); i += 7)
    inputs[0][i] = std::bit_cast<float>(0x7f800001u + (i % 2 ? 0xfffeu : 0u));
  for (int n : {0, 1, 3, 7, 100, 1023, 1024, 1025, 5003}) inputs.push_back(any_bits(n));
  for (float e : {0.f, -0.f, 1e-45f, -1e-45f, 0.3f, -3e38f, inf}) inputs.emplace_back(2050, e);
  for (Level level : runnable_levels()) {
    const auto& kernels = qsim::cpu::observe_kernels(level);
    for (const auto& x : inputs) {
      const auto n = static_cast<std::int64_t>(x.size());
      Seen direct, counted;
      FiniteRange range, same_range;
      NonFinite others, same_others;
      kernels.directly[0](x.data(), n, range, others, direct.state());
      kernels.count[0](x.data(), n, same_range, same_others, *scratch);
      kernels.flush(*scratch, same_range, counted.state());
      CHECK(direct == one_by_one(x));
      CHECK(counted == direct);
      CHECK(range.lowest == same_range.lowest);
      CHECK(range.highest == same_range.highest);
      CHECK(others.nans == same_others.nans);
      CHECK(std::memcmp(scratch.get(), empty.get(), sizeof(SketchScratch)) == 0);
    }
  }
}
