// Products of groups of rows with a matrix each. An element is the fixed expression of _panels.h.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "_panels.h"
#include "_threads.h"

namespace {

constexpr int CHUNKS = 8;
constexpr int64_t AHEAD = 16;  // rows of a matrix that are fetched before they are read
constexpr int64_t ROWS = 504;  // of a thread's turn
constexpr int64_t DEPTH = 512;  // rows whose products are one chain of `outer`: their panel stays in near memory
constexpr int64_t FEW_ROWS = 6;  // up to which a matrix is read in its own order, and not copied into panels

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

// A range of rows of a group, by one panel of columns of its matrix.
struct Part {
    int64_t group, first, rows, panel;
};

// run(part, scratch) for each part; `size` numbers of scratch for each thread.
template <typename T, typename Run>
void by_parts(const std::vector<Part>& parts, T* scratch, int64_t size, int64_t threads, Run run) {
    std::atomic<int64_t> next(0);
    together(threads, [&](int64_t thread) {
        for (size_t part; (part = next++) < parts.size();) run(parts[part], scratch + thread * size);
    });
}

template <typename T, typename W>
void product(const T* x, const W* w, const int64_t* counts, T* y, T* scratch, int64_t m, int64_t k, int64_t n, int64_t e,
             int64_t transposed, int64_t threads) {
    std::vector<Part> parts;
    int64_t start = 0;
    for (int64_t g = 0; g < e; start += counts[g++])
        for (int64_t r = 0; r < counts[g]; r += ROWS)
            for (int64_t p = 0; p * PANEL < n; ++p)
                parts.push_back({g, start + r, counts[g] - r < ROWS ? counts[g] - r : ROWS, p});
    by_parts(parts, scratch, k * PANEL, threads, [&](const Part& part, T* panel) {
        const int64_t column = part.panel * PANEL, valid = n - column < PANEL ? n - column : PANEL;
        const W* from = w + part.group * k * n + (transposed ? column * k : column);
        Job<T, T> job = {x + part.first * k, panel, nullptr, y + part.first * n + column, k, 1, PANEL, n,
                         part.rows, k, CHUNKS, valid};
        if constexpr (sizeof(T) == sizeof(W))
            if (part.rows <= FEW_ROWS && !transposed && valid == PANEL) {
                job.b = from, job.across = n;
                return multiply(job);
            }
        if constexpr (FUSED && sizeof(T) == 4)  // generations with vectors of a width that pays
            if (transposed && valid == PANEL) {
                pack_transposed<Here>(from, panel, k);
                return multiply(job);
            }
        pack(from, panel, k, n, valid, transposed);
        multiply(job);
    });
    std::memset(y + start * n, 0, (m - start) * n * sizeof(T));
}

// Products of rows by DEPTH of them, which are added in their order.
template <typename T>
void outer(const T* x, const T* y, const int64_t* counts, T* out, T* scratch, int64_t k, int64_t n, int64_t e,
           int64_t size, int64_t threads) {
    std::vector<Part> parts;
    std::vector<int64_t> starts(e + 1);
    for (int64_t g = 0; g < e; ++g) {
        starts[g + 1] = starts[g] + counts[g];
        for (int64_t r = 0; r < k; r += ROWS)
            for (int64_t p = 0; p * PANEL < n; ++p) parts.push_back({g, r, k - r < ROWS ? k - r : ROWS, p});
    }
    by_parts(parts, scratch, size, threads, [&](const Part& part, T* panel) {
        const int64_t column = part.panel * PANEL, valid = n - column < PANEL ? n - column : PANEL;
        const int64_t start = starts[part.group], count = counts[part.group];
        T *to = out + (part.group * k + part.first) * n + column, *more = panel + DEPTH * PANEL;
        for (int64_t row = 0; row == 0 || row < count; row += DEPTH) {
            const int64_t depth = count - row < DEPTH ? count - row : DEPTH;
            pack(y + (start + row) * n + column, panel, depth, n, valid, false);
            multiply(Job<T, T>{x + (start + row) * k + part.first, panel, nullptr, row ? more : to, 1, k, PANEL,
                      row ? PANEL : n, part.rows, depth, depth < PANEL ? 1 : CHUNKS, valid});
            for (int64_t i = 0; row && i < part.rows; ++i)
                for (int64_t j = 0; j < valid; ++j) to[i * n + j] += more[i * PANEL + j];
        }
    });
}

}  // namespace

extern "C" {

#define PRODUCT(NAME, T, W)                                                                                            \
    void grouped_product_##NAME(const T* x, const W* w, const int64_t* counts, T* y, T* scratch, int64_t m, int64_t k, \
                                int64_t n, int64_t e, int64_t transposed, int64_t threads) {           \
        product<T, W>(x, w, counts, y, scratch, m, k, n, e, transposed, threads);                              \
    }
#define OUTER(T)                                                                                                       \
    void grouped_outer_##T(const T* x, const T* y, const int64_t* counts, T* out, T* scratch, int64_t k, int64_t n,    \
                           int64_t e, int64_t size, int64_t threads) {                                 \
        outer<T>(x, y, counts, out, scratch, k, n, e, size, threads);                                          \
    }
PRODUCT(float, float, float)
PRODUCT(bfloat16, float, uint16_t)
PRODUCT(double, double, double)
OUTER(float)
OUTER(double)

}  // extern "C"
