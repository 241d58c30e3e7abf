// Vectors of float for several generations of processors, and functions of them with the same bits on all.
//
// Sources that include it are built with -ffp-contract=fast: where the generation has fused multiply-adds, `fused` is
// one by contraction. So nowhere else may the result of a multiplication be added to something, unless it is exact.
#pragma once
#include <atomic>
#include <cmath>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define GENERATIONS 3
#define V4 __attribute__((target("arch=x86-64-v4")))
#define V3 __attribute__((target("arch=x86-64-v3")))
#else
#define GENERATIONS 1
#endif

namespace {

template <int BYTES>
struct Vec;
#define VECTORS(BYTES)                                                                        \
    template <>                                                                               \
    struct Vec<BYTES> {                                                                       \
        typedef float V __attribute__((vector_size(BYTES), aligned(4), may_alias));           \
        typedef int32_t Int __attribute__((vector_size(BYTES), aligned(4), may_alias));       \
        typedef uint32_t Word __attribute__((vector_size(BYTES), aligned(4), may_alias));     \
        typedef uint16_t Half __attribute__((vector_size(BYTES / 2), aligned(2), may_alias)); \
        static constexpr int lanes = BYTES / 4;                                               \
    };
VECTORS(16)
VECTORS(32)
VECTORS(64)

template <int BYTES>
INLINE typename Vec<BYTES>::V load(const float* p) {
    return *(const typename Vec<BYTES>::V*)p;
}

template <int BYTES>
INLINE void store(float* p, typename Vec<BYTES>::V x) {
    *(typename Vec<BYTES>::V*)p = x;
}

// x in all lanes; a difference, which the compiler drops, as -0 - 0 is -0.
template <int BYTES>
INLINE typename Vec<BYTES>::V all(float x) {
    return x - typename Vec<BYTES>::V{};
}

// a * b + c, rounded once: by contraction, or element by element where the processor may lack it.
template <int BYTES, bool FUSES>
INLINE typename Vec<BYTES>::V fused(typename Vec<BYTES>::V a, typename Vec<BYTES>::V b, typename Vec<BYTES>::V c) {
    if (FUSES) return a * b + c;
    for (int i = 0; i < Vec<BYTES>::lanes; ++i) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
}

// e^x as in `_exponential.py`: 0 below -87, infinity above the largest number, NaN of NaN.
template <int BYTES, bool FUSES>
INLINE typename Vec<BYTES>::V exponential(typename Vec<BYTES>::V x) {
    typedef typename Vec<BYTES>::V V;
    typedef typename Vec<BYTES>::Int Int;
    const V given = x;
    x = x < -87.0f ? all<BYTES>(-87.0f) : x;
    x = x > 89.0f ? all<BYTES>(89.0f) : x;
    const V shifted = fused<BYTES, FUSES>(x, all<BYTES>(1.44269504f), all<BYTES>(12582912.0f)), n = shifted - 12582912.0f;
    V r = fused<BYTES, FUSES>(n, all<BYTES>(-0.693145751953125f), x);
    r = fused<BYTES, FUSES>(n, all<BYTES>(-1.42860677e-6f), r);
    constexpr float terms[] = {1.39819995e-3f, 8.33345205e-3f, 4.16657962e-2f, 0.166666657f, 0.5f, 1.0f, 1.0f};
    V y = all<BYTES>(1.98756912e-4f);
    UNROLL
    for (int i = 0; i < 7; ++i) y = fused<BYTES, FUSES>(y, r, all<BYTES>(terms[i]));
    const Int whole = (Int)shifted - 0x4b400000, half = whole >> 1;
    y = y * (V)((half + 127) << 23) * (V)((whole - half + 127) << 23);  // two factors: 2^128 is no float
    return given < -87.0f ? V{} : y;
}

// run(part) for each of `parts` parts, by at most `threads` threads.
template <typename Run>
void share(int64_t parts, int64_t threads, Run run) {
    std::atomic<int64_t> next(0);
    auto work = [&] {
        for (int64_t part; (part = next++) < parts;) run(part);
    };
    std::vector<std::thread> others;
    try {
        for (int64_t t = 1; t < threads && t < parts; ++t) others.emplace_back(work);
    } catch (const std::exception&) {  // the system gives no more threads: those that there are take all parts
    }
    work();
    for (auto& other : others) other.join();
}

}  // namespace
