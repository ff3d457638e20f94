// Whether the processor had to round a result below the smallest normal number.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace qsim::cpu {
namespace {

// Watches from construction on. Keep the computation in a function that is not inlined: the compiler may move
// arithmetic past a reading of the status register.
class UnderflowWatch {
 public:
#if defined(__SSE2__)
  UnderflowWatch() {
    if (seen()) _mm_setcsr(_mm_getcsr() & ~kUnderflow);  // reading is cheaper than writing
  }
  bool seen() const { return (_mm_getcsr() & kUnderflow) != 0; }

 private:
  static constexpr unsigned kUnderflow = _MM_EXCEPT_UNDERFLOW;
#else
  UnderflowWatch() { std::feclearexcept(FE_UNDERFLOW); }
  bool seen() const { return std::fetestexcept(FE_UNDERFLOW) != 0; }
#endif
};

}  // namespace
}  // namespace qsim::cpu
