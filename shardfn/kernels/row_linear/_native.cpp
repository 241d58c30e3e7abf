// y = x W^T + bias of a packed W: each element is the fixed expression of _panels.h.
#include "../_panels.h"
#include "../_threads.h"
#include "_codes.h"

#include <algorithm>

namespace {

// `across` elements of W for each k, `size` for a panel.
template <typename W>
void by_panels(void (*multiply)(const Job<float, W>&), const float* x, const void* w, const float* bias, float* y,
               int64_t M, int64_t K, int64_t N, int64_t chunks, int64_t across, int64_t size, int64_t threads) {
    const int64_t panels = (N + PANEL - 1) / PANEL;
    // Codes fetch for themselves.
    share(panels, threads, [&](int64_t panel) {
        const W* next = across ? (const W*)w + std::min(panel + threads, panels - 1) * size : nullptr;
        const int64_t column = panel * PANEL;
        const float* shift = bias ? bias + column : nullptr;
        multiply({x, (const W*)w + panel * size, shift, y + column, K, 1, across, N, M, K, chunks, N - column, next});
    });
}

}  // namespace

extern "C" {

// x [M, K], w of `kind`: [panels, K, PANEL] float (0) or bfloat16 (1), or [panels, groups] records of int8 (2) or int4
// (3), bias [N] or null -> y [M, N]
void row_linear(const float* x, const void* w, const float* bias, float* y, int64_t M, int64_t K, int64_t N,
                int64_t chunks, int64_t kind, int64_t threads, int64_t newest) {
    const int64_t size = K * PANEL, groups = (K + GROUP - 1) / GROUP;
    switch (kind) {
        case 0: return by_panels(multiplies<float, float>(newest), x, w, bias, y, M, K, N, chunks, PANEL, size, threads);
        case 1: return by_panels(multiplies<float, uint16_t>(newest), x, w, bias, y, M, K, N, chunks, PANEL, size, threads);
        case 2: return by_panels(decodes<Int8>(newest), x, w, bias, y, M, K, N, chunks, 0, groups, threads);
        case 3: return by_panels(decodes<Int4>(newest), x, w, bias, y, M, K, N, chunks, 0, groups, threads);
    }
}

}  // extern "C"
