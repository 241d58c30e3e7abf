// Vectors of float32 in the width of a generation of processors. Products and sums are fused only where `fused` fuses
// them, so that each operation is rounded once, and every generation has the same bits: compile with -ffp-contract=off.
// `Here` is the generation that a file is compiled for.
#pragma once
#include <cmath>
#include <cstdint>
#include <utility>

#include "_generations.h"

template <int BYTES>
struct Vec {
    typedef float V __attribute__((vector_size(BYTES), aligned(4), may_alias));
    typedef int32_t Int __attribute__((vector_size(BYTES), aligned(4), may_alias));
    typedef uint16_t Half __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
    static constexpr int lanes = BYTES / 4;
};

// A generation: its vectors, the rows of a block, and the vectors of a row, that fill its registers.
struct Any : Vec<16> {
    static constexpr int rows = 2, columns = 2;
    static INLINE V fused(V a, V b, V c) {
        for (int i = 0; i < lanes; ++i) c[i] = std::fma(a[i], b[i], c[i]);
        return c;
    }
};
#if GENERATION == 3
struct Avx2 : Vec<32> {
    static constexpr int rows = 6, columns = 2;
    static INLINE V fused(V a, V b, V c) { return __builtin_ia32_vfmaddps256(a, b, c); }
};
using Here = Avx2;
#elif GENERATION == 4
struct Avx512 : Vec<64> {
    static constexpr int rows = 6, columns = 4;
    static INLINE V fused(V a, V b, V c) { return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4); }
};
using Here = Avx512;
#else
using Here = Any;
#endif

template <class L>
INLINE typename L::V load(const float* p) { return *(const typename L::V*)p; }

template <class L>
INLINE typename L::V load(const uint16_t* p) {  // bfloat16
    return (typename L::V)(__builtin_convertvector(*(const typename L::Half*)p, typename L::Int) << 16);
}

template <class L>
INLINE void store(float* p, typename L::V x) { *(typename L::V*)p = x; }

// A vector of equal elements. A function that returned it would make them one by one.
#define ALL(x) ((x) - typename L::V{})

template <class L, int... AT>
INLINE typename L::V picked(typename L::V a, typename L::V b, std::integer_sequence<int, AT...>) {
#if GENERATION
    return __builtin_shufflevector(a, b, AT...);
#else
    const int at[] = {AT...};
    typename L::V out;
    for (int i = 0; i < L::lanes; ++i) out[i] = at[i] < L::lanes ? a[at[i]] : b[at[i] - L::lanes];
    return out;
#endif
}

// Lane i of the first (high = 0) or second halves of the parts of a and b; parts have 2 half lanes.
constexpr int half_at(int lanes, int half, int high, int i) {
    const int source = half >= 4 ? i / (lanes / 2) : i % 4 / 2;
    const int j = half >= 4 ? i % (lanes / 2) : i % 2;
    const int part = half >= 4 ? j / half * 2 * half + j % half : i / 4 * 4 + j * (half == 1 ? 2 : 1);
    return source * lanes + part + high * half;
}

template <class L, int HALF, int HIGH, int... I>
INLINE typename L::V halves(typename L::V a, typename L::V b, std::integer_sequence<int, I...>) {
    return picked<L>(a, b, std::integer_sequence<int, half_at(L::lanes, HALF, HIGH, I)...>());
}

template <class L, int HALF, int HIGH>
INLINE typename L::V halves(typename L::V a, typename L::V b) {
    return halves<L, HALF, HIGH>(a, b, std::make_integer_sequence<int, L::lanes>());
}

// The place among L::lanes vectors at which the two functions below expect that of lane i of their results.
template <class L>
constexpr int place_of(int i) { return i % 4 * (L::lanes / 4) + i / 4; }

// The sum of each vector by halving: its second half is added to its first, and so on. Overwrites x.
template <class L, int HALF = L::lanes / 2>
INLINE typename L::V sums_of(typename L::V* x) {
    UNROLL
    for (int i = 0; i < HALF; ++i) x[i] = halves<L, HALF, 0>(x[2 * i], x[2 * i + 1]) + halves<L, HALF, 1>(x[2 * i], x[2 * i + 1]);
    if constexpr (HALF > 1) return sums_of<L, HALF / 2>(x);
    return x[0];
}

// Rows become columns: out[i] has lane i of every vector. Overwrites x.
template <class L, int HALF = L::lanes / 2>
INLINE void transpose(typename L::V* x, typename L::V* out) {
    typename L::V low[HALF], high[HALF];
    UNROLL
    for (int i = 0; i < HALF; ++i) {
        low[i] = halves<L, HALF, 0>(x[2 * i], x[2 * i + 1]);
        high[i] = halves<L, HALF, 1>(x[2 * i], x[2 * i + 1]);
    }
    if constexpr (HALF > 1) {
        transpose<L, HALF / 2>(low, out);
        transpose<L, HALF / 2>(high, out + HALF);
    } else {
        out[0] = low[0];
        out[1] = high[0];
    }
}

template <class L, int HALF, int... I>
INLINE typename L::V turned(typename L::V x, std::integer_sequence<int, I...>) {
    return picked<L>(x, x, std::integer_sequence<int, (I + HALF) % L::lanes...>());
}

template <class L, int HALF = L::lanes / 2>
INLINE float largest(typename L::V x) {
    const typename L::V other = turned<L, HALF>(x, std::make_integer_sequence<int, L::lanes>());
    x = other > x ? other : x;
    if constexpr (HALF > 1) return largest<L, HALF / 2>(x);
    return x[0];
}

// e^x of x <= 0, as in _exponential.py; 0 below -87, so that results are normal numbers.
template <class L>
INLINE typename L::V exponential(typename L::V x) {
    typedef typename L::V V;
    const V magic = ALL(12582912.0f);
    const V t = L::fused(x, ALL(1.4426950408889634f), magic), n = t - magic;
    const V r = L::fused(n, ALL(1.904654299957768e-09f), L::fused(n, ALL(-0.693147182464599609375f), x));
    const float terms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f};
    V y = ALL(1.9875691500e-4f);
    UNROLL
    for (int i = 0; i < 7; ++i) y = L::fused(y, r, ALL(terms[i]));
    const V power = (V)(((typename L::Int)t << 23) + 0x3F800000);
    return x < -87.0f ? V{} : y * power;
}
