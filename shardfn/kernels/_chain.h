// Functions with one type: their arguments as an array of 64-bit integers, so that a list of them is called by one.
// Addresses and integers pass as they are, a float as its bits in the lower half.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace {

template <typename T>
T argument(int64_t x) {
    if constexpr (std::is_pointer_v<T>) {
        return (T)x;
    } else if constexpr (std::is_same_v<T, float>) {
        float value;
        const int32_t bits = (int32_t)x;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    } else {
        return x;
    }
}

// The function's result, 0 = no error.
template <typename R, typename... A, std::size_t... I>
int64_t unpacked(R (*f)(A...), const int64_t* from, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<R>) {
        f(argument<A>(from[I])...);
        return 0;
    } else {
        return f(argument<A>(from[I])...);
    }
}

template <typename R, typename... A>
int64_t unpacked(R (*f)(A...), const int64_t* from) {
    return unpacked(f, from, std::index_sequence_for<A...>());
}

}  // namespace

#define CHAINED(f) extern "C" int64_t f##_chained(const int64_t* from) { return unpacked(f, from); }
