// Activations of single elements. Each is one fixed expression: the elements beside it, threads and the width of vectors
// do not change its bits.
#include <cmath>
#include <cstring>

#include "../_chain.h"
#include "../_threads.h"
#include "../_vectors.h"

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

using Run = void (*)(const Call&, int64_t);

template <typename Op>
void any(const Call& o, int64_t part) { part_of<Any, Op>(o, part); }

#if GENERATIONS == 3
template <typename Op>
V4 void v4(const Call& o, int64_t part) { part_of<Avx512, Op>(o, part); }
template <typename Op>
V3 void v3(const Call& o, int64_t part) { part_of<Avx2, Op>(o, part); }

template <typename Op>
Run here(int64_t newest) { return form_of<Run>(newest, v4<Op>, v3<Op>, any<Op>); }
#else
template <typename Op>
Run here(int64_t) { return any<Op>; }
#endif

template <typename Op>
void run(const Call& o, int64_t threads, int64_t newest) {
    const Run one = here<Op>(newest);
    share((o.n + PART - 1) / PART, threads, [&](int64_t part) { one(o, part); });
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

using Turn = void (*)(const float*, const float*, const float*, float*, int64_t);

void turn_any(const float* x, const float* cos, const float* sin, float* y, int64_t half) {
    turned_row<Any>(x, cos, sin, y, half);
}

#if GENERATIONS == 3
V4 void turn_v4(const float* x, const float* cos, const float* sin, float* y, int64_t half) {
    turned_row<Avx512>(x, cos, sin, y, half);
}
V3 void turn_v3(const float* x, const float* cos, const float* sin, float* y, int64_t half) {
    turned_row<Avx2>(x, cos, sin, y, half);
}

Turn turns(int64_t newest) { return form_of(newest, turn_v4, turn_v3, turn_any); }
#else
Turn turns(int64_t) { return turn_any; }
#endif

}  // namespace

extern "C" {

void gated_silu(const float* gate, const float* up, float* y, int64_t n, int64_t threads, int64_t newest) {
    run<GatedSilu>({gate, up, y, n}, threads, newest);
}

void rotate(const float* x, const float* cos, const float* sin, float* y, int64_t tokens, int64_t heads, int64_t dim,
            int64_t newest) {
    const Turn turn = turns(newest);
    for (int64_t t = 0; t < tokens; ++t, cos += dim, sin += dim)
        for (int64_t h = 0; h < heads; ++h, x += dim, y += dim) turn(x, cos, sin, y, dim / 2);
}

void added(const float* x, const float* other, float* y, int64_t n, int64_t threads, int64_t newest) {
    run<Added>({x, other, y, n}, threads, newest);
}

void multiplied(const float* x, const float* other, float* y, int64_t n, int64_t threads, int64_t newest) {
    run<Multiplied>({x, other, y, n}, threads, newest);
}

// Rows times a factor each (`each`), or each times one row of factors.
void scaled(const float* x, const float* by, float* y, int64_t rows, int64_t size, int64_t each, int64_t newest) {
    for (int64_t r = 0; r < rows; ++r, x += size, y += size) {
        if (each) run<WithOne<Multiplied>>({x, by + r, y, size}, 1, newest);
        else run<Multiplied>({x, by, y, size}, 1, newest);
    }
}

void shifted(const float* x, float* y, int64_t n, float by, int64_t threads, int64_t newest) {
    run<WithOne<Added>>({x, &by, y, n}, threads, newest);
}

void inverse_root(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = 1.0f / std::sqrt(x[i]);
}

void gelu(const float* x, float* y, int64_t n, int64_t threads, int64_t newest) {
    run<Gelu>({x, nullptr, y, n}, threads, newest);
}

}  // extern "C"

CHAINED(gated_silu)
CHAINED(rotate)
CHAINED(gelu)
CHAINED(added)
CHAINED(multiplied)
CHAINED(scaled)
CHAINED(shifted)
CHAINED(inverse_root)
