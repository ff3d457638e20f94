// qsim._C: eager calls of the operators that are called most, from Python straight to the dispatcher's typed handle;
// and what is asked by the hundred in one call of a model: about tensors and quantizers (stamp.h, settled.h), and which
// call of a container it is (known_calls.h).
//
// torch.ops parses arguments by the schema into boxed values, which at 1024 elements costs more than everything else;
// pybind11 puts them into vectors first. Here they are read where Python has them (arguments.h). What is not exactly of
// an operator's types goes to torch.ops, which decides: subclasses and modes with __torch_function__, numbers that are
// no plain int or float, and whatever is an error. So both have the same results and the same errors.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/arguments.h"
#include "python/known_calls.h"
#include "python/settled.h"
#include "python/stamp.h"
#include "python/unlocked.h"

namespace qsim {
namespace {

using at::Tensor;
using Integer = std::optional<std::int64_t>;
using MaybeTensor = std::optional<Tensor>;

// What Python's argument is parsed to, for a parameter of an operator.
template <class Parameter>
struct Parsed {
  using Type = Parameter;
  static Parameter given(const Type& x) { return x; }
};
template <>
struct Parsed<const Tensor&> {
  using Type = PlainTensor;
  static const Tensor& given(const Type& x) { return *x.tensor; }
};
template <>
struct Parsed<Tensor&> {
  using Type = PlainTensor;
  static Tensor& given(const Type& x) { return const_cast<Tensor&>(*x.tensor); }
};
template <>
struct Parsed<const MaybeTensor&> {
  using Type = std::optional<PlainTensor>;
  static MaybeTensor given(const Type& x) { return x ? MaybeTensor(*x->tensor) : std::nullopt; }
};
template <>
struct Parsed<at::TensorList> {
  using Type = std::vector<PlainTensor>;
  static std::vector<Tensor> given(const Type& list) {
    std::vector<Tensor> tensors;
    tensors.reserve(list.size());
    for (const PlainTensor& x : list) tensors.push_back(*x.tensor);
    return tensors;
  }
};

// What the schema says; null where it says nothing.
py::object default_of(const c10::Argument& argument) {
  const auto& value = argument.default_value();
  if (!value) return {};
  if (value->isNone()) return py::none();
  if (value->isBool()) return py::bool_(value->toBool());
  if (value->isInt()) return py::int_(value->toInt());
  if (value->isDouble()) return py::float_(value->toDouble());
  return py::str(value->toStringRef());
}

// The arguments of a call, as Python gives them to a function with METH_FASTCALL: those with names behind the others.
struct Given {
  PyObject* const* values;
  std::size_t positional;
  PyObject* names;  // a tuple, or null

  std::size_t named() const { return names == nullptr ? 0 : static_cast<std::size_t>(PyTuple_GET_SIZE(names)); }
  PyObject* name(std::size_t i) const { return PyTuple_GET_ITEM(names, static_cast<Py_ssize_t>(i)); }
};

// torch.ops.qsim.<name>.<overload>, which wants options by name.
py::object through_torch(const c10::FunctionSchema& schema, const Given& given) {
  const std::string overload = schema.overload_name().empty() ? "default" : schema.overload_name();
  const std::string name = schema.name().substr(std::string_view("qsim::").size());
  py::list positional;
  py::dict named;
  for (std::size_t i = 0; i < given.positional; ++i) {
    const bool by_name = i < schema.arguments().size() && schema.arguments()[i].kwarg_only();
    if (by_name) {
      named[schema.arguments()[i].name().c_str()] = py::handle(given.values[i]);
    } else {
      positional.append(py::handle(given.values[i]));
    }
  }
  for (std::size_t i = 0; i < given.named(); ++i) {
    named[py::handle(given.name(i))] = py::handle(given.values[given.positional + i]);
  }
  const py::object operators = py::module_::import("torch").attr("ops").attr("qsim");
  return operators.attr(name.c_str()).attr(overload.c_str())(*positional, **named);
}

// Adds operator qsim::<name>.<overload> to the module, with the names and defaults of its schema. All may be given by
// position, which costs least.
template <class Signature>
struct Binding;

template <class Result, class... Parameters>
struct Binding<Result(Parameters...)> {
  static void define(py::module_& m, const char* as, const char* name, const char* overload = "") {
    auto* const binding = new Binding(as, name, overload);  // as long as the interpreter
    const py::capsule self(binding);
    m.attr(as) = py::reinterpret_steal<py::object>(
        PyCFunction_NewEx(&binding->method_, self.ptr(), py::str("qsim._C").release().ptr()));
  }

 private:
  static constexpr std::size_t kCount = sizeof...(Parameters);
  using Slots = std::array<PyObject*, kCount>;

  Binding(const char* as, const char* name, const char* overload)
      : op_(c10::Dispatcher::singleton().findSchemaOrThrow((std::string("qsim::") + name).c_str(), overload)),
        call_(op_.typed<Result(Parameters...)>()),
        method_{as, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&called)), METH_FASTCALL | METH_KEYWORDS,
                nullptr} {
    for (std::size_t i = 0; i < kCount; ++i) {
      const c10::Argument& argument = op_.schema().arguments()[i];
      names_[i] = PyUnicode_InternFromString(argument.name().c_str());
      defaults_[i] = default_of(argument).release().ptr();
    }
  }

  static PyObject* called(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* names) {
    HANDLE_TH_ERRORS
    const auto& binding = *static_cast<const Binding*>(PyCapsule_GetPointer(self, nullptr));
    const Given given{values, static_cast<std::size_t>(positional), names};
    Slots slots = binding.defaults_;
    std::tuple<typename Parsed<Parameters>::Type...> parsed;
    if (at::impl::torch_function_mode_enabled() || !binding.place(given, slots) ||
        !parse_all(slots, parsed, std::index_sequence_for<Parameters...>())) {
      return through_torch(binding.op_.schema(), given).release().ptr();
    }
    return binding.run(parsed, std::index_sequence_for<Parameters...>());
    END_HANDLE_TH_ERRORS
  }

  // Puts the arguments where the schema has them; false if there is one too many or an unknown name.
  bool place(const Given& given, Slots& slots) const {
    if (given.positional > kCount) return false;
    for (std::size_t i = 0; i < given.positional; ++i) slots[i] = given.values[i];
    for (std::size_t i = 0; i < given.named(); ++i) {
      std::size_t at = given.positional;
      while (at < kCount && names_[at] != given.name(i)) ++at;  // Python has names of keywords once
      if (at == kCount) return false;
      slots[at] = given.values[given.positional + i];
    }
    return true;
  }

  template <class Tuple, std::size_t... i>
  static bool parse_all(const Slots& slots, Tuple& parsed, std::index_sequence<i...>) {
    return ((slots[i] != nullptr && parse(slots[i], std::get<i>(parsed))) && ...);
  }

  template <class Tuple, std::size_t... i>
  PyObject* run(const Tuple& parsed, std::index_sequence<i...>) const {
    std::tuple<decltype(Parsed<Parameters>::given(std::get<i>(parsed)))...> arguments(
        Parsed<Parameters>::given(std::get<i>(parsed))...);
    const auto call = [&]() -> Result {
      const Unlocked meanwhile(std::get<0>(arguments));
      return call_.call(std::get<i>(arguments)...);
    };
    if constexpr (std::is_void_v<Result>) {
      call();
      Py_RETURN_NONE;
    } else {
      return py::cast(call()).release().ptr();
    }
  }

  c10::OperatorHandle op_;
  c10::TypedOperatorHandle<Result(Parameters...)> call_;
  PyMethodDef method_;
  Slots names_{}, defaults_{};
};

using FakeQuantize = Tensor(const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t, Integer, Integer,
                            std::string_view, double);
using FakeQuantizeOut = Tensor&(const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t, Integer,
                                Integer, std::string_view, double, Tensor&);
using FakeQuantizeInPlace = Tensor&(Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t, Integer, Integer,
                                    std::string_view, double);
using Observe = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&);
using ObserveRange = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, Integer, Integer);
using ObserveFakeQuantize = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                   const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t, double,
                                   Integer, Integer, bool, double, std::string_view);
using Format = std::string_view;
using Saturate = std::optional<bool>;
using RoundToFormat = Tensor(const Tensor&, Format, Saturate, const MaybeTensor&, Integer, Integer);
using RoundToFormatOut = Tensor&(const Tensor&, Format, Saturate, const MaybeTensor&, Integer, Integer, Tensor&);
using RoundToFormatInPlace = Tensor&(Tensor&, Format, Saturate, const MaybeTensor&, Integer, Integer);
using RoundToFormatCounted = Tensor(const Tensor&, Format, const Tensor&, const MaybeTensor&, Saturate,
                                    const MaybeTensor&, Integer, Integer);
using CountFormat = void(const Tensor&, Format, const Tensor&, const MaybeTensor&, Saturate, const MaybeTensor&,
                         Integer, Integer);
using MaybeFormat = std::optional<Format>;
using FakeQuantizeDynamic = Tensor(const Tensor&, std::int64_t, std::int64_t, Integer, Integer, bool, std::string_view,
                                   double, MaybeFormat, std::string_view);
using RoundToFormatDynamic = Tensor(const Tensor&, Format, Integer, Integer, Saturate, double, MaybeFormat,
                                    std::string_view);
using ClipGrad = std::tuple<Tensor, Tensor>(at::TensorList, double, double, std::string_view);

}  // namespace
}  // namespace qsim

PYBIND11_MODULE(_C, m) {
  using namespace qsim;
  Binding<FakeQuantize>::define(m, "fake_quantize", "fake_quantize");
  Binding<FakeQuantizeOut>::define(m, "fake_quantize_out", "fake_quantize", "out");
  Binding<FakeQuantizeInPlace>::define(m, "fake_quantize_", "fake_quantize_");
  Binding<Observe>::define(m, "observe_", "observe_");
  Binding<ObserveRange>::define(m, "observe_range_", "observe_range_");
  Binding<ObserveFakeQuantize>::define(m, "observe_fake_quantize", "observe_fake_quantize");
  Binding<RoundToFormat>::define(m, "round_to_format", "round_to_format");
  Binding<RoundToFormatOut>::define(m, "round_to_format_out", "round_to_format", "out");
  Binding<RoundToFormatInPlace>::define(m, "round_to_format_", "round_to_format_");
  Binding<RoundToFormatCounted>::define(m, "round_to_format_counted", "round_to_format_counted");
  Binding<CountFormat>::define(m, "count_format_", "count_format_");
  Binding<FakeQuantizeDynamic>::define(m, "fake_quantize_dynamic", "fake_quantize_dynamic");
  Binding<RoundToFormatDynamic>::define(m, "round_to_format_dynamic", "round_to_format_dynamic");
  Binding<ClipGrad>::define(m, "clip_grad_", "clip_grad_");
  const auto listed = [](const py::args& tensors) { return std::vector<py::handle>(tensors.begin(), tensors.end()); };
  py::class_<Stamp>(m, "Stamp")
      .def(py::init([listed](const py::args& tensors) { return Stamp(listed(tensors)); }))
      .def("matches", [listed](const Stamp& self, const py::args& tensors) { return self.matches(listed(tensors)); })
      .def("__reduce__", [](const py::object& self) { return py::make_tuple(py::type::of(self), py::tuple()); });
  bind_settled(m);
  bind_known_calls(m);
}
