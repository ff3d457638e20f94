// Picks the instruction-set level once, at the first call of any kernel.
#include "qsim/level.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace qsim::cpu {

namespace {

constexpr Level kLevels[] = {Level::avx512, Level::avx2, Level::baseline};  // best first

Level choose() {
  const char* forced = std::getenv("QSIM_CPU_CAPABILITY");
  for (Level level : kLevels) {
    if (forced == nullptr || *forced == '\0') {
      if (supported(level)) return level;
    } else if (name_of(level) == forced) {
      if (supported(level)) return level;
      throw std::runtime_error(
          "QSIM_CPU_CAPABILITY=" + std::string(forced) +
          ": this processor or build does not support it; unset the variable or choose a lower level");
    }
  }
  throw std::runtime_error("QSIM_CPU_CAPABILITY=" + std::string(forced) + ": expected default, avx2 or avx512");
}

}  // namespace

bool supported(Level level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  switch (level) {  // the features of x86-64-v3 and -v4 (clang does not accept those names here)
    case Level::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && supported(Level::avx2);
    case Level::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
             __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("lzcnt") &&
             __builtin_cpu_supports("movbe");
    case Level::baseline:
      return true;
  }
  return false;
#else
  return level == Level::baseline;
#endif
}

std::string_view name_of(Level level) {
  return level == Level::avx512 ? "avx512" : level == Level::avx2 ? "avx2" : "default";
}

Level level() {
  static const Level chosen = choose();
  return chosen;
}

}  // namespace qsim::cpu
