// Integers stored, and read back, against the scalar twin.
#include "fake_quantize_case.h"
#include "qsim/quantize.h"

namespace {

using qsim::cpu::Bounds;
using qsim::cpu::Level;

// A kernel over [0, n) in two parts, the first a multiple of 8.
template <class Run>
void in_parts(std::int64_t n, std::int64_t cut, Run run) {
  if (cut > 0) run(std::int64_t{0}, cut);
  if (cut < n) run(cut, n);
}

template <class Q, class T, class Kernel>
void check_stored(fuzz::FakeQuantizeCase<T>& call, std::int64_t cut, Kernel kernel) {
  using A = fuzz::arithmetic_t<T>;
  const auto layout = call.kernel_layout();
  for (Level level : fuzz::runnable_levels()) {
    const auto grids = call.grids(fuzz::prepare(qsim::cpu::fake_quantize_kernels(level), A{}), Bounds::of_range);
    std::vector<Q> q(call.x.size());
    in_parts(call.n, cut, [&](std::int64_t begin, std::int64_t end) {
      kernel(level)(call.x.data(), q.data(), begin, end, grids, layout, static_cast<A>(call.quant_min), call.rounding);
    });
    for (std::int64_t e = 0; e < call.n; ++e) {
      const auto i = static_cast<std::size_t>(e);
      const double stored = call.level_of(fuzz::widened(call.x[i]), call.encoding(e));
      const double expected =
          std::isnan(stored) ? call.quant_min : std::clamp<double>(stored, call.quant_min, call.quant_max);
      fuzz::require(q[i] == static_cast<Q>(static_cast<std::int32_t>(expected)), level, "quantize");
    }
  }
}

template <class Q, class T, class Kernel>
void check_read(fuzz::Input& input, fuzz::FakeQuantizeCase<T>& call, std::int64_t cut, Kernel kernel) {
  using A = fuzz::arithmetic_t<T>;
  call.learned = false;
  call.quant_min = std::numeric_limits<Q>::min();
  call.quant_max = std::numeric_limits<Q>::max();
  for (std::size_t i = 0; i < call.scales.size(); ++i) {
    call.zero_points[i] = input.between(call.quant_min, call.quant_max);
    call.encodings[i] = {call.scales[i], static_cast<double>(call.zero_points[i])};
  }
  std::vector<Q> q(call.x.size());
  for (Q& one : q) one = static_cast<Q>(input.bits(sizeof(Q)));
  const auto layout = call.kernel_layout();
  for (Level level : fuzz::runnable_levels()) {
    const auto grids = call.grids(fuzz::prepare(qsim::cpu::fake_quantize_kernels(level), A{}), Bounds::of_range);
    std::vector<T> y(q.size());
    in_parts(call.n, cut, [&](std::int64_t begin, std::int64_t end) {
      kernel(level)(q.data(), y.data(), begin, end, grids, layout);
    });
    for (std::int64_t e = 0; e < call.n; ++e) {
      const auto i = static_cast<std::size_t>(e);
      const auto by = call.encoding(e);
      const T nearest = fuzz::narrowed<T>(static_cast<A>(q[i] - by.zero_point) * by.scale);
      fuzz::require_same(y[i], fuzz::widened(nearest) == 0 ? T{} : nearest, level, "dequantize", e);
    }
  }
}

template <class T, class Of>
void check(fuzz::Input& input, Of of) {
  fuzz::FakeQuantizeCase<T> call(input);
  const std::int64_t cut = input.between(0, static_cast<int>(call.n / 8)) * 8;
  const auto kernels = [of](Level level) -> auto& { return of(qsim::cpu::quantize_kernels(level)); };
  const int choice = static_cast<int>(input.bits(1) % 8);
  switch (choice) {
    case 0:
      return check_read<std::int8_t>(input, call, cut, [&](Level level) { return kernels(level).from_i8; });
    case 1:
      return check_read<std::uint8_t>(input, call, cut, [&](Level level) { return kernels(level).from_u8; });
    case 2:
      return check_read<std::int16_t>(input, call, cut, [&](Level level) { return kernels(level).from_i16; });
    case 3:
      return check_read<std::uint16_t>(input, call, cut, [&](Level level) { return kernels(level).from_u16; });
    default:
      break;
  }
  const auto fits = [&](int low, int high) { return low <= call.quant_min && call.quant_max <= high; };
  if ((fits(-128, 127) || fits(0, 255)) && choice != 4) {
    check_stored<std::uint8_t>(call, cut, [&](Level level) { return kernels(level).to_8; });
  } else if (fits(-32768, 32767) || fits(0, 65535)) {
    check_stored<std::uint16_t>(call, cut, [&](Level level) { return kernels(level).to_16; });
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  fuzz::with_element_type(input, [&](auto type, auto of) { check<decltype(type)>(input, of); });
  return 0;
}
