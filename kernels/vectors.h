// Blocks of two vectors of fp32, for fp32, bf16 and fp16 in memory. They use vector extensions of g++ and clang++, so
// one source serves all processors, with vectors as wide as the registers (wider ones would be kept in memory). Only
// fp16 uses an intrinsic, if the processor converts it (F16C).

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#else
constexpr int LANES = 8, REGISTERS = 16;
#endif
constexpr int BLOCK = 2 * LANES;  // elements that are loaded and widened together
typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4)));

// Vectors in memory, at any address, of any type. (A memcpy of one may be done in halves, which costs more than a sum.)
typedef float vec_in_memory __attribute__((vector_size(LANES * 4), aligned(1), may_alias));
typedef uint32_t uvec_in_memory __attribute__((vector_size(LANES * 4), aligned(1), may_alias));
inline vec get(const float* at) { return *reinterpret_cast<const vec_in_memory*>(at); }
inline void put(float* at, vec v) { *reinterpret_cast<vec_in_memory*>(at) = v; }

struct bf16 {
    uint16_t bits;
};
struct fp16 {
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
inline float widen(fp16 value) {  // avoids denormal fp32 values, which the caller's thread may flush to zero
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, magnitude = value.bits & 0x7fff;
    float out = float(magnitude) * 0x1p-24f;
    uint32_t bits;
    std::memcpy(&bits, &out, 4);
    if (magnitude >= 0x7c00) bits = magnitude << 13 | 0x7f800000;
    else if (magnitude >= 0x0400) bits = (magnitude << 13) + (112u << 23);
    bits |= sign;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline fp16 narrow(float value) {  // to the nearest even; from 65520 on it is infinite, NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (bits >= 0x477ff000) return {uint16_t(sign | 0x7c00)};
    if (bits >= 0x38800000) return {uint16_t(sign | (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13)};
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;  // its last place is the smallest fp16, 2^-24
    std::memcpy(&bits, &magnitude, 4);
    return {uint16_t(sign | (bits - 0x3f000000))};
}
// A block in two vectors; `place` is an element's position in them. bf16 is split into even and odd elements, because
// that takes two operations.
inline uvec get(const bf16* at) { return *reinterpret_cast<const uvec_in_memory*>(at); }
inline pair load(const float* at) { return {get(at), get(at + LANES)}; }
inline pair load(const bf16* at) {
    const uvec bits = get(at);
    return {(vec)(bits << 16), (vec)(bits & 0xffff0000u)};
}
#if defined(__AVX512F__)
inline vec get(const fp16* at) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))); }
inline void put(fp16* at, vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
inline vec get(const fp16* at) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }
inline void put(fp16* at, vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
#else
inline vec get(const fp16* at) {
    vec out;
    for (int i = 0; i < LANES; i++) out[i] = widen(at[i]);
    return out;
}
inline void put(fp16* at, vec v) {
    for (int i = 0; i < LANES; i++) at[i] = narrow(v[i]);
}
#endif
inline pair load(const fp16* at) { return {get(at), get(at + LANES)}; }
// The first or the second vector of a block
template <int WHICH>
inline vec half(const float* at) {
    return get(at + WHICH * LANES);
}
template <int WHICH>
inline vec half(const bf16* at) {
    return (vec)(WHICH ? get(at) & 0xffff0000u : get(at) << 16);
}
template <int WHICH>
inline vec half(const fp16* at) {
    return get(at + WHICH * LANES);
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
// The value rounded as memory of this type would hold it
inline pair rounded(const float*, pair p) { return p; }
inline pair rounded(const bf16*, pair p) { return {(vec)round_bits(p.a), (vec)round_bits(p.b)}; }

inline void store(float* at, pair p) { put(at, p.a), put(at + LANES, p.b); }
inline void store(bf16* at, pair p) {
    *reinterpret_cast<uvec_in_memory*>(at) = (round_bits(p.a) >> 16) | round_bits(p.b);
}
inline void store(fp16* at, pair p) { put(at, p.a), put(at + LANES, p.b); }
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
inline void store(fp16* at, float value) { *at = narrow(value); }
inline float total(vec v) {
    float lanes[LANES];
    put(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
inline float total(pair p) { return total(p.a + p.b); }

// Returns the sum of v[i]'s lanes in lane i. Neighbouring lanes are added, then neighbouring sums, so the bits of a
// vector's sum do not depend on its index.
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#define PICK(i, S, at) (((i) & S) ? LANES + (at) : (at))
#define OWN(i, S) PICK(i, S, i), PICK(i + 1, S, i + 1), PICK(i + 2, S, i + 2), PICK(i + 3, S, i + 3)
#define OTHER(i, S) PICK(i, S, (i) ^ S), PICK(i + 1, S, (i + 1) ^ S), PICK(i + 2, S, (i + 2) ^ S), PICK(i + 3, S, (i + 3) ^ S)
#if defined(__AVX512F__)
#define EACH(OF, S) OF(0, S), OF(4, S), OF(8, S), OF(12, S)
#else
#define EACH(OF, S) OF(0, S), OF(4, S)
#endif
#define FOLD(S) \
    for (int i = 0; i < LANES; i += 2 * S) \
        v[i] = SHUFFLE(v[i], v[i + S], EACH(OWN, S)) + SHUFFLE(v[i], v[i + S], EACH(OTHER, S));
inline vec totals(vec* v) {
    FOLD(1) FOLD(2) FOLD(4)
#if defined(__AVX512F__)
    FOLD(8)
#endif
    return v[0];
}
#undef FOLD
#undef EACH
#undef PICK
#undef OWN
#undef OTHER
#undef SHUFFLE

}  // namespace
