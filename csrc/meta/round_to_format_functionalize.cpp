#include <torch/library.h>

#include <optional>
#include <string_view>

#include "functionalize.h"
#include "operator_named.h"

namespace qsim {
namespace {

using at::Tensor;
using Saturate = std::optional<bool>;
using OptionalTensor = std::optional<Tensor>;
using OptionalInt = std::optional<std::int64_t>;

Tensor& round_to_format_out_functionalize(const Tensor& x, std::string_view format, Saturate saturate,
                                          const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size,
                                          Tensor& out) {
  static const auto call = operator_named<Tensor(const Tensor&, std::string_view, Saturate, const OptionalTensor&,
                                                 OptionalInt, OptionalInt)>("qsim::round_to_format");
  const Tensor from = unwrapped(x);
  const OptionalTensor by = scale ? OptionalTensor(unwrapped(*scale)) : std::nullopt;
  return write_through(out, [&] { return call.call(from, format, saturate, by, axis, block_size); });
}

Tensor& round_to_format_inplace_functionalize(Tensor& x, std::string_view format, Saturate saturate,
                                              const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
  return round_to_format_out_functionalize(x, format, saturate, scale, axis, block_size, x);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Functionalize, m) {
  m.impl("round_to_format.out", round_to_format_out_functionalize);
  m.impl("round_to_format_", round_to_format_inplace_functionalize);
}
}  // namespace qsim
