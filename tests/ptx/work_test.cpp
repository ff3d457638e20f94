// How much the kernels have to do whose work depends on the shape of what they get. Others: scripts/sass_budget.py.
#include <catch2/catch.hpp>

#include "../cuda/device.h"
#include "qsim/cuda/observe_range.h"
#include "runtime.h"

namespace {

constexpr double kMostAnElement = 30;

}  // namespace

TEST_CASE("ranges of few elements take few instructions an element") {
  constexpr std::int64_t kRows = 16384;
  const DeviceArray<float> lowest(kRows), highest(kRows);
  const DeviceArray<std::int64_t> counts(4);
  for (const std::int64_t inner : {9, 16, 27, 32, 49, 64, 147}) {
    const DeviceArray<float> x(sample<float>(kRows * inner, 0));
    for (const std::int64_t ranges : {kRows, kRows / 16}) {  // weights, and activations of 16 images
      ptx::work_since_last_call();
      require(qsim::cuda::observe_range(x.data(), qsim::Element::f32, kRows / ranges, ranges, inner, lowest.data(),
                                        highest.data(), counts.data(), nullptr));
      const std::uint64_t instructions = ptx::work_since_last_call().instructions;
      INFO(ranges << " ranges of " << inner);
      CHECK(instructions > 0);
      CHECK(static_cast<double>(instructions) / static_cast<double>(kRows * inner) <= kMostAnElement);
    }
  }
}
