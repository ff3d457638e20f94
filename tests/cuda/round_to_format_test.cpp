#include "qsim/round_to_format.h"

#include <catch2/catch.hpp>

#include "device.h"
#include "qsim/cuda/round_to_format.h"

using qsim::FloatFormat;
using qsim::Layout;
using qsim::cuda::RoundToFormatCall;

namespace {

constexpr auto kFormats = qsim::kAll<FloatFormat>;

// Scales in both memories, or none.
template <class T>
struct Scaling {
  using A = qsim::arithmetic_t<T>;

  Scaling() = default;
  Scaling(std::int64_t n, const Layout& of) : layout(of), host(static_cast<std::size_t>(n) + 64) {
    for (std::size_t i = 0; i < host.size(); ++i) host[i] = A(1e-3) * static_cast<A>(i % 97 + 1);
  }

  qsim::cpu::FormatScales<A> scales() const {
    if (host.empty()) return {};
    return {host.data(), layout};
  }
  // What overflows may be any number where it is still to be multiplied.
  qsim::FormatIn<A> format(FloatFormat name, bool saturate) const {
    return host.empty() ? qsim::format_in<T>(name, saturate) : qsim::format_in<A>(name, saturate);
  }

  Layout layout = {};
  std::vector<A> host;
};

template <class T>
std::vector<Scaling<T>> scalings(std::int64_t n) {
  const auto part = [&](std::int64_t parts) { return (n + parts - 1) / parts; };
  std::vector<Scaling<T>> all(1);
  for (const Layout& layout : {Layout{n, n, 1, n}, Layout{n, part(3), 1, part(3)}, Layout{n, n, 37, 1},
                               Layout{n, n, 3, 5}, Layout{part(2), 32, 1, 1}, Layout{part(4), 70, 7, 1}}) {
    all.push_back({n, layout});
  }
  return all;
}

template <class T>
void check_rounding(const std::vector<T>& x, FloatFormat name, bool saturate, std::size_t offset,
                    const Scaling<T>& by = {}) {
  const auto n = static_cast<std::int64_t>(x.size());
  CAPTURE(n, static_cast<int>(name), saturate, offset, by.layout.segment, by.layout.width);
  const DeviceArray<qsim::arithmetic_t<T>> scale(by.host, 0);
  const RoundToFormatCall call{kElementOf<T>, n, name, saturate, by.host.empty() ? nullptr : scale.data(), by.layout};
  std::vector<T> y(n);
  std::vector<std::uint8_t> mask((n + 7) / 8);
  of_type<T>(qsim::cpu::round_to_format_kernels())
      .with_mask(x.data(), y.data(), mask.data(), 0, n, by.scales(), by.format(name, saturate));
  const DeviceArray<T> from(x, offset), to(n, offset);
  const DeviceArray<std::uint8_t> bits(mask.size());
  require(qsim::cuda::round_to_format(call, from.data(), to.data(), bits.data(), nullptr));
  CHECK(differences(to.host(), y) == 0);
  CHECK(bits.host() == mask);
  require(qsim::cuda::round_to_format(call, from.data(), from.data(), nullptr, nullptr));  // in place
  CHECK(differences(from.host(), y) == 0);
}

// Two batches into the same counters.
template <class T>
void check_counts(const std::vector<T>& x, FloatFormat name, bool saturate, const Scaling<T>& by) {
  const auto n = static_cast<std::int64_t>(x.size());
  CAPTURE(n, static_cast<int>(name), saturate, by.layout.segment, by.layout.width);
  const DeviceArray<qsim::arithmetic_t<T>> scale(by.host, 0);
  const RoundToFormatCall call{kElementOf<T>, n, name, saturate, by.host.empty() ? nullptr : scale.data(), by.layout};
  std::vector<T> y(n);
  qsim::FormatCounts found;
  qsim::SquaredSums sums;
  of_type<T>(qsim::cpu::round_to_format_kernels())
      .counted(x.data(), y.data(), 0, n, by.scales(), by.format(name, saturate), found, &sums);
  const std::vector<std::int64_t> counts = {
      2 * n, 2 * found.nans, 2 * found.infs, 2 * found.overflows, 2 * found.underflows, 2 * found.subnormals};

  const DeviceArray<qsim::SquaredSums> partial(qsim::cuda::format_partials(n));
  std::vector<double> first;
  for (std::size_t offset : {0, 1}) {
    const DeviceArray<T> from(x, offset), to(n, offset);
    const DeviceArray<std::int64_t> device_counts(6);
    const DeviceArray<double> device_squares(2);
    const auto count = [&](T* into, double* squares) {
      require(
          qsim::cuda::count_format(call, from.data(), into, device_counts.data(), squares, partial.data(), nullptr));
    };
    count(to.data(), device_squares.data());
    count(nullptr, nullptr);  // counts alone
    CHECK(differences(to.host(), y) == 0);
    CHECK(device_counts.host() == counts);
    const std::vector<double> squares = device_squares.host();
    CHECK(squares[0] == Approx(sums.error).epsilon(1e-12));
    CHECK(squares[1] == Approx(sums.signal).epsilon(1e-12));
    if (offset == 0) first = squares;
    CHECK(differences(squares, first) == 0);  // alignment decides how memory is read, not what is added to what
  }
}

}  // namespace

TEMPLATE_TEST_CASE("rounded elements and what is counted of them equal the CPU's", "", float, double, qsim::Float16,
                   qsim::BFloat16) {
  for (std::int64_t n : {1, 9, 2048, 4107}) {
    const std::vector<TestType> x = sample<TestType>(n, 0.5);
    for (FloatFormat name : kFormats) {
      // One format of each way to round in full, the others once: the emulation is slow.
      const bool in_full = name == FloatFormat::float8_e4m3fn || name == FloatFormat::bfloat16;
      if (!in_full && n != 2048) continue;
      for (bool saturate : {false, true}) {
        const bool scaled = saturate && in_full;
        for (const Scaling<TestType>& by : scaled ? scalings<TestType>(n) : std::vector<Scaling<TestType>>(1)) {
          for (std::size_t offset : {0, 1}) check_rounding(x, name, saturate, offset, by);
          check_counts(x, name, saturate, by);
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("every 16-bit element", "", qsim::Float16, qsim::BFloat16) {
  std::vector<TestType> x;
  for (unsigned bits = 0; bits < 0x10000; ++bits) x.push_back({static_cast<std::uint16_t>(bits)});
  for (FloatFormat name : kFormats) check_rounding(x, name, false, 0);
}

TEST_CASE("nothing to round, no launch") {
  const RoundToFormatCall call{qsim::Element::f32, 0, FloatFormat::float16, false, nullptr, {}};
  CHECK(qsim::cuda::round_to_format(call, nullptr, nullptr, nullptr, nullptr) == cudaSuccess);
  CHECK(qsim::cuda::count_format(call, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr) == cudaSuccess);
}
