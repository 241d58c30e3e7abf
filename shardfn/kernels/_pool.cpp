// The threads of a process that share the work of kernels: made when they are first asked for, asleep between calls.
//
// A call offers seats. A thread that finds a free seat takes part; when the caller has no more work, it closes the seats
// that are left, and waits for the threads that have taken one. So a call never waits for a thread that wakes up late.
// One call at a time has the threads; another one beside it, or inside of it, works alone.
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#define PAUSE __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE asm volatile("yield")
#else
#define PAUSE
#endif

namespace {

using Job = void (*)(void* context, int64_t thread);

// How long a thread watches for what it waits for, before it sleeps.
constexpr std::chrono::microseconds WATCH(20);
constexpr uint64_t SEATS = 0xffff;

template <typename Ready>
bool watched(Ready ready) {
    const auto end = std::chrono::steady_clock::now() + WATCH;
    do {
        for (int i = 0; i < 16; ++i) {
            if (ready()) return true;
            PAUSE;
        }
    } while (std::chrono::steady_clock::now() < end);
    return ready();
}

struct Pool {
    std::atomic<bool> busy{false};
    std::atomic<uint64_t> offer{0};  // the number of the call above, free seats in the lowest 16 bits
    std::atomic<int64_t> done{0};    // of the threads that have taken a seat of this call
    std::atomic<int64_t> sleeping{0};
    std::atomic<bool> waiting{false};  // the caller sleeps
    std::mutex lock;
    std::condition_variable wake, end;
    int64_t threads = 0;  // made by callers, one at a time
    Job job = nullptr;
    void* context = nullptr;

    bool offered() const { return offer.load() & SEATS; }

    void work() {
        for (;;) {
            if (!watched([&] { return offered(); })) {
                std::unique_lock<std::mutex> held(lock);
                ++sleeping;  // before the last look: a caller that offers after it sees this number
                wake.wait(held, [&] { return offered(); });
                --sleeping;
            }
            uint64_t seen = offer.load();
            // Exchanged only if the call is still the one that was seen: its job is read after that.
            while (seen & SEATS && !offer.compare_exchange_weak(seen, seen - 1)) {
            }
            if (!(seen & SEATS)) continue;
            job(context, seen & SEATS);
            ++done;
            if (waiting.load()) {
                { std::lock_guard<std::mutex> held(lock); }  // the caller waits by now
                end.notify_one();
            }
        }
    }

    void grow(int64_t wanted) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of Python
        try {
            for (; threads < wanted; ++threads) std::thread([this] { work(); }).detach();
        } catch (const std::exception&) {  // the system gives no more threads: those that there are share the work
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void run(Job given, void* with, int64_t others) {
        grow(others);
        others = others < threads ? others : threads;
        job = given, context = with;
        done = 0;
        offer = ((offer.load() >> 16) + 1) << 16 | others;
        if (int64_t asleep = sleeping.load()) {
            { std::lock_guard<std::mutex> held(lock); }  // they wait by now
            for (int64_t i = 0; i < asleep && i < others; ++i) wake.notify_one();
        }
        given(with, 0);
        const int64_t taken = others - (int64_t)(offer.fetch_and(~SEATS) & SEATS);
        auto over = [&] { return done.load() == taken; };
        if (watched(over)) return;
        std::unique_lock<std::mutex> held(lock);
        waiting = true;
        end.wait(held, over);
        waiting = false;
    }
};

std::atomic<Pool*> pool{nullptr};

// A forked process has none of these threads, and perhaps locks that they held: it makes its own.
void forget() { pool = nullptr; }

Pool* own() {
    static const int once = pthread_atfork(nullptr, nullptr, forget);
    (void)once;
    Pool* found = pool.load();
    if (found) return found;
    Pool* made = new Pool;  // never freed, as its threads never end
    if (pool.compare_exchange_strong(found, made)) return made;
    delete made;
    return found;
}

}  // namespace

extern "C" {

// job(context, 0) on this thread, and job(context, i) for some i from 1 to `threads - 1` on others; an i at most once.
void share_work(Job job, void* context, int64_t threads) {
    if (threads > (int64_t)SEATS) threads = SEATS;
    Pool* const found = threads > 1 ? own() : nullptr;
    if (!found || found->busy.exchange(true)) return job(context, 0);
    found->run(job, context, threads - 1);
    found->busy = false;
}

}  // extern "C"
