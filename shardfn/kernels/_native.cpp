// What numpy would pass over memory several times for, in one pass. Every sum has the order of `_sums.py`, every
// operation rounds as the reference's does (build with -ffp-contract=off), so that the bits are the same.
#include <cstdint>
#include <cstring>

// The loops are compiled for several generations of processors; the loader takes the one it finds.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

namespace {

constexpr int64_t LANES = 1 << 10, SPAN = 1 << 18;
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace

extern "C" {

// y [c] += x [n <= c]; lanes [ceil(c / SPAN), LANES] += y^2
CLONES void add_squares(const float* x, int64_t n, float* y, int64_t c, double* lanes) {
    for (int64_t lo = 0; lo < c; lo += LANES) {
        double* sums = lanes + lo / SPAN * LANES;
        const int64_t num = least(LANES, c - lo), more = least(num, n - lo);
        for (int64_t j = 0; j < more; ++j) y[lo + j] += x[lo + j];
        for (int64_t j = 0; j < num; ++j) sums[j] += (double)y[lo + j] * (double)y[lo + j];
    }
}

// y [8 b] += mean over k of tables [k, 256, 8] at bits [k, b]; lanes [ceil(8 b / SPAN), LANES] += y^2
CLONES void add_mean(const uint8_t* bits, int64_t k, int64_t b, const float* tables, float* y, double* lanes) {
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
CLONES void pack(const float* y, int64_t c, uint8_t* bits) {
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
CLONES void subtract_signs(float* y, int64_t c, float scale, uint8_t* bits) {
    for (int64_t lo = 0; lo < c; lo += LANES) {
        const int64_t num = least(LANES, c - lo);
        pack(y + lo, num, bits + lo / 8);
        for (int64_t j = 0; j < num; ++j) y[lo + j] -= y[lo + j] >= 0.0f ? scale : -scale;
    }
}

// out [8 b] of table [256, 8] at bits [b]
CLONES void expand(const uint8_t* bits, int64_t b, const float* table, float* out) {
    for (int64_t j = 0; j < b; ++j) *(Eight*)(out + 8 * j) = *(const Eight*)(table + 8 * bits[j]);
}

}
