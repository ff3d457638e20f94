// How much the kernels have to do whose work depends on the shape of what they get. Others: scripts/sass_budget.py.
#include <catch2/catch.hpp>

#include "../cuda/device.h"
#include "qsim/cuda/observe_range.h"
#include "qsim/cuda/search_range.h"
#include "qsim/observe.h"
#include "runtime.h"

using qsim::QuantGrid;
using qsim::RangeMethod;

namespace {

// One after the other: a device has thousands of threads, and each is slow. One that laid out a sketch alone took
// 115,000.
constexpr std::uint64_t kMostSteps = 11500;
constexpr double kMostAnElement = 30;

}  // namespace

TEST_CASE("a search on a sketch takes few steps") {
  const std::vector<float> x = sample<float>(1 << 20, 0);
  std::vector<std::int64_t> counts(qsim::kSketchBins);
  std::vector<std::int32_t> low_bits(1);
  qsim::FiniteRange range;
  qsim::NonFinite others;
  qsim::cpu::observe_kernels().directly[0](x.data(), static_cast<std::int64_t>(x.size()), range, others,
                                           {counts.data(), low_bits.data()});
  const DeviceArray<float> lowest(std::vector{range.lowest}), highest(std::vector{range.highest}), low(1), high(1);
  const DeviceArray<std::int64_t> sketch(counts);
  const DeviceArray<std::int32_t> bits(low_bits);
  const DeviceArray<std::uint8_t> workspace(qsim::cuda::search_range_workspace_bytes(1));
  for (const RangeMethod method : {RangeMethod::percentile, RangeMethod::mse, RangeMethod::entropy}) {
    for (const QuantGrid grid : {QuantGrid{-128, 127, false}, QuantGrid{-128, 127, true}, QuantGrid{-8, 7, true}}) {
      ptx::work_since_last_call();
      require(qsim::cuda::search_range(lowest.data(), highest.data(), sketch.data(), bits.data(), 1,
                                       {grid, method, 99.99, 1}, workspace.data(), low.data(), high.data(), nullptr));
      const std::uint64_t steps = ptx::work_since_last_call().longest;
      INFO("method " << static_cast<int>(method) << ", " << grid.quant_max << ", symmetric " << grid.symmetric);
      CHECK(steps > 0);
      CHECK(steps <= kMostSteps);
    }
  }
}

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
