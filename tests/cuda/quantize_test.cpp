#include "qsim/quantize.h"

#include <catch2/catch.hpp>

#include "grids.h"
#include "qsim/cuda/quantize.h"

using qsim::Rounding;
using qsim::cuda::FakeQuantizeCall;

namespace {

// The integers of a storage type, and the kernel that reads them.
template <class Q>
struct Storage;
template <>
struct Storage<std::int8_t> {
  static constexpr qsim::Integer kInteger = qsim::Integer::i8;
  static auto read(const auto& kernels) { return kernels.from_i8; }
};
template <>
struct Storage<std::uint8_t> {
  static constexpr qsim::Integer kInteger = qsim::Integer::u8;
  static auto read(const auto& kernels) { return kernels.from_u8; }
};
template <>
struct Storage<std::int16_t> {
  static constexpr qsim::Integer kInteger = qsim::Integer::i16;
  static auto read(const auto& kernels) { return kernels.from_i16; }
};
template <>
struct Storage<std::uint16_t> {
  static constexpr qsim::Integer kInteger = qsim::Integer::u16;
  static auto read(const auto& kernels) { return kernels.from_u16; }
};

template <class T>
void check_quantize(const Case& c, double quant_min, double quant_max, Rounding rounding, std::size_t offset) {
  using A = qsim::arithmetic_t<T>;
  CAPTURE(c.n, c.layout.segment, c.layout.width, c.layout.run, quant_min, quant_max, offset);
  const auto low = static_cast<A>(quant_min), high = static_cast<A>(quant_max);
  const Parameters<A> parameters(c.parameters, false, low, high);
  const FakeQuantizeCall call{kElementOf<T>, c.n, parameters.source(), c.layout, rounding};
  const std::vector<T> x = sample<T>(c.n);
  const DeviceArray<T> device_x(x, offset);
  const auto& kernels = of_type<T>(qsim::cpu::quantize_kernels());
  const auto check = [&](auto integer, auto kernel) {
    using Q = decltype(integer);
    std::vector<Q> q(c.n);
    kernel(x.data(), q.data(), 0, c.n, parameters.grids(), c.layout, low, rounding);
    const DeviceArray<Q> device_q(c.n, offset);
    require(qsim::cuda::quantize(call, device_x.data(), device_q.data(), sizeof(Q), nullptr));
    CHECK(device_q.host() == q);
  };
  quant_max - quant_min < 256 ? check(std::uint8_t{}, kernels.to_8) : check(std::uint16_t{}, kernels.to_16);
}

template <class T, class Q>
void check_dequantize(const Case& c, std::size_t offset) {
  using A = qsim::arithmetic_t<T>;
  CAPTURE(c.n, c.layout.segment, c.layout.width, c.layout.run, sizeof(Q), offset);
  const Parameters<A> parameters(c.parameters, false, static_cast<A>(std::numeric_limits<Q>::min()),
                                 static_cast<A>(std::numeric_limits<Q>::max()));
  const FakeQuantizeCall call{kElementOf<T>, c.n, parameters.source(), c.layout, Rounding::divide};
  const std::vector<Q> q = sample<Q>(c.n);
  std::vector<T> y(c.n);
  Storage<Q>::read(of_type<T>(qsim::cpu::quantize_kernels()))(q.data(), y.data(), 0, c.n, parameters.grids(), c.layout);
  const DeviceArray<Q> device_q(q, offset);
  const DeviceArray<T> device_y(c.n, offset);
  require(qsim::cuda::dequantize(call, Storage<Q>::kInteger, device_q.data(), device_y.data(), nullptr));
  CHECK(differences(device_y.host(), y) == 0);
}

}  // namespace

TEMPLATE_TEST_CASE("integers equal the CPU's", "", float, double, qsim::Float16, qsim::BFloat16) {
  constexpr double kGrids[][2] = {{-8, 7}, {-128, 127}, {0, 255}, {-32768, 32767}, {0, 65535}};
  for (const Case& c : kCases) {
    for (const auto& [quant_min, quant_max] : kGrids) {
      check_quantize<TestType>(c, quant_min, quant_max, Rounding::divide, 0);
    }
    check_quantize<TestType>(c, -128, 127, Rounding::reciprocal, 1);
  }
}

TEMPLATE_TEST_CASE("numbers from integers equal the CPU's", "", float, double, qsim::Float16, qsim::BFloat16) {
  for (const Case& c : kCases) {
    for (std::size_t offset : {0, 1}) check_dequantize<TestType, std::int8_t>(c, offset);
    check_dequantize<TestType, std::uint8_t>(c, 0);
    check_dequantize<TestType, std::int16_t>(c, 0);
    check_dequantize<TestType, std::uint16_t>(c, 0);
  }
}

TEST_CASE("nothing to quantize, no launch") {
  const FakeQuantizeCall call{qsim::Element::f32, 0, {}, {0, 0, 1, 0}, Rounding::divide};
  CHECK(qsim::cuda::quantize(call, nullptr, nullptr, 1, nullptr) == cudaSuccess);
  CHECK(qsim::cuda::dequantize(call, qsim::Integer::i8, nullptr, nullptr, nullptr) == cudaSuccess);
}
