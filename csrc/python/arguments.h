// Python's arguments as C++ values of an operator's types: what is exactly of such a type, and nothing converted.
#pragma once
#include <ATen/core/Tensor.h>
#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace qsim {

// A torch.Tensor or Parameter, borrowed from its Python object.
struct PlainTensor {
  const at::Tensor* tensor = nullptr;
};

inline bool parse(PyObject* x, PlainTensor& out) {
  if (!THPVariable_CheckExact(x)) return false;
  out.tensor = &THPVariable_Unpack(x);
  return true;
}

inline bool parse(PyObject* x, std::int64_t& out) {
  if (!PyLong_CheckExact(x)) return false;
  int overflow = 0;
  out = PyLong_AsLongLongAndOverflow(x, &overflow);
  return overflow == 0;
}

inline bool parse(PyObject* x, double& out) {
  if (PyFloat_CheckExact(x)) {
    out = PyFloat_AS_DOUBLE(x);
    return true;
  }
  std::int64_t whole = 0;
  if (!parse(x, whole)) return false;
  out = static_cast<double>(whole);
  return true;
}

inline bool parse(PyObject* x, bool& out) {
  out = x == Py_True;
  return PyBool_Check(x);
}

inline bool parse(PyObject* x, std::string_view& out) {
  if (!PyUnicode_CheckExact(x)) return false;
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(x, &size);
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  out = std::string_view(text, static_cast<std::size_t>(size));
  return true;
}

template <class T>
bool parse(PyObject* x, std::optional<T>& out) {
  if (x == Py_None) return true;
  return parse(x, out.emplace());
}

template <class T>
bool parse(PyObject* x, std::vector<T>& out) {
  if (!PyList_CheckExact(x) && !PyTuple_CheckExact(x)) return false;
  out.resize(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(x)));
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (!parse(PySequence_Fast_GET_ITEM(x, static_cast<Py_ssize_t>(i)), out[i])) return false;
  }
  return true;
}

}  // namespace qsim
