// Weights in codes, decoded in registers: scale q, or scale q + least, of groups of GROUP inputs. A scale has 11 bits
// and q at most 8, or 20 and 4, so that their product is exact, and a weight is rounded at most once, as is that of the
// reference.
#pragma once
#include "_panels.h"

#include <vector>

constexpr int GROUP = 32;
constexpr int AHEAD = 8192;  // bytes that are fetched before they are read: processors' own prefetching ends with a page

// The records of _row_codes.py: of a group of inputs and all outputs of a panel. A word has the codes of four inputs of
// an output, as products of whole numbers read them; in Int4 also of the next four, in the high nibbles.
struct Int8 {
    static constexpr int inputs = 4;  // of a row
    uint16_t scale[PANEL];
    int8_t q[GROUP / inputs][PANEL][4];
};
template <typename N>
struct Nibbles {
    static constexpr int inputs = 8;
    N scale[PANEL], least[PANEL];
    uint8_t q[GROUP / inputs][PANEL][4];
};
typedef Nibbles<uint16_t> Int4;
typedef Nibbles<float> Int4Wide;

template <int BYTES>
struct Lanes : Wide<float, BYTES> {
    typedef int32_t Int __attribute__((vector_size(BYTES), aligned(4), may_alias));
};

// Of float16, without arithmetic on subnormal numbers, which a process may have switched off.
template <int BYTES>
INLINE typename Lanes<BYTES>::V of_half(const uint16_t* p) {
    typedef Lanes<BYTES> L;
    typedef typename L::Int Int;
#if GENERATION >= 3
    typedef int16_t Eight __attribute__((vector_size(16), aligned(2), may_alias));
    typedef int16_t Sixteen __attribute__((vector_size(32), aligned(2), may_alias));
#if GENERATION == 4
    if constexpr (BYTES == 64)
        return (typename L::V)__builtin_ia32_vcvtph2ps512_mask((Sixteen)*(const Sixteen*)p, typename L::V{}, -1, 4);
#endif
    if constexpr (BYTES == 32) return (typename L::V)__builtin_ia32_vcvtph2ps256(*(const Eight*)p);
#endif
    const Int h = (Int)__builtin_convertvector(*(const typename L::Half*)p, typename L::Word);
    const Int size = h & 0x7FFF, sign = (h & 0x8000) << 16;
    const Int large = (size << 13) + (size < 0x7C00 ? Int{} + (112 << 23) : Int{} + (224 << 23));
    const typename L::V small = __builtin_convertvector(size, typename L::V) * 0x1p-24f;
    return (typename L::V)((size < 0x400 ? (Int)small : large) | sign);
}

template <int BYTES>
INLINE typename Lanes<BYTES>::V number(const uint16_t* p) { return of_half<BYTES>(p); }
template <int BYTES>
INLINE typename Lanes<BYTES>::V number(const float* p) { return *(const typename Lanes<BYTES>::V*)p; }

// The words of a row of codes, from an output on.
template <int BYTES, typename W>
INLINE typename Lanes<BYTES>::Int words(const W& group, int64_t row, int at) {
    return *(const typename Lanes<BYTES>::Int*)group.q[row][at];
}

// The code of an input of a row of codes, as a float.
template <int BYTES>
INLINE typename Lanes<BYTES>::V code(const Int8&, typename Lanes<BYTES>::Int word, int input) {
    return __builtin_convertvector(word << (24 - 8 * input) >> 24, typename Lanes<BYTES>::V);
}

template <int BYTES, typename N>
INLINE typename Lanes<BYTES>::V code(const Nibbles<N>&, typename Lanes<BYTES>::Int word, int input) {
    typedef Lanes<BYTES> L;
    const typename L::Int q = word >> (input % 4 * 8 + input / 4 * 4);
#if GENERATION == 4
    if constexpr (BYTES == 64) {  // whose permutations read the low four bits alone
        const typename L::V values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return __builtin_shuffle(values, q);
    }
#endif
    return __builtin_convertvector(q & 15, typename L::V);
}

// The numbers of a group and NV vectors of outputs, and the values of codes.
template <int BYTES, int NV, typename W>
struct Numbers;

template <int BYTES, int NV>
struct Numbers<BYTES, NV, Int8> {
    typename Lanes<BYTES>::V scale[NV];

    INLINE Numbers(const Int8& group, int at) {
        UNROLL
        for (int v = 0; v < NV; ++v) scale[v] = of_half<BYTES>(group.scale + at + v * Lanes<BYTES>::lanes);
    }
    INLINE typename Lanes<BYTES>::V value(typename Lanes<BYTES>::V q, int v) const { return q * scale[v]; }
};

template <int BYTES, int NV, typename N>
struct Numbers<BYTES, NV, Nibbles<N>> {
    typename Lanes<BYTES>::V scale[NV], least[NV];

    INLINE Numbers(const Nibbles<N>& group, int at) {
        UNROLL
        for (int v = 0; v < NV; ++v) {
            scale[v] = number<BYTES>(group.scale + at + v * Lanes<BYTES>::lanes);
            least[v] = number<BYTES>(group.least + at + v * Lanes<BYTES>::lanes);
        }
    }
    INLINE typename Lanes<BYTES>::V value(typename Lanes<BYTES>::V q, int v) const { return q * scale[v] + least[v]; }
};

// The chains of a chunk of a weight in codes.
template <typename W, int BYTES, bool FUSES, int R, int NV>
struct CodedChain {
    typedef typename Wide<float, BYTES>::V V;
    typedef typename Lanes<BYTES>::Int Int;

    static INLINE void run(const Job<float, W>& o, const float* left, int64_t k, int64_t last, int at, const Coming<W>&,
                           V (&sum)[R][NV]) {
        while (k < last) {
            const W& group = o.b[k / GROUP];
            const int64_t end = k - k % GROUP + GROUP < last ? k - k % GROUP + GROUP : last;
            const Numbers<BYTES, NV, W> numbers(group, at);
            while (k < end) {
                const int64_t row = k % GROUP / W::inputs;
                Int word[NV];
                UNROLL
                for (int v = 0; v < NV; ++v) word[v] = words<BYTES>(group, row, at + v * Lanes<BYTES>::lanes);
                if (at == 0)
                    UNROLL
                    for (int line = 0; line < 4; ++line) __builtin_prefetch((const char*)group.q[row] + AHEAD + 64 * line);
                if (k % W::inputs == 0 && k + W::inputs <= end) {
                    UNROLL
                    for (int i = 0; i < W::inputs; ++i, left += o.along) step(o, group, numbers, word, i, left, sum);
                    k += W::inputs;
                } else {
                    const int64_t next = k - k % W::inputs + W::inputs;
                    for (; k < next && k < end; ++k, left += o.along)
                        step(o, group, numbers, word, k % W::inputs, left, sum);
                }
            }
        }
    }

    static INLINE void step(const Job<float, W>& o, const W& group, const Numbers<BYTES, NV, W>& numbers,
                            const Int (&word)[NV], int input, const float* left, V (&sum)[R][NV]) {
        V row[NV];
        UNROLL
        for (int v = 0; v < NV; ++v) row[v] = numbers.value(code<BYTES>(group, word[v], input), v);
        add_row<float, BYTES, FUSES, R, NV>(sum, left, o.down, row);
    }
};

template <int BYTES, bool FUSES, int R, int NV>
struct Chain<float, Int8, BYTES, FUSES, R, NV> : CodedChain<Int8, BYTES, FUSES, R, NV> {};
template <typename N, int BYTES, bool FUSES, int R, int NV>
struct Chain<float, Nibbles<N>, BYTES, FUSES, R, NV> : CodedChain<Nibbles<N>, BYTES, FUSES, R, NV> {};

// The weights of a group, [GROUP, PANEL].
template <int BYTES, typename W>
INLINE void decode_group(const W& group, float* out) {
    typedef typename Lanes<BYTES>::V V;
    for (int at = 0; at < PANEL; at += Lanes<BYTES>::lanes) {
        const Numbers<BYTES, 1, W> numbers(group, at);
        for (int row = 0; row < GROUP / W::inputs; ++row) {
            const auto word = words<BYTES>(group, row, at);
            UNROLL
            for (int i = 0; i < W::inputs; ++i)
                *(V*)(out + (row * W::inputs + i) * PANEL + at) = numbers.value(code<BYTES>(group, word, i), 0);
        }
    }
}

// This thread's memory for a decoded panel.
inline float* decoded_room(int64_t size) {
    static thread_local std::vector<float> room;
    if ((int64_t)room.size() < size) room.resize(size);
    return room.data();
}

// The most rows for which decoding in registers, for eight at a time, is the faster way. A nibble takes more
// instructions than a byte, most of all without wide permutations.
template <typename W, int BYTES>
constexpr int64_t few_rows = (BYTES < 64 ? 8 : 16) * (W::inputs == 8 ? 1 : 2);

// Many rows: a panel is decoded once for all of them.
template <typename W, int BYTES>
INLINE void decoded_panel(const Job<float, W>& o, void (*multiply)(const Job<float, float>&)) {
    const int64_t groups = (o.K + GROUP - 1) / GROUP;
    float* room = decoded_room(groups * GROUP * PANEL);
    for (int64_t g = 0; g < groups; ++g) {
        for (size_t at = 0; at < sizeof(W); at += 64) __builtin_prefetch((const char*)(o.b + g) + AHEAD + at);
        decode_group<BYTES>(o.b[g], room + g * GROUP * PANEL);
    }
    multiply({o.a, room, o.bias, o.y, o.down, o.along, PANEL, o.out, o.M, o.K, o.chunks, o.valid});
}

// Rows whose codes are decoded once for all of them.
template <typename W, int BYTES, bool FUSES, int R, int NV>
INLINE void coded_rows(const Job<float, W>& o, int64_t first) {
    Nodes<float, R> nodes;
    for (int at = 0; at < PANEL && at < o.valid; at += NV * Wide<float, BYTES>::lanes)
        for (int64_t c = 0; c < o.chunks; ++c)
            tile<float, W, BYTES, FUSES, R, NV>(o, first, at, {nullptr, o.K, 1}, {c, o.K, o.chunks}, 0, nodes);
}

// Up to eight rows at once.
template <typename W, int BYTES, bool FUSES>
INLINE void coded_panel(const Job<float, W>& o, void (*multiply)(const Job<float, float>&)) {
    if (o.M > few_rows<W, BYTES>) return decoded_panel<W, BYTES>(o, multiply);
    constexpr int most = PANEL / Wide<float, BYTES>::lanes, four = most < 4 ? most : 4, few = BYTES == 64 ? 2 : 1;
    for (int64_t m = 0, height; m < o.M; m += height) {
        const int64_t rest = o.M - m;
        height = slim<FUSES> ? 1 : rest == 9 ? 5 : rest > 8 ? 8 : rest;
        if constexpr (!slim<FUSES>) switch (height) {
            case 8: coded_rows<W, BYTES, FUSES, 8, few>(o, m); continue;
            case 7: coded_rows<W, BYTES, FUSES, 7, few>(o, m); continue;
            case 6: coded_rows<W, BYTES, FUSES, 6, few>(o, m); continue;
            case 5: coded_rows<W, BYTES, FUSES, 5, few>(o, m); continue;
            case 4: coded_rows<W, BYTES, FUSES, 4, 2 * few>(o, m); continue;
            case 3: coded_rows<W, BYTES, FUSES, 3, 2 * few>(o, m); continue;
            case 2: coded_rows<W, BYTES, FUSES, 2, four>(o, m); continue;
        }
        coded_rows<W, BYTES, FUSES, 1, four>(o, m);
    }
}

template <typename W>
void multiply_coded(const Job<float, W>& o) { coded_panel<W, WIDTH, FUSED>(o, multiply<float, float>); }
