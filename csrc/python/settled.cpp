#include "python/settled.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "python/unlocked.h"

namespace qsim {
namespace {

using at::Tensor;

// A name that attributes are looked up by, made once.
class Name {
 public:
  explicit Name(const char* text) : text_(PyUnicode_InternFromString(text)) {}
  // Borrowed; null where there is no such attribute.
  PyObject* in(PyObject* dict) const { return PyDict_GetItem(dict, text_); }
  bool is_true_in(PyObject* dict) const { return in(dict) == Py_True; }

 private:
  PyObject* text_;
};

struct Names {
  Name enabled{"_enabled"}, observing{"_observing"}, has_encoding{"_has_encoding"}, training{"training"},
      turns{"_turns"}, spec{"_spec"}, buffers{"_buffers"}, parameters{"_parameters"}, scale{"scale"},
      zero_point{"zero_point"};
  Name hooks[4] = {Name("_forward_hooks"), Name("_forward_pre_hooks"), Name("_backward_hooks"),
                   Name("_backward_pre_hooks")};
};

const Names& names() {
  static const auto* const made = new Names();  // as long as the interpreter
  return *made;
}

py::handle tensor_in(PyObject* dict, const Name& name) {
  PyObject* const found = dict == nullptr ? nullptr : name.in(dict);
  return found != nullptr && THPVariable_Check(found) ? found : nullptr;
}

// Null for subclasses of torch.Tensor but nn.Parameter, and for whatever else is none.
const Tensor* plain(const py::handle& x) {
  return x && THPVariable_CheckExact(x.ptr()) ? &THPVariable_Unpack(x.ptr()) : nullptr;
}

// A dense tensor of numbers, while no mode of __torch_function__ is on; null for others.
const Tensor* quantizable(const py::handle& x) {
  const Tensor* const t = plain(x);
  return t != nullptr && is_dense_float(*t) && !at::impl::torch_function_mode_enabled() ? t : nullptr;
}

// What a spec says, by the name that it has in Python.
template <class T>
T said(const py::object& spec, const char* name) {
  return spec.attr(name).cast<T>();
}

bool needs_gradient(const std::vector<py::handle>& tensors) {
  return c10::GradMode::is_enabled() && std::any_of(tensors.begin(), tensors.end(), [](const py::handle& t) {
           return THPVariable_Check(t.ptr()) && THPVariable_Unpack(t.ptr()).requires_grad();
         });
}

}  // namespace

bool QuantizerVars::is_watched() const {
  return std::any_of(std::begin(names().hooks), std::end(names().hooks), [&](const Name& name) {
    PyObject* const hooks = name.in(vars_.ptr());
    return hooks == nullptr || !PyDict_Check(hooks) || PyDict_Size(hooks) != 0;
  });
}

bool QuantizerVars::quantizes_alone() const {
  PyObject* const vars = vars_.ptr();
  return names().enabled.is_true_in(vars) && !names().observing.is_true_in(vars) && !is_watched();
}

bool QuantizerVars::has_encoding() const { return names().has_encoding.is_true_in(vars_.ptr()); }

bool QuantizerVars::has_spec(const py::object& spec) const { return names().spec.in(vars_.ptr()) == spec.ptr(); }

py::handle QuantizerVars::scale() const {
  const py::handle buffer = tensor_in(names().buffers.in(vars_.ptr()), names().scale);
  return buffer ? buffer : tensor_in(names().parameters.in(vars_.ptr()), names().scale);
}

py::handle QuantizerVars::zero_point() const { return tensor_in(names().buffers.in(vars_.ptr()), names().zero_point); }

int QuantizerVars::visit(visitproc visit, void* arg) const {
  Py_VISIT(vars_.ptr());
  return 0;
}

bool QuantizerVars::Settings::operator==(const Settings& other) const {
  return spec.is(other.spec) && enabled == other.enabled && observing == other.observing &&
         training == other.training && turns == other.turns;
}

QuantizerVars::Settings QuantizerVars::settings() const {
  PyObject* const vars = vars_.ptr();
  PyObject *const spec = names().spec.in(vars), *const turns = names().turns.in(vars);
  return {py::reinterpret_borrow<py::object>(spec), names().enabled.is_true_in(vars),
          names().observing.is_true_in(vars), names().training.is_true_in(vars),
          turns == nullptr ? -1 : PyLong_AsLongLong(turns)};
}

Settled::Settled(const py::dict& vars, const py::object& spec, std::int64_t few)
    : vars_(vars),
      spec_(spec),
      quant_min_(said<std::int64_t>(spec, "quant_min")),
      quant_max_(said<std::int64_t>(spec, "quant_max")),
      axis_(said<std::optional<std::int64_t>>(spec, "axis")),
      block_size_(said<std::optional<std::int64_t>>(spec, "block_size")),
      rounding_(said<std::string>(spec, "rounding")),
      few_(few) {}

py::object Settled::quantize(const py::handle& x, bool in_place) const {
  HANDLE_TH_ERRORS
  using Quantize = Tensor(const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t,
                          std::optional<std::int64_t>, std::optional<std::int64_t>, std::string_view, double);
  using QuantizeInPlace = Tensor&(Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t,
                                  std::optional<std::int64_t>, std::optional<std::int64_t>, std::string_view, double);
  static const auto quantize =
      c10::Dispatcher::singleton().findSchemaOrThrow("qsim::fake_quantize", "").typed<Quantize>();
  static const auto quantize_in_place =
      c10::Dispatcher::singleton().findSchemaOrThrow("qsim::fake_quantize_", "").typed<QuantizeInPlace>();
  const Tensor *const given = quantizable(x), *const scale = plain(vars_.scale()),
                      *const from = plain(vars_.zero_point());
  if (given == nullptr || scale == nullptr || from == nullptr || given->scalar_type() == at::kDouble ||
      !vars_.has_encoding() || !vars_.quantizes_alone() || !is_its_spec()) {
    return py::none();
  }
  Tensor y = *given;
  {
    const Tensor by = *scale, zero_point = *from;  // another thread may give the quantizer others
    const Unlocked meanwhile(y);
    if (in_place) {
      quantize_in_place.call(y, by, zero_point, quant_min_, quant_max_, axis_, block_size_, rounding_, 1.0);
    } else {
      y = quantize.call(y, by, zero_point, quant_min_, quant_max_, axis_, block_size_, rounding_, 1.0);
    }
  }
  return in_place ? py::reinterpret_borrow<py::object>(x)
                  : py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(y)));
  END_HANDLE_TH_ERRORS_PYBIND
}

py::object Settled::direct(const py::handle& x) const {
  const Tensor* const given = plain(x);
  return given != nullptr && given->numel() < few_ ? quantize(x, false) : py::none();
}

bool Settled::is_fixed() const {
  const Tensor* const scale = plain(vars_.scale());
  return scale != nullptr && scale->is_cpu() && !scale->requires_grad() && vars_.has_encoding() &&
         vars_.quantizes_alone() && is_its_spec();
}

SettledDynamic::SettledDynamic(const py::dict& vars, const py::object& spec)
    : vars_(vars),
      spec_(spec),
      is_float_(said<bool>(spec, "is_float")),
      quant_min_(said<std::int64_t>(spec, "quant_min")),
      quant_max_(said<std::int64_t>(spec, "quant_max")),
      format_(said<std::string>(spec, "dtype")),
      axis_(said<std::optional<std::int64_t>>(spec, "axis")),
      block_size_(said<std::optional<std::int64_t>>(spec, "block_size")),
      symmetric_(said<bool>(spec, "symmetric")),
      rounding_(said<std::string>(spec, "rounding")),
      saturate_(said<std::optional<bool>>(spec, "saturate")),
      min_scale_(said<double>(spec, "min_scale")),
      scale_format_(said<std::optional<std::string>>(spec, "scale_format")),
      scale_rounding_(said<std::string>(spec, "scale_rounding")) {}

py::object SettledDynamic::direct(const py::handle& x) const {
  HANDLE_TH_ERRORS
  using Integer = std::optional<std::int64_t>;
  using Format = std::optional<std::string_view>;
  using Quantize = Tensor(const Tensor&, std::int64_t, std::int64_t, Integer, Integer, bool, std::string_view, double,
                          Format, std::string_view);
  using Round =
      Tensor(const Tensor&, std::string_view, Integer, Integer, std::optional<bool>, double, Format, std::string_view);
  auto& all = c10::Dispatcher::singleton();
  static const auto quantize = all.findSchemaOrThrow("qsim::fake_quantize_dynamic", "").typed<Quantize>();
  static const auto round = all.findSchemaOrThrow("qsim::round_to_format_dynamic", "").typed<Round>();
  const Tensor* const given = quantizable(x);
  if (given == nullptr || given->dim() == 0 || !vars_.quantizes_alone() || !is_its_spec()) return py::none();
  Tensor y = *given;
  {
    const Unlocked meanwhile(y);
    y = is_float_ ? round.call(y, format_, axis_, block_size_, saturate_, min_scale_, scale_format_, scale_rounding_)
                  : quantize.call(y, quant_min_, quant_max_, axis_, block_size_, symmetric_, rounding_, min_scale_,
                                  scale_format_, scale_rounding_);
  }
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(y)));
  END_HANDLE_TH_ERRORS_PYBIND
}

Unchanged::Unchanged(const py::dict& vars)
    : vars_(vars), settings_(vars_.settings()), encoding_(std::vector{vars_.scale(), vars_.zero_point()}) {}

bool Unchanged::operator()() const {
  return settings_ == vars_.settings() && encoding_.matches(std::vector{vars_.scale(), vars_.zero_point()});
}

KeptParameter::KeptParameter(const std::vector<py::dict>& quantizers) {
  for (const py::dict& vars : quantizers) quantizers_.emplace_back(vars);
}

std::vector<py::handle> KeptParameter::tensors(const py::handle& parameter) const {
  std::vector<py::handle> found{parameter};
  for (const QuantizerVars& quantizer : quantizers_) {
    found.push_back(quantizer.scale());
    found.push_back(quantizer.zero_point());
  }
  return found;
}

py::object KeptParameter::direct(const py::handle& parameter) const {
  if (!kept_) return py::none();
  for (std::size_t i = 0; i < quantizers_.size(); ++i) {
    if (quantizers_[i].is_watched() || !(kept_->settings[i] == quantizers_[i].settings())) return py::none();
  }
  const py::object quantized = kept_->quantized;  // to compare large tensors lets other threads run, which may forget
  const std::vector<py::handle> now = tensors(parameter);
  if (needs_gradient(now) || !kept_->result.matches({quantized})) return py::none();
  return kept_->tensors.matches(now) ? quantized : py::none();
}

int KeptParameter::visit(visitproc visit, void* arg) const {
  for (const QuantizerVars& quantizer : quantizers_) {
    if (const int stop = quantizer.visit(visit, arg)) return stop;
  }
  return 0;
}

void KeptParameter::keep(const py::object& parameter, const py::object& quantized) {
  std::vector<QuantizerVars::Settings> settings;
  for (const QuantizerVars& quantizer : quantizers_) settings.push_back(quantizer.settings());
  Kept now{std::move(settings), Stamp(tensors(parameter)), Stamp({quantized}, Stamp::Bytes::kSampled), quantized};
  const auto before = std::exchange(kept_, std::move(now));
}

namespace {

// With its visit(): a hook of the quantizer may lead back to what holds one of these, and such a circle can be freed.
template <class T>
py::custom_type_setup collected() {
  return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    PyTypeObject& type = heap_type->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      const auto held = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
      return held.holder_constructed() ? static_cast<const T*>(held.value_ptr())->visit(visit, arg) : 0;
    };
  });
}

}  // namespace

void bind_settled(py::module_& m) {
  py::class_<Direct>(m, "Direct").def("__call__", &Direct::direct);
  py::class_<Settled, Direct>(m, "Settled", collected<Settled>())
      .def(py::init<const py::dict&, const py::object&, std::int64_t>())
      .def("quantize", &Settled::quantize, py::arg("x"), py::arg("in_place"))
      .def("is_its_spec", &Settled::is_its_spec)
      .def("is_fixed", &Settled::is_fixed);
  py::class_<SettledDynamic, Direct>(m, "SettledDynamic", collected<SettledDynamic>())
      .def(py::init<const py::dict&, const py::object&>())
      .def("is_its_spec", &SettledDynamic::is_its_spec);
  py::class_<Unchanged>(m, "Unchanged", collected<Unchanged>())
      .def(py::init<const py::dict&>())
      .def("__call__", &Unchanged::operator());
  py::class_<KeptParameter, Direct>(m, "KeptParameter", collected<KeptParameter>())
      .def(py::init<const std::vector<py::dict>&>())
      .def("keep", &KeptParameter::keep)
      .def("forget", &KeptParameter::forget)
      .def("is_empty", &KeptParameter::is_empty);
}

}  // namespace qsim
