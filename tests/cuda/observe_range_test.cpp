#include "qsim/cuda/observe_range.h"

#include <catch2/catch.hpp>

#include "device.h"

using qsim::FiniteRange;
using qsim::NonFinite;

namespace {

struct State {
  explicit State(std::int64_t ranges) : lowest(ranges, INFINITY), highest(ranges, -INFINITY), counts(4) {}
  std::vector<float> lowest, highest;
  std::vector<std::int64_t> counts;
};

struct DeviceState {
  explicit DeviceState(const State& state) : lowest(state.lowest), highest(state.highest), counts(state.counts) {}
  DeviceArray<float> lowest, highest;
  DeviceArray<std::int64_t> counts;
};

void check_same(const DeviceState& got, const State& expected) {
  CHECK(differences(got.lowest.host(), expected.lowest) == 0);
  CHECK(differences(got.highest.host(), expected.highest) == 0);
  CHECK(got.counts.host() == expected.counts);
}

void add_counts(State& state, std::int64_t n, NonFinite found) {
  const std::int64_t counts[] = {n, found.nans, found.positive_infs, found.negative_infs};
  for (int i = 0; i < 4; ++i) state.counts[i] += counts[i];
}

template <class T>
void observe(const std::vector<T>& x, std::int64_t outer, std::int64_t ranges, std::int64_t inner, State& state) {
  NonFinite found;
  qsim::cpu::observe_range_kernels().of[static_cast<int>(kElementOf<T>)](
      x.data(), outer, ranges, inner, state.lowest.data(), state.highest.data(), found);
  add_counts(state, outer * ranges * inner, found);
}

// Element (o, s, i) of [outer, size, inner] belongs to range (o, s / block, i).
template <class T>
void observe_blocks(const std::vector<T>& x, std::int64_t outer, std::int64_t size, std::int64_t inner,
                    std::int64_t block, State& state) {
  const std::int64_t blocks = (size + block - 1) / block;
  NonFinite found;
  for (std::int64_t e = 0; e < outer * size * inner; ++e) {
    const std::int64_t o = e / (size * inner), s = e / inner % size, i = e % inner;
    const std::int64_t range = (o * blocks + s / block) * inner + i;
    qsim::cpu::observe_range_kernels().of[static_cast<int>(kElementOf<T>)](
        x.data() + e, 1, 1, 1, state.lowest.data() + range, state.highest.data() + range, found);
  }
  add_counts(state, outer * size * inner, found);
}

}  // namespace

TEMPLATE_TEST_CASE("ranges equal the CPU's, batch after batch", "", float, double, qsim::Float16, qsim::BFloat16) {
  const std::int64_t layouts[][3] = {{1, 1, 1},    {1, 1, 15},    {1, 1, 5000},   {50000, 1, 1}, {3, 5, 200},
                                     {1, 700, 9},  {50, 3, 1},    {100, 7, 3},    {20, 64, 1},   {33, 700, 1},
                                     {17, 40, 49}, {2000, 3, 10}, {200, 2, 2},    {1, 3, 9000},  {1, 2, 1025},
                                     {40, 300, 7}, {33, 1, 31},   {4, 1, 100003}, {100, 257, 1}, {2, 128, 1024}};
  for (const auto& [outer, ranges, inner] : layouts) {
    for (double any : {0.0, 0.25, 1.0}) {
      CAPTURE(outer, ranges, inner, any);
      State expected(ranges);
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
                                                  {2, 70, 33, 4},
                                                  {1, 9, 2000, 4},
                                                  {5, 7, 3, 100}}) {
    CAPTURE(outer, size, inner, block);
    const std::vector<TestType> x = sample<TestType>(outer * size * inner);
    State expected(outer * ((size + block - 1) / block) * inner);
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
    State expected(1);
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
