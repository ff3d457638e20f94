#include "machine.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <cstring>

namespace ptx {

namespace {

constexpr std::size_t kAllocationAlignment = 256;  // as cudaMalloc
constexpr std::byte kGarbage{0xA5};

}  // namespace

void* Memory::allocate(std::size_t bytes) {
  auto memory = std::make_unique<std::byte[]>(bytes + kAllocationAlignment);
  const auto raw = reinterpret_cast<std::uint64_t>(memory.get());
  const std::uint64_t begin = (raw + kAllocationAlignment - 1) / kAllocationAlignment * kAllocationAlignment;
  std::fill_n(reinterpret_cast<std::byte*>(begin), bytes, kGarbage);
  regions_.emplace(begin, std::pair{begin + bytes, std::move(memory)});
  return reinterpret_cast<void*>(begin);
}

void Memory::free(void* memory) {
  regions_.erase(reinterpret_cast<std::uint64_t>(memory));
  begin_ = 1, end_ = 0;
}

void Memory::check(std::uint64_t address, std::size_t bytes) {
  if (address >= begin_ && address + bytes <= end_) return;
  auto region = regions_.upper_bound(address);
  if (region == regions_.begin() || address + bytes > (--region)->second.first) {
    throw std::out_of_range("outside of every allocation");
  }
  begin_ = region->first, end_ = region->second.first;
}

std::vector<std::byte> Memory::contents() const {
  std::vector<std::byte> all;
  for (const auto& [begin, region] : regions_) {
    all.insert(all.end(), reinterpret_cast<std::byte*>(begin), reinterpret_cast<std::byte*>(region.first));
  }
  return all;
}

void Memory::restore(const std::vector<std::byte>& contents) {
  const std::byte* from = contents.data();
  for (const auto& [begin, region] : regions_) {
    std::memcpy(reinterpret_cast<std::byte*>(begin), from, region.first - begin);
    from += region.first - begin;
  }
}

Warp::Warp(const Kernel& kernel, Block& block, unsigned first_thread, const Grid& grid)
    : kernel_(kernel),
      block_(block),
      threads_(std::min<unsigned>(kLanes, grid.threads - first_thread)),
      registers_(static_cast<std::size_t>(kernel.slots) * kLanes) {
  for (const auto& [slot, value] : kernel.constants) fill(slot, value);
  for (const auto& [name, slot] : kernel.specials) {
    if (name == "%ntid.x") fill(slot, grid.threads);
    if (name == "%nctaid.x") fill(slot, grid.blocks_x);
    if (name == "%nctaid.y") fill(slot, grid.blocks_y);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      if (name == "%tid.x") this->slot(slot)[lane] = first_thread + lane;
      if (name == "%laneid") this->slot(slot)[lane] = lane;
    }
  }
}

void Warp::fill(int slot, std::uint64_t value) { std::fill_n(this->slot(slot), kLanes, value); }

void Warp::begin_block(unsigned x, unsigned y) {
  alive_ = threads_ == kLanes ? ~0u : (1u << threads_) - 1;
  next_.fill(0);
  steps = 0;
  for (const auto& [name, slot] : kernel_.specials) {
    if (name == "%ctaid.x") fill(slot, x);
    if (name == "%ctaid.y") fill(slot, y);
  }
}

int Warp::lowest(unsigned lanes, int from) const {
  int found = INT_MAX;
  for (; lanes != 0; lanes &= lanes - 1) {
    const int place = next_[std::countr_zero(lanes)];
    if (place >= from) found = std::min(found, place);
  }
  return found;
}

unsigned Warp::lanes_at(int place, unsigned among) const {
  unsigned found = 0;
  for (; among != 0; among &= among - 1) {
    const int lane = std::countr_zero(among);
    if (next_[lane] == place) found |= 1u << lane;
  }
  return found;
}

// Whether the lanes at a place need not wait there for others.
bool Warp::may_go(int place, unsigned group) {
  const Instruction& instruction = kernel_.code.at(place);
  if (instruction.kind == Kind::barrier) return false;
  if (instruction.kind != Kind::collective) return true;
  const auto members = static_cast<unsigned>(slot(instruction.members)[std::countr_zero(group)]);
  if ((members & ~alive_) != 0) throw std::runtime_error("waits for lanes that have ended: " + instruction.text);
  if ((group & ~members) != 0) throw std::runtime_error("a lane is not in its own mask: " + instruction.text);
  return group == members;
}

void Warp::run() {
  while (alive_ != 0) {
    unsigned waiting = 0, group = 0;
    int place = 0;
    do {
      waiting |= group;
      const unsigned rest = alive_ & ~waiting;
      if (rest == 0) {
        const int first = lowest(alive_);
        if (kernel_.code.at(first).kind == Kind::barrier && lanes_at(first, alive_) == alive_) return;
        throw std::runtime_error("lanes wait for each other, the first at: " + kernel_.code.at(first).text);
      }
      place = lowest(rest);
      group = lanes_at(place, rest);
    } while (!may_go(place, group));
    stretch(place, group);
  }
}

// As far as these lanes go together before they meet others, part, end or wait.
void Warp::stretch(int place, unsigned group) {
  const int end = lowest(alive_ & ~group, place);  // those before it wait
  while (place < end) {
    const Instruction& instruction = kernel_.code.at(place);
    if (instruction.kind >= Kind::barrier && !may_go(place, group)) break;
    active = group;
    if (instruction.guard >= 0) {
      const auto mask = static_cast<unsigned>(*slot(instruction.guard));
      active &= instruction.guard_wanted ? mask : ~mask;
    }
    instructions += std::popcount(active);
    ++steps;
    ++place;
    if (active == 0) continue;
    if (instruction.kind == Kind::exit) {
      alive_ &= ~active;
      group &= ~active;
      if (group == 0) return;
    } else if (instruction.kind != Kind::branch) {
      try {
        instruction.run(*this, instruction);
      } catch (const std::exception& error) {
        throw std::runtime_error(kernel_.name + ": " + instruction.text + ": " + error.what());
      }
    } else if (active == group) {
      place = instruction.target;
    } else {
      for (int lane = 0; lane < kLanes; ++lane) {
        if (group >> lane & 1) next_[lane] = active >> lane & 1 ? instruction.target : place;
      }
      return;
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (group >> lane & 1) next_[lane] = place;
  }
}

void Warp::leave_barrier() {
  for (int& next : next_) ++next;
}

std::byte* Warp::at(const Instruction& instruction, int lane, std::size_t bytes, std::size_t alignment) {
  const std::uint64_t base = slot(instruction.operand[0])[lane];
  if (instruction.space == Space::global) {
    const std::uint64_t address = base + static_cast<std::uint64_t>(instruction.offset);
    if (address % alignment != 0) throw std::runtime_error("misaligned address");
    block_.memory.check(address, bytes);
    return reinterpret_cast<std::byte*>(address);
  }
  auto& memory = instruction.space == Space::shared ? block_.shared : block_.parameters;
  // An address in shared memory may be a register of 32 bits.
  const std::uint64_t address = static_cast<std::uint32_t>(base + static_cast<std::uint64_t>(instruction.offset));
  if (address % alignment != 0) throw std::runtime_error("misaligned address");
  if (address + bytes > memory.size()) throw std::out_of_range("outside of shared memory or parameters");
  return memory.data() + address;
}

Work run_grid(const Kernel& kernel, const Grid& grid, std::vector<std::byte> parameters, Memory& memory,
              bool descending) {
  std::vector<std::byte> shared(kernel.shared_bytes + grid.dynamic_shared);
  Block block{memory, parameters, shared};
  std::vector<Warp> warps;
  for (unsigned first = 0; first < grid.threads; first += kLanes) warps.emplace_back(kernel, block, first, grid);
  const unsigned blocks = grid.blocks_x * grid.blocks_y;
  Work work{0, 0};
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned b = descending ? blocks - 1 - i : i;
    std::fill(shared.begin(), shared.end(), kGarbage);
    for (Warp& warp : warps) warp.begin_block(b % grid.blocks_x, b / grid.blocks_x);
    for (;;) {
      int barrier = -1;
      for (Warp& warp : warps) {
        warp.run();
        if (warp.done()) continue;
        if (barrier >= 0 && barrier != warp.barrier()) {
          throw std::runtime_error(kernel.name + ": warps of a block wait at two barriers");
        }
        barrier = warp.barrier();
      }
      if (barrier < 0) break;
      for (Warp& warp : warps) warp.leave_barrier();
    }
    for (const Warp& warp : warps) work.longest = std::max(work.longest, warp.steps);
  }
  for (const Warp& warp : warps) work.instructions += warp.instructions;
  return work;
}

}  // namespace ptx
