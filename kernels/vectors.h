// Blocks of 32 elements in two vectors of fp32, for fp32 and bf16 in memory. Plain vector extensions of g++ and clang++:
// one source for every processor.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;
constexpr int BLOCK = 2 * LANES;  // elements that are loaded and widened together
typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4)));

struct bf16 {
    uint16_t bits;
};
struct pair {
    vec a, b;
};

inline float widen(float value) { return value; }
inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
// A block in two vectors; `place` is where an element of the block lies in them. bf16 comes as even and odd elements,
// for that takes two operations.
inline pair load(const float* at) {
    pair out;
    std::memcpy(&out, at, sizeof out);
    return out;
}
inline pair load(const bf16* at) {
    uvec bits;
    std::memcpy(&bits, at, sizeof bits);
    return {(vec)(bits << 16), (vec)(bits & 0xffff0000u)};
}
inline int place(const float*, int i) { return i; }
inline int place(const bf16*, int i) { return i / 2 + (i & 1) * LANES; }

inline vec all(float value) { return vec{} + value; }
inline pair operator+(pair p, pair q) { return {p.a + q.a, p.b + q.b}; }
inline pair operator*(pair p, pair q) { return {p.a * q.a, p.b * q.b}; }
inline pair operator*(pair p, float factor) { return {p.a * factor, p.b * factor}; }

// The upper 16 bits of each lane rounded to the nearest even bf16, the lower ones zero; NaN stays NaN.
inline uvec round_bits(vec v) {
    uvec bits = (uvec)v;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    return v != v ? uvec{} + 0x7fc00000u : rounded;
}
// The value that memory of this type would hold
inline pair rounded(const float*, pair p) { return p; }
inline pair rounded(const bf16*, pair p) { return {(vec)round_bits(p.a), (vec)round_bits(p.b)}; }

inline void store(float* at, pair p) { std::memcpy(at, &p, sizeof p); }
inline void store(bf16* at, pair p) {
    uvec bits = (round_bits(p.a) >> 16) | round_bits(p.b);
    std::memcpy(at, &bits, sizeof bits);
}
// The first `count` elements of a block, the others as zeros
template <typename W>
inline pair load(const W* at, int count) {
    if (count >= BLOCK) return load(at);
    W part[BLOCK] = {};
    std::memcpy(part, at, count * sizeof(W));
    return load(part);
}
template <typename W>
inline void store(W* at, pair p, int count) {
    if (count >= BLOCK) return store(at, p);
    W part[BLOCK];
    store(part, p);
    std::memcpy(at, part, count * sizeof(W));
}

inline void store(float* at, float value) { *at = value; }
inline void store(bf16* at, float value) {  // to the nearest even, NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    at->bits = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float total(pair p) {
    vec v = p.a + p.b;
    float lanes[LANES];
    std::memcpy(lanes, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

}  // namespace
