// The forward operators of fake_quantize on a device that has
//
//   static Tensor empty(const Tensor& x);    // as empty_like
//   static Tensor mask(const Tensor& x);     // as empty_mask
//   static void run(const Tensor& x, const Tensor& y, const Tensor& mask, const Tensor& scale,
//                   const Tensor& zero_point, const FakeQuantizeOptions& options);
//                   // x and y dense with equal strides; y may be x. mask: undefined, or that of x in memory order
#pragma once

#include <torch/library.h>

#include <tuple>

#include "elementwise.h"
#include "fake_quantize.h"
#include "memory.h"

namespace qsim {

template <class Device>
struct FakeQuantizeOperators {
  using Tensor = at::Tensor;
  using Axis = std::optional<std::int64_t>;

  static auto runner(const Tensor& mask, const Tensor& scale, const Tensor& zero_point,
                     const FakeQuantizeOptions& options) {
    return [mask, &scale, &zero_point, &options](const Tensor& x, const Tensor& y) {
      Device::run(x, y, mask, scale, zero_point, options);
    };
  }

  static void check_result(const Tensor& x, const Tensor& result, const Tensor& scale, const Tensor& zero_point) {
    const NamedTensor written{x.is_same(result) ? "x" : "out", result};
    check_memory("qsim::fake_quantize", {written}, {{"scale", scale}, {"zero_point", zero_point}});
  }

  static Tensor plain(const Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                      std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding, double) {
    const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
    return fresh(x, Device::empty(x), runner(Tensor(), scale, zero_point, options));
  }

  static Tensor& out(const Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                     std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding, double,
                     Tensor& result) {
    const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
    check_out("qsim::fake_quantize", x, result);
    check_result(x, result, scale, zero_point);
    into(x, result, Device::empty, runner(Tensor(), scale, zero_point, options));
    return result;
  }

  static Tensor& in_place(Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                          std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding,
                          double grad_factor) {
    return out(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding, grad_factor, x);
  }

  static std::tuple<Tensor, Tensor> with_mask(const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                                              std::int64_t quant_min, std::int64_t quant_max, Axis axis,
                                              Axis block_size, std::string_view rounding) {
    const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
    const Tensor mask = Device::mask(x);
    return {fresh(x, Device::empty(x), runner(mask, scale, zero_point, options)), mask};
  }

  static Tensor with_mask_in_place(Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                                   std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding) {
    const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
    check_result(x, x, scale, zero_point);
    const Tensor mask = Device::mask(x);
    into(x, x, Device::empty, runner(mask, scale, zero_point, options));
    return mask;
  }

  static void implement(torch::Library& m) {
    m.impl("fake_quantize", plain);
    m.impl("fake_quantize.out", out);
    m.impl("fake_quantize_", in_place);
    m.impl("fake_quantize_with_mask", with_mask);
    m.impl("fake_quantize_with_mask_", with_mask_in_place);
  }
};

}  // namespace qsim
