#include "qsim/round_to_format.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "levels.h"

using namespace qsim;  // NOLINT: tests only

namespace {

const cpu::RoundToFormat<float>& kernels(cpu::Level level, float) { return cpu::round_to_format_kernels(level).f32; }
const cpu::RoundToFormat<double>& kernels(cpu::Level level, double) { return cpu::round_to_format_kernels(level).f64; }

constexpr auto kFormats = qsim::kAll<FloatFormat>;

// Ordinary numbers, then stretches of small ones, then any bit pattern.
template <class A>
std::vector<A> sample(std::int64_t n) {
  std::mt19937_64 generator(static_cast<unsigned>(n));
  std::normal_distribution<A> normal;
  std::vector<A> x(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    const auto bits = static_cast<bits_t<A>>(generator());
    x[i] = i % 1024 < 512 ? normal(generator) : i % 1024 < 768 ? normal(generator) * A(1e-7) : number_of<A>(bits);
  }
  return x;
}

template <class A>
A one_by_one(A x, const FormatIn<A>& format) {
  return format.upper_half ? round_to_format<true>(x, format) : round_to_format<false>(x, format);
}

// Per tensor, per channel outermost and innermost, with a period, per block with short last ones; of n elements.
std::vector<Layout> layouts(std::int64_t n) {
  const auto size = [&](std::int64_t parts) { return std::max<std::int64_t>(1, (n + parts - 1) / parts); };
  return {{n, n, 1, n}, {n, size(3), 1, size(3)}, {n, n, 37, 1},
          {n, n, 3, 5}, {size(2), 32, 1, 1},      {size(4), 70, 7, 1}};
}

std::int64_t parameter_of(const Layout& layout, std::int64_t e) {
  const std::int64_t segments = (layout.outer + layout.segment - 1) / layout.segment;
  const std::int64_t inside = e % layout.outer;
  return (e / layout.outer * segments + inside / layout.segment) * layout.width +
         inside % layout.segment / layout.run % layout.width;
}

template <class A>
struct Expected {
  std::vector<A> y;
  std::vector<std::uint8_t> mask;
  FormatCounts counts;

  Expected(const std::vector<A>& x, const FormatIn<A>& format, const cpu::FormatScales<A>& scales)
      : y(x), mask((x.size() + 7) / 8) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      const A scale = scales.scale == nullptr ? A(1) : scales.scale[parameter_of(scales.layout, at)];
      const A quotient = x[i] / scale;
      y[i] = one_by_one(quotient, format) * scale;
      mask[i / 8] |= static_cast<std::uint8_t>((in_format(quotient, format) ? 1 : 0) << i % 8);
      count(x[i], quotient, format, counts);
    }
  }
};

template <class A>
bool same(const std::vector<A>& got, const std::vector<A>& expected) {  // any NaN is as good as another
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (bits_of(got[i]) != bits_of(expected[i]) && (got[i] == got[i] || expected[i] == expected[i])) return false;
  }
  return true;
}

bool same(const FormatCounts& a, const FormatCounts& b) {
  return a.nans == b.nans && a.infs == b.infs && a.overflows == b.overflows && a.underflows == b.underflows &&
         a.subnormals == b.subnormals;
}

// All in one call, and in two that cut the runs.
template <class A>
void check_level(cpu::Level level, const std::vector<A>& x, const FormatIn<A>& format,
                 const cpu::FormatScales<A>& scales, const Expected<A>& expected) {
  const auto& run = kernels(level, A{});
  const auto n = static_cast<std::int64_t>(x.size()), cut = n / 3 / 8 * 8;
  std::vector<A> plain(x), masked(x), counted(x.size());
  std::vector<std::uint8_t> mask(expected.mask.size());
  FormatCounts found, alone;
  SquaredSums squares;
  for (const auto& [begin, end] : {std::pair(std::int64_t{0}, cut), std::pair(cut, n)}) {
    run.plain(plain.data(), plain.data(), begin, end, scales, format);
    run.with_mask(masked.data(), masked.data(), mask.data(), begin, end, scales, format);
    run.counted(x.data(), counted.data(), begin, end, scales, format, found, &squares);
  }
  run.counted(x.data(), nullptr, 0, n, scales, format, alone, nullptr);
  CHECK(same(plain, expected.y));
  CHECK(same(masked, expected.y));
  CHECK(same(counted, expected.y));
  CHECK(mask == expected.mask);
  CHECK(same(found, expected.counts));
  CHECK(same(alone, expected.counts));
}

}  // namespace

TEMPLATE_TEST_CASE("every level rounds, marks and counts as the formula", "", float, double) {
  for (const std::int64_t n : {0, 1, 15, 33, 1025, 2500}) {
    const std::vector<TestType> x = sample<TestType>(n);
    std::vector<TestType> scale(static_cast<std::size_t>(n) + 64);
    for (std::size_t i = 0; i < scale.size(); ++i) scale[i] = TestType(1e-3) * static_cast<TestType>(i % 97 + 1);
    for (const FloatFormat name : kFormats) {
      for (const bool saturate : {false, true}) {
        const auto format = format_in<TestType>(name, saturate);
        std::vector<cpu::FormatScales<TestType>> scales(1);
        if (n > 0) {
          for (const Layout& layout : layouts(n)) scales.push_back({scale.data(), layout});
        }
        for (const auto& of : scales) {
          const Expected<TestType> expected(x, format, of);
          for (const cpu::Level level : runnable_levels()) check_level(level, x, format, of, expected);
        }
      }
    }
  }
}

TEST_CASE("bfloat16 is the same by bits and by addition") {
  const auto bfloat = format_in<float>(FloatFormat::bfloat16, false);
  for (const float x : {1.00390625f, 1.01171875f, 0x1p-133f, 0x1.8p-134f, 3.3961775e38f, 1e-45f, -0.f}) {
    const double nearest = one_by_one(x, bfloat),
                 wide = one_by_one<double>(x, format_in<double>(FloatFormat::bfloat16, false));
    CHECK(nearest == wide);  // one by carrying bits, one by adding
    CHECK(std::signbit(nearest) == std::signbit(x));
  }
}
