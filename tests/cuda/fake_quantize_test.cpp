#include "qsim/fake_quantize.h"

#include <catch2/catch.hpp>

#include "grids.h"

using qsim::Layout;
using qsim::Rounding;
using qsim::Slices;
using qsim::cuda::FakeQuantizeCall;

namespace {

// Long ones, of which a parameter has several parts.
const std::vector<Case> kLongCases = {
    {{40960, 40960, 1, 40960}, 40960, 1},
    {{60000, 60000, 3, 1}, 60000, 3},
    {{59994, 59994, 33, 1}, 59994, 33},  // a tile of one column
    {{60000, 60000, 2, 15000}, 60000, 2},
};

template <class T>
void check_elementwise(const Case& c, bool learned, Rounding rounding, std::size_t offset) {
  using A = qsim::arithmetic_t<T>;
  CAPTURE(c.n, c.layout.outer, c.layout.segment, c.layout.width, c.layout.run, learned, offset);
  Parameters<A> parameters(c.parameters, learned);
  const FakeQuantizeCall call{kElementOf<T>, c.n, parameters.source(), c.layout, rounding};
  const std::vector<T> x = sample<T>(c.n), grad = sample<T>(c.n, 0.25, 2);
  std::vector<T> y(c.n), kept(c.n), recomputed(c.n);
  std::vector<std::uint8_t> mask((c.n + 7) / 8);
  of_type<T>(qsim::cpu::fake_quantize_kernels())
      .with_mask(x.data(), y.data(), mask.data(), 0, c.n, parameters.grids(), c.layout, rounding);
  of_type<T>(qsim::cpu::fake_quantize_backward_kernels())(grad.data(), x.data(), recomputed.data(), 0, c.n,
                                                          parameters.grids(), c.layout, rounding);

  const DeviceArray<T> device_x(x, offset), device_grad(grad, offset), out(c.n, offset), without(c.n, 0);
  const DeviceArray<std::uint8_t> bits(mask.size());
  require(qsim::cuda::fake_quantize(call, device_x.data(), out.data(), bits.data(), nullptr));
  CHECK(differences(out.host(), y) == 0);
  CHECK(bits.host() == mask);
  require(qsim::cuda::fake_quantize(call, device_x.data(), without.data(), nullptr, nullptr));
  CHECK(differences(without.host(), y) == 0);
  require(qsim::cuda::fake_quantize_backward(call, device_grad.data(), device_x.data(), out.data(), nullptr));
  CHECK(differences(out.host(), recomputed) == 0);
  require(qsim::cuda::keep_where_set(device_grad.data(), bits.data(), out.data(), c.n, sizeof(T), nullptr));
  CHECK(differences(out.host(), recomputed) == 0);
  require(qsim::cuda::fake_quantize(call, device_x.data(), device_x.data(), nullptr, nullptr));  // in place
  CHECK(differences(device_x.host(), y) == 0);
}

// What rounds to a tie, or nearly, up to beyond the ends of the grid, and any bits at all.
template <class T>
std::vector<T> around_ties(std::int64_t n, double scale, double steps) {
  std::vector<T> x = sample<T>(n, 0.5);
  std::mt19937_64 random(static_cast<unsigned>(n));
  std::uniform_real_distribution<double> draw(-steps, steps);
  for (std::int64_t i = 0; i < n; i += 2) {
    x[i] = element<T>((std::floor(draw(random)) + 0.5) * scale);
    std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t> bits;
    std::memcpy(&bits, &x[i], sizeof bits);
    bits = static_cast<decltype(bits)>(bits + random() % 5 - 2);
    std::memcpy(&x[i], &bits, sizeof bits);
  }
  return x;
}

// One grid, and the same for every channel: the two ways in which elements are rounded.
template <class T>
void check_grid(float scale, float quant_min, float quant_max) {
  const std::int64_t n = 2 * 512 + 3 * 8 + 5;  // 117 channels of 9
  const std::vector<T> x = around_ties<T>(n, scale, 1.1 * (quant_max - quant_min));
  for (std::int64_t run : {n, std::int64_t{9}}) {
    const Layout layout{n, n, run == n ? 1 : n / run, run};
    CAPTURE(scale, quant_min, quant_max, run);
    Parameters<float> parameters(std::vector<float>(n / run, scale), false, quant_min, quant_max);
    const FakeQuantizeCall call{kElementOf<T>, n, parameters.source(), layout, Rounding::divide};
    std::vector<T> y(n);
    std::vector<std::uint8_t> mask((n + 7) / 8);
    of_type<T>(qsim::cpu::fake_quantize_kernels())
        .with_mask(x.data(), y.data(), mask.data(), 0, n, parameters.grids(), layout, Rounding::divide);
    const DeviceArray<T> device_x(x), out(n);
    const DeviceArray<std::uint8_t> bits(mask.size());
    require(qsim::cuda::fake_quantize(call, device_x.data(), out.data(), bits.data(), nullptr));
    CHECK(differences(out.host(), y) == 0);
    CHECK(bits.host() == mask);
  }
}

Slices slices_for(const Layout& layout) {  // small, so that a segment has several
  const std::int64_t row = layout.width * layout.run;
  const std::int64_t length = layout.width == 1 ? std::min<std::int64_t>(3000, layout.segment) : 40 * row;
  return {length, (layout.segment + length - 1) / length};
}

template <class T>
void check_learnable(const Case& c, bool learned) {
  using A = qsim::arithmetic_t<T>;
  CAPTURE(c.n, c.layout.outer, c.layout.segment, c.layout.width, c.layout.run, learned);
  Parameters<A> parameters(c.parameters, learned);
  const FakeQuantizeCall call{kElementOf<T>, c.n, parameters.source(), c.layout, Rounding::divide};
  const std::vector<T> x = sample<T>(c.n), grad = sample<T>(c.n, 0, 2);
  const Slices slices = slices_for(c.layout);
  const std::int64_t sums = c.parameters * slices.per_segment;

  std::vector<T> dx(c.n);
  std::vector<A> dscale(c.parameters), dzero(c.parameters);
  std::vector<double> partial(2 * sums);
  const qsim::cpu::PartialSums to{partial.data(), partial.data() + sums};
  const auto& kernels = qsim::cpu::fake_quantize_learnable_kernels();
  of_type<T>(kernels)(grad.data(), x.data(), dx.data(), 0, sums / c.layout.width, parameters.grids(), c.layout,
                      Rounding::divide, slices, to);
  const auto fold = [&](auto kernel) {
    kernel(to, slices, c.parameters, c.layout.width, 1, 1, parameters.scales().data(), 0.5, dscale.data(),
           dzero.data());
  };
  if constexpr (std::is_same_v<A, double>) {
    fold(kernels.fold_f64);
  } else {
    fold(kernels.fold_f32);
  }

  // float32 terms of at most 15 steps times a gradient around 3, of which each thread and lane adds a few dozen
  const double rounding = 2e-6 * static_cast<double>((c.n + c.parameters - 1) / c.parameters);
  std::vector<A> first_scale;
  for (std::size_t offset : {0, 1}) {
    const DeviceArray<T> device_x(x, offset), device_grad(grad, offset), out(c.n, offset);
    const DeviceArray<double> workspace(
        std::vector<double>(qsim::cuda::learnable_partial_sums(call, c.parameters), 1e9));
    const DeviceArray<A> device_scale(c.parameters), device_zero(c.parameters);
    require(qsim::cuda::fake_quantize_learnable_backward(call, device_grad.data(), device_x.data(), out.data(),
                                                         c.parameters, 0.5, workspace.data(), device_scale.data(),
                                                         device_zero.data(), nullptr));
    CHECK(differences(out.host(), dx) == 0);
    const std::vector<A> scale = device_scale.host(), zero = device_zero.host();
    const auto near = [&](A got, A cpu) {
      return (is_nan(got) && is_nan(cpu)) || std::abs(got - cpu) <= rounding + 1e-6 * std::abs(cpu);
    };
    int wrong = 0;
    for (std::int64_t p = 0; p < c.parameters; ++p) wrong += !near(scale[p], dscale[p]) || !near(zero[p], dzero[p]);
    CHECK(wrong == 0);
    if (offset == 0) first_scale = scale;
    CHECK(differences(scale, first_scale) == 0);  // alignment decides how memory is read, not what is added to what
  }
}

}  // namespace

TEMPLATE_TEST_CASE("forward, mask and gradients equal the CPU", "", float, double, qsim::Float16, qsim::BFloat16) {
  for (const Case& c : kCases) {
    for (bool learned : {false, true}) {
      for (std::size_t offset : {0, 1}) check_elementwise<TestType>(c, learned, Rounding::divide, offset);
    }
    check_elementwise<TestType>(c, false, Rounding::reciprocal, 0);
  }
}

TEMPLATE_TEST_CASE("scales of every size", "", float, qsim::Float16, qsim::BFloat16) {
  for (float scale :
       {0x1p-149f, 0x1p-126f, 0x1.8p-101f, 0x1p-100f, 0x1.fffffep-60f, 0x1p-26f, 0x1.2p-25f, 0x1.99999ap-4f,
        0x1.fffffep-1f, 0x1.000002p0f, 0x1.8p15f, 0x1p24f, 0x1.000002p24f, 0x1p100f, 3e38f}) {
    check_grid<TestType>(scale, -128, 127);
    check_grid<TestType>(scale, 0, 65535);
  }
}

TEST_CASE("grids of every size") {
  for (float scale : {0x1.99999ap-4f, 0x1.fffffep-60f}) {
    for (float end : {1.f, 0x1p15f, 0x1p21f, 0x1p21f + 1, 0x1p23f}) {
      check_grid<float>(scale, -end, end - 1);
      check_grid<float>(scale, -end, 0);
      check_grid<float>(scale, 0, end);
    }
  }
}

TEST_CASE("more elements than a grid takes at once") {
  const std::int64_t n = beyond_the_grid();
  check_elementwise<qsim::BFloat16>({{n, n, 1, n}, n, 1}, false, Rounding::divide, 0);
}

TEMPLATE_TEST_CASE("learned gradients", "", float, double, qsim::Float16, qsim::BFloat16) {
  for (const auto& cases : {kCases, kLongCases}) {
    for (const Case& c : cases) {
      for (bool learned : {false, true}) check_learnable<TestType>(c, learned);
    }
  }
}

TEST_CASE("nothing to do is no launch") {
  const DeviceArray<float> scale(1);
  const DeviceArray<std::int32_t> zero(1);
  const FakeQuantizeCall call{
      qsim::Element::f32, 0, {scale.data(), zero.data(), false, -8, 7}, {0, 0, 1, 0}, Rounding::divide};
  CHECK(qsim::cuda::fake_quantize(call, nullptr, nullptr, nullptr, nullptr) == cudaSuccess);
  CHECK(qsim::cuda::fake_quantize_backward(call, nullptr, nullptr, nullptr, nullptr) == cudaSuccess);
  CHECK(qsim::cuda::keep_where_set(nullptr, nullptr, nullptr, 0, 4, nullptr) == cudaSuccess);
}
