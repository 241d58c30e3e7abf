// Attention of ragged tokens over a paged cache, which first receives their keys and values. Threads take groups:
// queries of one sequence that follow each other, with the query heads of one key head. Query r is of token rows[r].
#include "_chain.h"
#include "_threads.h"
#include "_cache_rows.h"
#include "_attention_tile.h"

#include <algorithm>
#include <atomic>
#include <thread>

namespace {

// Rows of queries that share a tile of keys.
constexpr int64_t ROWS = 64;

struct Call {
    const float *q, *k, *v;
    void* cache;
    const int32_t *slots, *positions, *sequences, *tables, *rows;
    const float *slopes, *sinks;
    const uint8_t* tree;
    const float* relative;  // of each head, by distance
    const int32_t* images;
    float *y, *lse;
    int64_t T, Q, H, G, K, q_stride, k_stride, v_stride, blocks, block, S, width, reach, window, kind, words, branch;
    int64_t parts;  // of a block: keys and values, or 1 of rows that are both
    Scoring how;

    int64_t token(int64_t query) const { return rows ? rows[query] : query; }
};

// For each token the first and the last position it sees, the first of guesses, and where the list of their slots begins.
struct Plan {
    std::vector<int64_t> begin, last, guesses, at;
    std::vector<int32_t> slots;
};

struct Group {
    int64_t first, count, begin, end, shared;  // queries, the positions they see, those before guesses
};

bool read_tree(const Call& o, Plan& plan, int64_t i) {
    const uint8_t* row = o.tree + i * o.T;
    const int64_t before = plan.slots.size();
    for (int64_t j = 0; j < o.T; ++j)
        if (row[j]) plan.slots.push_back(j);
    const int64_t count = plan.slots.size() - before;
    plan.guesses[i] -= count;
    if (count && plan.slots.back() != i) return false;
    for (int64_t n = 0; n < count; ++n) {
        int32_t& place = plan.slots[before + n];
        if (o.sequences[place] != o.sequences[i] || o.positions[place] != plan.guesses[i] + n) return false;
        place = o.slots[place];
    }
    return true;
}

enum Branch { TEXT, IMAGES, TEXT_OF_ALL, WHOLE };

// Widens what token i sees to the image that it is of.
void see_image(const Call& o, Plan& plan, int64_t i) {
    const int32_t* words = o.images + o.sequences[i] * o.words;
    const auto image = [&](int64_t p) { return (uint32_t)words[p / TILE] >> (p % TILE) & 1; };
    int64_t low = o.positions[i], high = low;
    if (!image(low)) return;
    while (low > 0 && image(low - 1)) --low;
    while (high + 1 < o.width * o.block && image(high + 1)) ++high;
    plan.begin[i] = std::min(plan.begin[i], low), plan.last[i] = high;
}

// Whether all numbers are in range; fills the plan.
bool read_plan(const Call& o, Plan& plan) {
    for (int64_t r = 0; r < o.Q; ++r)
        if (o.token(r) < 0 || o.token(r) >= o.T) return false;
    plan.begin.resize(o.T), plan.last.resize(o.T), plan.guesses.resize(o.T), plan.at.resize(o.T);
    std::vector<int64_t> low(o.S, 0), high(o.S, 0);  // by sequence, the entries of its table that were checked
    for (int64_t i = 0; i < o.T; ++i) {
        const int64_t s = o.sequences[i], p = o.positions[i];
        if (o.slots[i] < 0 || o.slots[i] >= o.blocks * o.block || s < 0 || s >= o.S || p < 0 || p >= o.width * o.block)
            return false;
        plan.begin[i] = o.window ? std::max<int64_t>(0, p - o.window + 1) : 0;
        plan.last[i] = p;
        if (o.images && o.branch == WHOLE) see_image(o, plan, i);
        plan.guesses[i] = plan.last[i] + 1;
        plan.at[i] = plan.slots.size();
    }
    for (int64_t i = 0; i < o.T; ++i) {
        plan.at[i] = plan.slots.size();
        if (o.tree && !read_tree(o, plan, i)) return false;
        const int64_t s = o.sequences[i], first = plan.begin[i] / o.block, end = (plan.guesses[i] + o.block - 1) / o.block;
        if (first < low[s] || first > high[s]) low[s] = high[s] = first;
        for (; high[s] < end; ++high[s]) {
            const int32_t b = o.tables[s * o.width + high[s]];
            if (b < 0 || b >= o.blocks) return false;
        }
    }
    return true;
}

std::vector<Group> groups_of(const Call& o, const Plan& plan) {
    const int64_t most = std::max<int64_t>(1, ROWS / (o.H / o.G));
    std::vector<Group> out;
    for (int64_t r = 0; r < o.Q; ++r) {
        const int64_t i = o.token(r), end = plan.last[i] + 1;
        const int64_t shared = plan.guesses[i] < end ? plan.guesses[i] : std::numeric_limits<int64_t>::max();
        if (out.empty() || out.back().count == most || o.sequences[i] != o.sequences[o.token(r - 1)]) {
            out.push_back({r, 1, plan.begin[i], end, shared});
            continue;
        }
        Group& group = out.back();
        ++group.count;
        group.begin = std::min(group.begin, plan.begin[i]);
        group.end = std::max(group.end, end);
        group.shared = std::min(group.shared, shared);
    }
    // The longest first, so that threads end together.
    std::stable_sort(out.begin(), out.end(), [](const Group& a, const Group& b) {
        return a.count * (a.end - a.begin) > b.count * (b.end - b.begin);
    });
    return out;
}

// The number of the row of a place of a block, for a key (part 0) or a value (1): rows of a head in a block follow one
// another, so that a head's keys are read in one go.
INLINE int64_t row_number(const Call& o, int64_t block, int64_t part, int64_t g, int64_t place) {
    return ((block * o.parts + part) * o.G + g) * o.block + place;
}

void write_head(const Call& o, int64_t g) {
    for (int64_t i = 0; i < o.T; ++i)
        for (int part = 0; part < o.parts; ++part) {
            const float* from = part ? o.v + i * o.v_stride + g * o.K : o.k + i * o.k_stride + g * o.K;
            const int64_t to = row_number(o, o.slots[i] / o.block, part, g, o.slots[i] % o.block);
            write_row(o.cache, to, o.kind, from, o.K);
        }
}

// Points to keys at positions from `low` to below `high` of a tile, which are in the table, in runs of a block.
INLINE void follow_table(const Call& o, const int32_t* table, int64_t g, int64_t tile, int low, int high, const float** to) {
    int64_t index = (tile + low) / o.block, place = (tile + low) % o.block;
    for (int n = low; n < high; ++index, place = 0) {
        const float* row = (const float*)o.cache + row_number(o, table[index], 0, g, place) * o.K;
        const int stop = (int)std::min<int64_t>(high, n + o.block - place);
        for (; n < stop; ++n, row += o.K) to[n] = row;
    }
}

// Where the next tile's keys are, as far as they are known to be in the table: the rest is that of this tile. After the
// last tile comes the first one of the next head.
INLINE void foresee(const Call& o, Scratch& s, const int32_t* table, int64_t g, int64_t first, int64_t tile, int64_t end,
                    int64_t rows) {
    int64_t next = tile + TILE, head = g;
    if (next >= end) next = first, ++head;
    s.apart = (o.parts - 1) * o.G * o.block * o.K;
    s.foresees = o.kind == FLOAT32 && o.K % LANES == 0 && rows <= FEW && head < o.G && next < end;
    if (!s.foresees) return;
    const int high = (int)std::min<int64_t>(TILE, end - next);
    follow_table(o, table, head, next, 0, high, s.later);
    for (int n = high; n < TILE; ++n) s.later[n] = s.later[0];
}

// Points to the keys and values at positions from `low` to below `high` of a tile: up to `guesses` those of the table,
// then those of token i's guesses. The others point at the first one, and are not read for a result.
template <class L>
INLINE void find_keys(const Call& o, const Plan& plan, Scratch& s, int64_t g, int64_t i, int64_t guesses, int64_t tile, int low,
               int high) {
    const bool staged = o.kind != FLOAT32 || o.K % LANES;
    const int32_t* table = o.tables + o.sequences[i] * o.width;
    if (!staged && tile + high <= guesses) {
        follow_table(o, table, g, tile, low, high, s.key);
        for (int n = low; n < high; ++n) s.value[n] = s.key[n] + s.apart;
    } else {
        int64_t index = (tile + low) / o.block, place = (tile + low) % o.block;
        for (int n = low; n < high; ++n, ++place) {
            if (place == o.block) ++index, place = 0;
            const int64_t guess = tile + n - guesses, slot = guess < 0 ? 0 : plan.slots[plan.at[i] + guess];
            const int64_t key = guess < 0 ? row_number(o, table[index], 0, g, place)
                                          : row_number(o, slot / o.block, 0, g, slot % o.block);
            const int64_t value = key + (o.parts - 1) * o.G * o.block;
            s.key[n] = staged ? s.keys + n * s.padded : (const float*)o.cache + key * o.K;
            s.value[n] = staged ? (o.parts == 1 ? s.keys : s.values) + n * s.padded : (const float*)o.cache + value * o.K;
            if (!staged) continue;
            read_row<L>(o.cache, key, o.kind, o.K, s.padded, s.keys + n * s.padded);
            if (o.parts > 1) read_row<L>(o.cache, value, o.kind, o.K, s.padded, s.values + n * s.padded);
        }
    }
    for (int n = 0; n < low; ++n) s.key[n] = s.key[low], s.value[n] = s.value[low];
    for (int n = high; n < TILE; ++n) s.key[n] = s.key[low], s.value[n] = s.value[low];
}

// The bits of the positions of a tile that token i sees by their kind.
INLINE uint32_t bits_of_kind(const Call& o, int64_t i, int64_t tile) {
    if (!o.images || o.branch == WHOLE) return EVERY;
    const int32_t* words = o.images + o.sequences[i] * o.words;
    const int64_t p = o.positions[i];
    const uint32_t images = (uint32_t)words[tile / TILE], own = uint32_t(1) << (p % TILE);
    const bool image = (uint32_t)words[p / TILE] & own;
    if (o.branch == TEXT_OF_ALL || (o.branch == TEXT && !image)) return ~images;
    if (!image) return images;
    return o.branch == IMAGES && p / TILE == tile / TILE ? own : 0;
}

template <class L>
INLINE void attend(const Call& o, const Plan& plan, const Group& group, int64_t g, Scratch& s) {
    const int64_t R = o.H / o.G, rows = group.count * R;
    std::vector<Seen> seen(rows);
    s.fit(rows, o.K);
    std::memset(s.q, 0, (char*)s.weights - (char*)s.q);  // queries, sums and lanes
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t head = g * R + row % R;
        std::memcpy(s.q + row * s.padded, o.q + (group.first + row / R) * o.q_stride + head * o.K, o.K * sizeof(float));
        s.most[row] = o.sinks ? o.sinks[head] : NONE;
        s.lanes[row * LANES] = s.most[row] > NONE ? 1 : 0;
        s.slope[row] = o.slopes ? o.slopes[head] : 0;
        s.relative[row] = o.relative ? o.relative + head * o.reach : nullptr;
    }
    for (int64_t tile = group.begin / TILE * TILE; tile < group.end; tile += TILE) {
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t i = o.token(group.first + row / R), own = o.positions[i] - tile;
            const int64_t low = std::max<int64_t>(0, plan.begin[i] - tile), high = std::min<int64_t>(TILE, plan.last[i] - tile + 1);
            Seen& one = seen[row] = {(int)std::min<int64_t>(low, TILE), (int)std::max<int64_t>(high, 0), (int)own, EVERY};
            if (!o.images || o.branch == WHOLE) continue;
            one.bits = bits_of_kind(o, i, tile);
            while (one.low < one.high && !(one.bits >> one.low & 1)) ++one.low;
            while (one.low < one.high && !(one.bits >> (one.high - 1) & 1)) --one.high;
        }
        // Tokens share the keys of a tile, up to the first guess.
        const bool shared = tile + TILE <= group.shared;
        const int64_t together = shared ? rows : R;
        for (int64_t row = 0; row < rows; row += together) {
            int low = TILE, high = 0;
            for (int64_t r = row; r < row + together; ++r)
                if (seen[r].low < seen[r].high) low = std::min(low, seen[r].low), high = std::max(high, seen[r].high);
            if (low >= high) continue;
            const int64_t i = o.token(group.first + row / R);
            const int64_t guesses = shared ? group.shared : plan.guesses[i], end = std::min<int64_t>(guesses, plan.last[i] + 1);
            foresee(o, s, o.tables + o.sequences[i] * o.width, g, group.begin / TILE * TILE, tile, end, together);
            find_keys<L>(o, plan, s, g, i, guesses, tile, low, high);
            add_tile<L>(s, o.how, row, row + together, seen.data(), o.K, o.slopes);
        }
    }
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = (group.first + row / R) * o.H + g * R + row % R;
        finish<L>(s, row, o.K, o.y + at * o.K, o.lse + at);
    }
}

}  // namespace

extern "C" {

// Returns 0 if all was written; 1, and changes nothing, if a number of the plan is out of range.
int64_t ragged_attention(const float* q, const float* k, const float* v, void* cache, const int32_t* slots,
                         const int32_t* positions, const int32_t* sequences, const int32_t* tables, const int32_t* rows,
                         const float* slopes, const float* sinks, const uint8_t* tree, const float* relative,
                         const int32_t* images, float* y, float* lse, int64_t T,
                         int64_t Q, int64_t H, int64_t G, int64_t K, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t blocks, int64_t block, int64_t S,
                         int64_t width, int64_t reach, int64_t window, int64_t kind, int64_t words, int64_t branch, int64_t parts, float scale, float cap, int64_t threads,
                         int64_t few) {
    const Call o = {q, k, v, cache, slots, positions, sequences, tables, rows, slopes, sinks, tree, relative, images, y, lse, T, Q, H, G, K,
                    q_stride, k_stride, v_stride, blocks, block, S, width, reach, window, kind, words, branch, parts, {scale, cap, reach}};
    Plan plan;
    if (!read_plan(o, plan)) return 1;
    const std::vector<Group> groups = groups_of(o, plan);
    const int64_t items = groups.size() * G;
    int64_t work = 0;
    for (const Group& group : groups) work += group.count * (group.end - group.begin) * H * K;
    std::atomic<int64_t> write(0), written(0), next(0);
    if (work <= few) threads = 1;
    together(threads < items ? threads : items, [&](int64_t) {
        static thread_local Scratch scratch;
        for (int64_t g; (g = write++) < G; ++written) write_head(o, g);
        while (written < G) std::this_thread::yield();  // a token may read the key of any other
        for (int64_t item; (item = next++) < items;) attend<Here>(o, plan, groups[item / G], item % G, scratch);
    });
    return 0;
}

}  // extern "C"

CHAINED(ragged_attention)
