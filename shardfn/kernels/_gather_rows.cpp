// Sums of rows by their numbers, and dot products of them. A row of the result is computed by one thread, in one order:
// compile with -ffp-contract=off, so that products and sums are rounded one by one.
#include <cstdint>
#include <cstring>

#include "_threads.h"

namespace {

constexpr int64_t PART = 1 << 15;  // elements read in a thread's turn
constexpr int LANES = 16;

// run(first, last) for ranges of the m rows.
template <typename Run>
void by_rows(int64_t m, int64_t work, int64_t threads, Run run) {
    const int64_t step = work < PART ? PART / (work + 1) + 1 : 1;
    share((m + step - 1) / step, threads, [&](int64_t part) {
        run(part * step, (part + 1) * step < m ? (part + 1) * step : m);
    });
}

inline bool names_a_row(int64_t at, int64_t n, int64_t* bad) {
    if (at >= 0 && at < n) return true;
    if (at != -1) __atomic_store_n(bad, 1, __ATOMIC_RELAXED);
    return false;
}

template <typename T>
void gather(const T* x, const int64_t* index, const T* weights, T* out, int64_t n, int64_t d, int64_t m, int64_t j,
            int64_t threads, int64_t* bad) {
    by_rows(m, d * j, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            T* to = out + i * d;
            bool begun = false;
            for (int64_t c = i * j; c < (i + 1) * j; ++c) {
                if (!names_a_row(index[c], n, bad)) continue;
                const T* row = x + index[c] * d;
                const T factor = weights ? weights[c] : T(1);
                if (!begun && !weights)
                    std::memcpy(to, row, d * sizeof(T));
                else if (!begun)
                    for (int64_t k = 0; k < d; ++k) to[k] = factor * row[k];
                else
                    for (int64_t k = 0; k < d; ++k) to[k] = to[k] + factor * row[k];
                begun = true;
            }
            if (!begun) std::memset(to, 0, d * sizeof(T));
        }
    });
}

template <typename T>
T dot(const T* a, const T* b, int64_t d) {
    T lanes[LANES] = {};
    int64_t k = 0;
    for (; k + LANES <= d; k += LANES)
        for (int l = 0; l < LANES; ++l) lanes[l] += a[k + l] * b[k + l];
    for (int l = 0; k < d; ++k, ++l) lanes[l] += a[k] * b[k];
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    return lanes[0];
}

template <typename T>
void dots(const T* x, const int64_t* index, const T* y, T* out, int64_t n, int64_t d, int64_t m, int64_t j,
          int64_t threads, int64_t* bad) {
    by_rows(m, d * j, threads, [&](int64_t first, int64_t last) {
        for (int64_t c = first * j; c < last * j; ++c)
            out[c] = names_a_row(index[c], n, bad) ? dot(x + index[c] * d, y + c / j * d, d) : T(0);
    });
}

}  // namespace

extern "C" {

#define FUNCTIONS(T)                                                                                                  \
    void gather_rows_##T(const T* x, const int64_t* index, const T* weights, T* out, int64_t n, int64_t d, int64_t m, \
                         int64_t j, int64_t threads, int64_t* bad) {                                                  \
        gather<T>(x, index, weights, out, n, d, m, j, threads, bad);                                                  \
    }                                                                                                                 \
    void row_dots_##T(const T* x, const int64_t* index, const T* y, T* out, int64_t n, int64_t d, int64_t m,          \
                      int64_t j, int64_t threads, int64_t* bad) {                                                     \
        dots<T>(x, index, y, out, n, d, m, j, threads, bad);                                                          \
    }
FUNCTIONS(float)
FUNCTIONS(double)

}  // extern "C"
