// y = x W^T + bias of packed W: each element is the fixed expression of _panels.h.
#include "_panels.h"
#include "_chain.h"
#include "_threads.h"
#include "_row_codes.h"

#include <algorithm>

namespace {

// A layer of some that have the same inputs: w of `kind`, [panels, K, PANEL] float (0) or bfloat16 (1), or [panels,
// groups] records of int8 (2) or int4 (3), bias [N] or null -> y [M, N].
struct Layer {
    const void* w;
    const float* bias;
    float* y;
    int64_t N;

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

// `across` elements of W for each k, `size` for a panel. The panels of all layers are shared as one row.
template <typename W>
void by_panels(void (*multiply)(const Job<float, W>&), const Call& o, int64_t across, int64_t size) {
    int64_t panels = 0;
    for (int64_t i = 0; i < o.num; ++i) panels += o.layers[i].panels();
    share(panels * ((o.M + ROWS - 1) / ROWS), o.threads, [&](int64_t part) {
        const int64_t row = part / panels * ROWS, rows = std::min(ROWS, o.M - row);
        int64_t panel = part % panels, after = std::min(panel + o.threads, panels - 1);
        const Layer &layer = o.layer_of(panel), &later = o.layer_of(after);
        const W* next = across ? (const W*)later.w + after * size : nullptr;  // codes fetch for themselves
        const int64_t column = panel * PANEL;
        const float* shift = layer.bias ? layer.bias + column : nullptr;
        multiply({o.x + row * o.K, (const W*)layer.w + panel * size, shift, layer.y + row * layer.N + column, o.K, 1,
                  across, layer.N, rows, o.K, o.chunks, layer.N - column, next});
    });
}

}  // namespace

extern "C" {

// x [M, K] times each of `num` layers of one kind.
void row_linears(const float* x, const void* layers, int64_t num, int64_t M, int64_t K, int64_t chunks, int64_t kind,
                 int64_t threads) {
    const int64_t size = K * PANEL, groups = (K + GROUP - 1) / GROUP;
    const Call o = {x, (const Layer*)layers, num, M, K, chunks, threads};
    switch (kind) {
        case 0: return by_panels(multiply<float, float>, o, PANEL, size);
        case 1: return by_panels(multiply<float, uint16_t>, o, PANEL, size);
        case 2: return by_panels(multiply_coded<Int8>, o, 0, groups);
        case 3: return by_panels(multiply_coded<Int4>, o, 0, groups);
    }
}

// The same; its layers come last, each as its four fields.
int64_t row_linears_chained(const int64_t* from) {
    row_linears((const float*)from[0], from + 7, from[1], from[2], from[3], from[4], from[5], from[6]);
    return 0;
}

}  // extern "C"
