// Work that threads share.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

// run(part) for each of `parts` parts, by at most `threads` threads.
template <typename Run>
void share(int64_t parts, int64_t threads, Run run) {
    std::atomic<int64_t> next(0);
    auto work = [&] {
        for (int64_t part; (part = next++) < parts;) run(part);
    };
    std::vector<std::thread> others;
    try {
        for (int64_t t = 1; t < threads && t < parts; ++t) others.emplace_back(work);
    } catch (const std::exception&) {  // the system gives no more threads: those that there are take all parts
    }
    work();
    for (auto& other : others) other.join();
}
