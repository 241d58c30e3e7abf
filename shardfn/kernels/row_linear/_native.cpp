// y = x W^T + bias of a packed W: each element is the fixed expression of _panels.h.
#include "../_panels.h"
#include "../_threads.h"

namespace {

template <typename W>
void by_panels(const float* x, const W* w, const float* bias, float* y, int64_t M, int64_t K, int64_t N, int64_t chunks,
               int64_t threads, int64_t newest) {
    const auto multiply = multiplies<float, W>(newest);
    share((N + PANEL - 1) / PANEL, threads, [&](int64_t panel) {
        const int64_t column = panel * PANEL;
        const float* shift = bias ? bias + column : nullptr;
        multiply({x, w + column * K, shift, y + column, K, 1, PANEL, N, M, K, chunks, N - column});
    });
}

}  // namespace

extern "C" {

// x [M, K], w [panels, K, PANEL] float or bfloat16, bias [N] or null -> y [M, N]
void row_linear(const float* x, const void* w, const float* bias, float* y, int64_t M, int64_t K, int64_t N,
                int64_t chunks, int64_t wide, int64_t threads, int64_t newest) {
    if (wide)
        by_panels(x, (const float*)w, bias, y, M, K, N, chunks, threads, newest);
    else
        by_panels(x, (const uint16_t*)w, bias, y, M, K, N, chunks, threads, newest);
}

}  // extern "C"
