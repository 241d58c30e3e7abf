// The generation of x86-64 that a file is compiled for, by the flags of the compiler: 4, 3 or 1. It is 0 for other
// processors and other compilers.
#pragma once
#include <cstdint>

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#if !defined(__x86_64__) || !defined(__GNUC__) || defined(__clang__) || __GNUC__ < 12
#define GENERATION 0
#elif defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define GENERATION 4
#elif defined(__AVX2__) && defined(__FMA__)
#define GENERATION 3
#else
#define GENERATION 1
#endif

// The bytes of a vector, and whether the processor has fused multiply-adds for sure.
constexpr int WIDTH = GENERATION == 4 ? 64 : GENERATION == 3 ? 32 : 16;
constexpr bool FUSED = GENERATION >= 3;
