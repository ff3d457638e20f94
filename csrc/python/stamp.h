// qsim._C.Stamp: recognizes tensors that were not written to since.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace qsim {

// The same objects, versions and memory, and the same bytes at sampled places. PyTorch counts no version of what is
// written through Tensor.data, NumPy, DLPack, shared memory, or by collectives: samples see that, unless it changes a
// few elements of many. On a device they would have to be waited for: a tensor there, or one that has no memory of its
// own to read, is never recognized. Holds no tensor: parameters that something refers to could not be swapped.
class Stamp {
 public:
  // Subclasses of torch.Tensor are never recognized, nor is a null handle.
  explicit Stamp(const std::vector<py::handle>& tensors);

  // Whether these are the tensors that were given, in this order, as they were then.
  bool matches(const std::vector<py::handle>& tensors) const;

 private:
  struct Seen {
    const PyObject* object;
    std::int64_t version;
    const void* data;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps its address, so that no other storage gets it
    std::vector<char> samples;
  };

  static std::optional<Seen> seen(const py::handle& tensor);
  static bool is_as(const Seen& seen, const py::handle& tensor);

  std::vector<Seen> seen_;
  bool recognizes_ = true;
};

}  // namespace qsim
