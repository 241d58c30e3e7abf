// Rows of a cache: the key or value of a head, as floats or in codes. The definition of codes is in _codes.py.
#pragma once
#include <algorithm>
#include <cstring>

#include "_vectors.h"

namespace {

enum Kind : int64_t { BFLOAT16 = 0, FLOAT32 = 1, INT8 = 2, FP8 = 3 };

// Elements of a row: in codes, bytes, and the last four are the scale.
int64_t row_of(int64_t kind, int64_t width) { return kind < INT8 ? width : (width + 3) / 4 * 4 + 4; }

uint16_t rounded(float x) {  // to bfloat16
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// The nearest whole number, ties to even.
float nearest(float x) { return x + 12582912.0f - 12582912.0f; }

uint8_t code_of(float x, bool fp8) {  // of a number up to the largest code in size
    if (!fp8) return (uint8_t)(int8_t)nearest(x);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint8_t sign = bits >> 24 & 0x80;
    if (std::fabs(x) < 0x1p-6f) return sign | (uint8_t)nearest(std::fabs(x) * 512.0f);
    bits &= 0x7FFFFFFF;
    return sign | (((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - 960);
}

void write_codes(const float* from, int64_t width, bool fp8, uint8_t* to) {
    const float top = fp8 ? 448.0f : 127.0f;
    float most = 0;
    for (int64_t at = 0; at < width; ++at) {
        const float size = std::fabs(from[at]);
        if (size > most || size != size) most = size;  // a NaN stays
    }
    const float scale = most / top;
    const int64_t end = row_of(INT8, width) - 4;
    for (int64_t at = 0; at < end; ++at) {
        const float x = at < width && scale > 0 ? from[at] / scale : 0.0f;
        to[at] = x == x ? code_of(std::min(std::max(x, -top), top), fp8) : 0;
    }
    std::memcpy(to + end, &scale, 4);
}

// Writes the row of this number.
void write_row(void* cache, int64_t number, int64_t kind, const float* from, int64_t width) {
    const int64_t to = number * row_of(kind, width);
    if (kind == FLOAT32)
        std::memcpy((float*)cache + to, from, width * sizeof(float));
    else if (kind == BFLOAT16)
        for (int64_t at = 0; at < width; ++at) ((uint16_t*)cache)[to + at] = rounded(from[at]);
    else
        write_codes(from, width, kind == FP8, (uint8_t*)cache + to);
}

template <class L>
INLINE typename L::V number_of(typename L::Int code, bool fp8) {
    typedef typename L::V V;
    typedef typename L::Int Int;
    if (!fp8) return __builtin_convertvector(code << 24 >> 24, V);
    const Int size = code & 127;
    const V value = size < 8 ? __builtin_convertvector(size, V) * 0x1p-9f : (V)((size << 20) + (120 << 23));
    return (V)((Int)value | (code & 128) << 24);
}

template <class L>
INLINE void read_codes(const uint8_t* from, int64_t width, bool fp8, float* to) {
    typedef typename L::Int Int;
    typedef uint8_t Bytes __attribute__((vector_size(L::lanes), aligned(1), may_alias));
    float scale;
    std::memcpy(&scale, from + row_of(INT8, width) - 4, 4);
    int64_t at = 0;
    for (; at + L::lanes <= width; at += L::lanes)
        store<L>(to + at, number_of<L>(__builtin_convertvector(*(const Bytes*)(from + at), Int), fp8) * scale);
    for (; at < width; ++at) to[at] = number_of<L>(Int{} + (int32_t)from[at], fp8)[0] * scale;
}

// Reads the row of this number as float32, with zeros up to `padded`.
template <class L>
INLINE void read_row(const void* cache, int64_t number, int64_t kind, int64_t width, int64_t padded, float* to) {
    const int64_t row = number * row_of(kind, width);
    if (kind == FLOAT32) {
        std::memcpy(to, (const float*)cache + row, width * sizeof(float));
    } else if (kind == BFLOAT16) {
        const uint16_t* from = (const uint16_t*)cache + row;
        int64_t at = 0;
        for (; at + L::lanes <= width; at += L::lanes) store<L>(to + at, load<L>(from + at));
        for (; at < width; ++at) {
            const uint32_t bits = (uint32_t)from[at] << 16;
            std::memcpy(to + at, &bits, 4);
        }
    } else {
        read_codes<L>((const uint8_t*)cache + row, width, kind == FP8, to);
    }
    for (int64_t at = width; at < padded; ++at) to[at] = 0;
}

}  // namespace
