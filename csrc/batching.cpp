// torch.vmap: what operators do with a batch of that of which the mapped function sees one.
//
// On elements one by one, where all samples share a grid: one call on the whole batch, with the axis moved behind that
// of the samples. Anything else is a loop over the samples, made contiguous, as what is stacked of them is: the bits of
// a mask are in the memory order of a sample.
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace qsim {
namespace {

using at::Tensor;
using Values = std::vector<c10::IValue>;

const at::functorch::BatchedTensorImpl* batch_in(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return nullptr;
  return at::functorch::maybeGetBatchedImpl(value.toTensor());
}

// The arguments of a call; of tensors of which the function sees a sample all samples, along the first dimension.
class Batch {
 public:
  Batch(const c10::OperatorHandle& op, const torch::jit::Stack& stack) : arguments_(op.schema().arguments()) {
    const auto given = torch::jit::last(stack, arguments_.size());
    for (const c10::IValue& value : given) {  // of several maps inside each other the innermost
      if (const auto* batch = batch_in(value)) level_ = std::max(level_, batch->level());
    }
    for (const c10::IValue& value : given) add(value);
  }

  // Whether what the operator reads besides its elements is the same for all samples.
  bool shares_grid() const {
    for (std::size_t i = 0; i < values_.size(); ++i) {
      if (is_batched_[i] && !is_element(i)) return false;
    }
    return true;
  }

  bool has(const char* name) const {
    for (std::size_t i = 0; i < values_.size(); ++i) {
      if (arguments_[i].name() == name) return !values_[i].isNone();
    }
    return false;
  }

  // For one call on all samples.
  Values of_all() const {
    Values values = values_;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::string& name = arguments_[i].name();
      const bool is_of_blocks = has("block_size") && (name == "scale" || name == "zero_point");
      if (values[i].isTensor() && !is_batched_[i] && (is_element(i) || is_of_blocks)) {
        values[i] = expanded(values[i].toTensor());
      } else if (name == "axis" && values[i].isInt() && values[i].toInt() >= 0) {
        values[i] = values[i].toInt() + 1;
      }
    }
    return values;
  }

  // For a call on one of them.
  Values of_sample(std::int64_t sample) const {
    Values values = values_;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto* alias = arguments_[i].alias_info();
      TORCH_CHECK_NOT_IMPLEMENTED(alias == nullptr || !alias->isWrite(), "qsim: under torch.vmap '",
                                  arguments_[i].name(),
                                  "' would be written once for each sample; call the operator without torch.vmap");
      if (is_batched_[i]) values[i] = values[i].toTensor().select(0, sample).contiguous();
    }
    return values;
  }

  // A result for all samples, as the function sees it.
  Tensor seen(const Tensor& of_all) const { return at::functorch::makeBatched(of_all, std::int64_t{0}, level_); }

  std::int64_t samples() const { return samples_.guard_int(__FILE__, __LINE__); }

 private:
  void add(const c10::IValue& value) {
    const auto* batch = batch_in(value);
    is_batched_.push_back(batch != nullptr && batch->level() == level_);
    values_.push_back(is_batched_.back() ? c10::IValue(batch->value().movedim(batch->bdim(), 0)) : value);
    if (is_batched_.back()) samples_ = values_.back().toTensor().sym_size(0);
  }

  bool is_element(std::size_t i) const {
    const std::string& name = arguments_[i].name();
    return name == "x" || name == "q" || name == "grad";
  }

  Tensor expanded(const Tensor& x) const {
    auto sizes = x.sym_sizes().vec();
    sizes.insert(sizes.begin(), samples_);
    return x.unsqueeze(0).expand_symint(sizes);
  }

  const std::vector<c10::Argument>& arguments_;
  std::int64_t level_ = 0;
  Values values_;
  std::vector<bool> is_batched_;
  c10::SymInt samples_ = 0;
};

std::vector<Tensor> results_of(const c10::OperatorHandle& op, Values&& values) {
  torch::jit::Stack stack(std::move(values));
  op.callBoxed(&stack);
  std::vector<Tensor> results;
  for (const c10::IValue& result : stack) results.push_back(result.toTensor());
  return results;
}

// What was written in place is returned as it was given.
void finish(const c10::OperatorHandle& op, const Batch& batch, const std::vector<Tensor>& results,
            torch::jit::Stack* stack) {
  const auto given = torch::jit::pop(*stack, op.schema().arguments().size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    const bool is_given = op.schema().returns()[i].alias_info() != nullptr;
    stack->push_back(is_given ? given[0] : c10::IValue(batch.seen(results[i])));
  }
}

void one_by_one(const c10::OperatorHandle& op, const Batch& batch, torch::jit::Stack* stack) {
  TORCH_CHECK_VALUE(batch.samples() > 0, op.schema().name(), ": got no samples from torch.vmap; expected some");
  std::vector<std::vector<Tensor>> found(op.schema().returns().size());
  for (std::int64_t sample = 0; sample < batch.samples(); ++sample) {
    const auto results = results_of(op, batch.of_sample(sample));
    for (std::size_t i = 0; i < results.size(); ++i) found[i].push_back(results[i].contiguous());
  }
  std::vector<Tensor> stacked;
  for (const auto& results : found) stacked.push_back(at::stack(results));
  finish(op, batch, stacked, stack);
}

void all_at_once(const c10::OperatorHandle& op, const Batch& batch, torch::jit::Stack* stack) {
  if (!batch.shares_grid()) return one_by_one(op, batch, stack);
  finish(op, batch, results_of(op, batch.of_all()), stack);
}

// A scale from the tensor itself is another for each sample.
void by_groups(const c10::OperatorHandle& op, const Batch& batch, torch::jit::Stack* stack) {
  if (!batch.has("axis")) return one_by_one(op, batch, stack);
  all_at_once(op, batch, stack);
}

using Rule = void(const c10::OperatorHandle&, const Batch&, torch::jit::Stack*);

template <Rule* rule>
void batched(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  rule(op, Batch(op, *stack), stack);
}

template <Rule* rule>
void implement(torch::Library& m, std::initializer_list<const char*> names) {
  for (const char* name : names) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&batched<rule>>());
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, FuncTorchBatched, m) {
  implement<all_at_once>(m, {"fake_quantize", "fake_quantize_", "fake_quantize_backward", "round_to_format",
                             "round_to_format_", "quantize", "dequantize", "observe_fake_quantize"});
  implement<by_groups>(m, {"fake_quantize_dynamic", "round_to_format_dynamic"});
  implement<one_by_one>(m,
                        {"fake_quantize_with_mask", "fake_quantize_mask_backward", "fake_quantize_learnable_backward",
                         "round_to_format_with_mask", "fake_quantize_bias", "fake_quantize_bias_with_mask"});
}
}  // namespace qsim
