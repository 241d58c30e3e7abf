// The blocks in lanes, and their readers. See docs/design/0020-shared-memory.md.
//
// Lane d of each rank's segment holds the blocks for rank d, and the lane of its own number those for all. A lane is a
// ring: its owner counts the bytes written, each reader those read, in its own segment. All counts are multiples of
// LINE, and every message begins with a Head that has its length.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <vector>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace lanes {

// A block of STREAMED bytes would drive all else out of the caches.
constexpr int64_t LINE = 64, PIECE = 1 << 18, STREAMED = 1 << 22;
enum Message : uint64_t { BLOCK = 0x626c6f636b, TAGGED = 0x746167676564 };

struct Head {
    uint64_t message, tag, length, spare[5];
};
static_assert(sizeof(Head) == LINE, "a head is a line");

inline int64_t lines(int64_t n) { return (n + LINE - 1) / LINE * LINE; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// As memcpy, past the caches: the written bytes are not read soon.
inline void stream(uint8_t* into, const uint8_t* from, int64_t n) {
#ifdef __SSE2__
    const int64_t ahead = least(n, -(intptr_t)into & 15);
    std::memcpy(into, from, ahead);
    into += ahead, from += ahead, n -= ahead;
    for (; n >= LINE; into += LINE, from += LINE, n -= LINE) {
        const __m128i a = _mm_loadu_si128((const __m128i*)from), b = _mm_loadu_si128((const __m128i*)from + 1);
        const __m128i c = _mm_loadu_si128((const __m128i*)from + 2), d = _mm_loadu_si128((const __m128i*)from + 3);
        _mm_stream_si128((__m128i*)into, a), _mm_stream_si128((__m128i*)into + 1, b);
        _mm_stream_si128((__m128i*)into + 2, c), _mm_stream_si128((__m128i*)into + 3, d);
    }
    _mm_sfence();
#endif
    std::memcpy(into, from, n);
}

struct Source;

// One transfer of this rank. `in_left` and `out_left` are how many of its blocks have not come or gone.
struct Op {
    std::atomic<int64_t> in_left{0}, out_left{0};
    std::atomic<bool> failed{false};
    // The sum of blocks of all ranks, if it is one: `pos` bytes of it are there.
    int64_t kind = -1, len = 0, pos = 0;
    const uint8_t* own = nullptr;
    uint8_t* out = nullptr;
    std::vector<Source*> rows;  // by rank; null for this one
};

struct Out {
    Op* op;
    const uint8_t* from;
    int64_t len, pos;
    uint64_t message, tag;
    bool begun, summed;  // `summed`: goes only as far as the op's sum is there
};

struct In {
    Op* op;
    uint8_t* into;
    int64_t len, pos;
    bool summed;
};

// A tagged message that began to come before any op had asked for it.
struct Early {
    uint64_t tag;
    std::vector<uint8_t> bytes;
};

struct Peer {
    const uint8_t* base = nullptr;  // its segment; null for this rank
    int bell = -1, pidfd = -1;
    bool gone = false, died = false;
};

// What this rank reads of one lane.
struct Source {
    int64_t peer = 0, all = 0;
    uint64_t read = 0;
    std::deque<In> queue;
    bool begun = false;
    Head head{};
    std::multimap<uint64_t, In> asked;
    std::deque<Early> early;  // those that are whole
    Early buffer{};           // of the tagged message that has begun, if no op had asked for it
    In tagged{};              // that message; without an op if it goes to the buffer
    bool waits() const { return !queue.empty() || !asked.empty() || begun; }
};

struct Lane {
    uint64_t written = 0;
    std::deque<Out> queue;
};

}  // namespace lanes
