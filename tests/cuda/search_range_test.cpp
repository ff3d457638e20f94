#include "qsim/cuda/search_range.h"

#include <catch2/catch.hpp>

#include "device.h"
#include "qsim/observe.h"

using qsim::QuantGrid;
using qsim::RangeMethod;
using qsim::RangeSearch;

namespace {

constexpr QuantGrid kGrids[] = {{-128, 127, false}, {-128, 127, true}, {-8, 7, true}};
constexpr RangeMethod kMethods[] = {RangeMethod::minmax, RangeMethod::percentile, RangeMethod::mse,
                                    RangeMethod::tf_enhanced, RangeMethod::entropy};

RangeSearch with(QuantGrid grid, RangeMethod method) {
  return {grid, method, 99.9, method == RangeMethod::mse ? 1.0 : 3.0};
}

template <class T>
std::vector<std::vector<T>> inputs() {
  std::vector<T> integers = sample<T>(900, 0);
  for (T& value : integers) value = std::rint(value);
  return {sample<T>(3000, 0),    sample<T>(1, 0), std::vector<T>(50, T(0)),           std::vector<T>(50, T(-1.7)),
          sample<T>(2000, 0.05), integers,        {T(NAN), T(INFINITY), T(-INFINITY)}};
}

const auto& kernel_for(const float*) { return qsim::cpu::search_range_data_kernels().f32; }
const auto& kernel_for(const double*) { return qsim::cpu::search_range_data_kernels().f64; }

}  // namespace

TEST_CASE("ranges from sketches equal the CPU's") {
  std::vector<float> lowest, highest;
  std::vector<std::int64_t> sketches;
  for (const std::vector<float>& x : inputs<float>()) {
    qsim::FiniteRange range;
    qsim::NonFinite others;
    sketches.resize(sketches.size() + qsim::kSketchBins);
    qsim::cpu::observe_kernels().directly[0](x.data(), static_cast<std::int64_t>(x.size()), range, others,
                                             &*sketches.end() - qsim::kSketchBins);
    lowest.push_back(range.lowest);
    highest.push_back(range.highest);
  }
  const auto count = static_cast<std::int64_t>(lowest.size());
  const DeviceArray<float> device_lowest(lowest), device_highest(highest);
  const DeviceArray<std::int64_t> device_sketches(sketches);
  for (RangeMethod method : kMethods) {
    for (QuantGrid grid : kGrids) {
      CAPTURE(static_cast<int>(method), grid.quant_min, grid.symmetric);
      const RangeSearch search = with(grid, method);
      const auto& kernels = qsim::cpu::search_range_kernels();
      std::vector<std::byte> workspace(kernels.workspace_bytes);
      std::vector<float> low(count), high(count);
      for (std::int64_t i = 0; i < count; ++i) {
        kernels.run(lowest[i], highest[i], sketches.data() + i * qsim::kSketchBins, search, workspace.data(), &low[i],
                    &high[i]);
      }
      const std::size_t bytes = qsim::cuda::search_range_workspace_bytes(count);
      const DeviceArray<std::uint8_t> device_workspace(std::vector<std::uint8_t>(bytes, 0xa5));
      const DeviceArray<float> device_low(count), device_high(count);
      require(qsim::cuda::search_range(device_lowest.data(), device_highest.data(), device_sketches.data(), count,
                                       search, device_workspace.data(), device_low.data(), device_high.data(),
                                       nullptr));
      CHECK(differences(device_low.host(), low) == 0);
      CHECK(differences(device_high.host(), high) == 0);
    }
  }
}

TEMPLATE_TEST_CASE("ranges from data equal the CPU's", "", float, double) {
  for (const std::vector<TestType>& x : inputs<TestType>()) {
    const auto length = static_cast<std::int64_t>(x.size()), block = length > 100 ? length / 2 + 7 : length;
    const std::int64_t count = (length + block - 1) / block;
    const DeviceArray<TestType> device(x);
    for (RangeMethod method : kMethods) {
      for (QuantGrid grid : kGrids) {
        CAPTURE(length, static_cast<int>(method), grid.quant_min, grid.symmetric);
        const RangeSearch search = with(grid, method);
        std::vector<std::byte> workspace(qsim::cpu::search_range_data_kernels().workspace_bytes);
        std::vector<TestType> low(count), high(count);
        for (std::int64_t i = 0; i < count; ++i) {
          kernel_for(x.data())(x.data() + i * block, std::min(block, length - i * block), search, workspace.data(),
                               &low[i], &high[i]);
        }
        const std::size_t bytes = qsim::cuda::search_range_data_workspace_bytes(count, method);
        const DeviceArray<std::uint8_t> device_workspace(std::vector<std::uint8_t>(bytes, 0xa5));
        const DeviceArray<TestType> device_low(count), device_high(count);
        require(qsim::cuda::search_range_data(device.data(), length, block, count, search, device_workspace.data(),
                                              device_low.data(), device_high.data(), nullptr));
        CHECK(differences(device_low.host(), low) == 0);
        CHECK(differences(device_high.host(), high) == 0);
      }
    }
  }
}
