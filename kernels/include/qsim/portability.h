// Marks for functions that g++ and nvcc both compile.
//
// QSIM_HD functions are inlined into every caller: a shared out-of-line copy compiled for AVX-512 could be the one
// the linker picks for every instruction-set level.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define QSIM_HD __host__ __device__ __forceinline__
#else
#define QSIM_HD inline __attribute__((always_inline))
#endif
