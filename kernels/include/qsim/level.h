// Instruction-set levels: which exist, which this processor can run, which is in use.
//
// A kernel file is compiled once per level and defines, in namespace qsim::cpu::QSIM_LEVEL, one constant table of
// functions. QSIM_LEVEL_TABLES(Table, name) in its header declares them and the accessor `name(Level)`:
//
//   struct ChooseQparamsKernels { void (*f32)(...); };
//   QSIM_LEVEL_TABLES(ChooseQparamsKernels, choose_qparams_kernels)  // cpu::choose_qparams_kernels().f32(...)
#pragma once

#include <string_view>

namespace qsim::cpu {

enum class Level { baseline, avx2, avx512 };  // x86-64-v2, -v3, -v4; elsewhere only baseline

bool supported(Level level);            // by this processor and this build
std::string_view name_of(Level level);  // "default", "avx2", "avx512": the values of QSIM_CPU_CAPABILITY

// The level in use: the best supported one, or what QSIM_CPU_CAPABILITY names (read once, at the first call).
// Throws std::runtime_error when the variable names an unknown or unsupported level.
Level level();

}  // namespace qsim::cpu

#if defined(__x86_64__)
#define QSIM_LEVEL_TABLES(Table, name)                                               \
  namespace v2 {                                                                     \
  extern const Table name;                                                           \
  }                                                                                  \
  namespace v3 {                                                                     \
  extern const Table name;                                                           \
  }                                                                                  \
  namespace v4 {                                                                     \
  extern const Table name;                                                           \
  }                                                                                  \
  [[maybe_unused]] static inline const Table& name(Level at = level()) {             \
    return at == Level::avx512 ? v4::name : at == Level::avx2 ? v3::name : v2::name; \
  }
#else
#define QSIM_LEVEL_TABLES(Table, name) \
  namespace base {                     \
  extern const Table name;             \
  }                                    \
  [[maybe_unused]] static inline const Table& name(Level = level()) { return base::name; }
#endif
