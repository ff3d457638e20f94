// qsim._C.KnownCalls: follows calls of a container that a hint recognizes, without Python.
//
// A mode sees every function that a model calls, most of which nothing is planned for, or which only move values. What
// it does for these (LocalMode.__torch_function__ in python/qsim/graph/execute/mode.py) is done here where a hint says
// which call it is and the call is as recorded; whatever else is left to Python, which decides alone.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>

namespace qsim {

// A mode that asks, and one call that it is asked about.
struct ModeCall {
  py::handle mode;
  py::tuple hints;  // of the node of the last call
  py::list counts, nodes;
  py::handle function;
  py::tuple args;
  py::dict kwargs;
};

class KnownCalls {
 public:
  // names: of functions. asked: names whose place is asked for. quiet: functions whose results need no quantizer,
  // wherever they are called. The rest: attributes of a Place, by key and by node.
  // All are shared: what Python adds is known here.
  KnownCalls(py::dict names, py::set asked, py::set quiet, py::list nodes_of, std::int64_t width, py::list floats,
             py::list weights, py::set conditional, py::object with_outputs, py::type shortcut);

  // What the call returns, made as planned; `left_to_python` where that is not for this class to say: nothing ran then.
  py::object operator()(const ModeCall& call) const;

  static py::object left_to_python();

  // The key of the call of a function of this name that the Python function above runs for, by the first of the hints
  // that holds; none where none does.
  static std::optional<std::int64_t> key(const py::tuple& hints, const py::handle& name);

 private:
  // The node that the call leads to; below 0 where a hint does not say, or it is not as recorded.
  std::int64_t node(const ModeCall& call, const py::handle& name) const;
  // What `quantize` makes of a tensor, without Python where it is a shortcut that can do so.
  py::object quantized(PyObject* quantize, PyObject* value) const;
  // As the functions of these names in Python.
  py::tuple with_operands(const py::tuple& args, PyObject* operands) const;
  py::object with_outputs(py::object out, PyObject* outputs, const py::tuple& given) const;
  bool is_of_floats(const ModeCall& call, std::int64_t node) const;
  bool has_own_weight(const ModeCall& call, std::int64_t node) const;

  py::dict names_;
  py::set asked_;
  py::set quiet_;
  py::list nodes_of_;
  std::int64_t width_;
  py::list floats_, weights_;
  py::set conditional_;
  py::object with_outputs_;
  py::type shortcut_;
};

void bind_known_calls(py::module_& m);

}  // namespace qsim
