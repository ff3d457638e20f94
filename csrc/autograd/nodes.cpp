#include "autograd/nodes.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <memory>
#include <mutex>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "operator_named.h"

namespace qsim {
namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;
using Axis = std::optional<std::int64_t>;

// A Node of which T says
//
//   for_each_saved(visit), for_each_lifted(visit)   its SavedVariables; these and its symbolic sizes
//   collect(args)                                   all of its state, to the key of compiled autograd's cache
//   values()                                        the same as a tuple, SavedVariables unpacked
//   static gradients(grad, values...)               what it computes
template <class T>
class SavingNode : public Node {
 public:
  SavingNode(const char* name, edge_list&& edges) : Node(std::move(edges)), name_(name) {}

  std::string name() const override { return name_; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    self().for_each_saved([](SavedVariable& x) { x.reset_data(); });
  }

  void compiled_args(CompiledNodeArgs& args) const override { static_cast<const T*>(this)->collect(args); }

  // Compiled autograd puts a call of `functional` into its graph, through which it traces later.
  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& saved) override {
    using torch::dynamo::autograd::IValuePacker;
    using Metadata = std::vector<std::optional<torch::autograd::InputMetadata>>;
    self().for_each_lifted([&](auto& member) { saved.before(member); });
    torch::dynamo::autograd::PackedArgs packed;
    std::apply([&](const auto&... value) { (packed.pack(value), ...); }, self().values());
    const auto arguments = std::move(packed).vec();
    std::vector<at::TypePtr> types;
    for (const at::IValue& argument : arguments) {
      types.push_back(argument.isTensor() ? at::TypePtr(at::TensorType::get()) : argument.type());
    }
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    const auto bound = compiler->bind_function(saved.get_py_compiler(), name_, functional, types,
                                               /*is_custom_function=*/true, /*is_traceable=*/true);
    variable_list results = compiler->call_function(
        saved.get_py_compiler(), "apply_functional", bound, grads, arguments,
        IValuePacker<Metadata>::pack(torch::dynamo::autograd::get_input_metadata(next_edges())));
    self().for_each_lifted([&](auto& member) { saved.after(member); });
    return results;
  }

 protected:
  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined()) return variable_list(num_outputs());
    return of_values(grads[0], self().values());
  }

 private:
  T& self() { return *static_cast<T*>(this); }

  template <class... Values>
  static variable_list of_values(const Tensor& grad, const std::tuple<Values...>& values) {
    return std::apply([&](const Values&... value) { return T::gradients(grad, value...); }, values);
  }

  template <class... Values>
  static std::tuple<Values...> unpacked(torch::dynamo::autograd::PackedArgs& packed, const std::tuple<Values...>*) {
    return std::tuple<Values...>{packed.template unpack<Values>()...};  // braces: in this order
  }

  static variable_list functional(const variable_list& grads, const std::vector<at::IValue>& arguments) {
    torch::dynamo::autograd::PackedArgs packed(arguments);
    using Values = decltype(std::declval<const T&>().values());
    return of_values(grads[0], unpacked(packed, static_cast<const Values*>(nullptr)));
  }

  const char* name_;
};

class MaskNode : public SavingNode<MaskNode> {
 public:
  MaskNode(const char* name, edge_list&& edges, const Tensor& mask, c10::SymIntArrayRef strides)
      : SavingNode(name, std::move(edges)), mask_(mask, false), strides_(strides.begin(), strides.end()) {}

  template <class Visit>
  void for_each_saved(Visit visit) {
    visit(mask_);
  }
  template <class Visit>
  void for_each_lifted(Visit visit) {
    visit(mask_);
    visit(strides_);
  }
  void collect(CompiledNodeArgs& args) const {
    args.collect(mask_, false);
    args.collect(c10::SymIntArrayRef(strides_));
  }
  std::tuple<Tensor, std::vector<c10::SymInt>> values() const {
    return {mask_.unpack(), {strides_.begin(), strides_.end()}};
  }
  static variable_list gradients(const Tensor& grad, const Tensor& mask, const std::vector<c10::SymInt>& strides) {
    using Signature = Tensor(const Tensor&, const Tensor&, at::OptionalSymIntArrayRef);
    static const auto backward = operator_named<Signature>("qsim::fake_quantize_mask_backward");
    return {backward.call(grad, mask, c10::SymIntArrayRef(strides))};
  }

 private:
  SavedVariable mask_;
  c10::SymDimVector strides_;
};

template <class T>
class SavedElements : public SavingNode<T> {
 public:
  SavedElements(const char* name, edge_list&& edges, const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                const Options& options)
      : SavingNode<T>(name, std::move(edges)),
        x_(x, false),
        scale_(scale, false),
        zero_point_(zero_point, false),
        options_(options) {}

  template <class Visit>
  void for_each_saved(Visit visit) {
    visit(x_);
    visit(scale_);
    visit(zero_point_);
  }
  template <class Visit>
  void for_each_lifted(Visit visit) {
    for_each_saved(visit);
  }
  void collect(CompiledNodeArgs& args) const {
    for (const SavedVariable* saved : {&x_, &scale_, &zero_point_}) args.collect(*saved, false);
    args.collect(options_.quant_min);
    args.collect(options_.quant_max);
    args.collect(options_.axis);
    args.collect(options_.block_size);
    args.collect(options_.rounding);
    args.collect(options_.grad_factor);
  }
  std::tuple<Tensor, Tensor, Tensor, std::int64_t, std::int64_t, Axis, Axis, std::string, double> values() const {
    const Options& o = options_;
    return {x_.unpack(), scale_.unpack(), zero_point_.unpack(), o.quant_min,  o.quant_max,
            o.axis,      o.block_size,    o.rounding,           o.grad_factor};
  }

 private:
  SavedVariable x_, scale_, zero_point_;
  Options options_;
};

class ElementsNode : public SavedElements<ElementsNode> {
 public:
  using SavedElements::SavedElements;

  static variable_list gradients(const Tensor& grad, const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                                 std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                                 const std::string& rounding, double) {
    using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t,
                             Axis, Axis, std::string_view);
    static const auto backward = operator_named<Signature>("qsim::fake_quantize_backward");
    return {backward.call(grad, x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding)};
  }
};

class LearnableNode : public SavedElements<LearnableNode> {
 public:
  using SavedElements::SavedElements;

  static variable_list gradients(const Tensor& grad, const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                                 std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                                 const std::string& rounding, double grad_factor) {
    using Signature =
        std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::int64_t,
                                           std::int64_t, Axis, Axis, std::string_view, double);
    static const auto backward = operator_named<Signature>("qsim::fake_quantize_learnable_backward");
    const auto [dx, dscale, dzero_point] =
        backward.call(grad, x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding, grad_factor);
    return {dx, dscale, zero_point.is_floating_point() ? dzero_point : Tensor()};
  }
};

template <class T, class... Arguments>
NodePointer make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePointer, std::shared_ptr<Node>>) {
    // deleteNode, found by its argument, takes long graphs apart without recursion.
    return NodePointer(new T(std::forward<Arguments>(arguments)...), [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
  }
}

}  // namespace

NodePointer mask_node(const char* name, edge_list&& edges, const Tensor& mask, c10::SymIntArrayRef strides) {
  return make_node<MaskNode>(name, std::move(edges), mask, strides);
}

NodePointer elements_node(const char* name, edge_list&& edges, const Tensor& x, const Tensor& scale,
                          const Tensor& zero_point, const Options& options) {
  return make_node<ElementsNode>(name, std::move(edges), x, scale, zero_point, options);
}

NodePointer learnable_node(const char* name, edge_list&& edges, const Tensor& x, const Tensor& scale,
                           const Tensor& zero_point, const Options& options) {
  return make_node<LearnableNode>(name, std::move(edges), x, scale, zero_point, options);
}

Tensor with_history(Tensor y, const NodePointer& node) {
  torch::autograd::set_history(y, node);
  return y;
}

void with_history_(const Tensor& x, NodePointer node) {
  const auto output = node->add_input_metadata(x);
  torch::autograd::impl::rebase_history(x, {std::move(node), output});
}

bool is_differentiated(const char* op, const Tensor& x) {
  if (!at::GradMode::is_enabled()) return false;
  TORCH_CHECK_NOT_IMPLEMENTED(!x._fw_grad(0).defined(), op,
                              ": forward-mode differentiation is not supported; use a backward pass, or detach()");
  return x.requires_grad();
}

bool is_transformed(const Tensor& x) {
  const auto keys = x.unsafeGetTensorImpl()->key_set();
  return keys.has(c10::DispatchKey::FuncTorchGradWrapper) || keys.has(c10::DispatchKey::FuncTorchBatched);
}

void refuse_transformed(const char* op, const Tensor& x) {
  TORCH_CHECK_NOT_IMPLEMENTED(!is_transformed(x), op, ": got a tensor inside a transform of torch.func, and what ",
                              "is written here has no gradient there; use the functional form and a fixed range");
}

}  // namespace qsim
