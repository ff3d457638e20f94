// Nodes of the backward graph of what quantizes straight-through. torch::autograd::Function would do as well, but costs
// three times as much a call: 4 of the 5 us that 1024 elements took.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

namespace qsim {

using torch::autograd::edge_list;
// What owns a node: c10::intrusive_ptr, std::shared_ptr in older releases of torch.
using NodePointer = std::remove_cvref_t<decltype(torch::autograd::Edge::function)>;

// The arguments of fake_quantize that are no tensors.
struct Options {
  std::int64_t quant_min, quant_max;
  std::optional<std::int64_t> axis, block_size;
  std::string rounding;
  double grad_factor;
};

// Where gradients of these go. Asked for before anything is written in place: a view that was written has another edge.
template <class... Tensors>
edge_list edges_of(const Tensors&... x) {
  return torch::autograd::collect_next_edges(x...);
}

// dx from one bit per element; strides: of the dense tensor in whose memory the bits were made.
NodePointer mask_node(const char* name, edge_list&& edges, const at::Tensor& mask, c10::SymIntArrayRef strides);

// dx, the range being computed again from x.
NodePointer elements_node(const char* name, edge_list&& edges, const at::Tensor& x, const at::Tensor& scale,
                          const at::Tensor& zero_point, const Options& options);

// dx, d scale and d zero_point from one pass over x. d zero_point is undefined where zero_point is integer.
NodePointer learnable_node(const char* name, edge_list&& edges, const at::Tensor& x, const at::Tensor& scale,
                           const at::Tensor& zero_point, const Options& options);

// y, which the operator has just made, as the output of node.
at::Tensor with_history(at::Tensor y, const NodePointer& node);

// x, which the operator has written, as the output of node.
void with_history_(const at::Tensor& x, NodePointer node);

// Whether a graph is being made and x is part of it. A tangent of forward-mode differentiation raises: there is no
// rule.
bool is_differentiated(const char* op, const at::Tensor& x);

// Whether x is what functions see that torch.func differentiates or maps.
bool is_transformed(const at::Tensor& x);

// Raises where x is: what the operator writes is not a function's own.
void refuse_transformed(const char* op, const at::Tensor& x);

}  // namespace qsim
