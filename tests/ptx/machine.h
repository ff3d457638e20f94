// Runs a grid of a decoded kernel: block after block, each warp until it waits for the others.
//
// Lanes of a warp that stand at the lowest instruction go first, so that they meet again. Every load and store is
// checked against the allocations and for its alignment; shared memory begins with garbage.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "program.h"

namespace ptx {

// Device memory: addresses are the host's.
class Memory {
 public:
  void* allocate(std::size_t bytes);
  void free(void* memory);
  // Throws where [address, address + bytes) is not of one allocation.
  void check(std::uint64_t address, std::size_t bytes);
  // What all of it holds, and holds again.
  std::vector<std::byte> contents() const;
  void restore(const std::vector<std::byte>& contents);

 private:
  std::map<std::uint64_t, std::pair<std::uint64_t, std::unique_ptr<std::byte[]>>> regions_;  // by address: end, memory
  std::uint64_t begin_ = 1, end_ = 0;  // the region of the last check
};

struct Grid {
  unsigned blocks_x, blocks_y, threads;
  std::size_t dynamic_shared;
};

struct Block {
  Memory& memory;
  std::vector<std::byte>&parameters, &shared;
};

class Warp {
 public:
  Warp(const Kernel& kernel, Block& block, unsigned first_thread, const Grid& grid);

  void begin_block(unsigned x, unsigned y);
  // Until every lane has ended or waits at a barrier. Throws where lanes wait for each other.
  void run();
  bool done() const { return alive_ == 0; }
  int barrier() const { return lowest(alive_); }  // the instruction it waits at
  void leave_barrier();

  std::uint64_t* slot(int index) { return registers_.data() + static_cast<std::size_t>(index) * kLanes; }
  // Where an instruction of memory may read or write for a lane.
  std::byte* at(const Instruction& instruction, int lane, std::size_t bytes, std::size_t alignment);

  unsigned active = 0;             // the lanes that an operation is for
  std::uint64_t instructions = 0;  // of all its lanes
  std::uint64_t steps = 0;         // that it took in this block, one after the other

 private:
  int lowest(unsigned lanes, int from = 0) const;  // place, of those from `from` on
  unsigned lanes_at(int place, unsigned among) const;
  bool may_go(int place, unsigned group);
  void stretch(int place, unsigned group);
  void fill(int slot, std::uint64_t value);

  const Kernel& kernel_;
  Block& block_;
  unsigned threads_;
  std::vector<std::uint64_t> registers_;
  std::array<int, kLanes> next_{};
  unsigned alive_ = 0;
};

struct Work {
  std::uint64_t instructions;  // of all threads
  std::uint64_t longest;       // steps of the warp that took most
};

// Blocks go in order, or from the last to the first.
Work run_grid(const Kernel& kernel, const Grid& grid, std::vector<std::byte> parameters, Memory& memory,
              bool descending);

}  // namespace ptx
