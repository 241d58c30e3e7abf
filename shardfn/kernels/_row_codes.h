// Weights in codes, decoded in registers: scale q, or scale q + least, of groups of GROUP inputs. A scale has 11 bits
// and q at most 8, so that their product is exact, and a weight is rounded at most once, as is that of the reference.
#pragma once
#include "_panels.h"

#include <vector>

constexpr int GROUP = 32;
constexpr int AHEAD = 8192;  // bytes that are fetched before they are read: processors' own prefetching ends with a page

// The records of _codes.py: of a group of inputs and all outputs of a panel.
struct Int8 {
    uint16_t scale[PANEL];
    int8_t q[GROUP][PANEL];
};
struct Int4 {
    uint16_t scale[PANEL], least[PANEL];
    uint8_t q[GROUP / 2][PANEL];  // even inputs in the low nibbles
};

template <int BYTES>
struct Lanes : Wide<float, BYTES> {
    typedef int32_t Int __attribute__((vector_size(BYTES), aligned(4), may_alias));
};

// Bytes as whole numbers, with the sign of B. GCC's own conversion takes them one by one.
template <int BYTES, typename B>
INLINE typename Lanes<BYTES>::Int of_bytes(const B* p) {
    typedef typename Lanes<BYTES>::Int Int;
    constexpr bool negative = B(-1) < 0;
#if GENERATION >= 3
    typedef char Sixteen __attribute__((vector_size(16), aligned(1), may_alias));
    typedef int64_t Two __attribute__((vector_size(16)));
    typedef int64_t Eight __attribute__((aligned(1), may_alias));
#if GENERATION == 4
    if constexpr (BYTES == 64) {
        const Sixteen bytes = *(const Sixteen*)p;
        return negative ? (Int)__builtin_ia32_pmovsxbd512_mask(bytes, Int{}, -1)
                        : (Int)__builtin_ia32_pmovzxbd512_mask(bytes, Int{}, -1);
    }
#endif
    if constexpr (BYTES == 32) {
        const Sixteen bytes = (Sixteen)Two{*(const Eight*)p, 0};
        return negative ? (Int)__builtin_ia32_pmovsxbd256(bytes) : (Int)__builtin_ia32_pmovzxbd256(bytes);
    }
#endif
    Int out;
    for (int i = 0; i < Lanes<BYTES>::lanes; ++i) out[i] = p[i];
    return out;
}

// Of float16, without arithmetic on subnormal numbers, which a process may have switched off.
template <int BYTES>
INLINE typename Lanes<BYTES>::V of_half(const uint16_t* p) {
    typedef Lanes<BYTES> L;
    typedef typename L::Int Int;
    const Int h = (Int)__builtin_convertvector(*(const typename L::Half*)p, typename L::Word);
    const Int size = h & 0x7FFF, sign = (h & 0x8000) << 16;
    const Int large = (size << 13) + (size < 0x7C00 ? Int{} + (112 << 23) : Int{} + (224 << 23));
    const typename L::V small = __builtin_convertvector(size, typename L::V) * 0x1p-24f;
    return (typename L::V)((size < 0x400 ? (Int)small : large) | sign);
}

// Small whole numbers as floats; of nibbles the low four bits of each lane count.
template <int BYTES>
INLINE typename Lanes<BYTES>::V of_nibble(typename Lanes<BYTES>::Int q) {
    typedef Lanes<BYTES> L;
#if GENERATION == 4
    if constexpr (BYTES == 64) {  // whose permutations read these bits alone
        const typename L::V values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return __builtin_shuffle(values, q);
    }
#endif
    return __builtin_convertvector(q & 15, typename L::V);
}

template <int BYTES, bool FUSES, int R, int NV>
struct Chain<float, Int8, BYTES, FUSES, R, NV> {
    typedef typename Wide<float, BYTES>::V V;
    static INLINE void run(const Job<float, Int8>& o, const float* left, int64_t k, int64_t last, int at,
                           const Coming<Int8>&, V (&sum)[R][NV]) {
        typedef Lanes<BYTES> L;
        while (k < last) {
            const Int8& group = o.b[k / GROUP];
            const int64_t end = k - k % GROUP + GROUP < last ? k - k % GROUP + GROUP : last;
            V scale[NV];
            UNROLL
            for (int v = 0; v < NV; ++v) scale[v] = of_half<BYTES>(group.scale + at + v * L::lanes);
            const int8_t* q = group.q[k % GROUP] + at;
            for (; k < end; ++k, left += o.along, q += PANEL) {
                if (at == 0) __builtin_prefetch(q + AHEAD);
                V row[NV];
                UNROLL
                for (int v = 0; v < NV; ++v)
                    row[v] = __builtin_convertvector(of_bytes<BYTES>(q + v * L::lanes), V) * scale[v];
                add_row<float, BYTES, FUSES, R, NV>(sum, left, o.down, row);
            }
        }
    }
};

template <int BYTES, bool FUSES, int R, int NV>
struct Chain<float, Int4, BYTES, FUSES, R, NV> {
    typedef typename Wide<float, BYTES>::V V;
    typedef Lanes<BYTES> L;
    typedef typename L::Int Int;

    static INLINE void run(const Job<float, Int4>& o, const float* left, int64_t k, int64_t last, int at,
                           const Coming<Int4>&, V (&sum)[R][NV]) {
        while (k < last) {
            const Int4& group = o.b[k / GROUP];
            const int64_t end = k - k % GROUP + GROUP < last ? k - k % GROUP + GROUP : last;
            V scale[NV], least[NV];
            UNROLL
            for (int v = 0; v < NV; ++v) {
                scale[v] = of_half<BYTES>(group.scale + at + v * L::lanes);
                least[v] = of_half<BYTES>(group.least + at + v * L::lanes);
            }
            if (k & 1) add<1>(o, group, k, left, at, scale, least, sum);
            for (; k + 1 < end; k += 2, left += 2 * o.along) add_two(o, group, k, left, at, scale, least, sum);
            if (k < end) add<0>(o, group, k, left, at, scale, least, sum);
        }
    }

    static INLINE void decode(V (&row)[NV], const Int (&q)[NV], const V (&scale)[NV], const V (&least)[NV]) {
        UNROLL
        for (int v = 0; v < NV; ++v) row[v] = of_nibble<BYTES>(q[v]) * scale[v] + least[v];
    }

    static INLINE void load(Int (&q)[NV], const Int4& group, int64_t k, int at) {
        UNROLL
        for (int v = 0; v < NV; ++v) q[v] = of_bytes<BYTES>(group.q[k % GROUP / 2] + at + v * L::lanes);
    }

    // One input, in the low (0) or the high nibbles.
    template <int HIGH>
    static INLINE void add(const Job<float, Int4>& o, const Int4& group, int64_t& k, const float*& left, int at,
                           const V (&scale)[NV], const V (&least)[NV], V (&sum)[R][NV]) {
        Int q[NV];
        V row[NV];
        load(q, group, k, at);
        UNROLL
        for (int v = 0; v < NV; ++v) q[v] >>= 4 * HIGH;
        decode(row, q, scale, least);
        add_row<float, BYTES, FUSES, R, NV>(sum, left, o.down, row);
        ++k;
        left += o.along;
    }

    static INLINE void add_two(const Job<float, Int4>& o, const Int4& group, int64_t k, const float* left, int at,
                               const V (&scale)[NV], const V (&least)[NV], V (&sum)[R][NV]) {
        Int q[NV];
        V row[NV];
        if (at == 0) __builtin_prefetch(group.q[k % GROUP / 2] + AHEAD);
        load(q, group, k, at);
        decode(row, q, scale, least);
        add_row<float, BYTES, FUSES, R, NV>(sum, left, o.down, row);
        UNROLL
        for (int v = 0; v < NV; ++v) q[v] >>= 4;
        decode(row, q, scale, least);
        add_row<float, BYTES, FUSES, R, NV>(sum, left + o.along, o.down, row);
    }
};

// The weights of a group, [GROUP, PANEL].
template <int BYTES>
INLINE void decode_group(const Int8& group, float* out) {
    typedef Lanes<BYTES> L;
    typedef typename L::V V;
    for (int at = 0; at < PANEL; at += L::lanes) {
        const V scale = of_half<BYTES>(group.scale + at);
        for (int k = 0; k < GROUP; ++k)
            *(V*)(out + k * PANEL + at) = __builtin_convertvector(of_bytes<BYTES>(group.q[k] + at), V) * scale;
    }
}

template <int BYTES>
INLINE void decode_group(const Int4& group, float* out) {
    typedef Lanes<BYTES> L;
    typedef typename L::V V;
    for (int at = 0; at < PANEL; at += L::lanes) {
        const V scale = of_half<BYTES>(group.scale + at), least = of_half<BYTES>(group.least + at);
        for (int k = 0; k < GROUP; k += 2) {
            const typename L::Int q = of_bytes<BYTES>(group.q[k / 2] + at);
            *(V*)(out + k * PANEL + at) = of_nibble<BYTES>(q) * scale + least;
            *(V*)(out + (k + 1) * PANEL + at) = of_nibble<BYTES>(q >> 4) * scale + least;
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
constexpr int64_t few_rows = (BYTES < 64 ? 8 : 16) * (sizeof(W) == sizeof(Int4) ? 1 : 2);

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
