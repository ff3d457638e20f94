#include "qsim/cuda/observe_range.h"

#include <catch2/catch.hpp>

#include "range_state.h"

namespace {

struct DeviceState {
  explicit DeviceState(const RangeState& state) : lowest(state.lowest), highest(state.highest), counts(state.counts) {}
  DeviceArray<float> lowest, highest;
  DeviceArray<std::int64_t> counts;
};

void check_same(const DeviceState& got, const RangeState& expected) {
  CHECK(differences(got.lowest.host(), expected.lowest) == 0);
  CHECK(differences(got.highest.host(), expected.highest) == 0);
  CHECK(got.counts.host() == expected.counts);
}

}  // namespace

TEMPLATE_TEST_CASE("ranges equal the CPU's, batch after batch", "", float, double, qsim::Float16, qsim::BFloat16) {
  const std::int64_t layouts[][3] = {{1, 1, 1},    {1, 1, 15},    {1, 1, 5000},   {50000, 1, 1}, {3, 5, 200},
                                     {1, 700, 9},  {50, 3, 1},    {100, 7, 3},    {20, 64, 1},   {33, 700, 1},
                                     {17, 40, 49}, {2000, 3, 10}, {200, 2, 2},    {1, 3, 9000},  {1, 2, 1025},
                                     {40, 300, 7}, {33, 1, 31},   {4, 1, 100003}, {100, 257, 1}, {2, 128, 1024},
                                     {1, 70, 200}, {1, 3000, 32}};
  for (const auto& [outer, ranges, inner] : layouts) {
    for (double any : {0.0, 0.25, 1.0}) {
      CAPTURE(outer, ranges, inner, any);
      RangeState expected(ranges);
      const DeviceState state(expected);
      for (std::size_t offset : {0, 1}) {
        const std::vector<TestType> x = sample<TestType>(outer * ranges * inner, any, static_cast<unsigned>(offset));
        const DeviceArray<TestType> device(x, offset);
        observe(x, outer, ranges, inner, expected);
        require(qsim::cuda::observe_range(device.data(), kElementOf<TestType>, outer, ranges, inner,
                                          state.lowest.data(), state.highest.data(), state.counts.data(), nullptr));
      }
      check_same(state, expected);
    }
  }
}

TEMPLATE_TEST_CASE("blocks along any axis", "", float, double, qsim::Float16, qsim::BFloat16) {
  for (const auto& [outer, size, inner, block] : {std::array<std::int64_t, 4>{1, 1, 1, 1},
                                                  {3, 70, 1, 32},
                                                  {40, 70, 1, 32},
                                                  {701, 96, 1, 32},
                                                  {2, 64, 1, 3},
                                                  {2, 70, 33, 4},
                                                  {1, 9, 2000, 4},
                                                  {5, 7, 3, 100}}) {
    CAPTURE(outer, size, inner, block);
    const std::vector<TestType> x = sample<TestType>(outer * size * inner);
    RangeState expected(outer * ((size + block - 1) / block) * inner);
    const DeviceState state(expected);
    const DeviceArray<TestType> device(x, 1);
    observe_blocks(x, outer, size, inner, block, expected);
    require(qsim::cuda::observe_blocks(device.data(), kElementOf<TestType>, outer, size, inner, block,
                                       state.lowest.data(), state.highest.data(), state.counts.data(), nullptr));
    check_same(state, expected);
  }
}

TEST_CASE("negative zeros and numbers without finite ones beside them") {
  for (float value : {-0.f, 0.f, NAN, INFINITY, -INFINITY, 1e-45f, -1e-45f, -3.5f}) {
    const std::vector<float> x(100, value);
    RangeState expected(1);
    const DeviceState state(expected);
    observe(x, 1, 1, 100, expected);
    require(qsim::cuda::observe_range(DeviceArray<float>(x).data(), qsim::Element::f32, 1, 1, 100, state.lowest.data(),
                                      state.highest.data(), state.counts.data(), nullptr));
    CAPTURE(value);
    check_same(state, expected);
  }
}

TEST_CASE("no elements, no launch") {
  for (auto [outer, ranges, inner] : {std::array<std::int64_t, 3>{0, 3, 4}, {2, 0, 4}, {2, 3, 0}}) {
    CHECK(qsim::cuda::observe_range(nullptr, qsim::Element::f32, outer, ranges, inner, nullptr, nullptr, nullptr,
                                    nullptr) == cudaSuccess);
    CHECK(qsim::cuda::observe_blocks(nullptr, qsim::Element::f32, outer, ranges, inner, 2, nullptr, nullptr, nullptr,
                                     nullptr) == cudaSuccess);
  }
}
