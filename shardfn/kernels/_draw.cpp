// Tokens drawn from logits, and the numbers to draw them by: bit for bit as in `_draw.py`. No product is fused with
// a sum (build with -ffp-contract=off), and sums have one order, so neither vectors nor threads change a bit.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>

#include "_chain.h"
#include "_generations.h"
#include "_threads.h"

namespace {

constexpr int BLOCK = 64, LANES = 8, MANY = 4;
constexpr int64_t BINS = 8192;
constexpr double LEAST = -708.0, COLDEST = 1e-5;

struct Call {
    const float* logits;
    const double *uniform, *temperature;
    const int64_t* top_k;
    const double *top_p, *min_p;
    const int64_t* targets;
    int64_t rows, vocab;
    int64_t* tokens;
    float* logprobs;
};

// A thread's memory. Of a row: weights [blocks, 64], the sums of the blocks before each [blocks + 1], keys in order,
// the bin of each logit, and where bins end.
struct Room {
    double *weights, *sums;
    uint64_t* keys;
    uint16_t* bins;
    uint32_t* ends;
};

INLINE int64_t blocks_of(int64_t v) { return (v + BLOCK - 1) / BLOCK; }
INLINE bool is_cold(const Call& o, int64_t i) { return o.temperature[i] < COLDEST; }
INLINE bool is_given(const Call& o, int64_t i) { return o.targets && o.targets[i] >= 0; }

INLINE bool in_range(const Call& o, int64_t i) {
    const double t = o.temperature[i], p = o.top_p[i], m = o.min_p[i], u = o.uniform[i];
    const int64_t k = o.top_k[i];
    const bool drawn = !is_cold(o, i) && !is_given(o, i);
    return t >= 0.0 && p >= 0.0 && p <= 1.0 && m >= 0.0 && m <= 1.0 && k >= 0 && k <= o.vocab &&
           (!drawn || (u >= 0.0 && u < 1.0)) && (!o.targets || (o.targets[i] >= -1 && o.targets[i] < o.vocab));
}

template <int BYTES>
struct Of {
    typedef double V __attribute__((vector_size(BYTES), aligned(4), may_alias));
    typedef int64_t Word __attribute__((vector_size(BYTES), aligned(4), may_alias));
    typedef float Half __attribute__((vector_size(BYTES / 2), aligned(4), may_alias));
    static constexpr int lanes = BYTES / 8;
};

// y = e^y of y <= 0; 0 below the normal numbers, and for NaN. Of several vectors side by side, as each step waits for
// the one before.
template <int BYTES>
INLINE void exponentials(typename Of<BYTES>::V* y) {
    typedef typename Of<BYTES>::V V;
    typedef typename Of<BYTES>::Word Word;
    const double magic = 6755399441055744.0;
    Word usual[MANY];
    V sum[MANY], r[MANY], value[MANY];
    UNROLL
    for (int g = 0; g < MANY; ++g) {
        usual[g] = y[g] >= LEAST;
        const V x = usual[g] ? y[g] : V{} + LEAST;
        sum[g] = x * 1.4426950408889634 + magic;  // its lowest bits are the whole number
        const V whole = sum[g] - magic;
        r[g] = (x - whole * 0.693145751953125) - whole * 1.4286068203094173e-06;
        value[g] = V{} + 1.0;
    }
    UNROLL
    for (int i = 13; i; --i)
        UNROLL
        for (int g = 0; g < MANY; ++g) value[g] = value[g] * r[g] * (1.0 / i) + 1.0;
    UNROLL
    for (int g = 0; g < MANY; ++g)
        y[g] = (V)((Word)(value[g] * (V)(((Word)sum[g] + 1023) << 52)) & usual[g]);
}

// The sum of 64 elements by 8 lanes and a tree.
template <int BYTES, typename Get>
INLINE double block_sum(const Get& get) {
    typedef typename Of<BYTES>::V V;
    constexpr int lanes = Of<BYTES>::lanes, num = LANES / lanes;
    V total[num];
    UNROLL
    for (int i = 0; i < num; ++i) total[i] = V{};  // which leaves the first summand as it is: weights are not -0
    for (int at = 0; at < BLOCK; at += MANY * lanes) {
        V y[MANY];
        get(at, y);
        UNROLL
        for (int g = 0; g < MANY; ++g) total[g % num] += y[g];
    }
    double one[LANES];
    UNROLL
    for (int i = 0; i < num; ++i) *(V*)(one + i * lanes) = total[i];
    return ((one[0] + one[4]) + (one[2] + one[6])) + ((one[1] + one[5]) + (one[3] + one[7]));
}

// Sums of the weights e^((x - most) / temperature), which are stored or not; x <= most.
template <int BYTES, bool DIVIDES, bool STORES>
INLINE void weigh(const float* x, double most, double temperature, int64_t v, const Room& room) {
    typedef typename Of<BYTES>::V V;
    typedef typename Of<BYTES>::Half Half;
    constexpr int lanes = Of<BYTES>::lanes;
    float last[BLOCK];
    room.sums[0] = 0.0;
    for (int64_t b = 0; b < blocks_of(v); ++b) {
        const float* from = x + b * BLOCK;
        double* to = room.weights + b * BLOCK;
        if (v - b * BLOCK < BLOCK) {  // the rest of a block has no weight
            for (int64_t j = 0; j < BLOCK; ++j) last[j] = b * BLOCK + j < v ? from[j] : -__builtin_inff();
            from = last;
        }
        room.sums[b + 1] = room.sums[b] + block_sum<BYTES>([&](int at, V* y) __attribute__((always_inline)) {
            UNROLL
            for (int g = 0; g < MANY; ++g) {
                y[g] = __builtin_convertvector(*(const Half*)(from + at + g * lanes), V) - most;
                if (DIVIDES) y[g] = y[g] / temperature;
            }
            exponentials<BYTES>(y);
            UNROLL
            for (int g = 0; STORES && g < MANY; ++g) *(V*)(to + at + g * lanes) = y[g];
        });
    }
}

template <int BYTES>
INLINE void add_up(int64_t v, const Room& room) {
    typedef typename Of<BYTES>::V V;
    for (int64_t b = 0; b < blocks_of(v); ++b) {
        const double* from = room.weights + b * BLOCK;
        room.sums[b + 1] = room.sums[b] + block_sum<BYTES>([&](int at, V* y) __attribute__((always_inline)) {
            UNROLL
            for (int g = 0; g < MANY; ++g) y[g] = *(const V*)(from + at + g * Of<BYTES>::lanes);
        });
    }
}

// The first of the largest logits, and the least one; -1 for a row with a NaN, or whose largest is not finite.
template <int BYTES>
INLINE int64_t largest(const float* x, int64_t v, float* least) {
    typedef typename Of<2 * BYTES>::Half F;  // as many bytes
    constexpr int lanes = BYTES / 4, step = MANY * lanes;
    float most = -__builtin_inff();
    bool is_nan = false;
    *least = __builtin_inff();
    int64_t j = 0;
    if (v >= step) {
        F high[MANY], low[MANY], nan[MANY];
        UNROLL
        for (int g = 0; g < MANY; ++g) high[g] = low[g] = nan[g] = *(const F*)(x + g * lanes);
        for (; j + step <= v; j += step)
            UNROLL
            for (int g = 0; g < MANY; ++g) {
                const F y = *(const F*)(x + j + g * lanes);
                high[g] = y > high[g] ? y : high[g];
                low[g] = y < low[g] ? y : low[g];
                nan[g] = y == y ? nan[g] : y;
            }
        for (int i = 0; i < step; ++i) {
            const float value = nan[i / lanes][i % lanes];
            is_nan |= value != value;
            most = std::max(most, high[i / lanes][i % lanes]), *least = std::min(*least, low[i / lanes][i % lanes]);
        }
    }
    for (; j < v; ++j) {
        is_nan |= x[j] != x[j];
        most = std::max(most, x[j]), *least = std::min(*least, x[j]);
    }
    if (is_nan || most - most != 0.0f) return -1;
    int64_t at = 0;
    for (; at + BLOCK <= v; at += BLOCK) {
        int32_t found = 0;
        for (int i = 0; i < BLOCK; ++i) found += x[at + i] == most ? 1 : 0;
        if (found) break;
    }
    while (x[at] != most) ++at;
    return at;
}

INLINE double logarithm(double x) {
    int e;
    double m = __builtin_frexp(x, &e);
    if (m < 0.7071067811865476) m *= 2, --e;
    const double f = (m - 1) / (m + 1), square = f * f;
    double y = 0.0;
    for (int i = 14; i >= 0; --i) y = y * square + 1.0 / (2 * i + 1);
    return e * 1.4286068203094173e-06 + (2 * f * y) + e * 0.693145751953125;
}

// Ascending keys are descending logits, and of equal ones, as 0 and -0 are, ascending indices.
INLINE uint64_t key_of(float x, int64_t j) {
    uint32_t word;
    x += 0.0f;
    std::memcpy(&word, &x, 4);
    word = word & 0x80000000u ? word : ~word & 0x7fffffffu;
    return (uint64_t)word << 32 | (uint64_t)j;
}

// Weights of tokens after the last key, and those below a least weight, become 0.
INLINE void keep(const float* x, int64_t v, uint64_t last, double least_weight, double* weights) {
    const int64_t end = last == ~0ull ? v : (int64_t)(uint32_t)last + 1;
    const double worst = last == ~0ull ? -__builtin_inf() : (double)x[end - 1];
    for (int64_t j = 0; j < end; ++j)
        weights[j] = ((double)x[j] >= worst) & (weights[j] >= least_weight) ? weights[j] : 0.0;
    for (int64_t j = end; j < v; ++j)
        weights[j] = ((double)x[j] > worst) & (weights[j] >= least_weight) ? weights[j] : 0.0;
}

// Puts keys into bins of falling logits, up to the bin of the k-th; returns that bin.
INLINE int64_t to_bins(const float* x, int64_t v, float most, float width, int64_t k, const Room& room) {
    const float scale = (float)(BINS - 1) / width;  // not a number times 0, or infinite: all in the last bin
    for (int64_t j = 0; j < v; ++j) {
        const float at = (most - x[j]) * scale;
        room.bins[j] = (uint16_t)(at < (float)(BINS - 1) ? (int32_t)at : (int32_t)(BINS - 1));
    }
    std::memset(room.ends, 0, BINS * sizeof(uint32_t));
    for (int64_t j = 0; j < v; ++j) ++room.ends[room.bins[j]];
    int64_t before = 0, bin = 0;
    for (; bin < BINS && before < k; ++bin) {
        const int64_t num = room.ends[bin];
        room.ends[bin] = (uint32_t)before;
        before += num;
    }
    for (int64_t j = 0; j < v; ++j)
        if (room.bins[j] < bin) room.keys[room.ends[room.bins[j]]++] = key_of(x[j], j);
    return bin - 1;
}

// The weights that the filters leave out become 0, and the sums are those of the others.
template <int BYTES>
INLINE void filter(const float* x, int64_t v, float most, float width, int64_t k, double p, double least_weight,
                   const Room& room) {
    uint64_t last = ~0ull;
    if (k || p < 1.0) {
        const int64_t num = k ? k : v, bin = to_bins(x, v, most, width, num, room);
        if (k) {
            std::nth_element(room.keys + (bin ? room.ends[bin - 1] : 0), room.keys + k - 1, room.keys + room.ends[bin]);
            last = room.keys[k - 1];
        }
        if (p < 1.0) {
            if (k) keep(x, v, last, 0.0, room.weights), add_up<BYTES>(v, room);
            const double wanted = p * room.sums[blocks_of(v)];
            double so_far = 0.0;
            int64_t j = 0;
            for (int64_t b = 0; b <= bin && (j == 0 || so_far < wanted); ++b) {
                const int64_t end = std::min<int64_t>(num, room.ends[b]);
                if (!std::is_sorted(room.keys + j, room.keys + end)) std::sort(room.keys + j, room.keys + end);
                for (; j < end && (j == 0 || so_far < wanted); ++j) so_far += room.weights[(uint32_t)room.keys[j]];
            }
            last = room.keys[j - 1];
        }
    } else if (least_weight <= 0.0)
        return;
    keep(x, v, last, least_weight, room.weights);
    add_up<BYTES>(v, room);
}

// The first token at which the sum of weights is above u times the total; else the last that has a weight.
INLINE int64_t drawn(int64_t v, double u, const Room& room) {
    const int64_t blocks = blocks_of(v);
    const double *weights = room.weights, *sums = room.sums, target = u * sums[blocks];
    int64_t at = 0, last = -1;
    while (at < blocks && !(sums[at + 1] > target)) ++at;
    if (at == blocks) {
        for (int64_t j = 0; j < blocks * BLOCK; ++j) last = weights[j] > 0.0 ? j : last;
        return last;
    }
    double so_far = sums[at];
    for (int64_t j = at * BLOCK; j < (at + 1) * BLOCK; ++j) {
        so_far += weights[j];
        last = weights[j] > 0.0 ? j : last;
        if (weights[j] > 0.0 && so_far > target) break;
    }
    return last;
}

template <int BYTES>
INLINE void one(const Call& o, int64_t i, const Room& room) {
    const int64_t v = o.vocab;
    const float* x = o.logits + i * v;
    const double temperature = o.temperature[i];
    float least;
    int64_t token = largest<BYTES>(x, v, &least);
    if (token < 0) {
        o.tokens[i] = -1, o.logprobs[i] = __builtin_nanf("");
        return;
    }
    const float most = x[token];
    const bool draws = !is_cold(o, i) && !is_given(o, i);
    if (draws && temperature == 1.0)
        weigh<BYTES, false, true>(x, most, 1.0, v, room);
    else
        weigh<BYTES, false, false>(x, most, 1.0, v, room);
    const double all = logarithm(room.sums[blocks_of(v)]);
    if (is_given(o, i)) token = o.targets[i];
    if (draws) {
        if (temperature != 1.0) weigh<BYTES, true, true>(x, most, temperature, v, room);
        const float width = std::min(most - least, (float)(64.0 * temperature));
        filter<BYTES>(x, v, most, width, o.top_k[i], o.top_p[i], o.min_p[i], room);
        token = drawn(v, o.uniform[i], room);
    }
    o.tokens[i] = token;
    o.logprobs[i] = (float)(((double)x[token] - (double)most) - all);
}

struct Top {
    const float* logits;
    int64_t num, vocab;
    int64_t* tokens;
    float* logprobs;
};

// The most probable tokens of a row, of equal ones the lower index first.
template <int BYTES>
INLINE void one(const Top& o, int64_t i, const Room& room) {
    const int64_t v = o.vocab;
    const float* x = o.logits + i * v;
    int64_t* tokens = o.tokens + i * o.num;
    float* logprobs = o.logprobs + i * o.num;
    float least;
    const int64_t first = largest<BYTES>(x, v, &least);
    if (first < 0) {
        for (int64_t j = 0; j < o.num; ++j) tokens[j] = -1, logprobs[j] = __builtin_nanf("");
        return;
    }
    weigh<BYTES, false, false>(x, x[first], 1.0, v, room);
    const double most = x[first], all = logarithm(room.sums[blocks_of(v)]);
    for (int64_t j = 0; j < v; ++j) room.keys[j] = key_of(x[j], j);
    std::partial_sort(room.keys, room.keys + o.num, room.keys + v);
    for (int64_t j = 0; j < o.num; ++j) {
        tokens[j] = (int64_t)(uint32_t)room.keys[j];
        logprobs[j] = (float)(((double)x[tokens[j]] - most) - all);
    }
}

// In the doubles that `_draw.py` counts.
INLINE Room room_at(double* at, int64_t v) {
    Room room = {at, at + blocks_of(v) * BLOCK, nullptr, nullptr, nullptr};
    room.keys = (uint64_t*)(room.sums + blocks_of(v) + 1);
    room.ends = (uint32_t*)(room.keys + v);
    room.bins = (uint16_t*)(room.ends + BINS);
    return room;
}

template <typename What>
void each_row(const What& o, int64_t r, double* memory, int64_t room, int64_t threads) {
    std::atomic<int64_t> next(0);
    together(threads < r ? threads : r, [&](int64_t thread) {
        const Room own = room_at(memory + thread * room, o.vocab);
        for (int64_t i; (i = next++) < r;) one<WIDTH>(o, i, own);
    });
}

}  // namespace

extern "C" {

// logits [r, v] and one of each argument a row, targets or null -> tokens, logprobs [r]; memory [threads, room].
// Returns 1, and writes nothing, if an argument is out of range.
int64_t draw_rows(const float* logits, const double* uniform, const double* temperature, const int64_t* top_k,
                  const double* top_p, const double* min_p, const int64_t* targets, int64_t* tokens, float* logprobs,
                  double* memory, int64_t room, int64_t r, int64_t v, int64_t threads) {
    const Call o = {logits, uniform, temperature, top_k, top_p, min_p, targets, r, v, tokens, logprobs};
    for (int64_t i = 0; i < r; ++i)
        if (!in_range(o, i)) return 1;
    each_row(o, r, memory, room, threads);
    return 0;
}

// The same, with memory of its own.
int64_t draw_rows_alone(const float* logits, const double* uniform, const double* temperature, const int64_t* top_k,
                        const double* top_p, const double* min_p, const int64_t* targets, int64_t* tokens,
                        float* logprobs, int64_t room, int64_t r, int64_t v, int64_t threads) {
    const std::unique_ptr<double[]> memory(new double[std::min(threads, r) * room]);
    return draw_rows(logits, uniform, temperature, top_k, top_p, min_p, targets, tokens, logprobs, memory.get(), room,
                     r, v, threads);
}

// logits [r, v] -> the most probable tokens and their log probabilities [r, num]; memory [threads, room].
void top_rows(const float* logits, int64_t* tokens, float* logprobs, double* memory, int64_t room, int64_t r,
              int64_t v, int64_t num, int64_t threads) {
    each_row(Top{logits, num, v, tokens, logprobs}, r, memory, room, threads);
}

// out [r] in [0, 1): the upper 53 bits of the two words of threefry2x32, by 20 rounds, of the halves of key and place
void draw_uniforms(const uint64_t* keys, const uint64_t* places, double* out, int64_t r) {
    static const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    for (int64_t j = 0; j < r; ++j) {
        const uint32_t k0 = (uint32_t)(keys[j] >> 32), k1 = (uint32_t)keys[j], ks[3] = {k0, k1, k0 ^ k1 ^ 0x1bd11bdau};
        uint32_t x0 = (uint32_t)(places[j] >> 32) + k0, x1 = (uint32_t)places[j] + k1;
        for (uint32_t i = 0; i < 5; ++i) {
            for (int n : rotations[i % 2]) {
                x0 += x1;
                x1 = (x1 << n | x1 >> (32 - n)) ^ x0;
            }
            x0 += ks[(i + 1) % 3];
            x1 += ks[(i + 2) % 3] + i + 1;
        }
        out[j] = (double)(int64_t)(((uint64_t)x0 << 32 | x1) >> 11) * 0x1p-53;
    }
}

}  // extern "C"

CHAINED(draw_rows_alone)
CHAINED(draw_uniforms)
