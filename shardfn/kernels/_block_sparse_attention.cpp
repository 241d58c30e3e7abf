// Attention over the tiles of a layout, forward and backward; a tile has `block` queries and `block` keys.
//
// Work is dealt to threads in units that the shapes alone fix, and what several units add to is summed in one order: the
// bits do not depend on the number of threads. Rows in scratch memory are padded with zeros to whole vectors.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "_generations.h"
#include "_threads.h"

#define APART __attribute__((noinline))

namespace {

// Of a type: elements to whose multiple rows are padded, and what its exponential needs.
template <typename T>
struct Of;
template <>
struct Of<float> {
    static constexpr int padded = 16, mantissa = 23, terms = 7;
    static constexpr float least = -87.0f, most = 88.0f, magic = 12582912.0f, high = 0.693359375f, low = -2.12194440e-4f;
};
template <>
struct Of<double> {
    static constexpr int padded = 8, mantissa = 52, terms = 13;
    static constexpr double least = -708.0, most = 709.0, magic = 6755399441055744.0, high = 6.93145751953125e-1,
                            low = 1.42860682030941723212e-6;
};

// The vectors of a processor, which divide a row. Wider ones than it has would be taken to pieces, in memory.
template <typename T, int BYTES>
struct Vec;
#define VECTORS(T, Int, BYTES)                                                                  \
    template <>                                                                                 \
    struct Vec<T, BYTES> {                                                                      \
        typedef T V __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));         \
        typedef Int I __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));       \
        typedef uint32_t Word __attribute__((vector_size(BYTES), aligned(4), may_alias));       \
        typedef uint16_t Half __attribute__((vector_size(2 * BYTES / sizeof(T)), aligned(2), may_alias)); \
        static constexpr int lanes = BYTES / sizeof(T);                                         \
    };
VECTORS(float, int32_t, 16)
VECTORS(float, int32_t, 32)
VECTORS(float, int32_t, 64)
VECTORS(double, int64_t, 16)
VECTORS(double, int64_t, 32)
VECTORS(double, int64_t, 64)

INLINE int64_t less(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// e^x; 0 below the normal numbers, NaN of NaN. x = n log 2 + r, |r| <= log 2 / 2, and the series of e^r.
template <typename T, int BYTES>
INLINE typename Vec<T, BYTES>::V exponential(typename Vec<T, BYTES>::V x) {
    typedef Of<T> O;
    typedef typename Vec<T, BYTES>::V V;
    typedef typename Vec<T, BYTES>::I I;
    const V given = x;
    x = x < O::least ? V{} + O::least : x;
    x = x > O::most ? V{} + O::most : x;
    const V n = x * (T)1.44269504088896340736 + O::magic;
    const V whole = n - O::magic, r = (x - whole * O::high) - whole * O::low;
    V y = V{} + 1;
    UNROLL
    for (int i = O::terms; i; --i) y = y * r * ((T)1 / i) + 1;
    const I power = ((I)n + (O::mantissa == 23 ? 127 : 1023)) << O::mantissa;
    y *= (V)power;
    return given < O::least ? V{} : y;
}

// C [MR, n] (+)= A B [k, n], n whole vectors; element (i, t) of A lies at i * row + t * column.
template <typename T, int BYTES, int MR, int NV, bool ADDS>
INLINE void rows_of(T* c, int64_t ldc, const T* a, int64_t row, int64_t column, const T* b, int64_t ldb, int64_t k) {
    typedef typename Vec<T, BYTES>::V V;
    constexpr int lanes = Vec<T, BYTES>::lanes;
    V sum[MR][NV];
    UNROLL
    for (int i = 0; i < MR; ++i)
        UNROLL
        for (int v = 0; v < NV; ++v) sum[i][v] = ADDS ? *(V*)(c + i * ldc + v * lanes) : V{};
    for (int64_t t = 0; t < k; ++t) {
        V right[NV];
        UNROLL
        for (int v = 0; v < NV; ++v) right[v] = *(const V*)(b + t * ldb + v * lanes);
        UNROLL
        for (int i = 0; i < MR; ++i) {
            const T left = a[i * row + t * column];
            UNROLL
            for (int v = 0; v < NV; ++v) sum[i][v] += left * right[v];
        }
    }
    UNROLL
    for (int i = 0; i < MR; ++i)
        UNROLL
        for (int v = 0; v < NV; ++v) *(V*)(c + i * ldc + v * lanes) = sum[i][v];
}

template <typename T, int BYTES, int MR, int NV, bool ADDS>
INLINE void columns_of(T* c, int64_t ldc, const T* a, int64_t row, int64_t column, const T* b, int64_t ldb, int64_t k,
                            int64_t m) {
    int64_t i = 0;
    for (; i + MR <= m; i += MR)
        rows_of<T, BYTES, MR, NV, ADDS>(c + i * ldc, ldc, a + i * row, row, column, b, ldb, k);
    for (; MR > 4 && i + 4 <= m; i += 4)
        rows_of<T, BYTES, 4, NV, ADDS>(c + i * ldc, ldc, a + i * row, row, column, b, ldb, k);
    for (; i < m; ++i) rows_of<T, BYTES, 1, NV, ADDS>(c + i * ldc, ldc, a + i * row, row, column, b, ldb, k);
}

template <typename T, int BYTES, int MR, int NV, bool ADDS>
INLINE void multiply(T* c, int64_t ldc, const T* a, int64_t row, int64_t column, const T* b, int64_t ldb, int64_t m, int64_t k,
                     int64_t n) {
    constexpr int lanes = Vec<T, BYTES>::lanes, wide = NV * lanes;
    int64_t j = 0;
    for (; j + wide <= n; j += wide)
        columns_of<T, BYTES, MR, NV, ADDS>(c + j, ldc, a, row, column, b + j, ldb, k, m);
    for (; NV > 1 && j < n; j += lanes)
        columns_of<T, BYTES, MR, 1, ADDS>(c + j, ldc, a, row, column, b + j, ldb, k, m);
}

// A function of its own: inlined wherever it is used, it would take long to compile.
template <typename T, bool ADDS>
APART void product(T* c, int64_t ldc, const T* a, int64_t row, int64_t column, const T* b, int64_t ldb, int64_t m,
                   int64_t k, int64_t n) {
    multiply<T, WIDTH, GENERATION == 4 ? 8 : GENERATION == 3 ? 6 : 4, 2, ADDS>(c, ldc, a, row, column, b, ldb, m, k, n);
}

// What one call is about; pointers that are null are not there.
template <typename T>
struct Call {
    int64_t B, T_, S, H, G, K, block, layouts, added_strides[4], table_heads;
    int64_t level, head0, query0, key0;  // of dropout: of 2^16 numbers those that drop, and where this lies in the whole
    double scale;
    const T *q, *k, *v;
    const int32_t *starts, *columns, *kinds;  // [layouts, rows + 1], [tiles], [tiles]: -1 where all pairs count
    const uint8_t* patterns;                  // [kinds, block, block]
    const int64_t *ids_q, *ids_k, *keys;      // [B, T], [B, S]: pairs of one id count; [B, 2]: of dropout
    const T *added, *table;                   // [B, H, T, S] by strides; [heads, T + S - 1] by key - query + T - 1
    T *y, *lse;                               // [B, T, H, K], [B, H, T]
    const T *dy, *delta;                      // as y and lse
    T *dq, *dk, *dv;
    // scratch
    T *kt, *vt, *kr, *vr, *partial;
    uint8_t* touched;  // of each part, which blocks of keys it adds to; of others its sums are not there
    int64_t W, P, chunks;  // rows of K and of a block in whole vectors; parts of the queries of a head

    int64_t rows() const { return ceil(T_, block); }
    int64_t blocks() const { return ceil(S, block); }
    int64_t length(int64_t i) const { return less(block, T_ - i * block); }
    int64_t width(int64_t j) const { return less(block, S - j * block); }
    const int32_t* row(int64_t h) const { return starts + (layouts > 1 ? h : 0) * (rows() + 1); }
    uint8_t* blocks_of(int64_t b, int64_t h, int64_t c) const { return touched + ((b * H + h) * chunks + c) * blocks(); }
    T* part(int64_t b, int64_t h, int64_t c) const { return partial + ((b * H + h) * chunks + c) * 2 * S * W; }
};

// to [rows, W] = from [rows, K] * factor, whose rows are `stride` apart
template <typename T>
INLINE void copy_rows(T* to, const T* from, int64_t rows, int64_t stride, int64_t K, int64_t W, T factor) {
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t d = 0; d < K; ++d) to[i * W + d] = from[i * stride + d] * factor;
        for (int64_t d = K; d < W; ++d) to[i * W + d] = 0;
    }
}

// to [K, P] = from [columns, K]^T
template <typename T>
INLINE void turn(T* to, const T* from, int64_t columns, int64_t stride, int64_t K, int64_t P) {
    for (int64_t d = 0; d < K; ++d) {
        for (int64_t j = 0; j < columns; ++j) to[d * P + j] = from[j * stride + d];
        for (int64_t j = columns; j < P; ++j) to[d * P + j] = 0;
    }
}

// A block of keys and values, as products read them.
template <typename T>
INLINE void pack(const Call<T>& o, int64_t unit, T*) {
    const int64_t M = o.blocks(), j = unit % M, g = unit / M % o.G, b = unit / M / o.G, stride = o.G * o.K;
    const int64_t n = o.width(j), from = ((b * o.S + j * o.block) * o.G + g) * o.K, head = b * o.G + g;
    turn(o.kt + (head * M + j) * o.K * o.P, o.k + from, n, stride, o.K, o.P);
    copy_rows(o.vr + (head * o.S + j * o.block) * o.W, o.v + from, n, stride, o.K, o.W, (T)1);
    if (!o.vt) return;
    turn(o.vt + (head * M + j) * o.K * o.P, o.v + from, n, stride, o.K, o.P);
    copy_rows(o.kr + (head * o.S + j * o.block) * o.W, o.k + from, n, stride, o.K, o.W, (T)1);
}

// The scores s [m, P] of a tile: what is added to them, and -inf where a pair does not count.
template <typename T>
INLINE void adjust(const Call<T>& o, T* s, int64_t ld, int64_t b, int64_t h, int64_t i, int64_t j, int32_t kind) {
    const int64_t m = o.length(i), n = o.width(j), P = o.P;
    const T out = -(T)__builtin_inf();
    const int64_t q0 = i * o.block, k0 = j * o.block;
    for (int64_t r = 0; r < m; ++r) {
        T* row = s + r * ld;
        if (o.added) {
            const T* added = o.added + b * o.added_strides[0] + h * o.added_strides[1] + (q0 + r) * o.added_strides[2];
            const int64_t step = o.added_strides[3];
            for (int64_t c = 0; c < n; ++c) row[c] += added[(k0 + c) * step];
        }
        if (o.table) {
            const T* table = o.table + (o.table_heads > 1 ? h : 0) * (o.T_ + o.S - 1) + (k0 - q0 - r + o.T_ - 1);
            for (int64_t c = 0; c < n; ++c) row[c] += table[c];
        }
        if (o.ids_q) {
            const int64_t id = o.ids_q[b * o.T_ + q0 + r], *ids = o.ids_k + b * o.S + k0;
            for (int64_t c = 0; c < n; ++c) row[c] = ids[c] == id ? row[c] : out;
        }
        if (kind >= 0) {
            const uint8_t* pattern = o.patterns + ((int64_t)kind * o.block + r) * o.block;
            for (int64_t c = 0; c < n; ++c) row[c] = pattern[c] ? row[c] : out;
        }
        for (int64_t c = n; c < P; ++c) row[c] = out;
    }
}

// The words of threefry2x32 of the counters (query, i + 0 .. num - 1), both of a counter side by side.
template <int BYTES>
INLINE void draw(uint32_t* to, const uint32_t* key, uint32_t query, uint32_t i, int64_t num) {
    typedef typename Vec<float, BYTES>::Word V;
    constexpr int lanes = BYTES / 4;
    constexpr uint32_t turns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    static const uint32_t steps[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const uint32_t ks[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDAu};
    for (int64_t at = 0; at < num; at += lanes) {
        V x0 = V{} + (query + ks[0]), x1 = *(const V*)steps + (i + (uint32_t)at + ks[1]);
        UNROLL
        for (int round = 0; round < 5; ++round) {
            UNROLL
            for (int j = 0; j < 4; ++j) {
                const uint32_t turn = turns[round % 2][j];
                x0 += x1;
                x1 = ((x1 << turn) | (x1 >> (32 - turn))) ^ x0;
            }
            x0 += ks[(round + 1) % 3];
            x1 += ks[(round + 2) % 3] + (uint32_t)(round + 1);
        }
        for (int l = 0; l < lanes; ++l) to[2 * (at + l)] = x0[l], to[2 * (at + l) + 1] = x1[l];
    }
}

// The key of a head of a sample.
template <typename T>
INLINE void key_of(const Call<T>& o, int64_t b, int64_t h, uint32_t* key) {
    const uint32_t own[2] = {(uint32_t)o.keys[2 * b], (uint32_t)o.keys[2 * b + 1]};
    uint32_t words[8];
    draw<16>(words, own, 0, (uint32_t)(o.head0 + h), 1);
    key[0] = words[0], key[1] = words[1];
}

// In units of T: by what a row of a tile is multiplied, and the words of which it is made.
template <typename T>
int64_t dropping_scratch(const Call<T>& o) { return o.keys ? 2 * o.P + 64 : 0; }

// x [n] *= by
template <typename T, int BYTES>
INLINE void scale_row(T* x, const T* by, int64_t n) {
    typedef typename Vec<T, BYTES>::V V;
    for (int64_t e = 0; e < n; e += Vec<T, BYTES>::lanes) *(V*)(x + e) *= *(const V*)(by + e);
}

// to [P]: by what the probabilities of query t and of keys s .. s + P - 1 are multiplied; 0 where they are dropped.
template <typename T, int BYTES>
INLINE void factors(const Call<T>& o, T* to, const uint32_t* key, int64_t t, int64_t s) {
    typedef Vec<T, BYTES> Own;
    uint32_t* words = (uint32_t*)(to + o.P);
    const int64_t first = o.key0 + s, skipped = first % 4;
    draw<BYTES>(words, key, (uint32_t)(o.query0 + t), (uint32_t)(first / 4), ceil(skipped + o.P, 4));
    // The quarters of both words are the numbers of four keys, in this order on a machine whose low bytes come first.
    const char* halves = (const char*)words + 2 * skipped;
    const T scale = (T)(65536.0 / (65536 - o.level));
    const int32_t level = (int32_t)o.level;
    for (int64_t e = 0; e < o.P; e += Own::lanes) {
        const typename Own::I found = __builtin_convertvector(*(const typename Own::Half*)(halves + 2 * e), typename Own::I);
        const typename Own::V all = typename Own::V{} + scale;
        *(typename Own::V*)(to + e) = found >= (typename Own::I{} + level) ? all : typename Own::V{};
    }
}

template <typename T, int BYTES>
INLINE T greatest(const T* x, int64_t n, T most) {
    typedef typename Vec<T, BYTES>::V V;
    constexpr int lanes = Vec<T, BYTES>::lanes;
    V top = V{} + most;
    for (int64_t c = 0; c < n; c += lanes) {
        const V value = *(const V*)(x + c);
        top = value <= top ? top : value;  // NaN stays
    }
    for (int l = 0; l < lanes; ++l) most = top[l] <= most ? most : top[l];
    return most;
}

// x [n] = e^(x - by), and its sum
template <typename T, int BYTES>
INLINE T exponentials(T* x, int64_t n, T by) {
    typedef typename Vec<T, BYTES>::V V;
    constexpr int lanes = Vec<T, BYTES>::lanes;
    V sum = V{};
    for (int64_t c = 0; c < n; c += lanes) {
        const V p = exponential<T, BYTES>(*(const V*)(x + c) - by);
        *(V*)(x + c) = p;
        sum += p;
    }
    T total = 0;
    for (int l = 0; l < lanes; ++l) total += sum[l];
    return total;
}

constexpr int64_t WIDE = 512;  // columns of scores that pass through the softmax together, where blocks are smaller

template <typename T>
int64_t at_once(const Call<T>& o) { return o.P < WIDE ? WIDE / o.P : 1; }

template <typename T>
int64_t forward_scratch(const Call<T>& o) {
    return o.block * (2 * o.W + o.P * at_once(o) + 2) + dropping_scratch(o);
}

// One block of queries of one head.
template <typename T>
INLINE void forward(const Call<T>& o, int64_t unit, T* scratch) {
    const int64_t N = o.rows(), M = o.blocks(), i = unit % N, h = unit / N % o.H, b = unit / N / o.H;
    const int64_t m = o.length(i), W = o.W, P = o.P, some = at_once(o), ld = some * P, head = b * o.G + h / (o.H / o.G);
    T *q = scratch, *sum = q + o.block * W, *s = sum + o.block * W, *top = s + o.block * ld, *total = top + o.block;
    T* kept = total + o.block;
    uint32_t key[2] = {};
    if (o.keys) key_of(o, b, h, key);
    const int64_t own = ((b * o.T_ + i * o.block) * o.H + h) * o.K;
    copy_rows(q, o.q + own, m, o.H * o.K, o.K, W, (T)o.scale);
    for (int64_t r = 0; r < m; ++r) top[r] = -(T)__builtin_inf(), total[r] = 0;
    std::memset(sum, 0, sizeof(T) * m * W);
    const int32_t* starts = o.row(h);
    for (int64_t at = starts[i]; at < starts[i + 1]; at += some) {
        const int64_t num = less(some, starts[i + 1] - at);
        for (int64_t t = 0; t < num; ++t) {
            const int64_t j = o.columns[at + t];
            product<T, false>(s + t * P, ld, q, W, 1, o.kt + (head * M + j) * o.K * P, P, m, o.K, P);
            adjust(o, s + t * P, ld, b, h, i, j, o.kinds[at + t]);
        }
        for (int64_t r = 0; r < m; ++r) {
            const T most = greatest<T, WIDTH>(s + r * ld, num * P, top[r]);
            const T shift = most == -(T)__builtin_inf() ? (T)0 : most;
            if (most != top[r]) {
                typedef typename Vec<T, WIDTH>::V V;
                const T factor = exponential<T, WIDTH>(V{} + (top[r] - shift))[0];
                total[r] *= factor;
                for (int64_t d = 0; d < W; ++d) sum[r * W + d] *= factor;
                top[r] = most;
            }
            total[r] += exponentials<T, WIDTH>(s + r * ld, num * P, shift);
            for (int64_t t = 0; o.keys && t < num; ++t) {
                factors<T, WIDTH>(o, kept, key, i * o.block + r, o.columns[at + t] * o.block);
                scale_row<T, WIDTH>(s + r * ld + t * P, kept, P);
            }
        }
        for (int64_t t = 0; t < num; ++t) {
            const int64_t j = o.columns[at + t];
            product<T, true>(sum, W, s + t * P, ld, 1, o.vr + (head * o.S + j * o.block) * W, W, m, o.width(j), W);
        }
    }
    for (int64_t r = 0; r < m; ++r) {
        T* y = o.y + own + r * o.H * o.K;
        const bool none = total[r] == 0;
        for (int64_t d = 0; d < o.K; ++d) y[d] = none ? (T)0 : sum[r * W + d] / total[r];
        o.lse[(b * o.H + h) * o.T_ + i * o.block + r] = none ? -(T)__builtin_inf() : top[r] + (T)__builtin_log(total[r]);
    }
}

template <typename T>
int64_t backward_scratch(const Call<T>& o) { return o.block * (3 * o.W + 2 * o.P) + dropping_scratch(o); }

// Some blocks of queries of one head: their dq, and what they add to dk and dv.
template <typename T>
INLINE void backward(const Call<T>& o, int64_t unit, T* scratch) {
    const int64_t c = unit % o.chunks, h = unit / o.chunks % o.H, b = unit / o.chunks / o.H;
    const int64_t N = o.rows(), M = o.blocks(), W = o.W, P = o.P, head = b * o.G + h / (o.H / o.G);
    T *q = scratch, *dy = q + o.block * W, *dq = dy + o.block * W, *p = dq + o.block * W, *ds = p + o.block * P;
    T *kept = ds + o.block * P, *dk = o.part(b, h, c), *dv = dk + o.S * W;
    uint32_t head_key[2] = {};
    if (o.keys) key_of(o, b, h, head_key);
    uint8_t* touched = o.blocks_of(b, h, c);
    std::memset(touched, 0, M);
    const int32_t* starts = o.row(h);
    const int64_t tiles = starts[N] - starts[0];
    for (int64_t i = 0; i < N; ++i) {
        const int64_t before = starts[i] - starts[0];
        // A row belongs to the part in which its first tile lies; rows without tiles to the first.
        if ((tiles && before < tiles ? before * o.chunks / tiles : 0) != c) continue;
        const int64_t m = o.length(i), own = ((b * o.T_ + i * o.block) * o.H + h) * o.K;
        const T *lse = o.lse + (b * o.H + h) * o.T_ + i * o.block, *delta = o.delta + (b * o.H + h) * o.T_ + i * o.block;
        copy_rows(q, o.q + own, m, o.H * o.K, o.K, W, (T)o.scale);
        copy_rows(dy, o.dy + own, m, o.H * o.K, o.K, W, (T)1);
        std::memset(dq, 0, sizeof(T) * m * W);
        for (int64_t at = starts[i]; at < starts[i + 1]; ++at) {
            const int64_t j = o.columns[at], n = o.width(j), tile = (head * M + j) * o.K * P;
            const int64_t key = (head * o.S + j * o.block) * W, sum = j * o.block * W;
            if (!touched[j]) {
                touched[j] = 1;
                std::memset(dk + sum, 0, sizeof(T) * n * W), std::memset(dv + sum, 0, sizeof(T) * n * W);
            }
            product<T, false>(p, P, q, W, 1, o.kt + tile, P, m, o.K, P);
            adjust(o, p, P, b, h, i, j, o.kinds[at]);
            product<T, false>(ds, P, dy, W, 1, o.vt + tile, P, m, o.K, P);
            for (int64_t r = 0; r < m; ++r) {
                exponentials<T, WIDTH>(p + r * P, P, lse[r] == -(T)__builtin_inf() ? (T)0 : lse[r]);
                if (o.keys) {
                    factors<T, WIDTH>(o, kept, head_key, i * o.block + r, j * o.block);
                    scale_row<T, WIDTH>(ds + r * P, kept, P);
                }
                for (int64_t e = 0; e < P; ++e) ds[r * P + e] = p[r * P + e] * (ds[r * P + e] - delta[r]);
                if (o.keys) scale_row<T, WIDTH>(p + r * P, kept, P);
            }
            product<T, true>(dv + sum, W, p, 1, P, dy, W, n, m, W);
            product<T, true>(dk + sum, W, ds, 1, P, q, W, n, m, W);
            product<T, true>(dq, W, ds, P, 1, o.kr + key, W, m, n, W);
        }
        for (int64_t r = 0; r < m; ++r)
            for (int64_t d = 0; d < o.K; ++d) o.dq[own + r * o.H * o.K + d] = dq[r * W + d] * (T)o.scale;
    }
}

// A block of keys: the sum over the query heads that read it, and over the parts.
template <typename T>
INLINE void gather(const Call<T>& o, int64_t unit, T* scratch) {
    const int64_t M = o.blocks(), j = unit % M, g = unit / M % o.G, b = unit / M / o.G, R = o.H / o.G;
    const int64_t n = o.width(j), size = n * o.W, to = ((b * o.S + j * o.block) * o.G + g) * o.K;
    for (int which = 0; which < 2; ++which) {
        bool some = false;
        for (int64_t x = 0; x < R * o.chunks; ++x) {
            if (!o.blocks_of(b, g * R + x / o.chunks, x % o.chunks)[j]) continue;
            const T* from = o.part(b, g * R + x / o.chunks, x % o.chunks) + (which * o.S + j * o.block) * o.W;
            if (!some)
                std::memcpy(scratch, from, sizeof(T) * size);
            else
                for (int64_t e = 0; e < size; ++e) scratch[e] += from[e];
            some = true;
        }
        if (!some) std::memset(scratch, 0, sizeof(T) * size);
        T* out = (which ? o.dv : o.dk) + to;
        for (int64_t r = 0; r < n; ++r)
            for (int64_t d = 0; d < o.K; ++d) out[r * o.G * o.K + d] = scratch[r * o.W + d];
    }
}

template <typename T>
using Run = void (*)(const Call<T>&, int64_t, T*);

template <typename T>
T* aligned(int64_t num) { return (T*)std::aligned_alloc(64, ceil(num * sizeof(T) + 64, 64) * 64); }

template <typename T>
void spread(const Call<T>& o, Run<T> run, int64_t units, int64_t scratch, int64_t threads) {
    std::atomic<int64_t> next(0);
    together(less(threads, units), [&](int64_t) {
        T* own = aligned<T>(scratch);
        for (int64_t unit; (unit = next++) < units;) run(o, unit, own);
        std::free(own);
    });
}

// numbers: B T S H G K block layouts, four strides of `added`, heads of the table, four of dropout, threads
template <typename T>
Call<T> read(const int64_t* numbers, const double* scale, void* const* at) {
    Call<T> o = {};
    std::memcpy(&o.B, numbers, sizeof(int64_t) * 17);
    o.scale = *scale;
    void const* const* p = at;
    o.q = (const T*)*p++, o.k = (const T*)*p++, o.v = (const T*)*p++;
    o.starts = (const int32_t*)*p++, o.columns = (const int32_t*)*p++, o.kinds = (const int32_t*)*p++;
    o.patterns = (const uint8_t*)*p++, o.ids_q = (const int64_t*)*p++, o.ids_k = (const int64_t*)*p++;
    o.keys = (const int64_t*)*p++;
    o.added = (const T*)*p++, o.table = (const T*)*p++;
    o.y = (T*)*p++, o.lse = (T*)*p++;
    o.dy = (const T*)*p++, o.delta = (const T*)*p++, o.dq = (T*)*p++, o.dk = (T*)*p++, o.dv = (T*)*p++;
    constexpr int unit = Of<T>::padded;
    o.W = ceil(o.K, unit) * unit, o.P = ceil(o.block, unit) * unit;
    return o;
}

template <typename T>
void attend(Call<T> o, bool back, int64_t threads) {
    const int64_t heads = o.B * o.G, keys = heads * o.blocks(), turned = keys * o.K * o.P, straight = heads * o.S * o.W;
    o.kt = aligned<T>(turned), o.vr = aligned<T>(straight);
    if (back) {
        o.vt = aligned<T>(turned), o.kr = aligned<T>(straight);
        o.chunks = less(o.rows(), ceil(16, o.B * o.H));
        o.partial = aligned<T>(o.B * o.H * o.chunks * 2 * o.S * o.W);
        o.touched = (uint8_t*)std::malloc(o.B * o.H * o.chunks * o.blocks());
    }
    spread(o, pack<T>, keys, 0, threads);
    if (back) {
        spread(o, backward<T>, o.B * o.H * o.chunks, backward_scratch(o), threads);
        spread(o, gather<T>, keys, o.block * o.W, threads);
    } else
        spread(o, forward<T>, o.B * o.H * o.rows(), forward_scratch(o), threads);
    for (T* x : {o.kt, o.vr, o.vt, o.kr, o.partial}) std::free(x);
    std::free(o.touched);
}

}  // namespace

extern "C" {

void block_sparse_attention(const int64_t* numbers, const double* scale, void* const* at, int64_t wide, int64_t back) {
    const int64_t threads = numbers[17];
    if (wide)
        attend(read<double>(numbers, scale, at), back, threads);
    else
        attend(read<float>(numbers, scale, at), back, threads);
}

}
