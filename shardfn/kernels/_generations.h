// Code for several generations of processors, of which a call takes the newest that the processor has.
#pragma once
#include <cstdint>

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define GENERATIONS 3
#define V4 __attribute__((target("arch=x86-64-v4")))
#define V3 __attribute__((target("arch=x86-64-v3")))
// Their declarations make the compiler know the instructions that templates name.
V4 void declares_instructions_of_v4();
V3 void declares_instructions_of_v3();
#else
#define GENERATIONS 1
#endif

#if GENERATIONS == 3
// Of the forms of a function, the one for the newest generation of x86-64 that the processor has, up to `newest`.
template <typename F>
F form_of(int64_t newest, F v4, F v3, F any) {
    __builtin_cpu_init();
    if (newest >= 4 && __builtin_cpu_supports("x86-64-v4")) return v4;
    return newest >= 3 && __builtin_cpu_supports("x86-64-v3") ? v3 : any;
}
#endif
