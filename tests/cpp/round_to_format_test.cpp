#include "qsim/round_to_format.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "levels.h"

using namespace qsim;  // NOLINT: tests only

namespace {

const cpu::RoundToFormat<float>& kernels(cpu::Level level, float) { return cpu::round_to_format_kernels(level).f32; }
const cpu::RoundToFormat<double>& kernels(cpu::Level level, double) { return cpu::round_to_format_kernels(level).f64; }

constexpr FloatFormat kFormats[] = {FloatFormat::float16, FloatFormat::bfloat16, FloatFormat::float8_e4m3fn,
                                    FloatFormat::float8_e5m2};

// Ordinary numbers, then stretches of small ones, then any bit pattern.
template <class A>
std::vector<A> sample(std::int64_t n) {
  std::mt19937_64 generator(static_cast<unsigned>(n));
  std::normal_distribution<A> normal;
  std::vector<A> x(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    const auto bits = static_cast<bits_t<A>>(generator());
    x[i] = i % 4096 < 2048 ? normal(generator) : i % 4096 < 3072 ? normal(generator) * A(1e-7) : number_of<A>(bits);
  }
  return x;
}

template <class A>
A one_by_one(A x, const FormatIn<A>& format) {
  return format.upper_half ? round_to_format<true>(x, format) : round_to_format<false>(x, format);
}

}  // namespace

TEMPLATE_TEST_CASE("every level rounds, marks and counts as the formula", "", float, double) {
  for (const std::int64_t n : {0, 1, 15, 33, 1023, 1024, 1025, 9001}) {
    const std::vector<TestType> x = sample<TestType>(n);
    for (const FloatFormat name : kFormats) {
      for (const bool saturate : {false, true}) {
        const auto format = format_in<TestType>(name, saturate);
        std::vector<TestType> expected(x);
        std::vector<std::uint8_t> bits((x.size() + 7) / 8);
        FormatCounts counts;
        for (std::size_t i = 0; i < x.size(); ++i) {
          expected[i] = one_by_one(x[i], format);
          bits[i / 8] |= static_cast<std::uint8_t>((in_format(x[i], format) ? 1 : 0) << i % 8);
          count(x[i], format, counts);
        }
        for (const cpu::Level level : runnable_levels()) {
          const auto& run = kernels(level, TestType{});
          const auto same = [&](const std::vector<TestType>& got) {
            return std::memcmp(got.data(), expected.data(), got.size() * sizeof(TestType)) == 0;
          };
          std::vector<TestType> plain(x), masked(x), counted(x.size());
          std::vector<std::uint8_t> mask(bits.size());
          FormatCounts found, alone;
          SquaredSums squares;
          run.plain(plain.data(), plain.data(), n, format);
          run.with_mask(masked.data(), masked.data(), mask.data(), n, format);
          run.counted(x.data(), counted.data(), n, format, found, &squares);
          run.counted(x.data(), nullptr, n, format, alone, nullptr);
          CHECK(same(plain));
          CHECK(same(masked));
          CHECK(same(counted));
          CHECK(mask == bits);
          for (const FormatCounts& got : {found, alone}) {
            CHECK(got.nans == counts.nans);
            CHECK(got.infs == counts.infs);
            CHECK(got.overflows == counts.overflows);
            CHECK(got.underflows == counts.underflows);
            CHECK(got.subnormals == counts.subnormals);
          }
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
