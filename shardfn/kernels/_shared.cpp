// What numpy would pass over memory several times for, in one pass. Every sum has the order of `_sums.py`, every
// operation rounds as the reference's does (build with -ffp-contract=off), so that the bits are the same.
#include <algorithm>
#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int64_t LANES = 1 << 10, SPAN = 1 << 18;
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(32), aligned(4), may_alias));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t num_codes(int64_t c, int64_t bits) { return bits == 8 ? c : (c + 1) / 2; }

// codes of one block, num <= LANES at a time
INLINE void encode(const float* x, int64_t num, float factor, int32_t half, uint8_t* codes) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number, ties to even
    int8_t whole[LANES];
    for (int64_t j = 0; j < num; ++j) {
        int32_t value = (int32_t)((x[j] * factor + magic) - magic);
        value = value < -half ? -half : value;
        whole[j] = (int8_t)(value > half - 1 ? half - 1 : value);
    }
    if (half == 128) {
        std::memcpy(codes, whole, num);
        return;
    }
    if (num % 2) whole[num] = 0;
    for (int64_t j = 0; j < (num + 1) / 2; ++j) codes[j] = (uint8_t)(whole[2 * j] << 4 | (whole[2 * j + 1] & 15));
}

INLINE void quantize_block(const float* x, int64_t num, int64_t bits, uint8_t* codes, float* scale) {
    uint32_t top = 0;  // the order of positive floats is that of their bits, and NaN is above them
    for (int64_t j = 0; j < num; ++j) {
        uint32_t word;
        std::memcpy(&word, x + j, 4);
        word &= 0x7fffffffu;
        top = word > top ? word : top;
    }
    float most;
    std::memcpy(&most, &top, 4);
    const float half = bits == 8 ? 128.0f : 8.0f;
    const bool small = most < 0x1p-110f;
    *scale = small ? 1.0f : most / half;  // as most * 2^(1-bits): both are exact
    if (top >= 0x7f800000u) {
        std::memset(codes, 0, num_codes(num, bits));
        return;
    }
    for (int64_t lo = 0; lo < num; lo += LANES)
        encode(x + lo, least(LANES, num - lo), small ? 1.0f : half / most, (int32_t)half, codes + num_codes(lo, bits));
}

// out = codes * scale, or += it
INLINE void decode(const uint8_t* codes, int64_t num, int64_t bits, float scale, bool add, float* out) {
    int8_t whole[LANES + 1];
    for (int64_t lo = 0; lo < num; lo += LANES) {
        const int64_t some = least(LANES, num - lo);
        const int8_t* values = (const int8_t*)codes + lo;
        if (bits == 4) {
            const int8_t* pairs = (const int8_t*)codes + lo / 2;
            for (int64_t j = 0; j < (some + 1) / 2; ++j) {
                whole[2 * j] = (int8_t)(pairs[j] >> 4);
                whole[2 * j + 1] = (int8_t)((int8_t)(pairs[j] << 4) >> 4);
            }
            values = whole;
        }
        if (add)
            for (int64_t j = 0; j < some; ++j) out[lo + j] += (float)values[j] * scale;
        else
            for (int64_t j = 0; j < some; ++j) out[lo + j] = (float)values[j] * scale;
    }
}

// u = rate (m / c1 / d + decay p), d = sqrt(nu / c2) + eps, infinite where nu <= 0; or p + u
template <bool DECAYS, bool ADDS>
INLINE void step(const float* p, const float* m, const float* nu, int64_t n, float rate, float c1, float c2, float eps,
                 float decay, float* out) {
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) {
        const float d = __builtin_sqrtf((nu[j] <= 0.0f ? __builtin_inff() : nu[j]) / c2) + eps;
        float u = m[j] / c1 / d;
        if (DECAYS) u += decay * p[j];
        u *= rate;
        out[j] = ADDS ? p[j] + u : u;
    }
}

}  // namespace

extern "C" {

// y [c] += x [n <= c]; lanes [ceil(c / SPAN), LANES] += y^2
void add_squares(const float* x, int64_t n, float* y, int64_t c, double* lanes) {
    for (int64_t lo = 0; lo < c; lo += LANES) {
        double* sums = lanes + lo / SPAN * LANES;
        const int64_t num = least(LANES, c - lo), more = least(num, n - lo);
        for (int64_t j = 0; j < more; ++j) y[lo + j] += x[lo + j];
        for (int64_t j = 0; j < num; ++j) sums[j] += (double)y[lo + j] * (double)y[lo + j];
    }
}

// lanes [spans, LANES], overwritten: the first becomes the sum of all, by halving
void sum_lanes(double* lanes, int64_t spans) {
    int64_t width = 1;
    for (int64_t i = 0; i < spans; ++i) {
        double* row = lanes + i * LANES;
        for (int64_t half = LANES / 2; half; half /= 2)
            for (int64_t j = 0; j < half; ++j) row[j] += row[j + half];
        lanes[i] = row[0];
        while (width < spans) width *= 2;
    }
    while (width /= 2)
        for (int64_t j = 0; j < width && j + width < spans; ++j) lanes[j] += lanes[j + width];
}

// m [n] = b m + a g
void moving_average(float* m, const float* g, int64_t n, float b, float a) {
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) m[j] = b * m[j] + a * g[j];
}

// y [8 b] += mean over k of tables [k, 256, 8] at bits [k, b]; lanes [ceil(8 b / SPAN), LANES] += y^2
void add_mean(const uint8_t* bits, int64_t k, int64_t b, const float* tables, float* y, double* lanes) {
    float total[LANES];
    for (int64_t lo = 0; lo < 8 * b; lo += LANES) {
        double* sums = lanes + lo / SPAN * LANES;
        const int64_t num = least(LANES, 8 * b - lo);
        for (int64_t i = 0; i < k; ++i) {
            const uint8_t* row = bits + i * b + lo / 8;
            const float* table = tables + i * 2048;
            for (int64_t j = 0; j < num / 8; ++j) {
                Eight* into = (Eight*)(total + 8 * j);
                const Eight value = *(const Eight*)(table + 8 * row[j]);
                *into = i ? *into + value : value;
            }
        }
        for (int64_t j = 0; j < num; ++j) y[lo + j] = total[j] / (float)k + y[lo + j];
        for (int64_t j = 0; j < num; ++j) sums[j] += (double)y[lo + j] * (double)y[lo + j];
    }
}

// bits [c / 8] of y >= 0, the first element the most significant
void pack(const float* y, int64_t c, uint8_t* bits) {
    uint8_t flags[LANES];
    for (int64_t lo = 0; lo < c; lo += LANES) {
        const int64_t num = least(LANES, c - lo);
        for (int64_t j = 0; j < num; ++j) flags[j] = y[lo + j] >= 0.0f;
        for (int64_t j = 0; j < num / 8; ++j) {
            uint64_t eight;
            std::memcpy(&eight, flags + 8 * j, 8);
            // Takes the lowest bit of byte i to bit 63 - i: the other products fall below bit 56 and never carry.
            bits[lo / 8 + j] = (uint8_t)((eight * 0x8040201008040201ull) >> 56);
        }
    }
}

// bits of y, and y less +-scale
void subtract_signs(float* y, int64_t c, float scale, uint8_t* bits) {
    for (int64_t lo = 0; lo < c; lo += LANES) {
        const int64_t num = least(LANES, c - lo);
        pack(y + lo, num, bits + lo / 8);
        for (int64_t j = 0; j < num; ++j) y[lo + j] -= y[lo + j] >= 0.0f ? scale : -scale;
    }
}

// out [r, 8 b] = +-scale [r] by bits [r, b]: the sign bit of scale, turned where the bit is 0
void unpack_rows(const uint8_t* bits, const float* scale, int64_t r, int64_t b, float* out) {
    const Words shifts = {24, 25, 26, 27, 28, 29, 30, 31}, top = Words{} + (1u << 31);
    for (int64_t i = 0; i < r; ++i, bits += b, out += 8 * b) {
        uint32_t word;
        std::memcpy(&word, scale + i, 4);
        const Words plus = Words{} + word;
        for (int64_t j = 0; j < b; ++j)
            *(Words*)(out + 8 * j) = plus ^ (~((Words{} + (uint32_t)bits[j]) << shifts) & top);
    }
}

// rows of blocks: x [r, c] -> codes [r, num_codes(c)], scales [r, ceil(c / block)]
void quantize(const float* x, int64_t r, int64_t c, int64_t bits, int64_t block, uint8_t* codes, float* scales) {
    for (int64_t i = 0; i < r; ++i, x += c, codes += num_codes(c, bits))
        for (int64_t lo = 0; lo < c; lo += block)
            quantize_block(x + lo, least(block, c - lo), bits, codes + num_codes(lo, bits), scales++);
}

// the inverse: out [r, c] = codes * scales
void dequantize(const uint8_t* codes, const float* scales, int64_t r, int64_t c, int64_t bits, int64_t block,
                       float* out) {
    for (int64_t i = 0; i < r; ++i, out += c, codes += num_codes(c, bits))
        for (int64_t lo = 0; lo < c; lo += block)
            decode(codes + num_codes(lo, bits), least(block, c - lo), bits, *scales++, false, out + lo);
}

// sum over k of codes [k, r, num_codes(c)] * scales [k, r, ceil(c / block)] -> total [r, c]; or, where there is memory
// for codes, room for one block in `total`, which is then quantized
void dequantize_sum(const uint8_t* from, const float* factors, int64_t k, int64_t r, int64_t c, int64_t bits,
                           int64_t block, float* total, uint8_t* codes, float* scales) {
    const int64_t width = num_codes(c, bits), blocks = (c + block - 1) / block;
    for (int64_t i = 0; i < r; ++i)
        for (int64_t n = 0; n < blocks; ++n) {
            const int64_t lo = n * block, num = least(block, c - lo);
            float* sum = codes ? total : total + i * c + lo;
            for (int64_t m = 0; m < k; ++m)
                decode(from + (m * r + i) * width + num_codes(lo, bits), num, bits, factors[(m * r + i) * blocks + n],
                       m > 0, sum);
            if (codes) quantize_block(sum, num, bits, codes + i * width + num_codes(lo, bits), scales + i * blocks + n);
        }
}

// out [n] = rate (m / c1 / (sqrt(nu / c2) + eps) + decay p); or p += it, where there is no memory for it
void preconditioned_step(float* p, const float* m, const float* nu, int64_t n, float rate, float c1, float c2,
                                float eps, float decay, float* out) {
    if (out && decay != 0.0f)
        step<true, false>(p, m, nu, n, rate, c1, c2, eps, decay, out);
    else if (out)
        step<false, false>(p, m, nu, n, rate, c1, c2, eps, decay, out);
    else if (decay != 0.0f)
        step<true, true>(p, m, nu, n, rate, c1, c2, eps, decay, p);
    else
        step<false, true>(p, m, nu, n, rate, c1, c2, eps, decay, p);
}

}
