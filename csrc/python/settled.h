// What is asked of a quantizer by the hundred in one call of a model, where nothing but its encoding decides on the
// result: qsim._C.Settled quantizes by it, Unchanged says whether it is what it was, KeptParameter holds what it made
// of a parameter. SettledDynamic is for quantizers without an encoding, which take the scale from each tensor.
//
// They read the quantizer's attributes where Python has them, in its __dict__, in every call: switches, hooks and
// buffers may be others each time. Where something is not as assumed they return None, and Python decides.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "python/stamp.h"

namespace qsim {

// The attributes of a qsim.Quantizer.
class QuantizerVars {
 public:
  explicit QuantizerVars(py::dict vars) : vars_(std::move(vars)) {}

  // Whether hooks see what goes into it and comes out of it (`is_watched` in Python).
  bool is_watched() const;
  // Whether all that it does is to quantize: it is on, and neither observes nor shows hooks what it does.
  bool quantizes_alone() const;
  // Whether it has an encoding.
  bool has_encoding() const;
  // Whether its spec is this very object.
  bool has_spec(const py::object& spec) const;
  // Its scale and zero point, borrowed; null where they are no tensors.
  py::handle scale() const;
  py::handle zero_point() const;

  // What besides the encoding decides on the result (`settings` in Python).
  struct Settings {
    py::object spec;
    bool enabled, observing, training;
    std::int64_t turns;

    bool operator==(const Settings& other) const;
  };
  Settings settings() const;
  // What the garbage collector has to see.
  int visit(visitproc visit, void* arg) const;

 private:
  py::dict vars_;
};

// What may quantize a tensor without Python.
class Direct {
 public:
  Direct() = default;
  Direct(const Direct&) = delete;
  Direct& operator=(const Direct&) = delete;
  virtual ~Direct() = default;
  // The tensor quantized; None where Python has to decide.
  virtual py::object direct(const py::handle& x) const = 0;
};

// Whether a tensor is one block of floating-point numbers, which quantizers are for.
inline bool is_dense_float(const at::Tensor& t) {
  return t.is_floating_point() && t.layout() == c10::kStrided && !t.is_nested();
}

// A quantizer that `is_plain` (in Python), and what its spec says: where it has another one, Python decides.
class Settled : public Direct {
 public:
  // few: `direct` quantizes fewer elements than these, not in place.
  Settled(const py::dict& vars, const py::object& spec, std::int64_t few);

  // The tensor quantized, in its own memory if `in_place`; None where Python has to decide: not now settled, watched,
  // or no dense tensor of up to 32 bits.
  py::object quantize(const py::handle& x, bool in_place) const;
  py::object direct(const py::handle& x) const override;
  // Whether the quantizer still has that spec.
  bool is_its_spec() const { return vars_.has_spec(spec_); }
  // Whether `quantize` would, by a scale on the CPU that no gradient is for.
  bool is_fixed() const;
  int visit(visitproc visit, void* arg) const { return vars_.visit(visit, arg); }

 private:
  QuantizerVars vars_;
  py::object spec_;
  std::int64_t quant_min_, quant_max_;
  std::optional<std::int64_t> axis_, block_size_;
  std::string rounding_;
  std::int64_t few_;
};

// A quantizer that `is_dynamic` (in Python), and what its spec says.
class SettledDynamic : public Direct {
 public:
  SettledDynamic(const py::dict& vars, const py::object& spec);

  py::object direct(const py::handle& x) const override;
  bool is_its_spec() const { return vars_.has_spec(spec_); }
  int visit(visitproc visit, void* arg) const { return vars_.visit(visit, arg); }

 private:
  QuantizerVars vars_;
  py::object spec_;
  bool is_float_;
  std::int64_t quant_min_, quant_max_;
  std::string format_;
  std::optional<std::int64_t> axis_, block_size_;
  bool symmetric_;
  std::string rounding_;
  std::optional<bool> saturate_;
  double min_scale_;
  std::optional<std::string> scale_format_;
  std::string scale_rounding_;
};

// Whether a quantizer's encoding and settings are what they were.
class Unchanged {
 public:
  explicit Unchanged(const py::dict& vars);
  bool operator()() const;
  int visit(visitproc visit, void* arg) const { return vars_.visit(visit, arg); }

 private:
  QuantizerVars vars_;
  QuantizerVars::Settings settings_;
  Stamp encoding_;
};

// What one or two quantizers made of a parameter, for as long as these and the parameter are what they were.
class KeptParameter : public Direct {
 public:
  explicit KeptParameter(const std::vector<py::dict>& quantizers);

  // What was kept; None where there is nothing, it holds no longer, hooks want to see, or a gradient is needed.
  py::object direct(const py::handle& parameter) const override;
  void keep(const py::object& parameter, const py::object& quantized);
  void forget() { kept_.reset(); }
  bool is_empty() const { return !kept_.has_value(); }
  int visit(visitproc visit, void* arg) const;

 private:
  struct Kept {
    std::vector<QuantizerVars::Settings> settings;
    Stamp tensors;
    Stamp result;
    py::object quantized;
  };

  // The parameter, and all encodings.
  std::vector<py::handle> tensors(const py::handle& parameter) const;

  std::vector<QuantizerVars> quantizers_;
  std::optional<Kept> kept_;
};

void bind_settled(py::module_& m);

}  // namespace qsim
