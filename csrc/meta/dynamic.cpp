#include "dynamic.h"

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace qsim {
namespace {

at::Tensor choose_block_scale_meta(const at::Tensor& lowest, const at::Tensor& highest, std::string_view element,
                                   std::string_view scale_format, std::string_view scale_rounding) {
  check_block_scale(lowest, highest, element, scale_format, scale_rounding);
  return empty_block_scale(lowest);
}

template <class Call>
at::Tensor empty(const at::Tensor& x, const Call&) {
  return at::empty_like(x);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Meta, m) {
  m.impl("choose_block_scale", choose_block_scale_meta);
  m.impl("fake_quantize_dynamic", integer_kernel<empty<IntegerCall>>);
  m.impl("round_to_format_dynamic", format_kernel<empty<FormatCall>>);
}
}  // namespace qsim
