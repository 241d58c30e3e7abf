// Calls of functions of _chain.h one after another.
#include <cstdint>

constexpr int MOST = 64;  // arguments of a call
using Function = int64_t (*)(const int64_t* arguments);

// `program` has, for each call, the function, the number of its arguments, and of each argument a place and a value: it
// is bases[place] + value, or the value where the place is -1. Returns 0, or the number from 1 of the first call that
// failed, after which none is made.
extern "C" int64_t run_chain(const int64_t* program, int64_t calls, const int64_t* bases) {
    int64_t given[MOST];
    for (int64_t call = 1; call <= calls; ++call) {
        const Function function = (Function)*program++;
        const int64_t num = *program++;
        for (int64_t i = 0; i < num; ++i, program += 2) given[i] = (*program < 0 ? 0 : bases[*program]) + program[1];
        if (function(given)) return call;
    }
    return 0;
}
