// y = (x - m) / sqrt(mean((x - m)^2) + eps) w + b of rows x, m = 0 or the mean. Sums are of 64 lanes, which are added by
// halving: the rows beside it, threads and the width of vectors do not change the bits of a row.
#include <cstring>

#include "_chain.h"
#include "_threads.h"
#include "_vectors.h"

namespace {

constexpr int LANES = 64;
constexpr int64_t PART = 1 << 13;  // elements of a thread's turn, at least one row

struct Call {
    const float *x, *w, *b;
    float* y;
    float eps;
    int64_t rows, d, centered;
};

// The lanes' sum: the first half of them plus the second, until one is left.
INLINE float halved(float* lanes) {
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
    return lanes[0];
}

// The sum over a row of x, or of (x - mean)^2.
template <class L, bool SQUARES>
INLINE float total(const float* x, int64_t d, float mean) {
    typedef typename L::V V;
    constexpr int lanes = L::lanes, num = LANES / lanes;
    V sum[num] = {};
    const int64_t whole = d / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        UNROLL
        for (int v = 0; v < num; ++v) {
            const V c = load<L>(x + i + v * lanes) - mean;
            sum[v] = SQUARES ? L::fused(c, c, sum[v]) : sum[v] + c;
        }
    float last[LANES] = {};
    for (int64_t i = whole; i < d; ++i) last[i - whole] = x[i] - mean;
    UNROLL
    for (int v = 0; v < num; ++v) {
        const V c = load<L>(last + v * lanes);
        if (whole < d) sum[v] = SQUARES ? L::fused(c, c, sum[v]) : sum[v] + c;
    }
    for (int v = 0; v < num; ++v) store<L>(last + v * lanes, sum[v]);
    return halved(last);
}

template <class L, bool BIASED>
INLINE typename L::V scaled(typename L::V x, float mean, float scale, const float* w, const float* b) {
    const auto y = (x - mean) * scale;
    return BIASED ? L::fused(y, load<L>(w), load<L>(b)) : y * load<L>(w);
}

template <class L, bool BIASED>
INLINE void row_of(const Call& o, const float* x, float* y) {
    constexpr int lanes = L::lanes;
    const float mean = o.centered ? total<L, false>(x, o.d, 0.0f) / o.d : 0.0f;
    const float scale = 1.0f / std::sqrt(total<L, true>(x, o.d, mean) / o.d + o.eps);
    int64_t i = 0;
    for (; i + lanes <= o.d; i += lanes)
        store<L>(y + i, scaled<L, BIASED>(load<L>(x + i), mean, scale, o.w + i, o.b + i));
    if (i == o.d) return;
    const int64_t bytes = (o.d - i) * sizeof(float);
    float some[lanes] = {}, w[lanes] = {}, b[lanes] = {};
    std::memcpy(some, x + i, bytes);
    std::memcpy(w, o.w + i, bytes);
    if (BIASED) std::memcpy(b, o.b + i, bytes);
    store<L>(some, scaled<L, BIASED>(load<L>(some), mean, scale, w, b));
    std::memcpy(y + i, some, bytes);
}

template <class L>
INLINE void part_of(const Call& o, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
        if (o.b)
            row_of<L, true>(o, o.x + r * o.d, o.y + r * o.d);
        else
            row_of<L, false>(o, o.x + r * o.d, o.y + r * o.d);
}

}  // namespace

extern "C" {

// x [rows, d], w [d], b [d] or null -> y [rows, d]
void row_norm(const float* x, const float* w, const float* b, float* y, float eps, int64_t rows, int64_t d,
              int64_t centered, int64_t threads) {
    const Call o = {x, w, b, y, eps, rows, d, centered};
    const int64_t each = d < PART ? PART / (d ? d : 1) : 1;
    share((rows + each - 1) / each, threads, [&](int64_t part) {
        part_of<Here>(o, part * each, (part + 1) * each < rows ? (part + 1) * each : rows);
    });
}

}  // extern "C"

CHAINED(row_norm)
