// y = x W^T + bias of W in codes and x rounded to 8 bits: sums of products of whole numbers within a group of inputs, and
// one fixed expression of floats over groups, by the chains and the tree of _panels.h, where a group counts as one k.
#include "_chain.h"
#include "_row_codes.h"
#include "_threads.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace {

// A group of inputs of a row, rounded: x = scale q. A row of them is a row of floats to _panels.h.
struct Rounded {
    int8_t q[GROUP];
    float scale, total;  // total = the sum of q
    int32_t offset;      // -128 total
    int32_t unused;
};
constexpr int FLOATS = sizeof(Rounded) / sizeof(float);
constexpr float TINY = 0x1p-90f, MAGIC = 12582912.0f;
constexpr int32_t NOT_FINITE = 0x7F800000;

// The definition of `round_rows`. NaN counts as the largest number.
INLINE void round_group(const float* x, Rounded& out) {
    typedef Lanes<WIDTH> L;
    typedef typename L::Int Int;
    typedef typename L::V V;
    Int top{};
    UNROLL
    for (int i = 0; i < GROUP; i += L::lanes) {
        const Int size = (Int)*(const V*)(x + i) & 0x7FFFFFFF;
        top = size > top ? size : top;
    }
    int32_t most = 0;
    for (int i = 0; i < L::lanes; ++i) most = top[i] > most ? top[i] : most;
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    const bool counts = largest >= TINY && most < NOT_FINITE;
    const float factor = counts ? 127.0f / largest : 0.0f;
    int32_t total = 0;
    int32_t codes[GROUP];
    UNROLL
    for (int i = 0; i < GROUP; i += L::lanes) {
        const V given = counts ? *(const V*)(x + i) : V{};
        *(Int*)(codes + i) = (Int)(given * factor + MAGIC) - 0x4B400000;
    }
    for (int i = 0; i < GROUP; ++i) {
        out.q[i] = (int8_t)codes[i];
        total += codes[i];
    }
    out.scale = most >= NOT_FINITE ? (float)NAN : counts ? largest / 127.0f : 0.0f;
    out.total = (float)total;
    out.offset = -128 * total;
}

INLINE void round_row(const float* x, int64_t K, Rounded* out) {
    int64_t k = 0;
    for (; k + GROUP <= K; k += GROUP) round_group(x + k, *out++);
    if (k == K) return;
    float rest[GROUP] = {};
    std::copy(x + k, x + K, rest);
    round_group(rest, *out);
}

// a b + c, rounded once.
template <int BYTES>
INLINE typename Lanes<BYTES>::V fused(typename Lanes<BYTES>::V a, typename Lanes<BYTES>::V b, typename Lanes<BYTES>::V c) {
#if GENERATION == 4
    if constexpr (BYTES == 64) return (typename Lanes<BYTES>::V)__builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
#endif
#if GENERATION >= 3
    if constexpr (BYTES == 32) return (typename Lanes<BYTES>::V)__builtin_ia32_vfmaddps256(a, b, c);
#endif
    for (int i = 0; i < Lanes<BYTES>::lanes; ++i) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
}

// Ways to add up products of four codes of each output and four codes of a row, the same for all outputs. `dot` adds to
// a sum, `ready` makes weights from words of codes, and `finish` the whole numbers from sums that began at `begin`.

#if GENERATION == 4
struct Vnni {
    static constexpr int BYTES = 64;
    typedef typename Lanes<BYTES>::Int Int;

    template <typename W>
    static INLINE Int begin(const Rounded& x) {
        return std::is_same_v<W, Int8> ? Int{} + x.offset : Int{};
    }
    // Bytes without a sign: those of Int8 are 128 too large.
    static INLINE Int ready(const Int8&, Int word, int) { return word ^ (int32_t)0x80808080; }
    template <typename N>
    static INLINE Int ready(const Nibbles<N>&, Int word, int half) { return word >> 4 * half & 0x0F0F0F0F; }
    template <typename W>
    static INLINE void dot(Int& sum, Int weight, Int x) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(x));
    }
    template <typename W>
    static INLINE Int finish(Int sum) { return sum; }
};
#endif

#if GENERATION >= 3
struct Maddubs {
    static constexpr int BYTES = 32;
    typedef typename Lanes<BYTES>::Int Int;
    typedef char Char __attribute__((vector_size(32), may_alias));
    typedef short Short __attribute__((vector_size(32), may_alias));

    template <typename W>
    static INLINE Int begin(const Rounded&) { return Int{}; }
    static INLINE Int ready(const Int8&, Int word, int) { return word; }
    template <typename N>
    static INLINE Int ready(const Nibbles<N>&, Int word, int half) { return word >> 4 * half & 0x0F0F0F0F; }
    template <typename W>
    static INLINE void dot(Int& sum, Int weight, Int x) {
        if constexpr (W::inputs == 8) {
            // A group adds up at most 16 products of at most 15 * 127 in each half word.
            sum = (Int)((Short)sum + (Short)__builtin_ia32_pmaddubsw256((Char)weight, (Char)x));
        } else {
            const Char size = (Char)__builtin_ia32_pabsb256((Char)weight), turned = (Char)__builtin_ia32_psignb256((Char)x, (Char)weight);
            sum += pairs((Short)__builtin_ia32_pmaddubsw256(size, turned));
        }
    }
    template <typename W>
    static INLINE Int finish(Int sum) {
        return W::inputs == 8 ? pairs((Short)sum) : sum;
    }
    static INLINE Int pairs(Short sum) { return (Int)__builtin_ia32_pmaddwd256(sum, Short{} + 1); }
};
#else
struct Plain {
    static constexpr int BYTES = 16;
    typedef typename Lanes<BYTES>::Int Int;

    template <typename W>
    static INLINE Int begin(const Rounded&) { return Int{}; }
    static INLINE Int ready(const Int8&, Int word, int) { return word; }
    template <typename N>
    static INLINE Int ready(const Nibbles<N>&, Int word, int half) { return word >> 4 * half & 0x0F0F0F0F; }
    template <typename W>
    static INLINE void dot(Int& sum, Int weight, Int x) {
        UNROLL
        for (int i = 0; i < 4; ++i) sum += (weight << (24 - 8 * i) >> 24) * (x << (24 - 8 * i) >> 24);
    }
    template <typename W>
    static INLINE Int finish(Int sum) { return sum; }
};
#endif

// A weight that is multiplied as whole numbers.
template <typename W, typename Dot>
struct Whole {
    W group;
};

}  // namespace

template <typename W, typename Dot, int BYTES, bool FUSES, int R, int NV>
struct Chain<float, Whole<W, Dot>, BYTES, FUSES, R, NV> {
    typedef typename Lanes<BYTES>::V V;
    typedef typename Lanes<BYTES>::Int Int;
    static constexpr int lanes = Lanes<BYTES>::lanes, HALVES = W::inputs / 4;

    static INLINE void run(const Job<float, Whole<W, Dot>>& o, const float* left, int64_t k, int64_t last, int at,
                           const Coming<Whole<W, Dot>>&, V (&total)[R][NV]) {
        for (; k < last; ++k, left += o.along) {
            const W& group = o.b[k].group;
            Int sum[R][NV];
            UNROLL
            for (int r = 0; r < R; ++r)
                UNROLL
                for (int v = 0; v < NV; ++v) sum[r][v] = Dot::template begin<W>(row(o, left, r));
            UNROLL
            for (int i = 0; i < GROUP / W::inputs; ++i) {
                if (at == 0)
                    UNROLL
                    for (int line = 0; line < 4; ++line) __builtin_prefetch((const char*)group.q[i] + AHEAD + 64 * line);
                UNROLL
                for (int half = 0; half < HALVES; ++half) {
                    Int weight[NV];
                    UNROLL
                    for (int v = 0; v < NV; ++v) weight[v] = Dot::ready(group, words<BYTES>(group, i, at + v * lanes), half);
                    UNROLL
                    for (int r = 0; r < R; ++r) {
                        int32_t four;
                        std::memcpy(&four, row(o, left, r).q + 4 * (i * HALVES + half), sizeof four);
                        const Int x = Int{} + four;
                        UNROLL
                        for (int v = 0; v < NV; ++v) Dot::template dot<W>(sum[r][v], weight[v], x);
                    }
                }
            }
            const Numbers<BYTES, NV, W> numbers(group, at);
            UNROLL
            for (int r = 0; r < R; ++r)
                UNROLL
                for (int v = 0; v < NV; ++v) {
                    const V whole = __builtin_convertvector(Dot::template finish<W>(sum[r][v]), V);
                    const V value = scaled(numbers, whole, row(o, left, r), v);
                    total[r][v] = fused<BYTES>(value, row(o, left, r).scale - V{}, total[r][v]);
                }
        }
    }

    static INLINE const Rounded& row(const Job<float, Whole<W, Dot>>& o, const float* left, int r) {
        return *(const Rounded*)(left + r * o.down);
    }
    static INLINE V scaled(const Numbers<BYTES, NV, Int8>& numbers, V whole, const Rounded&, int v) {
        return numbers.scale[v] * whole;
    }
    template <typename N>
    static INLINE V scaled(const Numbers<BYTES, NV, Nibbles<N>>& numbers, V whole, const Rounded& x, int v) {
        return fused<BYTES>(numbers.least[v], x.total - V{}, numbers.scale[v] * whole);
    }
};

namespace {

template <typename W, typename Dot>
void multiply_whole(const Job<float, W>& o) {
    const Job<float, Whole<W, Dot>> job = {o.a, (const Whole<W, Dot>*)o.b, o.bias, o.y, o.down, o.along, 0,
                                           o.out, o.M, o.K, o.chunks, o.valid};
    panel_of<float, Whole<W, Dot>, Dot::BYTES, FUSED, Dot::BYTES == 64 ? 2 : 1>(job);
}

template <typename W>
void multiply_coded_rows(const Job<float, W>& o) {
#if GENERATION == 4
    static const bool vnni = __builtin_cpu_supports("avx512vnni");
    return vnni ? multiply_whole<W, Vnni>(o) : multiply_whole<W, Maddubs>(o);
#elif GENERATION == 3
    return multiply_whole<W, Maddubs>(o);
#else
    return multiply_whole<W, Plain>(o);
#endif
}

// Codes of W [panels, groups], bias [N] or null -> y [M, N]. A panel begins `apart` records after the panel before.
struct Layer {
    const void* w;
    const float* bias;
    float* y;
    int64_t N, apart, kind;  // int8 (0), int4 (1) or int4_wide (2)

    int64_t panels() const { return (N + PANEL - 1) / PANEL; }
};

constexpr int64_t ROWS = 504, ROUNDED = 16;  // rows of a part

template <typename W>
void run_panel(const Layer& layer, const Rounded* x, int64_t row, int64_t rows, int64_t panel, int64_t groups, int64_t chunks) {
    const int64_t column = panel * PANEL;
    multiply_coded_rows<W>({(const float*)(x + row * groups), (const W*)layer.w + panel * layer.apart,
                            layer.bias ? layer.bias + column : nullptr, layer.y + row * layer.N + column,
                            groups * FLOATS, FLOATS, 0, layer.N, rows, groups, chunks, layer.N - column});
}

}  // namespace

extern "C" {

// x [M, K] times each of `num` layers.
void integer_linears(const float* x, const void* given, int64_t num, int64_t M, int64_t K, int64_t chunks, int64_t threads) {
    const Layer* layers = (const Layer*)given;
    const int64_t groups = (K + GROUP - 1) / GROUP;
    static thread_local std::vector<Rounded> room;
    if ((int64_t)room.size() < M * groups) room.resize(M * groups);
    Rounded* rounded = room.data();
    share((M + ROUNDED - 1) / ROUNDED, threads, [&](int64_t part) {
        for (int64_t m = part * ROUNDED; m < std::min(M, (part + 1) * ROUNDED); ++m)
            round_row(x + m * K, K, rounded + m * groups);
    });
    int64_t panels = 0;
    for (int64_t i = 0; i < num; ++i) panels += layers[i].panels();
    share(panels * ((M + ROWS - 1) / ROWS), threads, [&](int64_t part) {
        const int64_t row = part / panels * ROWS, rows = std::min(ROWS, M - row);
        int64_t panel = part % panels;
        const Layer* layer = layers;
        for (; panel >= layer->panels(); ++layer) panel -= layer->panels();
        const auto run = layer->kind == 2 ? run_panel<Int4Wide> : layer->kind ? run_panel<Int4> : run_panel<Int8>;
        run(*layer, rounded, row, rows, panel, groups, chunks);
    });
}

// The same; its layers come last, each as its six fields.
int64_t integer_linears_chained(const int64_t* from) {
    integer_linears((const float*)from[0], from + 6, from[1], from[2], from[3], from[4], from[5]);
    return 0;
}

}  // extern "C"
