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
    typedef typename Wide<T, BYTES>::V V;
    if constexpr (FUSES && BYTES == 32) {
        // With 16 registers, compilers that may choose the form of the instruction keep some of the sums in memory.
        V both = left - V{}, next = sum;
        if constexpr (sizeof(T) == 4)
            asm("vfmadd231ps %2, %1, %0" : "+v"(next) : "v"(right), "v"(both));
        else
            asm("vfmadd231pd %2, %1, %0" : "+v"(next) : "v"(right), "v"(both));
        sum = next;
    } else if (FUSES)
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
    int64_t K, each;  // elements for each k

    Coming(const W* next, int64_t K, int64_t tiles)
        : from(next), K(K), each(next ? (PANEL / line + tiles - 1) / tiles * line : 0) {}

    INLINE Coming of_tile(int64_t tile) const {
        Coming own = *this;
        own.from += tile * each * K;
        if ((tile + 1) * each > PANEL) own.each = 0;
        return own;
    }

    // Those for the elements of K from k to `last`.
    INLINE void fetch(int64_t k, int64_t last) const {
        for (const W *p = from + k * each, *end = from + last * each; p < end; p += line) __builtin_prefetch(p);
    }
};

// The chains of a chunk, from k to `last`, of NV vectors from column `at` on: by the kind of the panel's elements.
template <typename T, typename W, int BYTES, bool FUSES, int R, int NV>
struct Chain {
    typedef typename Wide<T, BYTES>::V V;
    // Of k: those for which a tile fetches at once, and those of an unrolled loop.
    static constexpr int FETCHED = 16, STEPS = FUSES ? 2 : 1;

    static INLINE void run(const Job<T, W>& o, const T* left, int64_t k, int64_t last, int at,
                           const Coming<W>& coming, V (&sum)[R][NV]) {
        const W* right = o.b + k * o.across + at;
        for (int64_t end; k < last; k = end) {
            end = k + FETCHED < last ? k + FETCHED : last;
            if constexpr (R > 2) coming.fetch(k, end);  // for a row or two processors fetch enough
            int64_t i = k;
            for (; i + STEPS <= end; i += STEPS)
                UNROLL
                for (int j = 0; j < STEPS; ++j) step(o, left, right, sum);
            for (; i < end; ++i) step(o, left, right, sum);
        }
    }

    static INLINE void step(const Job<T, W>& o, const T*& left, const W*& right, V (&sum)[R][NV]) {
        V row[NV];
        UNROLL
        for (int v = 0; v < NV; ++v) row[v] = wide<T, BYTES>(right + v * Wide<T, BYTES>::lanes);
        add_row<T, BYTES, FUSES, R, NV>(sum, left, o.down, row);
        left += o.along;
        right += o.across;
    }
};

// Writes the results of a tile.
template <typename T, int BYTES, int R, int NV, typename J>
INLINE void write(const J& o, T* y, int at, const typename Wide<T, BYTES>::V (&sum)[R][NV]) {
    typedef typename Wide<T, BYTES>::V V;
    constexpr int lanes = Wide<T, BYTES>::lanes;
    const int64_t valid = o.valid - at;
    if (NV * lanes <= valid) {
        UNROLL
        for (int v = 0; v < NV; ++v) {
            const V shift = o.bias ? *(const V*)(o.bias + at + v * lanes) : -V{};  // -0 changes no sum
            UNROLL
            for (int r = 0; r < R; ++r) *(V*)(y + r * o.out + at + v * lanes) = sum[r][v] + shift;
        }
        return;
    }
    alignas(64) T part[R * NV * lanes];
    UNROLL
    for (int r = 0; r < R; ++r)
        UNROLL
        for (int v = 0; v < NV; ++v) *(V*)(part + (r * NV + v) * lanes) = sum[r][v];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < valid; ++i) {
            const T value = part[r * NV * lanes + i];
            y[r * o.out + at + i] = o.bias ? value + o.bias[at + i] : value;
        }
}

// The nodes of the trees of some rows, by level.
template <typename T, int ROWS>
struct Nodes {
    alignas(64) T of[LEVELS][ROWS * PANEL];
};

// A chunk of K, from k to `last`.
struct Chunk {
    int64_t number, k, last;

    Chunk(int64_t number, int64_t K, int64_t chunks)
        : number(number), k(number * K / chunks), last((number + 1) * K / chunks) {}
};

// One chunk of R rows, from `first` on, by NV vectors of one panel, from column `at` of it. With the last chunk, the
// results are written. The first row of the nodes is row `first - row`.
template <typename T, typename W, int BYTES, bool FUSES, int R, int NV, int ROWS>
INLINE void tile(const Job<T, W>& o, int64_t first, int at, const Coming<W>& coming, const Chunk& chunk, int64_t row,
                 Nodes<T, ROWS>& nodes) {
    typedef typename Wide<T, BYTES>::V V;
    constexpr int lanes = Wide<T, BYTES>::lanes;
    const int64_t place = row * PANEL + at;
    V sum[R][NV];
    UNROLL
    for (int r = 0; r < R; ++r)
        UNROLL
        for (int v = 0; v < NV; ++v) sum[r][v] = V{};
    Chain<T, W, BYTES, FUSES, R, NV>::run(o, o.a + first * o.down + chunk.k * o.along, chunk.k, chunk.last,
                                          at, coming, sum);
    const auto add = [&](int level) __attribute__((always_inline)) {
        UNROLL
        for (int r = 0; r < R; ++r)
            UNROLL
            for (int v = 0; v < NV; ++v) sum[r][v] = *(const V*)(nodes.of[level] + place + r * PANEL + v * lanes) + sum[r][v];
    };
    int level = 0;
    for (int64_t n = chunk.number; n & 1; n >>= 1, ++level) add(level);
    if (chunk.number + 1 < o.chunks) {
        UNROLL
        for (int r = 0; r < R; ++r)
            UNROLL
            for (int v = 0; v < NV; ++v) *(V*)(nodes.of[level] + place + r * PANEL + v * lanes) = sum[r][v];
        return;
    }
    // The nodes that are left, the last one first.
    for (++level; level < LEVELS; ++level)
        if (o.chunks >> level & 1) add(level);
    write<T, BYTES, R, NV>(o, o.y + first * o.out, at, sum);
}

// All columns of some rows.
template <typename T, typename W, int BYTES, bool FUSES, int R, int NV, int ROWS>
INLINE void rows(const Job<T, W>& o, int64_t first, const Chunk& chunk, const Coming<W>& coming, int64_t row,
                 Nodes<T, ROWS>& nodes) {
    constexpr int width = NV * Wide<T, BYTES>::lanes, across = PANEL / width;
    int64_t number = (first + 5) / 6 * across;
    for (int at = 0; at < PANEL && at < o.valid; at += width, ++number)
        tile<T, W, BYTES, FUSES, R, NV>(o, first, at, coming.of_tile(number), chunk, row, nodes);
}

// A chunk of a panel is multiplied by all rows of a block before the next: so it is read from near memory.
constexpr int BLOCK = 48, MOST_ROWS = BLOCK + 2;

// Little code, a row at a time, for processors of x86-64 without fused multiply-adds: compilers take long for more.
template <bool FUSES>
constexpr bool slim = GENERATION == 1 && !FUSES;

// `NV` vectors by six rows fill the registers; fewer rows take more vectors.
template <typename T, typename W, int BYTES, bool FUSES, int NV>
INLINE void block(const Job<T, W>& o, int64_t first, int64_t num, const Chunk& chunk, const Coming<W>& coming,
                  Nodes<T, MOST_ROWS>& nodes) {
    constexpr int most = PANEL / Wide<T, BYTES>::lanes, two = 2 * NV < most ? 2 * NV : most;
    constexpr int one = 4 * NV < most ? 4 * NV : most;
    for (int64_t m = 0, height; m < num; m += height) {
        const int64_t rest = num - m;
        // Seven rows and eight are two tiles of about one size: one or two rows alone would not fill the registers.
        height = slim<FUSES> ? 1 : rest > 8 || rest == 6 ? 6 : rest > 6 ? 4 : rest;
        if constexpr (!slim<FUSES>) switch (height) {
            case 6: rows<T, W, BYTES, FUSES, 6, NV>(o, first + m, chunk, coming, m, nodes); continue;
            case 5: rows<T, W, BYTES, FUSES, 5, NV>(o, first + m, chunk, coming, m, nodes); continue;
            case 4: rows<T, W, BYTES, FUSES, 4, NV>(o, first + m, chunk, coming, m, nodes); continue;
            case 3: rows<T, W, BYTES, FUSES, 3, NV>(o, first + m, chunk, coming, m, nodes); continue;
            case 2: rows<T, W, BYTES, FUSES, 2, two>(o, first + m, chunk, coming, m, nodes); continue;
        }
        rows<T, W, BYTES, FUSES, 1, one>(o, first + m, chunk, coming, m, nodes);
    }
}

// All rows of a job.
template <typename T, typename W, int BYTES, bool FUSES, int NV>
INLINE void panel_of(const Job<T, W>& o) {
    static thread_local Nodes<T, MOST_ROWS> own;
    Nodes<T, MOST_ROWS>* nodes = &own;
    asm("" : "+r"(nodes));  // or compilers ask for the address of the thread's own in every tile, by a call
    const Coming<W> coming(o.next, o.K, (o.M + 5) / 6 * (PANEL / (NV * Wide<T, BYTES>::lanes)));
    for (int64_t first = 0, num; first < o.M; first += num) {
        num = o.M - first > MOST_ROWS ? BLOCK : o.M - first;
        for (int64_t c = 0; c < o.chunks; ++c)
            block<T, W, BYTES, FUSES, NV>(o, first, num, {c, o.K, o.chunks}, coming, *nodes);
    }
}

template <typename T, typename W>
void multiply(const Job<T, W>& o) { panel_of<T, W, WIDTH, FUSED, WIDTH == 64 ? 4 : 2>(o); }
