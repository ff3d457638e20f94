// Forward, in place and with mask, against the scalar twin.
#include "fake_quantize_case.h"

namespace {

template <class T, class Of>
void check(fuzz::Input& input, Of of) {
  fuzz::FakeQuantizeCase<T> call(input);
  const std::int64_t n = call.n, cut = input.between(0, static_cast<int>(n / 8)) * 8;
  for (qsim::cpu::Level level : fuzz::runnable_levels()) {
    const auto& table = qsim::cpu::fake_quantize_kernels(level);
    const auto& kernels = of(table);
    const auto& prepare = fuzz::prepare(table, qsim::arithmetic_t<T>{});
    const auto layout = call.kernel_layout();
    const std::pair<std::int64_t, std::int64_t> parts[] = {{0, cut}, {cut, n}};
    std::vector<T> y(call.x.size()), in_place = call.x, masked(call.x.size());
    std::vector<std::uint8_t> mask((call.x.size() + 7) / 8, 0xaa);
    auto grids = call.grids(prepare, qsim::cpu::Bounds::of_values);
    for (auto [begin, end] : parts) {
      if (begin == end) continue;
      kernels.forward(call.x.data(), y.data(), begin, end, grids, layout, call.rounding);
    }
    grids = call.grids(prepare, qsim::cpu::Bounds::of_range);
    for (auto [begin, end] : parts) {
      if (begin == end) continue;
      kernels.forward(in_place.data(), in_place.data(), begin, end, grids, layout, call.rounding);
      kernels.with_mask(call.x.data(), masked.data(), mask.data(), begin, end, grids, layout, call.rounding);
    }
    for (std::int64_t e = 0; e < n; ++e) {
      const auto i = static_cast<std::size_t>(e);
      const T expected = call.expected(e);
      fuzz::require_same(y[i], expected, level, "forward", e);
      fuzz::require_same(in_place[i], expected, level, "in place", e);
      fuzz::require_same(masked[i], expected, level, "with mask", e);
      fuzz::require((mask[i / 8] >> i % 8 & 1) == call.inside(e), level, "mask");
    }
    fuzz::require(n % 8 == 0 || mask.back() >> n % 8 == 0, level, "bits past the end of the mask");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  fuzz::with_element_type(input, [&](auto type, auto of) { check<decltype(type)>(input, of); });
  return 0;
}
