// y = x W^T + bias of a packed W: each element is one fixed expression. Chunk i of K is a chain of fused multiply-adds
// over ascending k, from 0; the chains are added by a binary tree. Neither the rows computed together, nor threads, nor
// the width of vectors change the expression. A processor without fused multiply-adds computes them one by one.
#include <cmath>
#include <cstdint>

#include "../_threads.h"

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

constexpr int PANEL = 64, LEVELS = 16;

struct Call {
    const float* x;
    const void* w;
    const float* bias;
    float* y;
    int64_t M, K, N, chunks;
};

template <int BYTES>
struct Vec;
#define VECTORS(BYTES)                                                                        \
    template <>                                                                               \
    struct Vec<BYTES> {                                                                       \
        typedef float V __attribute__((vector_size(BYTES), aligned(4), may_alias));           \
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
INLINE typename Vec<BYTES>::V load(const uint16_t* p) {  // bfloat16
    typedef typename Vec<BYTES>::Word Word;
    return (typename Vec<BYTES>::V)(__builtin_convertvector(*(const typename Vec<BYTES>::Half*)p, Word) << 16);
}

// left * right + sum, rounded once: by contraction, or element by element where the processor may lack it.
template <int BYTES, bool FUSES>
INLINE void add_product(typename Vec<BYTES>::V& sum, float left, typename Vec<BYTES>::V right) {
    if (FUSES)
        sum += left * right;
    else
        for (int i = 0; i < Vec<BYTES>::lanes; ++i) sum[i] = std::fma(left, right[i], sum[i]);
}

// R rows by NV vectors of one panel.
template <int BYTES, bool FUSES, typename W, int R, int NV>
INLINE void tile(const Call& o, const float* x, const W* w, float* y, int64_t column) {
    typedef typename Vec<BYTES>::V V;
    constexpr int lanes = Vec<BYTES>::lanes;
    V node[LEVELS][R][NV], sum[R][NV];
    for (int64_t c = 0; c < o.chunks; ++c) {
        UNROLL
        for (int r = 0; r < R; ++r)
            UNROLL
            for (int v = 0; v < NV; ++v) sum[r][v] = V{};
        const int64_t last = (c + 1) * o.K / o.chunks;
        for (int64_t k = c * o.K / o.chunks; k < last; ++k) {
            V right[NV];
            UNROLL
            for (int v = 0; v < NV; ++v) right[v] = load<BYTES>(w + k * PANEL + v * lanes);
            UNROLL
            for (int r = 0; r < R; ++r)
                UNROLL
                for (int v = 0; v < NV; ++v) add_product<BYTES, FUSES>(sum[r][v], x[r * o.K + k], right[v]);
        }
        int level = 0;
        for (int64_t n = c; n & 1; n >>= 1, ++level)
            UNROLL
            for (int r = 0; r < R; ++r)
                UNROLL
                for (int v = 0; v < NV; ++v) sum[r][v] = node[level][r][v] + sum[r][v];
        UNROLL
        for (int r = 0; r < R; ++r)
            UNROLL
            for (int v = 0; v < NV; ++v) node[level][r][v] = sum[r][v];
    }
    // The nodes that are left, the last one first.
    int level = __builtin_ctzll(o.chunks);
    const int first = level;
    for (++level; level < LEVELS; ++level)
        if (o.chunks >> level & 1)
            UNROLL
            for (int r = 0; r < R; ++r)
                UNROLL
                for (int v = 0; v < NV; ++v) node[first][r][v] = node[level][r][v] + node[first][r][v];
    const int64_t valid = o.N - column;
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < NV; ++v)
            for (int i = 0; i < lanes && v * lanes + i < valid; ++i) {
                const float value = node[first][r][v][i];
                y[r * o.N + v * lanes + i] = o.bias ? value + o.bias[column + v * lanes + i] : value;
            }
}

template <int BYTES, bool FUSES, typename W, int R, int NV>
INLINE void rows(const Call& o, int64_t m, const W* w, int64_t panel) {
    constexpr int width = NV * Vec<BYTES>::lanes;
    for (int at = 0; at < PANEL; at += width) {
        const int64_t column = panel * PANEL + at;
        if (column < o.N) tile<BYTES, FUSES, W, R, NV>(o, o.x + m * o.K, w + at, o.y + m * o.N + column, column);
    }
}

// All rows of one panel; `NV` vectors by six rows fill the registers, fewer rows take more of them.
template <int BYTES, bool FUSES, typename W, int NV>
INLINE void panel_of(const Call& o, int64_t panel) {
    constexpr int most = PANEL / Vec<BYTES>::lanes, two = 2 * NV < most ? 2 * NV : most;
    const W* w = (const W*)o.w + panel * o.K * PANEL;
    int64_t m = 0;
    // Seven rows and eight are two parts of about one size: one or two rows alone would not fill the registers.
    for (; o.M - m > 8 || o.M - m == 6; m += 6) rows<BYTES, FUSES, W, 6, NV>(o, m, w, panel);
    switch (o.M - m) {
        case 8: rows<BYTES, FUSES, W, 4, NV>(o, m, w, panel); return rows<BYTES, FUSES, W, 4, NV>(o, m + 4, w, panel);
        case 7: rows<BYTES, FUSES, W, 4, NV>(o, m, w, panel); return rows<BYTES, FUSES, W, 3, NV>(o, m + 4, w, panel);
        case 5: return rows<BYTES, FUSES, W, 5, NV>(o, m, w, panel);
        case 4: return rows<BYTES, FUSES, W, 4, NV>(o, m, w, panel);
        case 3: return rows<BYTES, FUSES, W, 3, NV>(o, m, w, panel);
        case 2: return rows<BYTES, FUSES, W, 2, two>(o, m, w, panel);
        case 1: return rows<BYTES, FUSES, W, 1, two>(o, m, w, panel);
    }
}

using Run = void (*)(const Call&, int64_t);

template <typename W>
void any(const Call& o, int64_t panel) { panel_of<16, false, W, 2>(o, panel); }

#if GENERATIONS == 3
template <typename W>
V4 void v4(const Call& o, int64_t panel) { panel_of<64, true, W, 4>(o, panel); }
template <typename W>
V3 void v3(const Call& o, int64_t panel) { panel_of<32, true, W, 2>(o, panel); }

template <typename W>
Run here(int64_t newest) {
    __builtin_cpu_init();
    if (newest >= 4 && __builtin_cpu_supports("x86-64-v4")) return v4<W>;
    return newest >= 3 && __builtin_cpu_supports("x86-64-v3") ? v3<W> : any<W>;
}
#else
template <typename W>
Run here(int64_t) { return any<W>; }
#endif

}  // namespace

extern "C" {

// x [M, K], w [panels, K, PANEL] float or bfloat16, bias [N] or null -> y [M, N]
void row_linear(const float* x, const void* w, const float* bias, float* y, int64_t M, int64_t K, int64_t N,
                int64_t chunks, int64_t wide, int64_t threads, int64_t newest) {
    const Call o = {x, w, bias, y, M, K, N, chunks};
    const Run run = wide ? here<float>(newest) : here<uint16_t>(newest);
    const int64_t panels = (N + PANEL - 1) / PANEL;
    share(panels, threads, [&](int64_t panel) { run(o, panel); });
}

}  // extern "C"
