#include "python/known_calls.h"

#include "python/settled.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <utility>

namespace qsim {
namespace {

// Names of attributes, made once.
struct Attributes {
  PyObject *f_code = PyUnicode_InternFromString("f_code"), *f_lasti = PyUnicode_InternFromString("f_lasti"),
           *f_locals = PyUnicode_InternFromString("f_locals"), *self = PyUnicode_InternFromString("self"),
           *container = PyUnicode_InternFromString("container"), *at = PyUnicode_InternFromString("at"),
           *met = PyUnicode_InternFromString("met"), *direct = PyUnicode_InternFromString("direct"),
           *view_as = PyUnicode_InternFromString("view_as"), *left = PyUnicode_InternFromString("left");
};

const Attributes& attributes() {
  static const auto* const made = new Attributes();  // as long as the interpreter
  return *made;
}

py::object owned(PyObject* object) {
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

std::int64_t number(PyObject* object) { return PyLong_AsLongLong(object); }

// As sys._getframe in the Python function that called.
py::object frame_at(PyObject* distance) {
  static PyObject* const get = py::module_::import("sys").attr("_getframe").cast<py::object>().release().ptr();
  return owned(PyObject_CallOneArg(get, distance));
}

bool stands_at(const py::object& frame, PyObject* code, PyObject* instruction) {
  if (owned(PyObject_GetAttr(frame.ptr(), attributes().f_code)).ptr() != code) return false;
  return number(owned(PyObject_GetAttr(frame.ptr(), attributes().f_lasti)).ptr()) == number(instruction);
}

bool is_forward_of(const py::object& frame, PyObject* leaf) {
  const py::object locals = owned(PyObject_GetAttr(frame.ptr(), attributes().f_locals));
  PyObject* const self = PyObject_GetItem(locals.ptr(), attributes().self);
  if (self == nullptr) PyErr_Clear();
  Py_XDECREF(self);
  return self == leaf;
}

// Whether the frames stand where they did when the hint (`qsim.graph.execute.place.Hint`) was noted.
bool holds(PyObject* hint) {
  const auto field = [&](Py_ssize_t i) { return PyTuple_GET_ITEM(hint, i); };
  const py::object near = frame_at(field(1));
  if (!stands_at(near, field(2), field(3))) return false;
  if (field(8) != Py_None && !is_forward_of(near, field(8))) return false;
  if (number(field(4)) == 0) return true;
  if (!stands_at(frame_at(field(4)), field(5), field(6))) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(field(7)); ++i) {
    PyObject* const more = PyTuple_GET_ITEM(field(7), i);
    const py::object frame = frame_at(PyTuple_GET_ITEM(more, 0));
    if (!stands_at(frame, PyTuple_GET_ITEM(more, 1), PyTuple_GET_ITEM(more, 2))) return false;
  }
  return true;
}

// While torch's functions are what they are without modes and subclasses.
class Disabled {
 public:
  Disabled() : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~Disabled() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before_); }
  Disabled(const Disabled&) = delete;
  Disabled& operator=(const Disabled&) = delete;

 private:
  at::impl::TorchFunctionDisabledState before_;
};

// As `quantized` in python/qsim/graph/execute/inputs.py.
bool is_quantized(PyObject* value) { return THPVariable_Check(value) && is_dense_float(THPVariable_Unpack(value)); }

// Of a result: whether an operation wrote to it under `torch.no_grad()`, and its gradient stays.
bool has_gradient_where_they_are_off(const at::Tensor& out) {
  return out.requires_grad() && !c10::GradMode::is_enabled();
}

// Whether a node (`qsim.graph.execute.nodes.Node`, whose fields these are) has no more than quantizers, at operands
// that are given by position.
bool has_quantizers_alone(PyObject* node, Py_ssize_t arguments) {
  for (Py_ssize_t i = 2; i < 5; ++i) {
    if (PyTuple_GET_ITEM(node, i) != Py_None) return false;
  }
  if (PyTuple_GET_ITEM(node, 5) != Py_False || PyTuple_GET_ITEM(node, 6) != Py_None) return false;
  PyObject* const operands = PyTuple_GET_ITEM(node, 0);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(operands); ++i) {
    PyObject* const slot = PyTuple_GET_ITEM(PyTuple_GET_ITEM(operands, i), 0);
    if (!PyLong_CheckExact(slot) || number(slot) >= arguments) return false;
  }
  return true;
}

// What a weak reference is to, null if that is gone.
py::object referent(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
#else
  PyObject* const found = PyWeakref_GetObject(reference);
  return found == Py_None ? py::object() : py::reinterpret_borrow<py::object>(found);
#endif
}

// Whether a tensor, what it is a view of, or its memory is among those that a dictionary has references to, by their
// ids, or by the negative addresses of memory: another may have the id of one that is gone.
bool is_among(PyObject* known, PyObject* value) {
  const auto has = [&](PyObject* object) {
    PyObject* const found = PyDict_GetItemWithError(known, owned(PyLong_FromVoidPtr(object)).ptr());
    return found != nullptr && referent(PyTuple_GET_ITEM(found, 0)).ptr() == object;
  };
  if (!THPVariable_Check(value)) return false;
  if (has(value)) return true;
  const at::Tensor& tensor = THPVariable_Unpack(value);
  if (tensor.is_view() && has(owned(THPVariable_Wrap(tensor._base())).ptr())) return true;
  if (!tensor.has_storage()) return false;
  const auto address = reinterpret_cast<std::intptr_t>(tensor.storage().unsafeGetStorageImpl());
  return PyDict_Contains(known, owned(PyLong_FromLongLong(-address)).ptr()) == 1;
}

// As `LeftToReaders.is_idle`.
bool is_idle(PyObject* left) {
  Py_ssize_t at = 0;
  PyObject *id = nullptr, *entry = nullptr;
  if (PyDict_Size(left) == 1 && PyDict_Next(left, &at, &id, &entry) != 0 && !referent(PyTuple_GET_ITEM(entry, 0))) {
    PyDict_Clear(left);
  }
  return PyDict_Size(left) == 0;
}

// Whether a call takes what the plan leaves in float for those that read it in the examples, and that somebody still
// knows (`qsim.graph.execute.left_to_readers`).
bool takes_what_is_left(PyObject* mode, const py::tuple& args) {
  const py::object left = owned(PyObject_GetAttr(mode, attributes().left));
  if (left.is_none() || is_idle(left.ptr())) return false;
  for (const py::handle& arg : args) {
    if (is_among(left.ptr(), arg.ptr())) return true;
    if (!PyTuple_Check(arg.ptr()) && !PyList_Check(arg.ptr())) continue;
    for (const py::handle& each : arg) {
      if (is_among(left.ptr(), each.ptr())) return true;
    }
  }
  return false;
}

}  // namespace

KnownCalls::KnownCalls(py::dict names, py::set asked, py::set quiet, py::list nodes_of, std::int64_t width,
                       py::list floats, py::list weights, py::set conditional, py::object with_outputs,
                       py::type shortcut)
    : names_(std::move(names)),
      asked_(std::move(asked)),
      quiet_(std::move(quiet)),
      nodes_of_(std::move(nodes_of)),
      width_(width),
      floats_(std::move(floats)),
      weights_(std::move(weights)),
      conditional_(std::move(conditional)),
      with_outputs_(std::move(with_outputs)),
      shortcut_(std::move(shortcut)) {}

py::object KnownCalls::left_to_python() {
  static PyObject* const sentinel = py::module_::import("builtins").attr("object")().release().ptr();
  return py::reinterpret_borrow<py::object>(sentinel);
}

py::object KnownCalls::operator()(const ModeCall& call) const {
  PyObject* const name = PyDict_GetItemWithError(names_.ptr(), call.function.ptr());
  if (name == nullptr) {
    PyErr_Clear();  // a function that cannot be looked up is Python's too
    return left_to_python();
  }
  if (PySet_Contains(asked_.ptr(), name) == 0) {
    if (PySet_Contains(quiet_.ptr(), call.function.ptr()) != 1 || takes_what_is_left(call.mode.ptr(), call.args)) {
      return left_to_python();
    }
    const Disabled meanwhile;
    return owned(PyObject_Call(call.function.ptr(), call.args.ptr(), call.kwargs.ptr()));
  }
  const std::int64_t found = node(call, name);
  if (found < 0) return left_to_python();
  const Disabled meanwhile;
  const py::int_ at(found);
  if (PyObject_SetAttr(call.mode.ptr(), attributes().at, at.ptr()) != 0) throw py::error_already_set();
  PyObject* const node = PyList_GET_ITEM(call.nodes.ptr(), found);
  const bool is_simple = has_quantizers_alone(node, PyTuple_GET_SIZE(call.args.ptr())) &&
                         PySet_Contains(conditional_.ptr(), at.ptr()) == 0;
  const bool quantizes =
      PyTuple_GET_SIZE(PyTuple_GET_ITEM(node, 0)) != 0 || PyTuple_GET_SIZE(PyTuple_GET_ITEM(node, 1)) != 0;
  if (!is_simple || (quantizes && takes_what_is_left(call.mode.ptr(), call.args))) {
    return owned(PyObject_CallMethodObjArgs(call.mode.ptr(), attributes().met, at.ptr(), call.function.ptr(),
                                            call.args.ptr(), call.kwargs.ptr(), nullptr));
  }
  const py::tuple args = with_operands(call.args, PyTuple_GET_ITEM(node, 0));
  return with_outputs(owned(PyObject_Call(call.function.ptr(), args.ptr(), call.kwargs.ptr())),
                      PyTuple_GET_ITEM(node, 1), args);
}

py::object KnownCalls::quantized(PyObject* quantize, PyObject* value) const {
  if (PyObject_TypeCheck(quantize, reinterpret_cast<PyTypeObject*>(shortcut_.ptr()))) {
    const py::object direct = owned(PyObject_GetAttr(quantize, attributes().direct));
    if (py::detail::make_caster<Direct> caster; caster.load(direct, false) && !direct.is_none()) {
      py::object found = py::detail::cast_op<const Direct&>(caster).direct(value);
      if (!found.is_none()) return found;
    }
  }
  return owned(PyObject_CallOneArg(quantize, value));
}

py::tuple KnownCalls::with_operands(const py::tuple& args, PyObject* operands) const {
  if (PyTuple_GET_SIZE(operands) == 0) return args;
  py::tuple given(args.size());
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args.ptr()); ++i) {
    PyTuple_SET_ITEM(given.ptr(), i, Py_NewRef(PyTuple_GET_ITEM(args.ptr(), i)));
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(operands); ++i) {
    PyObject* const operand = PyTuple_GET_ITEM(operands, i);
    const Py_ssize_t slot = number(PyTuple_GET_ITEM(operand, 0));
    PyObject* const value = PyTuple_GET_ITEM(given.ptr(), slot);
    if (!is_quantized(value)) continue;
    py::object found = quantized(PyTuple_GET_ITEM(operand, 1), value);
    PyTuple_SetItem(given.ptr(), slot, found.release().ptr());
  }
  return given;
}

py::object KnownCalls::with_outputs(py::object out, PyObject* outputs, const py::tuple& given) const {
  if (PyTuple_GET_SIZE(outputs) == 0) return out;
  if (!THPVariable_Check(out.ptr()) || has_gradient_where_they_are_off(THPVariable_Unpack(out.ptr()))) {
    return owned(PyObject_CallFunctionObjArgs(with_outputs_.ptr(), out.ptr(), outputs, given.ptr(), nullptr));
  }
  if (!is_quantized(out.ptr())) return out;
  py::object found = quantized(PyTuple_GET_ITEM(PyTuple_GET_ITEM(outputs, 0), 1), out.ptr());
  if (!found.is(out)) return found;
  for (const py::handle& each : given) {
    if (each.is(out)) return owned(PyObject_CallMethodObjArgs(found.ptr(), attributes().view_as, found.ptr(), nullptr));
  }
  return found;
}

std::optional<std::int64_t> KnownCalls::key(const py::tuple& hints, const py::handle& name) {
  for (const py::handle& hint : hints) {
    if (PyObject_RichCompareBool(PyTuple_GET_ITEM(hint.ptr(), 0), name.ptr(), Py_EQ) == 1 && holds(hint.ptr())) {
      return number(PyTuple_GET_ITEM(hint.ptr(), 9));
    }
  }
  return std::nullopt;
}

std::int64_t KnownCalls::node(const ModeCall& call, const py::handle& name) const {
  constexpr std::int64_t kNone = -1;
  const std::int64_t key = KnownCalls::key(call.hints, name).value_or(kNone);
  if (key < 0 || key >= width_) return kNone;
  PyObject* const nodes = PyList_GET_ITEM(nodes_of_.ptr(), key);
  const std::int64_t count = number(PyList_GET_ITEM(call.counts.ptr(), key));
  if (count >= PyList_GET_SIZE(nodes) || PyList_GET_ITEM(nodes, count) == Py_None) return kNone;
  const std::int64_t found = number(PyList_GET_ITEM(nodes, count));
  if (!is_of_floats(call, found) || !has_own_weight(call, found)) return kNone;
  PyList_SetItem(call.counts.ptr(), key, PyLong_FromLongLong(count + 1));
  return found;
}

bool KnownCalls::is_of_floats(const ModeCall& call, std::int64_t node) const {
  PyObject* const slot = PyList_GET_ITEM(floats_.ptr(), node);
  if (slot == Py_None) return true;
  if (!PyLong_CheckExact(slot) || number(slot) >= PyTuple_GET_SIZE(call.args.ptr())) return false;
  PyObject* const operand = PyTuple_GET_ITEM(call.args.ptr(), number(slot));
  return !THPVariable_Check(operand) || THPVariable_Unpack(operand).is_floating_point();
}

bool KnownCalls::has_own_weight(const ModeCall& call, std::int64_t node) const {
  PyObject* const own = PyList_GET_ITEM(weights_.ptr(), node);
  if (own == Py_None) return true;
  PyObject* const slot = PyTuple_GET_ITEM(own, 0);
  if (!PyLong_CheckExact(slot) || number(slot) >= PyTuple_GET_SIZE(call.args.ptr())) return false;
  const py::object container = owned(PyObject_GetAttr(call.mode.ptr(), attributes().container));
  if (container.is_none()) return true;
  const py::object weight = owned(PyObject_CallOneArg(PyTuple_GET_ITEM(own, 1), container.ptr()));
  return PyTuple_GET_ITEM(call.args.ptr(), number(slot)) == weight.ptr();
}

void bind_known_calls(py::module_& m) {
  m.attr("LEFT_TO_PYTHON") = KnownCalls::left_to_python();
  py::class_<KnownCalls>(m, "KnownCalls")
      .def(py::init<py::dict, py::set, py::set, py::list, std::int64_t, py::list, py::list, py::set, py::object,
                    py::type>())
      .def_static("key", &KnownCalls::key)
      .def("__call__",
           [](const KnownCalls& self, const py::handle& mode, const py::tuple& hints, const py::list& counts,
              const py::list& nodes, const py::handle& function, const py::tuple& args,
              const py::dict& kwargs) { return self({mode, hints, counts, nodes, function, args, kwargs}); });
}

}  // namespace qsim
