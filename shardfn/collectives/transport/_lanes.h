// Lanes: the rings of one channel, the writes into them and the reads. See docs/design/0020-shared-memory.md.
#pragma once
#include "_blocks.h"
#include "_sum_rows.h"
#include <exception>
#include <set>
#include <string>
#include <unistd.h>

namespace lanes {

// Wakes the poller of the other end of a pipe; a full one wakes as well.
inline void poke(int pipe) {
    const ssize_t ignored = ::write(pipe, "", 1);
    (void)ignored;
}

struct Channel {
    int64_t size, me, ring, head;
    uint8_t* base;
    std::vector<Peer> peers;
    std::vector<Lane> out;        // by lane
    std::vector<Source> sources;  // 2 peer + (1 if it is the lane to all)
    std::set<Op*> active;
    std::string error;
    bool news = false;  // whether a transfer has ended since somebody looked

    // Lines of a segment's head.
    int64_t written_at(int64_t lane) const { return lane * LINE; }
    int64_t read_at(int64_t writer, int64_t all) const { return (size + 2 * writer + all) * LINE; }
    int64_t rings_at(int64_t peer) const { return (3 * size + peer) * LINE; }
    int64_t closed_at() const { return 4 * size * LINE; }

    static uint64_t load(const uint8_t* at) { return __atomic_load_n((const uint64_t*)at, __ATOMIC_ACQUIRE); }
    static void store(uint8_t* at, uint64_t value) { __atomic_store_n((uint64_t*)at, value, __ATOMIC_RELEASE); }

    // The peer has noted under `rings` its wishes before it looked for the last time, and this rank looks there
    // after it has published: with a full fence in between on both sides, one of the two sees the other.
    void tell(int64_t p) {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (load(peers[p].base + rings_at(me))) wake(p);
    }
    void wake(int64_t p) { poke(peers[p].bell); }

    void fail(const std::string& why) {
        if (error.empty()) error = why;
        for (Lane& lane : out) lane.queue.clear();
        for (Source& source : sources) source.queue.clear(), source.asked.clear(), source.begun = false;
        for (Op* op : active) op->failed = true;
        active.clear();
        news = true;
    }

    void gone_out(Op* op) {
        if (!--op->out_left) ended(op);
    }
    void come_in(Op* op) {
        if (!--op->in_left) ended(op);
    }
    void ended(Op* op) {
        news = true;
        if (!op->in_left && !op->out_left) active.erase(op);
    }

    // Bytes that may be written to a lane: readers that are gone need none. -1 for a count that cannot be.
    int64_t room(int64_t lane) {
        int64_t least_room = ring;
        for (int64_t p = 0; p < size; ++p) {
            if (p == me || peers[p].gone || (lane != me && lane != p)) continue;
            const uint64_t unread = out[lane].written - load(peers[p].base + read_at(me, lane == me));
            if (unread > (uint64_t)ring) return -1;
            least_room = least(least_room, ring - (int64_t)unread);
        }
        return least_room;
    }

    bool push(int64_t l) {
        Lane& lane = out[l];
        if (lane.queue.empty() || (l != me && peers[l].gone)) return false;
        Out& o = lane.queue.front();
        const int64_t space = room(l);
        if (space < 0) return fail("a reader of this rank's memory has counted what cannot be"), true;
        if (space < LINE) return false;
        int64_t put = 0;  // a head and the first bytes are published together: the reader is woken once
        if (!o.begun) {
            const Head first{o.message, o.tag, (uint64_t)o.len, {}};
            std::memcpy(base + head + l * ring + lane.written % ring, &first, LINE);
            put = LINE;
            o.begun = true;
        }
        const int64_t at = (lane.written + put) % ring;
        const int64_t ready = (o.summed ? o.op->pos : o.len) - o.pos;
        const int64_t n = least(least(ready, space - put), least(PIECE, ring - at));
        if (n <= 0 && !put) return false;
        if (n > 0) {
            std::memcpy(base + head + l * ring + at, o.from + o.pos, n);
            o.pos += n;
            put += lines(n);
        }
        lane.written += put;
        store(base + written_at(l), lane.written);
        for (int64_t p = 0; p < size; ++p)
            if (p != me && (l == me || l == p) && !peers[p].gone) tell(p);
        if (o.pos == o.len) {
            Op* op = o.op;
            lane.queue.pop_front();
            gone_out(op);
        }
        return true;
    }

    const uint8_t* bytes(const Source& s) const {
        return peers[s.peer].base + head + (s.all ? s.peer : me) * ring + s.read % ring;
    }
    int64_t there(const Source& s) {
        const uint64_t n = load(peers[s.peer].base + written_at(s.all ? s.peer : me)) - s.read;
        return n <= (uint64_t)ring && n % LINE == 0 ? (int64_t)n : -1;
    }

    // A writer that waits for room is woken when half of the ring is free, not for each piece.
    void advance(Source& s, int64_t n) {
        s.read += lines(n);
        store(base + read_at(s.peer, s.all), s.read);
        const int64_t unread = there(s);
        if (!peers[s.peer].gone && unread >= 0 && unread <= ring / 2) tell(s.peer);
    }

    // Decides where a tagged message goes.
    bool expect(Source& s, const Head& h) {
        auto found = s.asked.find(h.tag);
        if (found != s.asked.end()) {
            s.tagged = found->second;
            s.asked.erase(found);
            return true;
        }
        try {
            s.buffer = Early{h.tag, std::vector<uint8_t>(h.length)};
        } catch (const std::exception&) {
            return fail("no memory for a message of " + std::to_string(h.length) + " bytes"), false;
        }
        s.tagged = In{nullptr, s.buffer.bytes.data(), (int64_t)h.length, 0, false};
        return true;
    }

    // A tagged message is there: to whom it belongs.
    void deliver(Source& s) {
        if (s.tagged.op) return come_in(s.tagged.op);
        auto found = s.asked.find(s.buffer.tag);
        if (found == s.asked.end()) return s.early.push_back(std::move(s.buffer));
        const In in = found->second;
        s.asked.erase(found);
        take(in, s.buffer);
    }

    void take(const In& in, const Early& from) {
        if ((int64_t)from.bytes.size() != in.len)
            return fail("a message of " + std::to_string(from.bytes.size()) + " bytes came where " +
                        std::to_string(in.len) + " were expected: ranks do not call the same");
        std::memcpy(in.into, from.bytes.data(), in.len);
        come_in(in.op);
    }

    bool begin(Source& s) {
        Head h;
        std::memcpy(&h, bytes(s), LINE);
        if (h.message == TAGGED && !expect(s, h)) return true;
        if (h.message != TAGGED && s.queue.empty()) return false;
        const int64_t wanted = h.message == TAGGED ? s.tagged.len : s.queue.front().len;
        if ((h.message != TAGGED && (h.message != BLOCK || !h.length)) || (int64_t)h.length != wanted) {
            fail("rank " + std::to_string(s.peer) + " of the channel sent " + std::to_string(h.length) +
                 " bytes where this one, rank " + std::to_string(me) + ", takes " + std::to_string(wanted) +
                 ": they do not call the same");
            return true;
        }
        s.head = h;
        s.begun = true;
        advance(s, LINE);
        if (h.length == 0) s.begun = false, deliver(s);
        return true;
    }

    bool pull(Source& s) {
        if (!s.waits()) return false;
        const int64_t n_there = there(s);
        if (n_there < 0) return fail("rank " + std::to_string(s.peer) + " has counted what cannot be"), true;
        if (!s.begun) return n_there >= LINE && begin(s);
        const bool tagged = s.head.message == TAGGED;
        In& in = tagged ? s.tagged : s.queue.front();
        if (in.summed) return sum(in.op);
        const int64_t n = least(least(n_there, in.len - in.pos), least(PIECE, ring - s.read % ring));
        if (n <= 0) return false;
        if (in.len < STREAMED) std::memcpy(in.into + in.pos, bytes(s), n);
        else stream(in.into + in.pos, bytes(s), n);
        in.pos += n;
        advance(s, n);
        if (in.pos < in.len) return true;
        s.begun = false;
        if (tagged) return deliver(s), true;
        Op* op = in.op;
        s.queue.pop_front();
        come_in(op);
        return true;
    }

    // Adds up the blocks from all ranks, in their order. Blocks of one op are at the head of all lanes at some time,
    // as all ranks fill their lanes in the same order.
    bool sum(Op* op) {
        int64_t n = least(op->len - op->pos, PIECE);
        for (Source* s : op->rows) {
            if (!s) continue;
            if (!s->begun || s->queue.empty() || s->queue.front().op != op || !s->queue.front().summed) return false;
            n = least(n, least(there(*s), ring - s->read % ring));
        }
        if (n <= 0) return false;
        const uint8_t* rows[1 << 10];
        for (size_t i = 0; i < op->rows.size(); ++i) rows[i] = op->rows[i] ? bytes(*op->rows[i]) : op->own + op->pos;
        sum_rows(op->kind, rows, (int64_t)op->rows.size(), n, op->out + op->pos);
        op->pos += n;
        const bool whole = op->pos == op->len;
        for (Source* s : op->rows) {
            if (!s) continue;
            advance(*s, n);
            if (whole) s->queue.pop_front(), s->begun = false;
        }
        if (whole) come_in(op);
        return true;
    }

    bool drive() {
        bool moved = false;
        for (int64_t l = 0; l < size; ++l) moved |= push(l);
        for (Source& s : sources)
            if (s.peer != me) moved |= pull(s);
        return moved;
    }

    // Says for which peers this rank waits; 0 takes it back.
    void say(bool waits) {
        for (int64_t p = 0; p < size; ++p) {
            if (p == me) continue;
            const bool from = sources[2 * p].waits() || sources[2 * p + 1].waits();
            const bool to = !out[p].queue.empty() || !out[me].queue.empty();
            store(base + rings_at(p), waits && (from || to));
        }
    }

    void look() {
        for (Peer& peer : peers)
            if (peer.base && !peer.gone && (peer.died || load(peer.base + closed_at()))) peer.gone = true;
    }

    // After a drive that began when a peer had gone, and so saw everything that it has published: ops that still wait
    // for it wait in vain. Blocks for it are dropped, as it will take no more.
    void judge() {
        for (int64_t p = 0; p < size; ++p) {
            if (p == me || !peers[p].gone) continue;
            bool lost = false;
            for (int64_t all = 0; all < 2; ++all) lost |= sources[2 * p + all].waits() && there(sources[2 * p + all]) <= 0;
            for (const Out& o : out[p].queue) lost |= o.message == TAGGED;
            if (lost)
                return fail("rank " + std::to_string(p) + " of the channel " +
                            (peers[p].died ? "died" : "closed it") + " before it had sent or taken everything");
            std::deque<Out> dropped;
            dropped.swap(out[p].queue);
            for (const Out& o : dropped) gone_out(o.op);
        }
    }
};

}  // namespace lanes
