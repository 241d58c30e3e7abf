// Penalties on the logits of tokens that a sequence has, bit for bit as in `_penalise.py`: float64, each operation
// rounded once (build with -ffp-contract=off). Beyond a copy of the logits, the work is that of the history's length.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "_threads.h"

namespace {

constexpr int32_t SEEN = 1 << 30;  // more than a history is long

struct Call {
    const float* logits;
    const int32_t *history, *prompts;
    const double *repetition, *presence, *frequency;
    float* out;
    int64_t rows, vocab, width;
};

bool in_range(const Call& o, int64_t i) {
    const double r = o.repetition[i];
    bool good = r > 0.0 && std::isfinite(r) && std::isfinite(o.presence[i]) && std::isfinite(o.frequency[i]);
    good &= o.prompts[i] >= 0 && o.prompts[i] <= o.width;
    for (int64_t j = 0; j < o.width; ++j) good &= o.history[i * o.width + j] >= -1 && o.history[i * o.width + j] < o.vocab;
    return good;
}

// counts [vocab] are 0 before and after
void one(const Call& o, int64_t i, int32_t* counts) {
    const float* x = o.logits + i * o.vocab;
    float* y = o.out + i * o.vocab;
    const int32_t* ids = o.history + i * o.width;
    const double repetition = o.repetition[i], presence = o.presence[i], frequency = o.frequency[i];
    std::memcpy(y, x, o.vocab * sizeof(float));
    if (repetition == 1.0 && presence == 0.0 && frequency == 0.0) return;
    for (int64_t j = 0; j < o.width; ++j)
        if (ids[j] >= 0) counts[ids[j]] = (counts[ids[j]] | SEEN) + (j >= o.prompts[i]);
    for (int64_t j = 0; j < o.width; ++j) {
        if (ids[j] < 0 || !counts[ids[j]]) continue;
        const int32_t drawn = counts[ids[j]] & ~SEEN;
        const double logit = x[ids[j]];
        double value = logit > 0.0 ? logit / repetition : logit * repetition;
        if (drawn) value = (value - frequency * (double)drawn) - presence;
        y[ids[j]] = (float)value;
        counts[ids[j]] = 0;
    }
}

}  // namespace

extern "C" {

// logits [r, v], history [r, w], one of each other argument a row -> out [r, v]; counts [threads, v], all 0. Returns 1,
// and writes nothing, if an argument is out of range.
int64_t penalise(const float* logits, const int32_t* history, const int32_t* prompts, const double* repetition,
                 const double* presence, const double* frequency, float* out, int32_t* counts, int64_t r, int64_t v,
                 int64_t w, int64_t threads) {
    const Call o = {logits, history, prompts, repetition, presence, frequency, out, r, v, w};
    for (int64_t i = 0; i < r; ++i)
        if (!in_range(o, i)) return 1;
    std::atomic<int64_t> next(0);
    together(threads < r ? threads : r, [&](int64_t thread) {
        for (int64_t i; (i = next++) < r;) one(o, i, counts + thread * v);
    });
    return 0;
}

}  // extern "C"
