#include "python/stamp.h"

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

namespace qsim {
namespace {

using at::Tensor;

constexpr std::size_t kWord = 4;      // bytes that are compared at each place
constexpr std::size_t kSampled = 64;  // about so many places of a tensor; all of a small one

// What the places have in common with an element, and between them, is an odd number of words, which does not fall in
// step with rows.
struct Places {
  std::size_t word;
  std::size_t count;
  std::size_t step;

  explicit Places(std::size_t bytes) : word(bytes % kWord == 0 ? kWord : 1) {
    const std::size_t words = bytes / word;
    step = std::max<std::size_t>(words / kSampled, 1) | 1;
    count = (words + step - 1) / step;
  }
};

const char* memory_of(const Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); }

// A tensor whose version is counted, in memory that the host can read; null for others.
const Tensor* readable(const py::handle& object) {
  if (!object || !THPVariable_CheckExact(object.ptr())) return nullptr;
  const Tensor& t = THPVariable_Unpack(object.ptr());
  const bool is_readable = t.is_cpu() && t.layout() == c10::kStrided && t.has_storage() && !t.is_inference();
  return is_readable ? &t : nullptr;
}

}  // namespace

std::optional<Stamp::Seen> Stamp::seen(const py::handle& tensor) {
  const Tensor* const t = readable(tensor);
  if (t == nullptr || at::has_internal_overlap(*t) != at::MemOverlap::No) return std::nullopt;
  const char* const from = memory_of(*t);
  const Places places(t->nbytes());
  std::vector<char> samples(places.count * places.word);
  for (std::size_t i = 0; i < places.count; ++i) {
    std::memcpy(&samples[i * places.word], from + i * places.step * places.word, places.word);
  }
  return Seen{tensor.ptr(), t->_version(), from, t->storage().getWeakStorageImpl(), std::move(samples)};
}

bool Stamp::is_as(const Seen& seen, const py::handle& tensor) {
  const Tensor* const t = readable(tensor);
  if (t == nullptr || tensor.ptr() != seen.object || t->_version() != seen.version) return false;
  if (t->storage().unsafeGetStorageImpl() != seen.storage._unsafe_get_target()) return false;
  const char* const from = memory_of(*t);
  const Places places(t->nbytes());
  if (from != seen.data || places.count * places.word != seen.samples.size()) return false;
  std::uint32_t differs = 0;  // no call for so few bytes, nor a branch
  for (std::size_t i = 0; i < places.count; ++i) {
    std::uint32_t then = 0, now = 0;
    if (places.word == kWord) {
      std::memcpy(&then, &seen.samples[i * kWord], kWord);
      std::memcpy(&now, from + i * places.step * kWord, kWord);
    } else {
      then = static_cast<std::uint8_t>(seen.samples[i]);
      now = static_cast<std::uint8_t>(from[i * places.step]);
    }
    differs |= then ^ now;
  }
  return differs == 0;
}

Stamp::Stamp(const std::vector<py::handle>& tensors) {
  seen_.reserve(tensors.size());
  for (const py::handle& tensor : tensors) {
    std::optional<Seen> found = seen(tensor);
    recognizes_ = recognizes_ && found.has_value();
    if (found) seen_.push_back(std::move(*found));
  }
}

bool Stamp::matches(const std::vector<py::handle>& tensors) const {
  if (!recognizes_ || tensors.size() != seen_.size()) return false;
  for (std::size_t i = 0; i < seen_.size(); ++i) {
    if (!is_as(seen_[i], tensors[i])) return false;
  }
  return true;
}

}  // namespace qsim
