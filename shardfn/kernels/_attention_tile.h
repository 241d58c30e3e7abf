// One tile of 32 positions for some rows of queries: scores, weights, and the weighted sum of values, which are carried
// from tile to tile. The definition, in this order of operations, is in _ragged_attention.py.
#pragma once
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "_vectors.h"

namespace {

constexpr int TILE = 32, LANES = 16;
constexpr float NONE = -std::numeric_limits<float>::infinity();

// Rows above which a tile of keys is transposed: then one load serves many rows.
constexpr int FEW = 12;

struct Scoring {
    float scale, cap;  // the cap is 0 without one, else scale is that of scores / cap
    int64_t reach;  // distances with a number of relative positions, 0 without
};

// The memory of one thread: `rows` rows of a group, and one tile. Widths are padded with zeros to `padded`.
struct Scratch {
    std::vector<float> memory;
    int64_t padded;
    float *q, *sums, *lanes, *weights, *most, *factor, *slope, *keys, *values, *turned;
    const float *key[TILE], *value[TILE], *later[TILE];
    std::vector<const float*> relative;  // of each row, by distance
    // Whether `later` has keys of the next tile, and the distance from a key to its value there.
    bool foresees;
    int64_t apart;

    void fit(int64_t rows, int64_t width) {
        padded = (width + LANES - 1) / LANES * LANES;
        if ((int64_t)relative.size() < rows) relative.resize(rows);
        const int64_t sizes[] = {rows * padded, rows * padded, rows * LANES, rows * TILE,   rows,
                                 rows,          rows,          TILE * padded, TILE * padded, TILE * padded};
        float** parts[] = {&q, &sums, &lanes, &weights, &most, &factor, &slope, &keys, &values, &turned};
        int64_t total = 0;
        for (int64_t size : sizes) total += size;
        if ((int64_t)memory.size() < total) memory.resize(total);
        float* at = memory.data();
        for (int i = 0; i < 10; ++i) {
            *parts[i] = at;
            at += sizes[i];
        }
    }
};

// The positions of a tile that a row sees: from `low` to below `high` where `bits` has a bit; `distance` from its place 0
// to the row's own.
struct Seen {
    int low, high, distance;
    uint32_t bits;
    bool operator==(const Seen& other) const { return low == other.low && high == other.high && bits == other.bits; }
};

constexpr uint32_t EVERY = ~uint32_t(0);

template <class L>
INLINE typename L::V tanh(typename L::V x) {
    typedef typename L::V V;
    typedef typename L::Int Int;
    const V square = x * x, size = (V)((Int)x & 0x7FFFFFFF);
    V y = ALL(-5.70498872745e-3f);
    for (float term : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
        y = L::fused(y, square, ALL(term));
    const V near = L::fused(y * square, x, x), e = exponential<L>(size * -2.0f), far = (1.0f - e) / (1.0f + e);
    return size < 0.625f ? near : (V)((Int)far | ((Int)x & (int32_t)0x80000000));
}

// Asks for a row of the next tile: of its keys while this tile's are multiplied, and of its values later. A cache of many
// sequences is in no near memory, and no processor foresees its blocks; lines are asked for in the order of memory.
INLINE void fetch_row(const float* row, int64_t padded) {
    for (int64_t at = 0; at < padded; at += LANES) __builtin_prefetch(row + at);
}

// Products of one row with L::lanes keys: 16 lanes each, STEPS elements a lane, so that the row is read once.
template <class L, int STEPS, bool FETCHES>
INLINE void products_of_steps(const Scratch& s, const float* q, int base, float* out) {
    typedef typename L::V V;
    constexpr int N = L::lanes, parts = LANES / N;
    V row[STEPS * parts], x[N];
    UNROLL
    for (int at = 0; at < STEPS * parts; ++at) row[at] = load<L>(q + at * N);
    UNROLL
    for (int i = 0; i < N; ++i) {
        const float* k = s.key[base + i];
        V sum[parts] = {};
        if (FETCHES) fetch_row(s.later[base + i], STEPS * LANES);
        UNROLL
        for (int at = 0; at < STEPS * parts; ++at) sum[at % parts] = L::fused(row[at], load<L>(k + at * N), sum[at % parts]);
        UNROLL
        for (int half = parts / 2; half; half /= 2)
            for (int p = 0; p < half; ++p) sum[p] = sum[p] + sum[p + half];
        x[place_of<L>(i)] = sum[0];
    }
    store<L>(out + base, sums_of<L>(x));
}

// The same of any number of elements, four keys at a time.
template <class L>
INLINE void products_of_any(const Scratch& s, const float* q, int base, float* out) {
    typedef typename L::V V;
    constexpr int N = L::lanes, parts = LANES / N, together = 4;
    V x[N];
    for (int i = 0; i < N; i += together) {
        const float* const* k = s.key + base + i;
        V sum[together][parts] = {};
        for (int64_t at = 0; at < s.padded; at += LANES)
            UNROLL
            for (int p = 0; p < parts; ++p) {
                const V left = load<L>(q + at + p * N);
                UNROLL
                for (int t = 0; t < together; ++t) sum[t][p] = L::fused(left, load<L>(k[t] + at + p * N), sum[t][p]);
            }
        UNROLL
        for (int t = 0; t < together; ++t) {
            UNROLL
            for (int half = parts / 2; half; half /= 2)
                for (int p = 0; p < half; ++p) sum[t][p] = sum[t][p] + sum[t][p + half];
            x[place_of<L>(i + t)] = sum[t][0];
        }
    }
    store<L>(out + base, sums_of<L>(x));
}

template <class L, int STEPS>
INLINE void products_of_steps(const Scratch& s, const float* q, bool fetches, float* out) {
    for (int base = 0; base < TILE; base += L::lanes)
        if (fetches)
            products_of_steps<L, STEPS, true>(s, q, base, out);
        else
            products_of_steps<L, STEPS, false>(s, q, base, out);
}

// 32 products of one row with keys.
template <class L>
INLINE void products(const Scratch& s, const float* q, bool fetches, float* out) {
    if constexpr (L::lanes > 4) {
        if (s.padded == 4 * LANES) return products_of_steps<L, 4>(s, q, fetches, out);
        if (s.padded == 8 * LANES) return products_of_steps<L, 8>(s, q, fetches, out);
    }
    for (int base = 0; base < TILE; base += L::lanes) {
        if (fetches)
            for (int i = 0; i < L::lanes; ++i) fetch_row(s.later[base + i], s.padded);
        products_of_any<L>(s, q, base, out);
    }
}

template <class L>
INLINE void transpose_keys(Scratch& s) {
    constexpr int N = L::lanes;
    for (int base = 0; base < TILE; base += N)
        for (int64_t at = 0; at < s.padded; at += N) {
            typename L::V x[N], out[N];
            UNROLL
            for (int i = 0; i < N; ++i) x[place_of<L>(i)] = load<L>(s.key[base + i] + at);
            transpose<L>(x, out);
            UNROLL
            for (int i = 0; i < N; ++i) store<L>(s.turned + (at + i) * TILE + base, out[i]);
        }
}

// The same products for R rows at once, from transposed keys: the 16 chains follow one another in the tree's order.
template <class L, int R>
INLINE void products_of_rows(const Scratch& s, const float* q, int64_t width, float* out) {
    typedef typename L::V V;
    constexpr int N = L::lanes, NV = 2;
    for (int base = 0; base < TILE; base += NV * N) {
        V node[5][R][NV], sum[R][NV];
        for (int c = 0; c < LANES; ++c) {
            UNROLL
            for (int r = 0; r < R; ++r)
                UNROLL
                for (int v = 0; v < NV; ++v) sum[r][v] = V{};
            for (int64_t k = (c & 1) << 3 | (c & 2) << 1 | (c & 4) >> 1 | c >> 3; k < width; k += LANES) {
                V right[NV];
                UNROLL
                for (int v = 0; v < NV; ++v) right[v] = load<L>(s.turned + k * TILE + base + v * N);
                UNROLL
                for (int r = 0; r < R; ++r) {
                    const V left = ALL(q[r * s.padded + k]);
                    UNROLL
                    for (int v = 0; v < NV; ++v) sum[r][v] = L::fused(left, right[v], sum[r][v]);
                }
            }
            int level = 0;
            for (int n = c; n & 1; n >>= 1, ++level)
                UNROLL
                for (int r = 0; r < R; ++r)
                    UNROLL
                    for (int v = 0; v < NV; ++v) sum[r][v] = node[level][r][v] + sum[r][v];
            UNROLL
            for (int r = 0; r < R; ++r)
                UNROLL
                for (int v = 0; v < NV; ++v) node[level][r][v] = sum[r][v];
        }
        UNROLL
        for (int r = 0; r < R; ++r)
            UNROLL
            for (int v = 0; v < NV; ++v) store<L>(out + r * TILE + base + v * N, sum[r][v]);
    }
}

// Products become weights, and the row's largest score and sums of weights are brought up to date.
template <class L>
INLINE void weigh(Scratch& s, const Scoring& how, int64_t row, Seen seen, bool slopes) {
    typedef typename L::V V;
    typedef typename L::Int Int;
    constexpr int N = L::lanes, count = TILE / N;
    float *weights = s.weights + row * TILE, *lanes = s.lanes + row * LANES;
    V x[count], top = ALL(NONE);
    Int at;
    for (int i = 0; i < N; ++i) at[i] = i;
    UNROLL
    for (int v = 0; v < count; ++v, at += N) {
        x[v] = load<L>(weights + v * N) * how.scale;
        if (how.cap != 0) x[v] = tanh<L>(x[v]) * how.cap;
        if (slopes) x[v] = L::fused(ALL(-s.slope[row]), __builtin_convertvector(seen.distance - at, V), x[v]);
        if (how.reach) {
            float numbers[N];
            for (int i = 0; i < N; ++i) {
                const int64_t away = seen.distance - at[i];
                numbers[i] = s.relative[row][away < 0 ? 0 : away < how.reach ? away : how.reach - 1];
            }
            x[v] = x[v] + load<L>(numbers);
        }
        // One by one: GCC takes a choice by two conditions apart, element by element.
        x[v] = at >= seen.low ? x[v] : ALL(NONE);
        x[v] = at < seen.high ? x[v] : ALL(NONE);
        if (seen.bits != EVERY)
            for (int i = 0; i < N; ++i)
                if (!(seen.bits >> (v * N + i) & 1)) x[v][i] = NONE;
        top = x[v] > top ? x[v] : top;
    }
    const float before = s.most[row], tile = largest<L>(top), most = tile > before ? tile : before;
    const float shift = most == NONE ? 0.0f : most;
    const float factor = before - most == 0 ? 1.0f : exponential<L>(ALL(before - shift))[0];
    UNROLL
    for (int v = 0; v < count; ++v) {
        x[v] = exponential<L>(x[v] - shift);
        store<L>(weights + v * N, x[v]);
    }
    UNROLL
    for (int v = 0; v < count / 2; ++v)
        store<L>(lanes + v * N, L::fused(load<L>(lanes + v * N), ALL(factor), x[v] + x[v + count / 2]));
    s.most[row] = most;
    s.factor[row] = factor;
}

// The sums of R rows that see the same positions, NV vectors of them, with the weighted values of the tile.
template <class L, int R, int NV>
INLINE void add_values(Scratch& s, int64_t row, int64_t column, Seen seen, bool fetches) {
    typedef typename L::V V;
    constexpr int N = L::lanes;
    V sum[R][NV] = {};
    const float* weights = s.weights + row * TILE;
    for (int n = seen.low; n < seen.high; ++n) {
        if (!(seen.bits >> n & 1)) continue;
        if (fetches) fetch_row(s.later[n] + s.apart, s.padded);
        V right[NV];
        UNROLL
        for (int v = 0; v < NV; ++v) right[v] = load<L>(s.value[n] + column + v * N);
        UNROLL
        for (int r = 0; r < R; ++r) {
            const V left = ALL(weights[r * TILE + n]);
            UNROLL
            for (int v = 0; v < NV; ++v) sum[r][v] = L::fused(left, right[v], sum[r][v]);
        }
    }
    UNROLL
    for (int r = 0; r < R; ++r)
        UNROLL
        for (int v = 0; v < NV; ++v) {
            float* y = s.sums + (row + r) * s.padded + column + v * N;
            store<L>(y, L::fused(load<L>(y), ALL(s.factor[row + r]), sum[r][v]));
        }
}

template <class L, int R>
INLINE void add_values(Scratch& s, int64_t row, Seen seen, bool fetches = false) {
    constexpr int N = L::lanes, NV = L::columns;
    int64_t column = 0;
    for (; column + NV * N <= s.padded; column += NV * N, fetches = false)
        add_values<L, R, NV>(s, row, column, seen, fetches);
    for (; column < s.padded; column += N, fetches = false) add_values<L, R, 1>(s, row, column, seen, fetches);
}

// Adds a tile to the rows from `first` on; `seen` are theirs. Rows that see nothing of it are unchanged.
template <class L>
INLINE void add_tile(Scratch& s, const Scoring& how, int64_t first, int64_t end, const Seen* seen, int64_t width, bool slopes) {
    constexpr int R = L::rows;
    int64_t row = first;
    if (end - first > FEW) {
        transpose_keys<L>(s);
        for (; row + R <= end; row += R) products_of_rows<L, R>(s, s.q + row * s.padded, width, s.weights + row * TILE);
        for (; row < end; ++row) products_of_rows<L, 1>(s, s.q + row * s.padded, width, s.weights + row * TILE);
    } else {
        for (; row < end; ++row) products<L>(s, s.q + row * s.padded, s.foresees && row == first, s.weights + row * TILE);
    }
    for (row = first; row < end; ++row)
        if (seen[row].low < seen[row].high) weigh<L>(s, how, row, seen[row], slopes);
    for (row = first; row < end;) {
        int64_t same = row + 1;
        while (same < end && same < row + R && seen[same] == seen[row]) ++same;
        if (seen[row].low >= seen[row].high) {
            row = same;
        } else if (same - row == R) {
            add_values<L, R>(s, row, seen[row], s.foresees && row == first);
            row = same;
        } else if (same - row >= 2) {
            add_values<L, 2>(s, row, seen[row], s.foresees && row == first);
            row += 2;
        } else {
            add_values<L, 1>(s, row, seen[row], s.foresees && row == first);
            row += 1;
        }
    }
}

// y = sums / the sum of weights, 0 without weights; and the logarithm of the sum of e^score.
template <class L>
INLINE void finish(const Scratch& s, int64_t row, int64_t width, float* y, float* lse) {
    float lanes[LANES];
    std::memcpy(lanes, s.lanes + row * LANES, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
    const float* sums = s.sums + row * s.padded;
    for (int64_t at = 0; at < width; ++at) y[at] = lanes[0] == 0 ? 0.0f : sums[at] / lanes[0];
    *lse = s.most[row] + std::log(lanes[0]);
}

}  // namespace
