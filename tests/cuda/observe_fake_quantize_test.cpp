#include "qsim/observe_fake_quantize.h"

#include <catch2/catch.hpp>

#include "grids.h"
#include "qsim/cuda/observe_fake_quantize.h"
#include "range_state.h"

using qsim::RunningRule;

namespace {

constexpr RunningRule kRules[] = {{0.01, {-128, 127, false}, 0}, {1, {-8, 7, true}, 1e-3}, {0, {0, 255, false}, 0}};

// What moves with every batch, on the CPU.
struct RunningState {
  explicit RunningState(std::int64_t n) : range(n), scale(n, 1), zero_point(n) {}

  void follow(const RangeState& batch, const RunningRule& rule) {
    qsim::cpu::running_range_kernels().follow(
        batch.lowest.data(), batch.highest.data(), static_cast<std::int64_t>(scale.size()), rule,
        {range.lowest.data(), range.highest.data(), scale.data(), zero_point.data()});
    for (int i = 0; i < 4; ++i) range.counts[i] += batch.counts[i];
  }

  RangeState range;
  std::vector<float> scale;
  std::vector<std::int32_t> zero_point;
};

struct DeviceState {
  explicit DeviceState(const RunningState& state)
      : lowest(state.range.lowest),
        highest(state.range.highest),
        scale(state.scale),
        zero_point(state.zero_point),
        counts(state.range.counts),
        observing(std::vector<std::uint8_t>{1}),
        off(std::vector<std::uint8_t>{0}) {}

  qsim::cuda::Running running(const RunningRule& rule, bool on = true) const {
    return {(on ? observing : off).data(),
            rule,
            {lowest.data(), highest.data(), scale.data(), zero_point.data()},
            counts.data()};
  }

  DeviceArray<float> lowest, highest, scale;
  DeviceArray<std::int32_t> zero_point;
  DeviceArray<std::int64_t> counts;
  DeviceArray<std::uint8_t> observing, off;
};

void check_same(const DeviceState& got, const RunningState& expected) {
  CHECK(differences(got.lowest.host(), expected.range.lowest) == 0);
  CHECK(differences(got.highest.host(), expected.range.highest) == 0);
  CHECK(differences(got.scale.host(), expected.scale) == 0);
  CHECK(got.zero_point.host() == expected.zero_point);
  CHECK(got.counts.host() == expected.range.counts);
}

// Five batches: numbers, numbers among others, nothing finite, the switch off, numbers again.
// observe(x, state) on the CPU; follow(x, running) on the device.
template <class T, class Observe, class Follow>
void check_batches(std::int64_t n, std::int64_t ranges, const RunningRule& rule, Observe observe, Follow follow) {
  RunningState expected(ranges);
  const DeviceState state(expected);
  for (int batch = 0; batch < 5; ++batch) {
    CAPTURE(batch, rule.averaging);
    std::vector<T> x = sample<T>(n, batch == 1 ? 0.25 : 0, static_cast<unsigned>(batch));
    if (batch == 2) x.assign(n, element<T>(NAN));
    const DeviceArray<T> device(x, batch % 2);
    if (batch != 3) {
      RangeState found(ranges);
      observe(x, found);
      expected.follow(found, rule);
    }
    require(follow(device.data(), state.running(rule, batch != 3)));
    check_same(state, expected);
  }
}

}  // namespace

TEMPLATE_TEST_CASE("running ranges follow as on the CPU", "", float, double, qsim::Float16, qsim::BFloat16) {
  const std::int64_t layouts[][3] = {{1, 1, 1},   {1, 1, 5000}, {5000, 1, 1}, {3, 5, 200}, {50, 3, 1},
                                     {1, 700, 9}, {33, 700, 1}, {40, 300, 3}, {2, 3, 2100}};
  for (const auto& [outer, ranges, inner] : layouts) {
    for (const RunningRule& rule : kRules) {
      CAPTURE(outer, ranges, inner);
      const DeviceArray<std::uint8_t> workspace(
          std::vector<std::uint8_t>(qsim::cuda::follow_ranges_workspace_bytes(ranges), 0xa5));
      check_batches<TestType>(
          outer * ranges * inner, ranges, rule,
          [&, outer = outer, ranges = ranges, inner = inner](const auto& x, RangeState& state) {
            observe(x, outer, ranges, inner, state);
          },
          [&, outer = outer, ranges = ranges, inner = inner](const TestType* x, const auto& running) {
            return qsim::cuda::follow_ranges(x, kElementOf<TestType>, outer, ranges, inner, running, workspace.data(),
                                             nullptr);
          });
    }
  }
}

TEMPLATE_TEST_CASE("running ranges of blocks", "", float, double, qsim::Float16, qsim::BFloat16) {
  const std::int64_t layouts[][4] = {{3, 70, 1, 32}, {2, 70, 33, 4}, {5, 7, 3, 100}};
  for (const auto& [outer, size, inner, block] : layouts) {
    for (const RunningRule& rule : kRules) {
      CAPTURE(outer, size, inner, block);
      check_batches<TestType>(
          outer * size * inner, outer * ((size + block - 1) / block) * inner, rule,
          [&, outer = outer, size = size, inner = inner, block = block](const auto& x, RangeState& state) {
            observe_blocks(x, outer, size, inner, block, state);
          },
          [&, outer = outer, size = size, inner = inner, block = block](const TestType* x, const auto& running) {
            return qsim::cuda::follow_blocks(x, kElementOf<TestType>, outer, size, inner, block, running, nullptr);
          });
    }
  }
}

TEST_CASE("fake-quantize behind a switch") {
  const Parameters<float> parameters(5, false);
  const DeviceArray<std::uint8_t> on(std::vector<std::uint8_t>{1}), off(std::vector<std::uint8_t>{0});
  for (std::int64_t n : {5, 4005}) {
    const qsim::Layout layout{n, n, 5, 1};
    const std::vector<float> x = sample<float>(n);
    std::vector<float> y(n);
    std::vector<std::uint8_t> mask((n + 7) / 8), all((n + 7) / 8, 0xff);
    if (n % 8 != 0) all.back() = static_cast<std::uint8_t>((1 << n % 8) - 1);
    qsim::cpu::fake_quantize_kernels().f32.with_mask(x.data(), y.data(), mask.data(), 0, n, parameters.grids(), layout,
                                                     qsim::Rounding::divide);
    const DeviceArray<float> from(x), to(n);
    const DeviceArray<std::uint8_t> bits(mask.size());
    qsim::cuda::FakeQuantizeCall call{qsim::Element::f32, n, parameters.source(), layout, qsim::Rounding::divide};
    call.enabled = on.data();
    require(qsim::cuda::fake_quantize(call, from.data(), to.data(), bits.data(), nullptr));
    CHECK(differences(to.host(), y) == 0);
    CHECK(bits.host() == mask);
    call.enabled = off.data();
    require(qsim::cuda::fake_quantize(call, from.data(), to.data(), bits.data(), nullptr));
    CHECK(differences(to.host(), x) == 0);
    CHECK(bits.host() == all);
  }
}
