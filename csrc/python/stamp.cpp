#include "python/stamp.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/COW.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "python/unlocked.h"

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

  bool leave_out() const { return step > 1; }  // whether there are bytes besides
};

const char* memory_of(const Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); }

constexpr std::size_t kChunk = std::size_t{1} << 18;  // bytes that one thread adds up in one go
constexpr std::size_t kUnlocked = kChunk;             // of as many bytes, other threads need not wait for it

// Sums of words, and sums of these sums (Fletcher's), modulo 2^64: they change with any single word, and where two
// change places. Several lanes, which a processor adds at the same time, so that memory is what takes time.
std::uint64_t sum_of_chunk(const char* from, std::size_t bytes) {
  constexpr std::size_t kLanes = 8;
  constexpr std::size_t kAhead = 4096;  // bytes that are asked for before they are read: half as long again without
  using Lanes = std::array<std::uint64_t, kLanes>;
  Lanes sums{1, 2, 3, 4, 5, 6, 7, 8}, sums_of_sums{}, words{};
  const auto add = [&] {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += words[lane];
      sums_of_sums[lane] += sums[lane];
    }
  };
  std::size_t at = 0;
  for (; at + sizeof(words) <= bytes; at += sizeof(words)) {
    __builtin_prefetch(from + at + kAhead);
    std::memcpy(words.data(), from + at, sizeof(words));
    add();
  }
  words = {};
  std::memcpy(words.data(), from + at, bytes - at);
  add();
  std::uint64_t sum = bytes;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    for (const std::uint64_t each : {sums[lane], sums_of_sums[lane]}) {
      sum = (sum ^ each) * 0x9E3779B97F4A7C15;
      sum ^= sum >> 32;  // products carry upwards alone
    }
  }
  return sum;
}

std::uint64_t sum_of(const char* from, std::size_t bytes) {
  if (bytes <= kChunk) return sum_of_chunk(from, bytes);
  const auto chunks = static_cast<std::int64_t>((bytes + kChunk - 1) / kChunk);
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(chunks));
  at::parallel_for(0, chunks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::size_t at = static_cast<std::size_t>(i) * kChunk;
      sums[static_cast<std::size_t>(i)] = sum_of_chunk(from + at, std::min(kChunk, bytes - at));
    }
  });
  return sum_of_chunk(reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof(std::uint64_t));
}

std::uint64_t sum_of(const Tensor& t) {
  const char* const from = memory_of(t);
  const c10::Storage held = t.storage();  // another thread may give the parameter another one
  const std::size_t bytes = t.nbytes();
  if (bytes < kUnlocked) return sum_of(from, bytes);
  const Unlocked meanwhile;
  return sum_of(from, bytes);
}

// Whether nobody knows where the memory is: whoever wants to write has to ask PyTorch first. What looks at it from
// outside of PyTorch (NumPy, DLPack) holds another tensor with the same storage, since it refuses one that requires a
// gradient; what was written in C++ may hold this one, as the node that accumulates its gradient does. Python's object
// of a storage, once made, is kept by the storage as the storage is by it. Who writes to shared memory is given other
// memory by its allocator; what `torch.load` read has none, and PyTorch would end the process there.
bool is_asked_for(const Tensor& t) {
  const c10::StorageImpl& storage = *t.storage().unsafeGetStorageImpl();
  if (storage.allocator() == nullptr) return false;
  const std::size_t of_storage = storage.pyobj_slot()->has_unique_reference() ? 2 : 1;
  const std::size_t of_tensor = torch::autograd::impl::try_get_grad_accumulator(t) ? 2 : 1;
  return t.requires_grad() && t.storage().use_count() == of_storage && t.use_count() == of_tensor;
}

// A tensor whose version is counted, in memory that the host can read; null for others.
const Tensor* readable(const py::handle& object) {
  if (!object || !THPVariable_CheckExact(object.ptr())) return nullptr;
  const Tensor& t = THPVariable_Unpack(object.ptr());
  const bool is_readable = t.is_cpu() && t.layout() == c10::kStrided && t.has_storage() && !t.is_inference();
  return is_readable ? &t : nullptr;
}

}  // namespace

std::optional<Stamp::Seen> Stamp::seen(const py::handle& tensor) const {
  const Tensor* const t = readable(tensor);
  if (t == nullptr || at::has_internal_overlap(*t) != at::MemOverlap::No) return std::nullopt;
  const char* const from = memory_of(*t);
  const Places places(t->nbytes());
  Seen now{tensor.ptr(), t->_version(), from, t->nbytes(), t->storage().getWeakStorageImpl(), {}, {}, {}};
  if (bytes_ == Bytes::kAll && places.leave_out()) {
    if (is_asked_for(*t)) now.shares = c10::impl::cow::lazy_clone_storage(*t->storage().unsafeGetStorageImpl());
    if (now.shares) return now;
    now.sum = sum_of(*t);
  }
  now.samples.resize(places.count * places.word);
  for (std::size_t i = 0; i < places.count; ++i) {
    std::memcpy(&now.samples[i * places.word], from + i * places.step * places.word, places.word);
  }
  return now;
}

bool Stamp::is_as(const Seen& seen, const py::handle& tensor) {
  const Tensor* const t = readable(tensor);
  if (t == nullptr || tensor.ptr() != seen.object || t->_version() != seen.version) return false;
  if (t->storage().unsafeGetStorageImpl() != seen.storage._unsafe_get_target()) return false;
  const char* const from = memory_of(*t);
  if (from != seen.data || t->nbytes() != seen.bytes) return false;
  if (seen.shares) return true;
  const Places places(seen.bytes);
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

Stamp::Stamp(const std::vector<py::handle>& tensors, Bytes bytes) : bytes_(bytes) {
  seen_.reserve(tensors.size());
  for (const py::handle& tensor : tensors) {
    std::optional<Seen> found = seen(tensor);
    recognizes_ = recognizes_ && found.has_value();
    if (found) seen_.push_back(std::move(*found));
  }
}

bool Stamp::matches(const std::vector<py::handle>& tensors) const {
  if (!recognizes_ || tensors.size() != seen_.size()) return false;
  std::vector<std::pair<Tensor, std::uint64_t>> left;  // of its own: other threads may run meanwhile
  for (std::size_t i = 0; i < seen_.size(); ++i) {
    if (!is_as(seen_[i], tensors[i])) return false;
    const Tensor& t = THPVariable_Unpack(tensors[i].ptr());
    if (seen_[i].sum) left.emplace_back(t, *seen_[i].sum);
  }
  return std::all_of(left.begin(), left.end(), [](const auto& each) { return sum_of(each.first) == each.second; });
}

}  // namespace qsim
