// Dot products of rows of weights with a few tokens, for operators that read each weight once.
//
// The bits of a token's sums do not depend on the other tokens.

#pragma once

#include "vectors.h"

namespace {

constexpr int INTO_L2 = 2;  // cache level for prefetched weights: a core can wait for more lines there than in L1
constexpr int TILE_TOKENS = REGISTERS / 8;  // with 4 rows the sums take half of the registers

// x in fp32, with each whole block in the order in which `load` returns weights
template <typename W>
void widen_row(const W* x, int width, float* out) {
    int k = 0;
    for (; k + BLOCK <= width; k += BLOCK) store(out + k, load(x + k));
    for (; k < width; k++) out[k] = widen(x[k]);
}

// One vector of each row times one of each token
template <int HALF, int ROWS, int TOKENS, typename W>
inline __attribute__((always_inline)) void add_products(const W* const* rows, const float* x, int64_t x_stride, int k, vec* acc) {
    vec xs[TOKENS];
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) xs[t] = half<HALF>(x + t * x_stride);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        const vec w = half<HALF>(rows[r] + k);
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) acc[r * TOKENS + t] += w * xs[t];
    }
}

// out[token * out_stride + row] = x[token] . rows[row]. AHEAD: also prefetches the rows `later`.
template <int ROWS, int TOKENS, bool AHEAD, typename W>
void dots(const W* const* rows, const W* const* later, const float* x, int64_t x_stride, int width, float* out, int64_t out_stride) {
    constexpr int SUMS = (ROWS * TOKENS + LANES - 1) / LANES * LANES;
    vec acc[SUMS] = {};
    int k = 0;
    for (; k + BLOCK <= width; k += BLOCK) {
        if (AHEAD)
            for (int r = 0; r < ROWS; r++) {
                __builtin_prefetch(later[r] + k, 0, INTO_L2);
                if (sizeof(W) * BLOCK > 64) __builtin_prefetch(later[r] + k + LANES, 0, INTO_L2);
            }
        // the first vectors of the blocks, then the second: fewer registers
        add_products<0, ROWS, TOKENS>(rows, x + k, x_stride, k, acc);
        add_products<1, ROWS, TOKENS>(rows, x + k, x_stride, k, acc);
    }
    float sums[SUMS];
    for (int i = 0; i < SUMS; i += LANES) put(sums + i, totals(acc + i));
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < TOKENS; t++) {
            float sum = sums[r * TOKENS + t];
            for (int j = k; j < width; j++) sum += widen(rows[r][j]) * x[t * x_stride + j];
            out[t * out_stride + r] = sum;
        }
}

// For 1 to TILE_TOKENS tokens; `later` may be null: nothing is prefetched
template <int ROWS, int TOKENS = TILE_TOKENS, typename W>
void dots_of(int tokens, const W* const* rows, const W* const* later, const float* x, int64_t x_stride, int width, float* out,
             int64_t out_stride) {
    if (tokens == TOKENS)
        return later ? dots<ROWS, TOKENS, true>(rows, later, x, x_stride, width, out, out_stride)
                     : dots<ROWS, TOKENS, false>(rows, later, x, x_stride, width, out, out_stride);
    if constexpr (TOKENS > 1) dots_of<ROWS, TOKENS - 1>(tokens, rows, later, x, x_stride, width, out, out_stride);
}

}  // namespace
