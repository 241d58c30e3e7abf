// Sums of rows in their order, with the bits of torch's: 16-bit floats are summed in 32 bits and rounded once.
#pragma once
#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

enum Kind { F32, F64, BF16, F16, I8, I16, I32, I64, BOOL };

namespace sums {

constexpr int64_t LANES = 1 << 10;

INLINE float bits_to_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
INLINE uint32_t float_to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// Each has the type of an element in memory, the type of its sum, and the conversions; LIGHT if these are cheap.
template <class T> struct Plain {
    static constexpr bool LIGHT = true;
    typedef T Kept;
    typedef T Wide;
    static INLINE T widen(T x) { return x; }
    static INLINE T narrow(T x) { return x; }
};
struct Bool {
    static constexpr bool LIGHT = true;
    typedef uint8_t Kept;
    typedef uint32_t Wide;
    static INLINE uint32_t widen(uint8_t x) { return x; }
    static INLINE uint8_t narrow(uint32_t x) { return x != 0; }
};
struct Bfloat {
    static constexpr bool LIGHT = true;
    typedef uint16_t Kept;
    typedef float Wide;
    static INLINE float widen(uint16_t x) { return bits_to_float((uint32_t)x << 16); }
    static INLINE uint16_t narrow(float x) {
        const uint32_t bits = float_to_bits(x);
        const uint32_t even = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
        return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : even);
    }
};
struct Half {
    static constexpr bool LIGHT = false;
    typedef uint16_t Kept;
    typedef float Wide;
    static INLINE float widen(uint16_t x) {
        const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
        // The exponents differ by 112, so 2^112; infinities and NaN get the greatest exponent.
        const float scaled = bits_to_float(rest << 13) * 0x1p112f;
        const uint32_t bits = rest >= 0x7c00 ? (rest << 13 | 0x7f800000u) : float_to_bits(scaled);
        return bits_to_float(bits | sign);
    }
    static INLINE uint16_t narrow(float x) {
        const uint32_t word = float_to_bits(x), sign = word >> 16 & 0x8000, bits = word & 0x7fffffffu;
        // Below 2^-14 the sum with 0.5 has the ulp of half's subnormals, and so is rounded as they are.
        const uint32_t small = float_to_bits(bits_to_float(bits) + 0.5f) - 0x3f000000u;
        const uint32_t normal = (bits + 0xfffu + (bits >> 13 & 1) - 0x38000000u) >> 13;
        const uint32_t great = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
        return (uint16_t)(sign | (bits >= 0x47800000u ? great : bits < 0x38800000u ? small : normal));
    }
};

// Of K rows, in registers. `out` may be one of them: an element is written when it has been read.
template <class E, int K> INLINE void add_few(const uint8_t* const* rows, int64_t n, uint8_t* out) {
    typedef typename E::Kept Kept;
    typedef typename E::Wide Wide;
    const Kept *a = (const Kept*)rows[0], *b = (const Kept*)rows[1];
    const Kept *c = (const Kept*)rows[K > 2 ? 2 : 0], *d = (const Kept*)rows[K > 3 ? 3 : 0];
    Kept* into = (Kept*)out;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) {
        Wide total = (Wide)(E::widen(a[j]) + E::widen(b[j]));
        if (K > 2) total = (Wide)(total + E::widen(c[j]));
        if (K > 3) total = (Wide)(total + E::widen(d[j]));
        into[j] = E::narrow(total);
    }
}

template <class E> INLINE void add_rows(const uint8_t* const* rows, int64_t k, int64_t bytes, uint8_t* out) {
    typedef typename E::Kept Kept;
    typedef typename E::Wide Wide;
    const int64_t n = bytes / (int64_t)sizeof(Kept);
    if (E::LIGHT && k == 2) return add_few<E, 2>(rows, n, out);
    if (E::LIGHT && k == 3) return add_few<E, 3>(rows, n, out);
    if (E::LIGHT && k == 4) return add_few<E, 4>(rows, n, out);
    Wide total[LANES];
    for (int64_t lo = 0; lo < n; lo += LANES) {
        const int64_t num = n - lo < LANES ? n - lo : LANES;
        const Kept* row = (const Kept*)rows[0] + lo;
        for (int64_t j = 0; j < num; ++j) total[j] = E::widen(row[j]);
        for (int64_t i = 1; i < k; ++i) {
            // Row by row: else the compiler joins several turns, and then does one element after the other.
            asm volatile("" ::: "memory");
            row = (const Kept*)rows[i] + lo;
            for (int64_t j = 0; j < num; ++j) total[j] = (Wide)(total[j] + E::widen(row[j]));
        }
        Kept* into = (Kept*)out + lo;  // written last: it may be one of the rows
        for (int64_t j = 0; j < num; ++j) into[j] = E::narrow(total[j]);
    }
}

}  // namespace sums

extern "C" inline void sum_rows(int64_t kind, const uint8_t* const* rows, int64_t k, int64_t bytes,
                                       uint8_t* out) {
    using namespace sums;
    switch (kind) {
        case F32: return add_rows<Plain<float>>(rows, k, bytes, out);
        case F64: return add_rows<Plain<double>>(rows, k, bytes, out);
        case BF16: return add_rows<Bfloat>(rows, k, bytes, out);
        case F16: return add_rows<Half>(rows, k, bytes, out);
        case I8: return add_rows<Plain<uint8_t>>(rows, k, bytes, out);
        case I16: return add_rows<Plain<uint16_t>>(rows, k, bytes, out);
        case I32: return add_rows<Plain<uint32_t>>(rows, k, bytes, out);
        case I64: return add_rows<Plain<uint64_t>>(rows, k, bytes, out);
        case BOOL: return add_rows<Bool>(rows, k, bytes, out);
    }
}
