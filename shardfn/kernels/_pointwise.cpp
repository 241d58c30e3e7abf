// Activations of single elements. Each is one fixed expression: the elements beside it, threads and the width of vectors
// do not change its bits.
#include <cmath>
#include <cstring>

#include "_chain.h"
#include "_threads.h"
#include "_vectors.h"

namespace {

constexpr int64_t PART = 1 << 13;  // elements of a thread's turn

struct Call {
    const float *x, *up;
    float* y;
    int64_t n;
};

// x / (1 + e^-a), by e^-|a| alone
template <class L>
INLINE typename L::V by_sigmoid(typename L::V x, typename L::V a) {
    const auto e = exponential<L>(a < 0.0f ? a : -a);
    return x * (a < 0.0f ? e : ALL(1.0f)) / (1.0f + e);
}

// gate / (1 + e^-gate) * up
struct GatedSilu {
    static constexpr int operands = 2;
    template <class L>
    static INLINE typename L::V of(typename L::V gate, typename L::V up) {
        return by_sigmoid<L>(gate, gate) * up;
    }
};

// up / (1 + e^-gate)
struct GatedSigmoid {
    static constexpr int operands = 2;
    template <class L>
    static INLINE typename L::V of(typename L::V gate, typename L::V up) {
        return by_sigmoid<L>(up, gate);
    }
};

// x / (1 + e^-a), a = x (c + 0.044715 c x^2), c = 2 sqrt(2 / pi)
struct Gelu {
    static constexpr int operands = 1;
    template <class L>
    static INLINE typename L::V of(typename L::V x, typename L::V) {
        const auto factor = L::fused(x * x, ALL(0.0713548162726009f), ALL(1.59576912160573f));
        return by_sigmoid<L>(x, x * factor);
    }
};

struct Added {
    static constexpr int operands = 2;
    template <class L>
    static INLINE typename L::V of(typename L::V x, typename L::V y) { return x + y; }
};

struct Multiplied {
    static constexpr int operands = 2;
    template <class L>
    static INLINE typename L::V of(typename L::V x, typename L::V y) { return x * y; }
};

// The second operand is one number.
template <typename Op>
struct WithOne : Op {
    static constexpr int operands = 0;
};

template <class L, typename Op>
INLINE void part_of(const Call& o, int64_t part) {
    typedef typename L::V V;
    constexpr int lanes = L::lanes;
    const int64_t end = (part + 1) * PART < o.n ? (part + 1) * PART : o.n;
    const V one = Op::operands == 0 ? ALL(*o.up) : V{};
    int64_t i = part * PART;
    for (; i + lanes <= end; i += lanes) {
        const V up = Op::operands == 2 ? load<L>(o.up + i) : one;
        store<L>(o.y + i, Op::template of<L>(load<L>(o.x + i), up));
    }
    if (i == end) return;
    float x[lanes] = {}, up[lanes] = {};
    std::memcpy(x, o.x + i, (end - i) * sizeof(float));
    if (Op::operands == 2) std::memcpy(up, o.up + i, (end - i) * sizeof(float));
    store<L>(x, Op::template of<L>(load<L>(x), Op::operands == 2 ? load<L>(up) : one));
    std::memcpy(o.y + i, x, (end - i) * sizeof(float));
}

template <typename Op>
void run(const Call& o, int64_t threads) {
    share((o.n + PART - 1) / PART, threads, [&](int64_t part) { part_of<Here, Op>(o, part); });
}

// x cos + (-b, a) sin of a row (a, b): each product, and each sum, is rounded once.
template <class L>
INLINE void turned_row(const float* x, const float* cos, const float* sin, float* y, int64_t half) {
    int64_t k = 0;
    for (; k + L::lanes <= half; k += L::lanes) {
        const auto a = load<L>(x + k), b = load<L>(x + k + half);
        store<L>(y + k, a * load<L>(cos + k) + -b * load<L>(sin + k));
        store<L>(y + k + half, b * load<L>(cos + k + half) + a * load<L>(sin + k + half));
    }
    for (; k < half; ++k) {
        const float a = x[k], b = x[k + half];
        y[k] = a * cos[k] + -b * sin[k];
        y[k + half] = b * cos[k + half] + a * sin[k + half];
    }
}

}  // namespace

extern "C" {

void gated_silu(const float* gate, const float* up, float* y, int64_t n, int64_t threads) {
    run<GatedSilu>({gate, up, y, n}, threads);
}

void gated_sigmoid(const float* gate, const float* up, float* y, int64_t n, int64_t threads) {
    run<GatedSigmoid>({gate, up, y, n}, threads);
}

void rotate(const float* x, const float* cos, const float* sin, float* y, int64_t tokens, int64_t heads, int64_t dim) {
    for (int64_t t = 0; t < tokens; ++t, cos += dim, sin += dim)
        for (int64_t h = 0; h < heads; ++h, x += dim, y += dim) turned_row<Here>(x, cos, sin, y, dim / 2);
}

void added(const float* x, const float* other, float* y, int64_t n, int64_t threads) {
    run<Added>({x, other, y, n}, threads);
}

void multiplied(const float* x, const float* other, float* y, int64_t n, int64_t threads) {
    run<Multiplied>({x, other, y, n}, threads);
}

// Rows times a factor each (`each`), or each times one row of factors.
void scaled(const float* x, const float* by, float* y, int64_t rows, int64_t size, int64_t each) {
    for (int64_t r = 0; r < rows; ++r, x += size, y += size) {
        if (each) run<WithOne<Multiplied>>({x, by + r, y, size}, 1);
        else run<Multiplied>({x, by, y, size}, 1);
    }
}

void shifted(const float* x, float* y, int64_t n, float by, int64_t threads) {
    run<WithOne<Added>>({x, &by, y, n}, threads);
}

void inverse_root(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = 1.0f / std::sqrt(x[i]);
}

// Rows of x [n, size] by numbers, int64 or int32. Negative numbers may count from the end. Returns 1 for a number out of
// range.
int64_t take_rows(const float* x, const void* index, float* y, int64_t n, int64_t num, int64_t size, int64_t wide,
                  int64_t from_end) {
    for (int64_t i = 0; i < num; ++i, y += size) {
        int64_t at = wide ? ((const int64_t*)index)[i] : ((const int32_t*)index)[i];
        if (at < 0 && from_end) at += n;
        if (at < 0 || at >= n) return 1;
        std::memcpy(y, x + at * size, size * sizeof(float));
    }
    return 0;
}

void gelu(const float* x, float* y, int64_t n, int64_t threads) {
    run<Gelu>({x, nullptr, y, n}, threads);
}

}  // extern "C"

CHAINED(gated_silu)
CHAINED(gated_sigmoid)
CHAINED(rotate)
CHAINED(gelu)
CHAINED(added)
CHAINED(multiplied)
CHAINED(scaled)
CHAINED(shifted)
CHAINED(inverse_root)
CHAINED(take_rows)
