// Drives the lanes of all channels of this process, on threads that start or await a transfer and on one that sleeps
// until a peer rings. Nothing here waits for one transfer while another could go on.
#include "_lanes.h"
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <system_error>
#include <thread>

using namespace lanes;

namespace {

constexpr auto SPIN = std::chrono::microseconds(20);

// 1: the events asked for (IN: all has come, OUT: all has left) have happened, 0: not yet, -1: failed.
enum { IN = 1, OUT = 2 };
int64_t state_of(const Op* op, int64_t asked) {
    if (op->failed) return -1;
    return !((asked & IN) && op->in_left) && !((asked & OUT) && op->out_left);
}

// Rounds of driving that a start takes upon itself before it leaves the rest to the thread.
constexpr int64_t ROUNDS = 8, FOR_EVER = INT64_MAX;

struct Engine {
    std::mutex mutex;
    std::atomic<int64_t> wanting{0};        // how many wait for the mutex, or are about to
    std::condition_variable ended, passed;  // a transfer has; no thread wants the mutex
    std::vector<Channel*> channels;
    bool driving = false;  // whether somebody is in `settle`, who may have lent the mutex
    int bell, other_end;

    bool drive() {
        bool moved = false, news = false;
        for (Channel* c : channels) moved |= c->drive(), news |= c->news, c->news = false;
        if (news) ended.notify_all();
        return moved;
    }

    void say(bool waits) {
        for (Channel* c : channels) c->say(waits);
    }

    void ring() { poke(other_end); }

    // Drives until nothing moves; after that a peer rings for new moves. After `limit` rounds the thread takes over.
    // Between rounds others get the mutex: channels may come and go there.
    void settle(std::unique_lock<std::mutex>& hold, int64_t limit) {
        if (driving) return;  // the thread that does it sees the changes
        driving = true;
        bool moved;
        for (;;) {
            moved = drive();
            for (; moved && limit; moved = drive()) {
                --limit;
                if (wanting) passed.wait(hold, [&] { return wanting == 0; });
            }
            if (moved) break;
            say(true);
            std::atomic_thread_fence(std::memory_order_seq_cst);
            for (Channel* c : channels) c->look();
            if (drive()) continue;
            for (Channel* c : channels) c->judge();
            break;
        }
        if (moved) ring();
        driving = false;
        ended.notify_all();
    }

    // Drives until a transfer is where somebody waits for it, or nothing has moved for a moment.
    int64_t follow(std::unique_lock<std::mutex>& hold, const Op* op, int64_t asked) {
        int64_t state = state_of(op, asked);
        if (driving || state) return state;
        auto until = std::chrono::steady_clock::now() + SPIN;
        driving = true;
        say(false);  // peers need not ring as long as this looks
        do {
            if (drive()) until = std::chrono::steady_clock::now() + SPIN;
            if (wanting) passed.wait(hold, [&] { return wanting == 0; });
            state = state_of(op, asked);
        } while (!state && std::chrono::steady_clock::now() < until);
        driving = false;
        settle(hold, ROUNDS);
        return state_of(op, asked);
    }

    [[noreturn]] void run() {
        std::vector<pollfd> fds;
        for (bool look = true;;) {
            {
                std::unique_lock<std::mutex> hold(mutex);
                char bin[4096];
                while (::read(bell, bin, sizeof bin) == sizeof bin) continue;
                fds.assign(1, pollfd{bell, POLLIN, 0});
                for (Channel* c : channels)
                    for (Peer& peer : c->peers) {
                        if (peer.pidfd < 0 || peer.died) continue;
                        pollfd one{peer.pidfd, POLLIN, 0};
                        peer.died = look && ::poll(&one, 1, 0) == 1;
                        if (!peer.died) fds.push_back(one);
                    }
                settle(hold, FOR_EVER);
            }
            ::poll(fds.data(), fds.size(), -1);
            look = false;
            for (size_t i = 1; i < fds.size(); ++i) look |= fds[i].revents != 0;
        }
    }
};

// The mutex, before threads that drive for long.
struct Hold {
    Engine* e;
    std::unique_lock<std::mutex> lock;
    explicit Hold(void* engine) : e((Engine*)engine) {
        ++e->wanting;
        lock = std::unique_lock<std::mutex>(e->mutex);
        if (!--e->wanting) e->passed.notify_one();
    }
};

}  // namespace

extern "C" {

// The one of this process; `bell` is the end of its pipe that it reads.
void* engine_new(int64_t bell, int64_t other_end) {
    Engine* e = new Engine;
    e->bell = (int)bell, e->other_end = (int)other_end;
    sigset_t all, before;  // signals are the main thread's
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        std::thread([e] { e->run(); }).detach();
    } catch (const std::system_error&) {  // no thread to be had: a limit, or no memory for its stack
        delete e;
        e = nullptr;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return e;
}

int64_t segment_bytes(int64_t size, int64_t ring) { return lines(4 * size + 1) * LINE + size * ring; }

// bases, bells and pidfds by rank; this rank's base is the one to write.
void* channel_new(void* engine, int64_t size, int64_t me, int64_t ring, uint8_t* const* bases, const int64_t* bells,
                  const int64_t* pidfds) {
    Engine* e = (Engine*)engine;
    Channel* c = new Channel;
    c->size = size, c->me = me, c->ring = ring, c->head = lines(4 * size + 1) * LINE, c->base = bases[me];
    c->peers.resize(size), c->out.resize(size), c->sources.resize(2 * size);
    for (int64_t p = 0; p < size; ++p) {
        for (int64_t all = 0; all < 2; ++all) c->sources[2 * p + all].peer = p, c->sources[2 * p + all].all = all;
        if (p == me) continue;
        c->peers[p].base = bases[p], c->peers[p].bell = (int)bells[p], c->peers[p].pidfd = (int)pidfds[p];
    }
    Hold hold(e);
    e->channels.push_back(c);
    e->ring();  // the thread is to watch the new peers
    return c;
}

// After it nothing touches the memory of any transfer. The descriptors and segments are the caller's to close.
void channel_close(void* engine, void* channel) {
    Engine* e = (Engine*)engine;
    Channel* c = (Channel*)channel;
    Hold hold(e);
    for (size_t i = 0; i < e->channels.size(); ++i)
        if (e->channels[i] == c) {
            e->channels.erase(e->channels.begin() + i);
            Channel::store(c->base + c->closed_at(), 1);
            for (int64_t p = 0; p < c->size; ++p)
                if (p != c->me) c->wake(p);
            c->fail("the channel has been closed");
            e->ended.notify_all();
            e->ring();  // the thread is to forget the peers
            break;
        }
    delete c;
}

// The blocks that a collective sends and takes. The own one of `froms` is not sent; null means no block.
// `kind` is that of the sum, or -1 for none; blocks of a sum for all go as they are summed.
struct Transfer {
    int64_t kind;
    const int64_t* out_bytes;
    const uint8_t* const* froms;
    const uint8_t* to_all;
    int64_t to_all_bytes;
    const int64_t* in_bytes;
    uint8_t* const* intos;
    const int64_t* all_bytes;
    uint8_t* const* alls;
    uint8_t* sum_into;
    int64_t sum_bytes;
};

// Null if the channel has failed.
void* start(void* engine, void* channel, const Transfer* t) {
    Engine* e = (Engine*)engine;
    Channel* c = (Channel*)channel;
    Hold hold(e);
    if (!c->error.empty()) return nullptr;
    Op* op = new Op;
    const bool sums = t->kind >= 0 && t->sum_bytes;
    if (sums) {
        op->kind = t->kind, op->len = t->sum_bytes, op->own = t->froms[c->me], op->out = t->sum_into, op->in_left = 1;
        for (int64_t p = 0; p < c->size; ++p) op->rows.push_back(p == c->me ? nullptr : &c->sources[2 * p]);
    }
    for (int64_t step = 1; step < c->size; ++step) {
        const int64_t to = (c->me + step) % c->size, p = (c->me + c->size - step) % c->size;
        if (t->out_bytes && t->out_bytes[to]) {
            c->out[to].queue.push_back(Out{op, t->froms[to], t->out_bytes[to], 0, BLOCK, 0, false, false});
            ++op->out_left;
        }
        if (sums) {
            c->sources[2 * p].queue.push_back(In{op, nullptr, t->sum_bytes, 0, true});
        } else if (t->in_bytes && t->in_bytes[p]) {
            c->sources[2 * p].queue.push_back(In{op, t->intos[p], t->in_bytes[p], 0, false});
            ++op->in_left;
        }
        if (t->all_bytes && t->all_bytes[p]) {
            c->sources[2 * p + 1].queue.push_back(In{op, t->alls[p], t->all_bytes[p], 0, false});
            ++op->in_left;
        }
    }
    if (t->to_all_bytes) {
        c->out[c->me].queue.push_back(Out{op, t->to_all, t->to_all_bytes, 0, BLOCK, 0, false, sums});
        ++op->out_left;
    }
    if (op->in_left || op->out_left) c->active.insert(op);
    e->settle(hold.lock, ROUNDS);
    return op;
}

// A tagged message, to a rank or (`sends` 0) from one.
void* message(void* engine, void* channel, int64_t sends, int64_t peer, int64_t tag, uint8_t* at, int64_t bytes) {
    Engine* e = (Engine*)engine;
    Channel* c = (Channel*)channel;
    Hold hold(e);
    if (!c->error.empty()) return nullptr;
    Op* op = new Op;
    c->active.insert(op);
    if (sends) {
        op->out_left = 1;
        c->out[peer].queue.push_back(Out{op, at, bytes, 0, TAGGED, (uint64_t)tag, false, false});
    } else {
        op->in_left = 1;
        const In in{op, at, bytes, 0, false};
        Source& s = c->sources[2 * peer];
        size_t i = 0;
        while (i < s.early.size() && s.early[i].tag != (uint64_t)tag) ++i;
        if (i == s.early.size()) {
            s.asked.emplace((uint64_t)tag, in);
        } else {
            c->take(in, s.early[i]);
            if (i < s.early.size()) s.early.erase(s.early.begin() + i);
        }
    }
    e->settle(hold.lock, ROUNDS);
    return op;
}

int64_t op_state(const void* op, int64_t asked) { return state_of((const Op*)op, asked); }

int64_t op_wait(void* engine, const void* op, int64_t asked, int64_t milliseconds) {
    Engine* e = (Engine*)engine;
    int64_t state = state_of((const Op*)op, asked);
    if (state) return state;
    Hold hold(e);
    if ((state = e->follow(hold.lock, (const Op*)op, asked))) return state;
    e->ended.wait_for(hold.lock, std::chrono::milliseconds(milliseconds),
                      [&] { return (state = state_of((const Op*)op, asked)) != 0; });
    return state;
}

// Of a transfer that nothing touches any more.
void op_free(void* op) { delete (Op*)op; }

// What went wrong, or for whom is waited.
int64_t why(void* engine, void* channel, char* text, int64_t bytes) {
    Engine* e = (Engine*)engine;
    Channel* c = (Channel*)channel;
    Hold hold(e);
    std::string said = c->error;
    if (said.empty())
        for (int64_t p = 0; p < c->size; ++p)
            if (p != c->me && (c->sources[2 * p].waits() || c->sources[2 * p + 1].waits() || !c->out[p].queue.empty()))
                said += (said.empty() ? "" : ", ") + std::to_string(p);
    const int64_t n = least((int64_t)said.size(), bytes);
    std::memcpy(text, said.data(), n);
    return n;
}

}
