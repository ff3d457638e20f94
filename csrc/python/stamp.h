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

// The same objects, versions, memory and bytes. PyTorch counts no version of what is written through Tensor.data,
// NumPy, DLPack, shared memory, or by collectives, and a row that is written so, or a single weight, is as wrong as all
// of them. Where all who write have to ask PyTorch for the memory, the stamp shares it copy-on-write: the memory that
// they are given is another one, and no byte has to be read. Elsewhere every byte counts; sampled places are looked at
// first. On a device they would have to be waited for: a tensor there, or one that has no memory of its own to read, is
// never recognized. Holds no tensor: parameters that something refers to could not be swapped.
class Stamp {
 public:
  // All bytes, or, of what nobody has a name for, those at sampled places.
  enum class Bytes { kAll, kSampled };

  // Subclasses of torch.Tensor are never recognized, nor is a null handle.
  explicit Stamp(const std::vector<py::handle>& tensors, Bytes bytes = Bytes::kAll);

  // Whether these are the tensors that were given, in this order, as they were then.
  bool matches(const std::vector<py::handle>& tensors) const;

 private:
  struct Seen {
    const PyObject* object;
    std::int64_t version;
    const void* data;
    std::size_t bytes;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps its address, so that no other storage gets it
    c10::intrusive_ptr<c10::StorageImpl> shares;        // its memory as it was; null where bytes are compared instead
    std::vector<char> samples;
    std::optional<std::uint64_t> sum;  // of all bytes, where they count
  };

  std::optional<Seen> seen(const py::handle& tensor) const;
  static bool is_as(const Seen& seen, const py::handle& tensor);

  Bytes bytes_;
  std::vector<Seen> seen_;
  bool recognizes_ = true;
};

}  // namespace qsim
