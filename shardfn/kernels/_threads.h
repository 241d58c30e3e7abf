// Work that the threads of `_pool.cpp` share.
#pragma once
#include <atomic>
#include <cstdint>

using OnThread = void (*)(void* context, int64_t thread);
using ShareWork = void (*)(OnThread job, void* context, int64_t threads);

namespace {

// Of the pool; a library that was given none works alone.
ShareWork share_work = nullptr;

// work(thread) on this thread, as 0, and on others, of numbers below `threads` that are all different. Some of them may
// begin late or never, so that each must take its parts from what is left.
template <typename Work>
void together(int64_t threads, Work work) {
    const OnThread job = [](void* context, int64_t thread) { (*(Work*)context)(thread); };
    if (share_work && threads > 1) return share_work(job, &work, threads);
    work(0);
}

// run(part) for each of `parts` parts, by at most `threads` threads.
template <typename Run>
void share(int64_t parts, int64_t threads, Run run) {
    std::atomic<int64_t> next(0);
    together(threads < parts ? threads : parts, [&](int64_t) {
        for (int64_t part; (part = next++) < parts;) run(part);
    });
}

}  // namespace

extern "C" void use_pool(ShareWork given) { share_work = given; }
