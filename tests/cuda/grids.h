// Layouts, and the same parameters for a kernel on the device and for one on the CPU.
#pragma once

#include <memory>

#include "device.h"
#include "qsim/cuda/fake_quantize.h"

struct Case {
  qsim::Layout layout;
  std::int64_t n, parameters;
};

constexpr std::int64_t kSeveralBlocks = 3 * 2048 + 11;

inline const std::vector<Case> kCases = {
    {{1, 1, 1, 1}, 1, 1},
    {{7, 7, 1, 7}, 7, 1},
    {{kSeveralBlocks, kSeveralBlocks, 1, kSeveralBlocks}, kSeveralBlocks, 1},  // per tensor
    {{4096, 4096, 1, 4096}, 4096, 1},                                          // no tail
    {{5001, 5001, 1, 5001}, 5001, 1},                                          // many octets behind the last stretch
    {{4500, 9, 1, 9}, 4500, 500},                                              // outermost axis, rows of 9
    {{12000, 4000, 1, 4000}, 12000, 3},                                        // few channels, long
    {{4000, 4000, 5, 40}, 4000, 5},                                            // a middle axis
    {{4005, 4005, 5, 3}, 4005, 5},                                             // runs shorter than an octet
    {{9000, 9000, 300, 1}, 9000, 300},                                         // channels last
    {{3000, 3000, 3, 1}, 3000, 3},                                             // few channels last
    {{64, 64, 64, 1}, 6400, 6400},                                             // every element its own parameter
    {{70, 32, 1, 1}, 3500, 150},                                               // blocks of 32, the last of a row short
    {{33 * 10, 4 * 33, 33, 1}, 10 * 330, 10 * 3 * 33},                         // blocks of 4 rows of 33, the last short
};

// The parameters on the device, and as the grids that the CPU kernels take.
template <class A>
class Parameters {
 public:
  Parameters(std::int64_t n, bool learned, A quant_min = -8, A quant_max = 7)
      : Parameters(values(n, A(0.01), A(0.6)), learned, quant_min, quant_max) {}
  Parameters(std::vector<A> scales, bool learned, A quant_min, A quant_max)
      : scales_(std::move(scales)), learned_(learned), quant_min_(quant_min), quant_max_(quant_max) {
    const auto n = static_cast<std::int64_t>(scales_.size());
    using qsim::cpu::Bounds;
    std::vector<A> zeros = values(n, A(-12), A(11));
    std::vector<std::int32_t> integers(n);
    for (std::int64_t i = 0; i < n; ++i) {
      integers[i] = std::clamp(static_cast<std::int32_t>(zeros[i]), static_cast<std::int32_t>(quant_min),
                               static_cast<std::int32_t>(quant_max));
      if (i % 7 == 6) zeros[i] = A(NAN);
    }
    scale_ = std::make_unique<DeviceArray<A>>(scales_);
    integer_ = std::make_unique<DeviceArray<std::int32_t>>(integers);
    zero_ = std::make_unique<DeviceArray<A>>(zeros);
    storage_.resize(qsim::cpu::Grids<A>::kArrays * n);
    A* const first = storage_.data();
    grids_ = {first, first + n, first + 2 * n, first + 3 * n, first + 4 * n, first + 5 * n};
    const auto& prepare = prepare_kernels(A{});
    grids_.regular =
        learned ? prepare.learned(scales_.data(), zeros.data(), n, quant_min, quant_max, Bounds::of_range, grids_)
                : prepare.integer(scales_.data(), integers.data(), n, quant_min, quant_max, Bounds::of_range, grids_);
  }

  qsim::cuda::GridSource source() const {
    return {scale_->data(), learned_ ? static_cast<const void*>(zero_->data()) : integer_->data(), learned_, quant_min_,
            quant_max_};
  }
  const qsim::cpu::Grids<A>& grids() const { return grids_; }
  const std::vector<A>& scales() const { return scales_; }

 private:
  static const auto& prepare_kernels(float) { return qsim::cpu::fake_quantize_kernels().prepare_f32; }
  static const auto& prepare_kernels(double) { return qsim::cpu::fake_quantize_kernels().prepare_f64; }

  static std::vector<A> values(std::int64_t n, A low, A high) {
    std::mt19937 random(static_cast<unsigned>(n));
    std::uniform_real_distribution<A> draw(low, high);
    std::vector<A> drawn(n);
    for (A& value : drawn) value = draw(random);
    return drawn;
  }

  std::vector<A> scales_, storage_;
  std::unique_ptr<DeviceArray<A>> scale_, zero_;
  std::unique_ptr<DeviceArray<std::int32_t>> integer_;
  qsim::cpu::Grids<A> grids_;
  bool learned_;
  A quant_min_, quant_max_;
};
