// Subnormals are ordinary numbers in every operator (docs/numerics.md, section 1), also for callers who have told the
// processor otherwise: torch.set_flush_denormal sets a mode of the calling thread, which threads inherit when they
// start.
#pragma once

#include <ATen/Parallel.h>

#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace qsim {

// Subnormals are kept while it lives.
class KeepSubnormals {
 public:
  KeepSubnormals() : found_(mode()) {
    if (found_ & kFlush) set_mode(found_ & ~kFlush);
  }
  ~KeepSubnormals() {
    if (found_ & kFlush) set_mode(found_);
  }
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;

 private:
#if defined(__SSE2__)
  using Mode = unsigned;
  static constexpr Mode kFlush = 0x8040;  // of MXCSR: results to zero, operands to zero
  static Mode mode() { return _mm_getcsr(); }
  static void set_mode(Mode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  using Mode = std::uint64_t;
  static constexpr Mode kFlush = 1 << 24;  // of FPCR: operands and results
  static Mode mode() {
    Mode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set_mode(Mode mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
  using Mode = unsigned;
  static constexpr Mode kFlush = 0;
  static Mode mode() { return 0; }
  static void set_mode(Mode) {}
#endif

  Mode found_;
};

// at::parallel_for, with subnormals kept in every thread.
template <class Run>
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain, const Run& run) {
  at::parallel_for(begin, end, grain, [&](std::int64_t first, std::int64_t last) {
    const KeepSubnormals guard;
    run(first, last);
  });
}

}  // namespace qsim
