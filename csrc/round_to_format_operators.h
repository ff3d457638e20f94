// The operators of round_to_format on a device that has
//
//   static Tensor empty(const Tensor& x);    // as empty_like
//   static Tensor mask(const Tensor& x);     // as empty_mask
//   static void round(const Tensor& x, const Tensor& y, const Tensor& mask, const RoundToFormatOptions& options);
//                   // x and y dense with equal strides; y may be x. mask: undefined, or that of x in memory order
//   static void count(const Tensor& x, const Tensor& y, const Tensor& counts, const std::optional<Tensor>& squares,
//                     const RoundToFormatOptions& options);
//                   // x dense; an undefined y is not written, otherwise it has the strides of x
#pragma once

#include <torch/library.h>

#include <tuple>

#include "elementwise.h"
#include "fake_quantize_layout.h"
#include "memory.h"
#include "round_to_format.h"

namespace qsim {

template <class Device>
struct RoundToFormatOperators {
  using Tensor = at::Tensor;
  using Saturate = std::optional<bool>;

  static auto runner(const Tensor& mask, const RoundToFormatOptions& options) {
    return [mask, &options](const Tensor& x, const Tensor& y) { Device::round(x, y, mask, options); };
  }

  static void check_result(const Tensor& x, const Tensor& result, const OptionalTensor& scale) {
    const NamedTensor written{x.is_same(result) ? "x" : "out", result};
    check_memory("qsim::round_to_format", {written}, {{"scale", scale.value_or(Tensor())}});
  }

  static Tensor plain(const Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                      OptionalInt axis, OptionalInt block_size) {
    const auto options = check_round_to_format(x, format, saturate, scale, axis, block_size);
    return fresh(x, Device::empty(x), runner(Tensor(), options));
  }

  static Tensor& out(const Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                     OptionalInt axis, OptionalInt block_size, Tensor& result) {
    const auto options = check_round_to_format(x, format, saturate, scale, axis, block_size);
    check_out("qsim::round_to_format", x, result);
    check_result(x, result, scale);
    into(x, result, Device::empty, runner(Tensor(), options));
    return result;
  }

  static Tensor& in_place(Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                          OptionalInt axis, OptionalInt block_size) {
    return out(x, format, saturate, scale, axis, block_size, x);
  }

  static std::tuple<Tensor, Tensor> with_mask(const Tensor& x, std::string_view format, Saturate saturate,
                                              const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
    const auto options = check_round_to_format(x, format, saturate, scale, axis, block_size);
    const Tensor mask = Device::mask(x);
    return {fresh(x, Device::empty(x), runner(mask, options)), mask};
  }

  static Tensor with_mask_in_place(Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                                   OptionalInt axis, OptionalInt block_size) {
    const auto options = check_round_to_format(x, format, saturate, scale, axis, block_size);
    check_result(x, x, scale);
    const Tensor mask = Device::mask(x);
    into(x, x, Device::empty, runner(mask, options));
    return mask;
  }

  static Tensor counted(const Tensor& x, std::string_view format, const Tensor& counts, const OptionalTensor& squares,
                        Saturate saturate, const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
    const auto options = check_counted(x, format, counts, squares, saturate, scale, axis, block_size);
    const Tensor from = dense(x), y = Device::empty(from);
    Device::count(from, y, counts, squares, options);
    return y;
  }

  static void count(const Tensor& x, std::string_view format, const Tensor& counts, const OptionalTensor& squares,
                    Saturate saturate, const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
    const auto options = check_counted(x, format, counts, squares, saturate, scale, axis, block_size);
    Device::count(dense(x), Tensor(), counts, squares, options);
  }

  static void implement(torch::Library& m) {
    m.impl("round_to_format", plain);
    m.impl("round_to_format.out", out);
    m.impl("round_to_format_", in_place);
    m.impl("round_to_format_with_mask", with_mask);
    m.impl("round_to_format_with_mask_", with_mask_in_place);
    m.impl("round_to_format_counted", counted);
    m.impl("count_format_", count);
  }
};

}  // namespace qsim
