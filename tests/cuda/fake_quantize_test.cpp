#include "qsim/fake_quantize.h"

#include <catch2/catch.hpp>

#include "device.h"
#include "qsim/cuda/fake_quantize.h"

using qsim::Grid;
using qsim::Layout;
using qsim::Rounding;
using qsim::Slices;
using qsim::cuda::FakeQuantizeCall;

namespace {

struct Case {
  Layout layout;
  std::int64_t n, parameters;
};

constexpr std::int64_t kSeveralBlocks = 3 * 2048 + 11, kBeyondTheGrid = 132 * 16 * 2048 + 4099;

const std::vector<Case> kCases = {
    {{1, 1, 1, 1}, 1, 1},
    {{7, 7, 1, 7}, 7, 1},
    {{kSeveralBlocks, kSeveralBlocks, 1, kSeveralBlocks}, kSeveralBlocks, 1},  // per tensor
    {{40960, 40960, 1, 40960}, 40960, 1},                                      // no tail
    {{4500, 9, 1, 9}, 4500, 500},                                              // outermost axis, rows of 9
    {{12000, 4000, 1, 4000}, 12000, 3},                                        // few channels, long
    {{12000, 12000, 5, 40}, 12000, 5},                                         // a middle axis
    {{12000, 12000, 5, 3}, 12000, 5},                                          // runs shorter than an octet
    {{9000, 9000, 300, 1}, 9000, 300},                                         // channels last
    {{9000, 9000, 3, 1}, 9000, 3},                                             // few channels last
    {{60000, 60000, 3, 1}, 60000, 3},                                          // the same, several parts
    {{59994, 59994, 33, 1}, 59994, 33},                                        // a tile of one column
    {{60000, 60000, 2, 15000}, 60000, 2},                                      // runs of several pieces
    {{64, 64, 64, 1}, 6400, 6400},                                             // every element its own parameter
    {{70, 32, 1, 1}, 7000, 300},                                               // blocks of 32, the last of a row short
    {{33 * 10, 4 * 33, 33, 1}, 30 * 330, 30 * 3 * 33},                         // blocks of 4 rows of 33, the last short
};

template <class T>
const auto& forward_of();
template <>
const auto& forward_of<float>() {
  return qsim::cpu::fake_quantize_kernels().f32;
}
template <>
const auto& forward_of<double>() {
  return qsim::cpu::fake_quantize_kernels().f64;
}
template <>
const auto& forward_of<qsim::Float16>() {
  return qsim::cpu::fake_quantize_kernels().f16;
}
template <>
const auto& forward_of<qsim::BFloat16>() {
  return qsim::cpu::fake_quantize_kernels().bf16;
}

template <class T>
const auto& backward_of();
template <>
const auto& backward_of<float>() {
  return qsim::cpu::fake_quantize_backward_kernels().f32;
}
template <>
const auto& backward_of<double>() {
  return qsim::cpu::fake_quantize_backward_kernels().f64;
}
template <>
const auto& backward_of<qsim::Float16>() {
  return qsim::cpu::fake_quantize_backward_kernels().f16;
}
template <>
const auto& backward_of<qsim::BFloat16>() {
  return qsim::cpu::fake_quantize_backward_kernels().bf16;
}

// The parameters on the device, and as the grids that the CPU kernels take.
template <class A>
class Parameters {
 public:
  Parameters(std::int64_t n, bool learned) : scales_(values(n, A(0.01), A(0.6))), learned_(learned) {
    const std::vector<A> zeros = values(n, A(-12), A(11));
    std::vector<std::int32_t> integers(n);
    for (std::int64_t i = 0; i < n; ++i) {
      integers[i] = static_cast<std::int32_t>(zeros[i]) % 8;
      const A zero_point = learned ? i % 7 == 6 ? A(NAN) : zeros[i] : static_cast<A>(integers[i]);
      learned_zeros_.push_back(zero_point);
      const Grid<A> grid = qsim::make_grid(scales_[i], zero_point, A(-8), A(7));
      grid_scales_.push_back(grid.scale);
      lows_.push_back(grid.low);
      highs_.push_back(grid.high);
    }
    scale_ = std::make_unique<DeviceArray<A>>(scales_);
    integer_ = std::make_unique<DeviceArray<std::int32_t>>(integers);
    zero_ = std::make_unique<DeviceArray<A>>(learned_zeros_);
  }

  qsim::cuda::GridSource source() const {
    return {scale_->data(), learned_ ? static_cast<const void*>(zero_->data()) : integer_->data(), learned_, -8, 7};
  }
  qsim::cpu::Grids<A> grids() { return {grid_scales_.data(), lows_.data(), highs_.data()}; }
  const std::vector<A>& scales() const { return scales_; }

 private:
  static std::vector<A> values(std::int64_t n, A low, A high) {
    std::mt19937 random(static_cast<unsigned>(n));
    std::uniform_real_distribution<A> draw(low, high);
    std::vector<A> drawn(n);
    for (A& value : drawn) value = draw(random);
    return drawn;
  }

  std::vector<A> scales_, learned_zeros_, grid_scales_, lows_, highs_;
  std::unique_ptr<DeviceArray<A>> scale_, zero_;
  std::unique_ptr<DeviceArray<std::int32_t>> integer_;
  bool learned_;
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
  forward_of<T>().with_mask(x.data(), y.data(), mask.data(), 0, c.n, parameters.grids(), c.layout, rounding);
  backward_of<T>().recompute(grad.data(), x.data(), recomputed.data(), 0, c.n, parameters.grids(), c.layout, rounding);

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
  backward_of<T>().learnable(grad.data(), x.data(), dx.data(), 0, sums / c.layout.width, parameters.grids(), c.layout,
                             Rounding::divide, slices, {partial.data(), partial.data() + sums});
  const auto fold = [](float) { return qsim::cpu::fake_quantize_backward_kernels().fold_f32; };
  const auto fold_wide = [](double) { return qsim::cpu::fake_quantize_backward_kernels().fold_f64; };
  const auto run_fold = [&](auto kernel) {
    kernel({partial.data(), partial.data() + sums}, slices, c.parameters, c.layout.width, 1, 1,
           parameters.scales().data(), 0.5, dscale.data(), dzero.data());
  };
  if constexpr (std::is_same_v<A, double>) {
    run_fold(fold_wide(0));
  } else {
    run_fold(fold(0));
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

TEST_CASE("more elements than a grid takes at once") {
  const std::int64_t n = kBeyondTheGrid;
  check_elementwise<qsim::BFloat16>({{n, n, 1, n}, n, 1}, false, Rounding::divide, 0);
}

TEMPLATE_TEST_CASE("learned gradients", "", float, double, qsim::Float16, qsim::BFloat16) {
  for (const Case& c : kCases) {
    for (bool learned : {false, true}) check_learnable<TestType>(c, learned);
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
