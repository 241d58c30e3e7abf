// Products of groups of rows with a matrix each. An element is one fixed expression: a chain of fused multiply-adds over
// ascending k for each chunk of K, from 0, and a binary tree over the chunks, as in row_linear/_native.cpp. Neither rows
// computed together, nor threads, nor the width of vectors change it.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../_threads.h"
#include "../_vectors.h"

namespace {

constexpr int PANEL = 64, LEVELS = 4, CHUNKS = 8;
constexpr int64_t AHEAD = 16;  // rows of a matrix that are fetched before they are read
constexpr int64_t ROWS = 504;  // of a thread's turn
constexpr int64_t FEW_ROWS = 6;  // up to which a matrix is read in its own order, and not copied into panels

template <typename T, int BYTES>
struct Wide {
    typedef T V __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
    static constexpr int lanes = BYTES / sizeof(T);
};

// y [M, PANEL] = a b, of a[r * down + k * along] and b[k * across + column]; `valid` columns are written.
template <typename T>
struct Job {
    const T *a, *b;
    T* y;
    int64_t down, along, across, out, M, K, chunks, valid;
};

template <typename T, int BYTES, bool FUSES>
INLINE void add_product(typename Wide<T, BYTES>::V& sum, T left, typename Wide<T, BYTES>::V right) {
    if (FUSES)
        sum += left * right;
    else
        for (int i = 0; i < Wide<T, BYTES>::lanes; ++i) sum[i] = std::fma(left, right[i], sum[i]);
}

// R rows by NV vectors of one panel.
template <typename T, int BYTES, bool FUSES, int R, int NV>
INLINE void tile(const Job<T>& o, const T* a, const T* b, T* y, int64_t valid) {
    typedef typename Wide<T, BYTES>::V V;
    constexpr int lanes = Wide<T, BYTES>::lanes;
    V node[LEVELS][R][NV], sum[R][NV];
    for (int64_t c = 0; c < o.chunks; ++c) {
        UNROLL
        for (int r = 0; r < R; ++r)
            UNROLL
            for (int v = 0; v < NV; ++v) sum[r][v] = V{};
        const int64_t last = (c + 1) * o.K / o.chunks;
        int64_t k = c * o.K / o.chunks;
        const T *left = a + k * o.along, *right = b + k * o.across;
        for (; k < last; ++k, left += o.along, right += o.across) {
            V row[NV];
            UNROLL
            for (int v = 0; v < NV; ++v) row[v] = *(const V*)(right + v * lanes);
            UNROLL
            for (int r = 0; r < R; ++r)
                UNROLL
                for (int v = 0; v < NV; ++v) add_product<T, BYTES, FUSES>(sum[r][v], left[r * o.down], row[v]);
        }
        int level = 0;  // chunks are a power of two: the last chunk's sum is the root
        for (int64_t n = c; n & 1; n >>= 1, ++level)
            UNROLL
            for (int r = 0; r < R; ++r)
                UNROLL
                for (int v = 0; v < NV; ++v) sum[r][v] = node[level][r][v] + sum[r][v];
        if (c + 1 < o.chunks)
            UNROLL
            for (int r = 0; r < R; ++r)
                UNROLL
                for (int v = 0; v < NV; ++v) node[level][r][v] = sum[r][v];
    }
    if (valid >= NV * lanes) {
        UNROLL
        for (int r = 0; r < R; ++r)
            UNROLL
            for (int v = 0; v < NV; ++v) *(V*)(y + r * o.out + v * lanes) = sum[r][v];
        return;
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < NV; ++v)
            for (int i = 0; i < lanes && v * lanes + i < valid; ++i) y[r * o.out + v * lanes + i] = sum[r][v][i];
}

template <typename T, int BYTES, bool FUSES, int R, int NV>
INLINE void rows(const Job<T>& o, int64_t m) {
    constexpr int width = NV * Wide<T, BYTES>::lanes;
    for (int at = 0; at < PANEL && at < o.valid; at += width)
        tile<T, BYTES, FUSES, R, NV>(o, o.a + m * o.down, o.b + at, o.y + m * o.out + at, o.valid - at);
}

// All rows of a job; `NV` vectors by six rows fill the registers, fewer rows take more of them.
template <typename T, int BYTES, bool FUSES, int NV>
INLINE void panel_of(const Job<T>& o) {
    constexpr int most = PANEL / Wide<T, BYTES>::lanes, two = 2 * NV < most ? 2 * NV : most;
    int64_t m = 0;
    for (; o.M - m > 8 || o.M - m == 6; m += 6) rows<T, BYTES, FUSES, 6, NV>(o, m);
    switch (o.M - m) {
        case 8: rows<T, BYTES, FUSES, 4, NV>(o, m); return rows<T, BYTES, FUSES, 4, NV>(o, m + 4);
        case 7: rows<T, BYTES, FUSES, 4, NV>(o, m); return rows<T, BYTES, FUSES, 3, NV>(o, m + 4);
        case 5: return rows<T, BYTES, FUSES, 5, NV>(o, m);
        case 4: return rows<T, BYTES, FUSES, 4, NV>(o, m);
        case 3: return rows<T, BYTES, FUSES, 3, NV>(o, m);
        case 2: return rows<T, BYTES, FUSES, 2, two>(o, m);
        case 1: return rows<T, BYTES, FUSES, 1, two>(o, m);
    }
}

inline double widened(double x) { return x; }
inline float widened(float x) { return x; }
inline float widened(uint16_t x) {  // bfloat16
    const uint32_t bits = (uint32_t)x << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

// `num` columns of a [K, n], or of the transpose of a [n, K], as a panel [K, PANEL] that is padded with zeros.
template <typename T, typename W>
void pack(const W* w, T* panel, int64_t K, int64_t n, int64_t num, bool transposed) {
    if (!transposed) {
        for (int64_t k = 0; k < K; ++k, w += n, panel += PANEL) {
            if (k + AHEAD < K)  // pieces of rows that lie apart, which no processor expects by itself
                for (size_t byte = 0; byte < PANEL * sizeof(W); byte += 64)
                    __builtin_prefetch((const char*)(w + AHEAD * n) + byte);
            if (sizeof(T) == sizeof(W) && num == PANEL) {
                std::memcpy(panel, w, PANEL * sizeof(T));
                continue;
            }
            for (int64_t j = 0; j < num; ++j) panel[j] = widened(w[j]);
            for (int64_t j = num; j < PANEL; ++j) panel[j] = 0;
        }
        return;
    }
    for (int64_t j = num; j < PANEL; ++j)
        for (int64_t k = 0; k < K; ++k) panel[k * PANEL + j] = 0;
    constexpr int64_t side = 16;
    for (int64_t k0 = 0; k0 < K; k0 += side)
        for (int64_t j0 = 0; j0 < num; j0 += side)
            for (int64_t j = j0; j < j0 + side && j < num; ++j)
                for (int64_t k = k0; k < k0 + side && k < K; ++k) panel[k * PANEL + j] = widened(w[j * K + k]);
}

// The same of float32, by squares of as many rows and columns as a vector has lanes.
template <class L, typename W>
INLINE void pack_transposed(const W* w, float* panel, int64_t K) {
    typedef typename L::V V;
    constexpr int lanes = L::lanes;
    int64_t k = 0;
    for (; k + lanes <= K; k += lanes)
        for (int j = 0; j < PANEL; j += lanes) {
            V in[lanes], out[lanes];
            UNROLL
            for (int i = 0; i < lanes; ++i) in[place_of<L>(i)] = load<L>(w + (j + i) * K + k);
            transpose<L>(in, out);
            UNROLL
            for (int i = 0; i < lanes; ++i) store<L>(panel + (k + i) * PANEL + j, out[i]);
        }
    for (; k < K; ++k)
        for (int j = 0; j < PANEL; ++j) panel[k * PANEL + j] = widened(w[j * K + k]);
}

// The code of one generation of processors.
template <typename T, typename W>
struct Code {
    void (*multiply)(const Job<T>&);
    void (*pack_transposed)(const W*, T*, int64_t);
};

template <typename T>
void multiply_any(const Job<T>& o) { panel_of<T, 16, false, 2>(o); }

#if GENERATIONS == 3
template <typename T>
V4 void multiply_v4(const Job<T>& o) { panel_of<T, 64, true, 4>(o); }
template <typename T>
V3 void multiply_v3(const Job<T>& o) { panel_of<T, 32, true, 2>(o); }
template <typename W>
V4 void pack_v4(const W* w, float* panel, int64_t K) { pack_transposed<Avx512>(w, panel, K); }
template <typename W>
V3 void pack_v3(const W* w, float* panel, int64_t K) { pack_transposed<Avx2>(w, panel, K); }
#endif

template <typename T, typename W>
Code<T, W> here(int64_t newest) {
#if GENERATIONS == 3
    __builtin_cpu_init();
    const bool v4 = newest >= 4 && __builtin_cpu_supports("x86-64-v4");
    if (v4 || (newest >= 3 && __builtin_cpu_supports("x86-64-v3"))) {
        Code<T, W> code = {v4 ? multiply_v4<T> : multiply_v3<T>, nullptr};
        if constexpr (sizeof(T) == 4) code.pack_transposed = v4 ? pack_v4<W> : pack_v3<W>;
        return code;
    }
#endif
    return {multiply_any<T>, nullptr};
}

// A range of rows of a group, by one panel of columns of its matrix.
struct Part {
    int64_t group, first, rows, panel;
};

// run(part, scratch) for each part; `size` numbers of scratch for each thread.
template <typename T, typename Run>
void by_parts(const std::vector<Part>& parts, T* scratch, int64_t size, int64_t threads, Run run) {
    std::atomic<int64_t> next(0);
    share(threads, threads, [&](int64_t thread) {
        for (size_t part; (part = next++) < parts.size();) run(parts[part], scratch + thread * size);
    });
}

template <typename T, typename W>
void product(const T* x, const W* w, const int64_t* counts, T* y, T* scratch, int64_t m, int64_t k, int64_t n, int64_t e,
             int64_t transposed, int64_t threads, int64_t newest) {
    const Code<T, W> code = here<T, W>(newest);
    std::vector<Part> parts;
    int64_t start = 0;
    for (int64_t g = 0; g < e; start += counts[g++])
        for (int64_t r = 0; r < counts[g]; r += ROWS)
            for (int64_t p = 0; p * PANEL < n; ++p)
                parts.push_back({g, start + r, counts[g] - r < ROWS ? counts[g] - r : ROWS, p});
    by_parts(parts, scratch, k * PANEL, threads, [&](const Part& part, T* panel) {
        const int64_t column = part.panel * PANEL, valid = n - column < PANEL ? n - column : PANEL;
        const W* from = w + part.group * k * n + (transposed ? column * k : column);
        Job<T> job = {x + part.first * k, panel, y + part.first * n + column, k, 1, PANEL, n, part.rows, k, CHUNKS, valid};
        if constexpr (sizeof(T) == sizeof(W))
            if (part.rows <= FEW_ROWS && !transposed && valid == PANEL) {
                job.b = from, job.across = n;
                return code.multiply(job);
            }
        if (transposed && valid == PANEL && code.pack_transposed)
            code.pack_transposed(from, panel, k);
        else
            pack(from, panel, k, n, valid, transposed);
        code.multiply(job);
    });
    std::memset(y + start * n, 0, (m - start) * n * sizeof(T));
}

template <typename T>
void outer(const T* x, const T* y, const int64_t* counts, T* out, T* scratch, int64_t k, int64_t n, int64_t e,
           int64_t most, int64_t threads, int64_t newest) {
    const Code<T, T> code = here<T, T>(newest);
    std::vector<Part> parts;
    std::vector<int64_t> starts(e + 1);
    for (int64_t g = 0; g < e; ++g) {
        starts[g + 1] = starts[g] + counts[g];
        for (int64_t r = 0; r < k; r += ROWS)
            for (int64_t p = 0; p * PANEL < n; ++p) parts.push_back({g, r, k - r < ROWS ? k - r : ROWS, p});
    }
    by_parts(parts, scratch, most * PANEL, threads, [&](const Part& part, T* panel) {
        const int64_t column = part.panel * PANEL, valid = n - column < PANEL ? n - column : PANEL;
        const int64_t start = starts[part.group], count = counts[part.group];
        T* to = out + (part.group * k + part.first) * n + column;
        Job<T> job = {x + start * k + part.first, panel, to, 1, k, PANEL, n, part.rows, count,
                      count < PANEL ? 1 : CHUNKS, valid};
        pack(y + start * n + column, panel, count, n, valid, false);
        code.multiply(job);
    });
}

}  // namespace

extern "C" {

#define PRODUCT(NAME, T, W)                                                                                            \
    void grouped_product_##NAME(const T* x, const W* w, const int64_t* counts, T* y, T* scratch, int64_t m, int64_t k, \
                                int64_t n, int64_t e, int64_t transposed, int64_t threads, int64_t newest) {           \
        product<T, W>(x, w, counts, y, scratch, m, k, n, e, transposed, threads, newest);                              \
    }
#define OUTER(T)                                                                                                       \
    void grouped_outer_##T(const T* x, const T* y, const int64_t* counts, T* out, T* scratch, int64_t k, int64_t n,    \
                           int64_t e, int64_t most, int64_t threads, int64_t newest) {                                 \
        outer<T>(x, y, counts, out, scratch, k, n, e, most, threads, newest);                                          \
    }
PRODUCT(float, float, float)
PRODUCT(bfloat16, float, uint16_t)
PRODUCT(double, double, double)
OUTER(float)
OUTER(double)

}  // extern "C"
