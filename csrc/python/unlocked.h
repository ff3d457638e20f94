// Letting other threads run Python while an operator works, where that pays.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>

namespace qsim {

// To give up the interpreter's lock and to take it again costs what a thousand elements do.
class Unlocked {
 public:
  Unlocked() { released_.emplace(); }
  explicit Unlocked(const at::Tensor& x) {
    constexpr std::int64_t kFew = 4096;  // elements, which no other thread helps with
    const bool is_few = x.is_cpu() && x.layout() == c10::kStrided && !x.is_nested() && x.numel() <= kFew;
    if (!is_few) released_.emplace();
  }
  explicit Unlocked(at::TensorList) : Unlocked() {}

 private:
  std::optional<py::gil_scoped_release> released_;
};

}  // namespace qsim
