#include "qsim/cuda/search_range.h"

#include <catch2/catch.hpp>

#include <memory>

#include "device.h"
#include "qsim/observe.h"

using qsim::QuantGrid;
using qsim::RangeMethod;
using qsim::RangeSearch;

namespace {

constexpr QuantGrid kGrids[] = {{-128, 127, false}, {-128, 127, true}, {-8, 7, true}};
constexpr auto kMethods = qsim::kAll<RangeMethod>;

RangeSearch with(QuantGrid grid, RangeMethod method) {
  return {grid, method, 99.9, method == RangeMethod::mse ? 1.0 : 3.0};
}

template <class T>
std::vector<std::vector<T>> inputs() {
  std::vector<T> integers;
  for (double value : sample<double>(900, 0)) integers.push_back(element<T>(std::rint(value)));
  return {sample<T>(3000, 0),
          sample<T>(1, 0),
          std::vector<T>(50, element<T>(0)),
          std::vector<T>(50, element<T>(-1.7)),
          sample<T>(2000, 0.05),
          integers,
          {element<T>(NAN), element<T>(INFINITY), element<T>(-INFINITY)}};
}

}  // namespace

TEST_CASE("ranges from sketches equal the CPU's") {
  std::vector<float> lowest, highest;
  std::vector<std::int64_t> sketches;
  std::vector<std::int32_t> low_bits;
  for (const std::vector<float>& x : inputs<float>()) {
    qsim::FiniteRange range;
    qsim::NonFinite others;
    sketches.resize(sketches.size() + qsim::kSketchBins);
    qsim::cpu::observe_kernels().directly[0](x.data(), static_cast<std::int64_t>(x.size()), range, others,
                                             {&*sketches.end() - qsim::kSketchBins, &low_bits.emplace_back()});
    lowest.push_back(range.lowest);
    highest.push_back(range.highest);
  }
  const auto count = static_cast<std::int64_t>(lowest.size());
  const DeviceArray<float> device_lowest(lowest), device_highest(highest);
  const DeviceArray<std::int64_t> device_sketches(sketches);
  const DeviceArray<std::int32_t> device_bits(low_bits);
  for (RangeMethod method : kMethods) {
    for (QuantGrid grid : kGrids) {
      CAPTURE(static_cast<int>(method), grid.quant_min, grid.symmetric);
      const RangeSearch search = with(grid, method);
      const auto& kernels = qsim::cpu::search_range_kernels();
      std::vector<std::byte> workspace(kernels.workspace_bytes);
      std::vector<float> low(count), high(count);
      for (std::int64_t i = 0; i < count; ++i) {
        kernels.run(lowest[i], highest[i], sketches.data() + i * qsim::kSketchBins,
                    static_cast<std::uint32_t>(low_bits[i]), search, workspace.data(), &low[i], &high[i]);
      }
      const std::size_t bytes = qsim::cuda::search_range_workspace_bytes(count);
      const DeviceArray<std::uint8_t> device_workspace(std::vector<std::uint8_t>(bytes, 0xa5));
      const DeviceArray<float> device_low(count), device_high(count);
      require(qsim::cuda::search_range(device_lowest.data(), device_highest.data(), device_sketches.data(),
                                       device_bits.data(), count, search, device_workspace.data(), device_low.data(),
                                       device_high.data(), nullptr));
      CHECK(differences(device_low.host(), low) == 0);
      CHECK(differences(device_high.host(), high) == 0);
    }
  }
}

// Rows of `length`, cut into blocks.
template <class T>
struct Weight {
  std::vector<T> data;
  std::int64_t length, block;
  QuantGrid grid;

  std::int64_t row_blocks() const { return (length + block - 1) / block; }
  std::int64_t ranges() const { return static_cast<std::int64_t>(data.size()) / length * row_blocks(); }
};

template <class T>
struct Ranges {
  std::vector<qsim::arithmetic_t<T>> low, high;
};

template <class T>
Ranges<T> on_cpu(const Weight<T>& weight, RangeMethod method) {
  const auto& kernels = qsim::cpu::search_range_data_kernels();
  const RangeSearch search = with(weight.grid, method);
  std::vector<std::byte> workspace(kernels.workspace_bytes(kElementOf<T>, weight.block, method));
  Ranges<T> found;
  found.low.resize(weight.ranges());
  found.high.resize(weight.ranges());
  for (std::int64_t i = 0; i < weight.ranges(); ++i) {
    const std::int64_t start = i % weight.row_blocks() * weight.block;
    kernels.run[static_cast<int>(kElementOf<T>)](weight.data.data() + i / weight.row_blocks() * weight.length + start,
                                                 std::min(weight.block, weight.length - start), search,
                                                 workspace.data(), &found.low[i], &found.high[i]);
  }
  return found;
}

// In one launch.
template <class T>
std::vector<Ranges<T>> on_device(const std::vector<Weight<T>>& weights, RangeMethod method) {
  using A = qsim::arithmetic_t<T>;
  std::vector<std::unique_ptr<DeviceArray<T>>> data;
  std::vector<std::unique_ptr<DeviceArray<A>>> low, high;
  qsim::cuda::DataTable table{};
  for (const Weight<T>& weight : weights) {
    const int t = table.tensors++;
    data.push_back(std::make_unique<DeviceArray<T>>(weight.data, t % 2));
    low.push_back(std::make_unique<DeviceArray<A>>(weight.ranges()));
    high.push_back(std::make_unique<DeviceArray<A>>(weight.ranges()));
    table.data[t] = data.back()->data();
    table.length[t] = weight.length;
    table.block[t] = weight.block;
    table.low[t] = low.back()->data();
    table.high[t] = high.back()->data();
    table.grid[t] = weight.grid;
    table.first_range[t + 1] = table.first_range[t] + weight.ranges();
  }
  const std::size_t bytes = qsim::cuda::search_range_data_workspace_bytes(table, method);
  const DeviceArray<std::uint8_t> workspace(std::vector<std::uint8_t>(bytes, 0xa5));
  require(qsim::cuda::search_range_data(table, kElementOf<T>, with({}, method), workspace.data(), nullptr));
  std::vector<Ranges<T>> found;
  for (std::size_t t = 0; t < weights.size(); ++t) found.push_back({low[t]->host(), high[t]->host()});
  return found;
}

TEMPLATE_TEST_CASE("ranges from the data of many tensors equal the CPU's", "", float, double, qsim::Float16,
                   qsim::BFloat16) {
  std::vector<Weight<TestType>> weights;
  for (const std::vector<TestType>& x : inputs<TestType>()) {
    const auto n = static_cast<std::int64_t>(x.size()), length = n % 2 == 0 ? n / 2 : n;
    for (QuantGrid grid : kGrids) weights.push_back({x, length, length > 100 ? length / 2 + 7 : length, grid});
  }
  // Few ranges of more values than one block takes: by slices, of which the last range may have fewer; as many as there
  // are blocks for: not.
  const std::vector<TestType> many = sample<TestType>(9000, 0.01);
  weights.push_back({many, 9000, 9000, kGrids[1]});
  weights.push_back({many, 9000, 5000, kGrids[2]});
  weights.push_back({std::vector<TestType>(5000, element<TestType>(0)), 5000, 5000, kGrids[0]});
  weights.push_back({std::vector<TestType>(5000, element<TestType>(NAN)), 5000, 5000, kGrids[0]});
  weights.push_back({sample<TestType>(4 * 4200, 0), 4200, 4200, kGrids[2]});
  for (RangeMethod method : kMethods) {
    const std::vector<Ranges<TestType>> got = on_device(weights, method);
    for (std::size_t t = 0; t < weights.size(); ++t) {
      CAPTURE(t, weights[t].length, static_cast<int>(method));
      const Ranges<TestType> expected = on_cpu(weights[t], method);
      CHECK(differences(got[t].low, expected.low) == 0);
      CHECK(differences(got[t].high, expected.high) == 0);
    }
  }
}

TEST_CASE("no tensors, no launch") {
  CHECK(qsim::cuda::search_range_data({}, qsim::Element::f32, with({}, RangeMethod::mse), nullptr, nullptr) ==
        cudaSuccess);
}
