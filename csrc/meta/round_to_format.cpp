#include "round_to_format.h"

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <tuple>

#include "fake_quantize.h"

namespace qsim {
namespace {

using at::Tensor;
using Saturate = std::optional<bool>;

Tensor round_to_format_meta(const Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                            OptionalInt axis, OptionalInt block_size) {
  check_round_to_format(x, format, saturate, scale, axis, block_size);
  return at::empty_like(x);
}

Tensor& round_to_format_out_meta(const Tensor& x, std::string_view format, Saturate saturate,
                                 const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size, Tensor& out) {
  check_round_to_format(x, format, saturate, scale, axis, block_size);
  check_out("qsim::round_to_format", x, out);
  return out;
}

Tensor& round_to_format_inplace_meta(Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                                     OptionalInt axis, OptionalInt block_size) {
  check_round_to_format(x, format, saturate, scale, axis, block_size);
  return x;
}

std::tuple<Tensor, Tensor> with_mask_meta(const Tensor& x, std::string_view format, Saturate saturate,
                                          const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
  check_round_to_format(x, format, saturate, scale, axis, block_size);
  return {at::empty_like(x), empty_mask(x)};
}

Tensor with_mask_inplace_meta(Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                              OptionalInt axis, OptionalInt block_size) {
  check_round_to_format(x, format, saturate, scale, axis, block_size);
  return empty_mask(x);
}

Tensor counted_meta(const Tensor& x, std::string_view format, const Tensor& counts, const OptionalTensor& squares,
                    Saturate saturate, const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
  check_counted(x, format, counts, squares, saturate, scale, axis, block_size);
  return at::empty_like(x);
}

void count_meta(const Tensor& x, std::string_view format, const Tensor& counts, const OptionalTensor& squares,
                Saturate saturate, const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
  check_counted(x, format, counts, squares, saturate, scale, axis, block_size);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Meta, m) {
  m.impl("round_to_format", round_to_format_meta);
  m.impl("round_to_format.out", round_to_format_out_meta);
  m.impl("round_to_format_", round_to_format_inplace_meta);
  m.impl("round_to_format_with_mask", with_mask_meta);
  m.impl("round_to_format_with_mask_", with_mask_inplace_meta);
  m.impl("round_to_format_counted", counted_meta);
  m.impl("count_format_", count_meta);
}
}  // namespace qsim
