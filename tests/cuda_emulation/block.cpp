// Runs a grid: blocks one after the other (or on two operating-system threads), the threads of a block as fibers that
// take turns at collectives.
#include <sanitizer/asan_interface.h>

#include <array>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

constinit thread_local uint3 threadIdx, blockIdx;
constinit thread_local dim3 blockDim, gridDim;

namespace qsim::cuda {
inline constexpr std::size_t kMostShared = 227 * 1024, kGuard = 64;           // the most that a block of sm_90 has
alignas(16) thread_local unsigned char dynamic_shared[kMostShared + kGuard];  // kernels/cuda/launch.cuh declares it
}  // namespace qsim::cuda

// Saves what a call preserves, notes where in *from, and continues where `to` was left. (swapcontext makes two system
// calls: a hundred times slower, and a shuffle is a switch for every lane.)
extern "C" void emulation_switch(void** from, void* to);
asm(R"(
  .text
  .type emulation_switch, @function
emulation_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
  .size emulation_switch, .-emulation_switch
)");

namespace emulation {
namespace {

constexpr std::size_t kStackBytes = 128 * 1024;
constexpr unsigned kWarp = 32;

enum class State { ready, in_warp, in_block, done };

using Stack = std::array<unsigned char, kStackBytes>;

// Kept from launch to launch: to map a thousand stacks anew takes longer than most kernels do.
class Stacks {
 public:
  std::unique_ptr<Stack> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::unique_ptr<Stack>(new Stack);
    std::unique_ptr<Stack> stack = std::move(free_.back());
    free_.pop_back();
    return stack;
  }
  void give_back(std::unique_ptr<Stack> stack) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(stack));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Stack>> free_;
} stacks;

struct Fiber {
  Fiber() : stack(stacks.take()), top(stack->end()) {}
  ~Fiber() {
    unpoison();
    stacks.give_back(std::move(stack));
  }
  Fiber(const Fiber&) = delete;

  // The frames from `top` on never return: AddressSanitizer would go on guarding their surroundings.
  void unpoison() {
    const auto* from = static_cast<unsigned char*>(top);
    ASAN_UNPOISON_MEMORY_REGION(from, static_cast<std::size_t>(stack->end() - from));
  }

  std::unique_ptr<Stack> stack;
  void* top;  // where its stack goes on
  uint3 index = {};
  State state = State::ready;
  const char* waits_for = "";
  Where where;
  unsigned mask = 0;
  std::uint64_t value = 0;
  int source = 0;
  Gathered gathered = {};
};

bool same_place(const Fiber& a, const Fiber& b) {
  return a.where.line() == b.where.line() && a.where.column() == b.where.column() &&
         std::string_view(a.where.file_name()) == b.where.file_name();
}

std::string described(const Fiber& fiber) {
  std::ostringstream text;
  text << "thread (" << fiber.index.x << ", " << fiber.index.y << ", " << fiber.index.z << ") of block (" << blockIdx.x
       << ", " << blockIdx.y << ", " << blockIdx.z << ") ";
  if (fiber.state == State::done) {
    text << "has returned";
  } else {
    text << "waits in " << fiber.waits_for << " at " << fiber.where.file_name() << ":" << fiber.where.line();
  }
  return text.str();
}

[[noreturn]] void fail(const std::string& what, const Fiber& a, const Fiber& b) {
  throw std::runtime_error(what + ": " + described(a) + ", " + described(b));
}

class Block {
 public:
  Block(unsigned threads, const std::function<void()>& body, bool backwards)
      : fibers_(threads), body_(body), backwards_(backwards) {
    current = this;
  }
  ~Block() { current = nullptr; }
  Block(const Block&) = delete;

  void run() {
    for (unsigned i = 0; i < fibers_.size(); ++i) start(fibers_[i], i);
    do {
      for (std::size_t i = 0; i < fibers_.size(); ++i) {
        Fiber& fiber = fibers_[backwards_ ? fibers_.size() - 1 - i : i];
        if (fiber.state == State::ready) resume(fiber);
      }
    } while (released());
  }

  void wait(State state, const char* name, Where where) {
    running_->state = state;
    running_->waits_for = name;
    running_->where = where;
    emulation_switch(&running_->top, scheduler_);
  }

  Fiber& running() { return *running_; }
  int lane() const { return static_cast<int>(running_ - fibers_.data()) % kWarp; }

  static thread_local Block* current;

 private:
  static void enter() {
    current->body_();
    current->wait(State::done, "", {});
    std::abort();  // nobody resumes a fiber that is done
  }

  void start(Fiber& fiber, unsigned rank) {
    fiber.index = {rank % blockDim.x, rank / blockDim.x % blockDim.y, rank / blockDim.x / blockDim.y};
    fiber.state = State::ready;
    fiber.unpoison();
    // what emulation_switch pops: six registers, then the address to return to, with the stack aligned as after a call
    auto** top = reinterpret_cast<void**>(fiber.stack->end());
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&Block::enter);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fiber.top = top;
  }

  void resume(Fiber& fiber) {
    running_ = &fiber;
    threadIdx = fiber.index;
    emulation_switch(&scheduler_, fiber.top);
  }

  // No fiber can run: lets those go whose collective is complete. False when all are done; throws when none can go on.
  bool released() {
    const Fiber *waiting = nullptr, *at_barrier = nullptr;
    bool any = false;
    for (Fiber& fiber : fibers_) {
      if (fiber.state == State::in_warp) {
        waiting = &fiber;
        any |= release_lanes(fiber);
      } else if (fiber.state == State::in_block) {
        at_barrier = &fiber;
      }
    }
    if (any || (waiting == nullptr && at_barrier == nullptr)) return any;
    if (waiting != nullptr) fail("deadlock", *waiting, missing(*waiting));
    for (Fiber& fiber : fibers_) {
      if (fiber.state == State::done) continue;
      if (!same_place(fiber, *at_barrier)) fail("a barrier in diverging code", fiber, *at_barrier);
      fiber.state = State::ready;
    }
    return true;
  }

  Fiber* warp_of(const Fiber& fiber) { return &fibers_[(&fiber - fibers_.data()) / kWarp * kWarp]; }
  unsigned lanes_of(const Fiber* warp) const {  // of the last warp of a block there may be fewer
    const auto count = static_cast<unsigned>(fibers_.data() + fibers_.size() - warp);
    return count >= kWarp ? ~0u : (1u << count) - 1;
  }

  static bool meets(const Fiber& a, const Fiber& b) {
    return b.state == State::in_warp && b.mask == a.mask && same_place(a, b);
  }

  const Fiber& missing(const Fiber& fiber) {
    const Fiber* warp = warp_of(fiber);
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (fiber.mask & lanes_of(warp) & 1u << lane && !meets(fiber, warp[lane])) return warp[lane];
    }
    return fiber;
  }

  bool release_lanes(const Fiber& first) {
    Fiber* warp = warp_of(first);
    const unsigned mask = first.mask & lanes_of(warp);
    if (!(mask >> (&first - warp) & 1)) fail("a lane outside its own mask", first, first);
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (!(mask >> lane & 1)) continue;
      if (warp[lane].state == State::done) fail("a lane of the mask is gone", first, warp[lane]);
      if (!meets(first, warp[lane])) return false;
      ballot |= (warp[lane].value != 0 ? 1u : 0u) << lane;
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (!(mask >> lane & 1)) continue;
      Fiber& fiber = warp[lane];
      if (!(mask >> fiber.source & 1)) fail("a shuffle from a lane that takes no part", fiber, fiber);
      fiber.gathered = {warp[fiber.source].value, ballot};
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (mask >> lane & 1) warp[lane].state = State::ready;
    }
    return true;
  }

  std::vector<Fiber> fibers_;
  const std::function<void()>& body_;
  bool backwards_;
  Fiber* running_ = nullptr;
  void* scheduler_ = nullptr;
};

thread_local Block* Block::current = nullptr;

// QSIM_EMULATION_ORDER: "descending" runs blocks and threads backwards, "concurrent" two blocks at a time.
std::string_view order() {
  const char* named = std::getenv("QSIM_EMULATION_ORDER");
  return named == nullptr ? "ascending" : named;
}

// Blocks first, first + step, ... of the grid, on the calling operating-system thread.
void run_blocks(const cudaLaunchConfig_t& config, const std::function<void()>& body, std::uint64_t first,
                std::uint64_t step) {
  const dim3 grid = config.gridDim, threads = config.blockDim;
  const std::uint64_t count = std::uint64_t{grid.x} * grid.y * grid.z;
  const bool backwards = order() == "descending";
  Block block(threads.x * threads.y * threads.z, body, backwards);
  blockDim = threads;
  gridDim = grid;
  for (std::uint64_t i = first; i < count; i += step) {
    const std::uint64_t rank = backwards ? count - 1 - i : i;
    blockIdx = {static_cast<unsigned>(rank % grid.x), static_cast<unsigned>(rank / grid.x % grid.y),
                static_cast<unsigned>(rank / grid.x / grid.y)};
    std::memset(qsim::cuda::dynamic_shared, 0xa5, config.dynamicSmemBytes + qsim::cuda::kGuard);
    block.run();
    for (std::size_t i = 0; i < qsim::cuda::kGuard; ++i) {
      if (qsim::cuda::dynamic_shared[config.dynamicSmemBytes + i] != 0xa5) {
        throw std::runtime_error("a write beyond dynamic shared memory");
      }
    }
  }
}

std::map<const void*, std::size_t>& allowed_shared() {
  static std::map<const void*, std::size_t> bytes;
  return bytes;
}

}  // namespace

void barrier(Where where) { Block::current->wait(State::in_block, "__syncthreads", where); }

Gathered gather(const char* name, unsigned mask, std::uint64_t value, int source, Where where) {
  Fiber& fiber = Block::current->running();
  fiber.mask = mask;
  fiber.value = value;
  fiber.source = source;
  Block::current->wait(State::in_warp, name, where);
  return fiber.gathered;
}

int lane() { return Block::current->lane(); }

cudaError_t allow_shared_memory(const void* kernel, int bytes) {
  if (bytes < 0 || static_cast<std::size_t>(bytes) > qsim::cuda::kMostShared) return cudaErrorInvalidValue;
  allowed_shared()[kernel] = static_cast<std::size_t>(bytes);
  return cudaSuccess;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, const std::function<void()>& body) {
  const dim3 grid = config.gridDim, threads = config.blockDim;
  const std::uint64_t in_block = std::uint64_t{threads.x} * threads.y * threads.z;
  const std::size_t allowed = std::max<std::size_t>(48 * 1024, allowed_shared()[kernel]);
  if (in_block == 0 || in_block > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0)
    return cudaErrorInvalidConfiguration;
  if (grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535) return cudaErrorInvalidConfiguration;
  if (config.dynamicSmemBytes > allowed) return cudaErrorInvalidValue;
  if (order() != "concurrent") {
    run_blocks(config, body, 0, 1);
    return cudaSuccess;
  }
  std::array<std::exception_ptr, 2> errors;
  std::array<std::thread, 2> workers;
  for (std::size_t i = 0; i < workers.size(); ++i) {
    workers[i] = std::thread([&, i] {
      try {
        run_blocks(config, body, i, workers.size());
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return cudaSuccess;
}

}  // namespace emulation
