// y = x W^T + bias of packed W: each element is the fixed expression of _panels.h.
#include "_panels.h"
#include "_chain.h"
#include "_threads.h"
#include "_row_codes.h"

#include <algorithm>
#include <cstring>

namespace {

// A layer of some that have the same inputs: w of `kind`, [panels, K, PANEL] float (0) or bfloat16 (1), or [panels,
// groups] records of int8 (2), int4 (3) or int4_wide (4), bias [N] or null -> y [M, N]. A panel begins `apart` rows or records after the
// panel before: more than it has, where w is a part of the inputs of a larger weight.
struct Layer {
    const void* w;
    const float* bias;
    float* y;
    int64_t N, apart;

    int64_t panels() const { return (N + PANEL - 1) / PANEL; }
};

struct Call {
    const float* x;
    const Layer* layers;
    int64_t num, M, K, chunks, threads;

    // The layer of a panel, which becomes the number of it there.
    const Layer& layer_of(int64_t& panel) const {
        const Layer* layer = layers;
        for (; panel >= layer->panels(); ++layer) panel -= layer->panels();
        return *layer;
    }
};

constexpr int64_t ROWS = 504;  // computed with one panel before the next: their inputs stay in near memory

// `across` elements of W for each k, 0 for records. The panels of all layers are shared as one row.
template <typename W>
void by_panels(void (*multiply)(const Job<float, W>&), const Call& o, int64_t across) {
    int64_t panels = 0;
    for (int64_t i = 0; i < o.num; ++i) panels += o.layers[i].panels();
    share(panels * ((o.M + ROWS - 1) / ROWS), o.threads, [&](int64_t part) {
        const int64_t row = part / panels * ROWS, rows = std::min(ROWS, o.M - row);
        int64_t panel = part % panels, after = std::min(panel + o.threads, panels - 1);
        const Layer &layer = o.layer_of(panel), &later = o.layer_of(after);
        const int64_t size = across ? layer.apart * across : layer.apart, column = panel * PANEL;
        const W* next = across ? (const W*)later.w + after * later.apart * across : nullptr;  // codes fetch for themselves
        const float* shift = layer.bias ? layer.bias + column : nullptr;
        multiply({o.x + row * o.K, (const W*)layer.w + panel * size, shift, layer.y + row * layer.N + column, o.K, 1,
                  across, layer.N, rows, o.K, o.chunks, layer.N - column, next});
    });
}

// Float16 as float, without arithmetic on subnormal numbers.
INLINE float from_half(uint16_t h) {
    const uint32_t size = h & 0x7FFF, sign = (uint32_t)(h & 0x8000) << 16;
    const float small = (float)(int32_t)size * 0x1p-24f;
    uint32_t bits;
    std::memcpy(&bits, &small, 4);
    if (size >= 0x400) bits = (size << 13) + (size < 0x7C00 ? 112u << 23 : 224u << 23);
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

INLINE float half_at(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return from_half(h);
}

// The values of a block of GGUF. The product is exact, so that a value is the same fused or not.
INLINE float float_at(const uint8_t* p) {
    float value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

constexpr int BLOCK_BYTES[] = {34, 20, 24};  // int8 (0), int4 (1) and int4_wide (2)

template <int KIND>
INLINE void decode_block(const uint8_t* p, float* y) {
    const float scale = KIND == 2 ? float_at(p) : half_at(p);
    if (KIND) {
        const float least = KIND == 2 ? float_at(p + 4) : half_at(p + 2);
        const uint8_t* q = p + (KIND == 2 ? 8 : 4);
        for (int i = 0; i < GROUP / 2; ++i) {
            y[i] = (float)(q[i] & 15) * scale + least;
            y[i + GROUP / 2] = (float)(q[i] >> 4) * scale + least;
        }
    } else {
        for (int i = 0; i < GROUP; ++i) y[i] = (float)(int8_t)p[2 + i] * scale;
    }
}

template <int KIND>
void decode_row(const uint8_t* p, float* y, int64_t k) {
    for (; k >= GROUP; k -= GROUP, p += BLOCK_BYTES[KIND], y += GROUP) decode_block<KIND>(p, y);
    if (!k) return;
    float last[GROUP];
    decode_block<KIND>(p, last);
    std::memcpy(y, last, k * sizeof(float));
}

}  // namespace

extern "C" {

// Rows of blocks of GGUF -> y [rows, K].
void decode_blocks(const uint8_t* blocks, float* y, int64_t rows, int64_t K, int64_t kind, int64_t threads) {
    const auto decode = kind == 2 ? decode_row<2> : kind == 1 ? decode_row<1> : decode_row<0>;
    const int64_t bytes = (K + GROUP - 1) / GROUP * BLOCK_BYTES[kind], each = 16384 / K + 1;
    share((rows + each - 1) / each, threads, [&](int64_t part) {
        for (int64_t r = part * each; r < rows && r < (part + 1) * each; ++r)
            decode(blocks + r * bytes, y + r * K, K);
    });
}

// x [M, K] times each of `num` layers of one kind.
void row_linears(const float* x, const void* layers, int64_t num, int64_t M, int64_t K, int64_t chunks, int64_t kind,
                 int64_t threads) {
    const Call o = {x, (const Layer*)layers, num, M, K, chunks, threads};
    switch (kind) {
        case 0: return by_panels(multiply<float, float>, o, PANEL);
        case 1: return by_panels(multiply<float, uint16_t>, o, PANEL);
        case 2: return by_panels(multiply_coded<Int8>, o, 0);
        case 3: return by_panels(multiply_coded<Int4>, o, 0);
        case 4: return by_panels(multiply_coded<Int4Wide>, o, 0);
    }
}

// The same; its layers come last, each as its five fields.
int64_t row_linears_chained(const int64_t* from) {
    row_linears((const float*)from[0], from + 7, from[1], from[2], from[3], from[4], from[5], from[6]);
    return 0;
}

}  // extern "C"
