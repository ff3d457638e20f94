// How many instructions a call executes: the processor's trap flag raises SIGTRAP after each. Needs no counters, no
// privileges and no tool; costs some microseconds an instruction.
#pragma once

#if !defined(__x86_64__) || !defined(__linux__)
#error "instructions are counted with the x86 trap flag on Linux"
#endif

#include <signal.h>
#include <x86intrin.h>

namespace counting {

inline volatile sig_atomic_t instructions = 0;

}  // namespace counting

template <class Call>
long instructions_of(Call call) {
  constexpr unsigned long long kTrapFlag = 1 << 8;
  struct sigaction count{}, before{};
  count.sa_handler = [](int) { counting::instructions = counting::instructions + 1; };
  sigaction(SIGTRAP, &count, &before);
  counting::instructions = 0;
  __writeeflags(__readeflags() | kTrapFlag);
  call();
  __writeeflags(__readeflags() & ~kTrapFlag);
  sigaction(SIGTRAP, &before, nullptr);
  return counting::instructions;
}
