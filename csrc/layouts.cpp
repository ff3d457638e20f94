// What is not a plain dense tensor is refused by name. Without these kernels torch would say that the operator "could
// not run with arguments from the SparseCPU backend", at the same place, and fail an internal assertion where a lazily
// negated view (z.conj().imag) is written to and not returned.
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

namespace qsim {
namespace {

constexpr const char* kOperators[] = {"choose_block_scale",
                                      "choose_qparams",
                                      "clip_grad_",
                                      "count_format_",
                                      "dequantize",
                                      "fake_quantize",
                                      "fake_quantize.out",
                                      "fake_quantize_",
                                      "fake_quantize_backward",
                                      "fake_quantize_bias",
                                      "fake_quantize_bias_with_mask",
                                      "fake_quantize_dynamic",
                                      "fake_quantize_learnable_backward",
                                      "fake_quantize_mask_backward",
                                      "fake_quantize_with_mask",
                                      "fake_quantize_with_mask_",
                                      "grad_power_sum",
                                      "observe_",
                                      "observe_fake_quantize",
                                      "observe_fake_quantize_with_mask",
                                      "observe_range_",
                                      "pack_int4",
                                      "quantize",
                                      "round_to_format",
                                      "round_to_format.out",
                                      "round_to_format_",
                                      "round_to_format_counted",
                                      "round_to_format_dynamic",
                                      "round_to_format_with_mask",
                                      "round_to_format_with_mask_",
                                      "scale_grad_",
                                      "search_range",
                                      "search_range_data",
                                      "search_range_weights",
                                      "unpack_int4"};

constexpr const char* kWriteWithoutReturning[] = {
    "clip_grad_",     "count_format_",           "fake_quantize_with_mask_",
    "observe_",       "observe_fake_quantize",   "observe_fake_quantize_with_mask",
    "observe_range_", "round_to_format_counted", "round_to_format_with_mask_",
    "scale_grad_"};

constexpr c10::DispatchKey kLayouts[] = {
    c10::DispatchKey::SparseCPU,       c10::DispatchKey::SparseCUDA,       c10::DispatchKey::SparseMeta,
    c10::DispatchKey::SparseCsrCPU,    c10::DispatchKey::SparseCsrCUDA,    c10::DispatchKey::SparseCsrMeta,
    c10::DispatchKey::NestedTensorCPU, c10::DispatchKey::NestedTensorCUDA, c10::DispatchKey::NestedTensorMeta,
    c10::DispatchKey::QuantizedCPU,    c10::DispatchKey::QuantizedCUDA,    c10::DispatchKey::QuantizedMeta,
    c10::DispatchKey::MkldnnCPU,
};

void check_dense(const std::string& op, const std::string& name, const at::Tensor& x) {
  if (!x.defined()) return;
  TORCH_CHECK_TYPE(!x.is_nested(), op, ": ", name, " is a nested tensor; expected a dense one: pass each of ", name,
                   ".unbind()");
  TORCH_CHECK_TYPE(!x.is_quantized(), op, ": ", name, " is a quantized tensor; expected a float or integer one: pass ",
                   name, ".dequantize() or ", name, ".int_repr()");
  TORCH_CHECK_TYPE(x.layout() == at::kStrided, op, ": ", name, " is a ", x.layout(),
                   " tensor; expected a dense one: pass ", name, ".to_dense()");
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& called = op.schema().name();
  const auto& arguments = op.schema().arguments();
  const auto given = torch::jit::last(*stack, arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (given[i].isTensor()) check_dense(called, arguments[i].name(), given[i].toTensor());
    if (!given[i].isTensorList()) continue;
    for (const at::Tensor& x : given[i].toTensorVector()) check_dense(called, arguments[i].name(), x);
  }
  TORCH_CHECK_TYPE(false, called, ": got a tensor that is not dense; pass its to_dense()");
}

// Negated views that are read are resolved, as torch's fallback does.
void resolve_negated(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    c10::IValue& given = torch::jit::peek(*stack, i, arguments.size());
    const auto resolved = [&](const at::Tensor& x) {
      if (!x.defined() || !x.is_neg()) return x;
      TORCH_CHECK_VALUE(!written, op.schema().name(), ": ", argument.name(),
                        " is written, but is a lazily negated view; pass ", argument.name(), ".resolve_neg()");
      return x.resolve_neg();
    };
    if (given.isTensor()) given = resolved(given.toTensor());
    if (!given.isTensorList()) continue;
    std::vector<at::Tensor> list = given.toTensorVector();
    std::transform(list.begin(), list.end(), list.begin(), resolved);
    given = list;
  }
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Negative);
  op.redispatchBoxed(keys & below, stack);
}

const auto kKernels = [] {
  std::vector<torch::Library> libraries;
  libraries.emplace_back(torch::Library::IMPL, "qsim", c10::DispatchKey::Negative, __FILE__, __LINE__);
  for (const char* name : kWriteWithoutReturning) {
    libraries.back().impl(name, torch::CppFunction::makeFromBoxedFunction<&resolve_negated>());
  }
  for (const c10::DispatchKey layout : kLayouts) {
    libraries.emplace_back(torch::Library::IMPL, "qsim", layout, __FILE__, __LINE__);
    for (const char* name : kOperators) {
      libraries.back().impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
    }
  }
  return libraries;
}();

}  // namespace
}  // namespace qsim
