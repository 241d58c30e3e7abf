// Rows times a panel of a matrix: each element is one fixed expression. Chunk i of K is a chain of fused multiply-adds
// over ascending k, from 0; the chains are added by a binary tree. Neither the rows computed together, nor the width of
// vectors change the expression. A processor without fused multiply-adds computes them one by one.
#pragma once
#include <cmath>
#include <cstdint>

#include "_vectors.h"

constexpr int PANEL = 64, LEVELS = 16;

template <typename T, int BYTES>
struct Wide {
    typedef T V __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
    typedef uint32_t Word __attribute__((vector_size(BYTES), aligned(4), may_alias));
    typedef uint16_t Half __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
    static constexpr int lanes = BYTES / sizeof(T);
};

// y [M, PANEL] = a b + bias, of a[r * down + k * along] and b[k * across + column]; `valid` columns are written.
template <typename T, typename W>
struct Job {
    const T* a;
    const W* b;
    const T* bias;  // or null
    T* y;
    int64_t down, along, across, out, M, K, chunks, valid;
    const W* next = nullptr;  // the panel that comes after this one: fetched while this one is multiplied; or null
};

template <typename T, int BYTES>
INLINE typename Wide<T, BYTES>::V wide(const T* p) {
    return *(const typename Wide<T, BYTES>::V*)p;
}

template <typename T, int BYTES>
INLINE typename Wide<T, BYTES>::V wide(const uint16_t* p) {  // bfloat16
    typedef Wide<T, BYTES> L;
    return (typename L::V)(__builtin_convertvector(*(const typename L::Half*)p, typename L::Word) << 16);
}

// left * right + sum, rounded once: by contraction, or element by element where the processor may lack it.
template <typename T, int BYTES, bool FUSES>
INLINE void add_product(typename Wide<T, BYTES>::V& sum, T left, typename Wide<T, BYTES>::V right) {
    if (FUSES)
        sum += left * right;
    else
        for (int i = 0; i < Wide<T, BYTES>::lanes; ++i) sum[i] = std::fma(left, right[i], sum[i]);
}

// One k of R chains: an element of each row, from `left` on, times a row of the panel.
template <typename T, int BYTES, bool FUSES, int R, int NV>
INLINE void add_row(typename Wide<T, BYTES>::V (&sum)[R][NV], const T* left, int64_t down,
                    const typename Wide<T, BYTES>::V (&row)[NV]) {
    UNROLL
    for (int r = 0; r < R; ++r)
        UNROLL
        for (int v = 0; v < NV; ++v) add_product<T, BYTES, FUSES>(sum[r][v], left[r * down], row[v]);
}

// The part of the next panel that a tile fetches, some lines for each k: in the order of memory, which is faster by half
// than a column of lines.
template <typename W>
struct Coming {
    static constexpr int line = sizeof(W) < 64 ? 64 / sizeof(W) : 1;
    const W* from;
    int64_t each;  // elements for each k

    Coming(const W* next, int64_t K, int64_t tile, int64_t tiles)
        : from(next), each((PANEL / line + tiles - 1) / tiles * line) {
        if (!next || (tile + 1) * each > PANEL) each = 0;
        from += tile * each * K;
    }

    INLINE void fetch(int64_t k) const {
        const W* at = from + k * each;
        for (const W* p = at; p < at + each; p += line) __builtin_prefetch(p);
    }
};

// The chains of a chunk, from k to `last`, of NV vectors from column `at` on: by the kind of the panel's elements.
template <typename T, typename W, int BYTES, bool FUSES, int R, int NV>
struct Chain {
    typedef typename Wide<T, BYTES>::V V;
    static INLINE void run(const Job<T, W>& o, const T* left, int64_t k, int64_t last, int at,
                           const Coming<W>& coming, V (&sum)[R][NV]) {
        const W* right = o.b + k * o.across + at;
        for (; k < last; ++k, left += o.along, right += o.across) {
            if constexpr (R > 2) coming.fetch(k);  // for a row or two processors fetch enough
            V row[NV];
            UNROLL
            for (int v = 0; v < NV; ++v) row[v] = wide<T, BYTES>(right + v * Wide<T, BYTES>::lanes);
            add_row<T, BYTES, FUSES, R, NV>(sum, left, o.down, row);
        }
    }
};

// R rows by NV vectors of one panel, from column `at` of it.
template <typename T, typename W, int BYTES, bool FUSES, int R, int NV>
INLINE void tile(const Job<T, W>& o, const T* a, T* y, int at, const Coming<W>& coming) {
    typedef typename Wide<T, BYTES>::V V;
    constexpr int lanes = Wide<T, BYTES>::lanes;
    V node[LEVELS][R][NV], sum[R][NV];
    for (int64_t c = 0; c < o.chunks; ++c) {
        UNROLL
        for (int r = 0; r < R; ++r)
            UNROLL
            for (int v = 0; v < NV; ++v) sum[r][v] = V{};
        const int64_t k = c * o.K / o.chunks, last = (c + 1) * o.K / o.chunks;
        Chain<T, W, BYTES, FUSES, R, NV>::run(o, a + k * o.along, k, last, at, coming, sum);
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
    const int64_t valid = o.valid - at;
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < NV; ++v) {
            const V value = node[first][r][v];
            const T* shift = o.bias ? o.bias + at + v * lanes : nullptr;
            T* to = y + r * o.out + at + v * lanes;
            if ((v + 1) * lanes <= valid)
                *(V*)to = o.bias ? value + *(const V*)shift : value;
            else
                for (int i = 0; i < lanes && v * lanes + i < valid; ++i) to[i] = o.bias ? value[i] + shift[i] : value[i];
        }
}

template <typename T, typename W, int BYTES, bool FUSES, int R, int NV>
INLINE void rows(const Job<T, W>& o, int64_t m) {
    constexpr int width = NV * Wide<T, BYTES>::lanes, across = PANEL / width;
    const int64_t before = (m + 5) / 6 * across, tiles = (o.M + 5) / 6 * across;
    for (int at = 0; at < PANEL && at < o.valid; at += width)
        tile<T, W, BYTES, FUSES, R, NV>(o, o.a + m * o.down, o.y + m * o.out, at, {o.next, o.K, before + at / width, tiles});
}

// All rows of a job; `NV` vectors by six rows fill the registers, fewer rows take more of them.
template <typename T, typename W, int BYTES, bool FUSES, int NV>
INLINE void panel_of(const Job<T, W>& o) {
    constexpr int most = PANEL / Wide<T, BYTES>::lanes, two = 2 * NV < most ? 2 * NV : most;
    int64_t m = 0;
    // Seven rows and eight are two parts of about one size: one or two rows alone would not fill the registers.
    for (; o.M - m > 8 || o.M - m == 6; m += 6) rows<T, W, BYTES, FUSES, 6, NV>(o, m);
    switch (o.M - m) {
        case 8: rows<T, W, BYTES, FUSES, 4, NV>(o, m); return rows<T, W, BYTES, FUSES, 4, NV>(o, m + 4);
        case 7: rows<T, W, BYTES, FUSES, 4, NV>(o, m); return rows<T, W, BYTES, FUSES, 3, NV>(o, m + 4);
        case 5: return rows<T, W, BYTES, FUSES, 5, NV>(o, m);
        case 4: return rows<T, W, BYTES, FUSES, 4, NV>(o, m);
        case 3: return rows<T, W, BYTES, FUSES, 3, NV>(o, m);
        case 2: return rows<T, W, BYTES, FUSES, 2, two>(o, m);
        case 1: return rows<T, W, BYTES, FUSES, 1, two>(o, m);
    }
}

template <typename T, typename W>
void panel_any(const Job<T, W>& o) { panel_of<T, W, 16, false, 2>(o); }

#if GENERATIONS == 3
template <typename T, typename W>
V4 void panel_v4(const Job<T, W>& o) { panel_of<T, W, 64, true, 4>(o); }
template <typename T, typename W>
V3 void panel_v3(const Job<T, W>& o) { panel_of<T, W, 32, true, 2>(o); }
#endif

// The code for a job.
template <typename T, typename W>
void (*multiplies(int64_t newest))(const Job<T, W>&) {
#if GENERATIONS == 3
    return form_of(newest, panel_v4<T, W>, panel_v3<T, W>, panel_any<T, W>);
#else
    return panel_any<T, W>;
#endif
}
