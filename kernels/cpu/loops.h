// What the per-level loops share. Everything has internal linkage: see scripts/audit_levels.sh.
#pragma once

// Iterations are independent although the pointers may be equal (in-place calls): no run-time overlap check, which
// would send equal pointers to the scalar loop.
#if defined(__clang__)
#define QSIM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__SANITIZE_ADDRESS__)
#define QSIM_INDEPENDENT  // checks may leave GCC no loop to annotate, of which it warns
#else
#define QSIM_INDEPENDENT _Pragma("GCC ivdep")
#endif
