// y = x W^T + bias in bf16 for a few tokens. Each weight is read once and widened in registers; sums are fp32 and
// rounded once.
//
// The order of an output's sum depends on d_in alone, so its bits are the same for any number of threads and any batch.

#include <algorithm>
#include <vector>

#include "dots.h"
#include "vectors.h"

extern "C" struct Product {
    const void* weight;  // [d_out, d_in]
    const void* bias;    // [d_out], or null
    const void* x;       // [tokens, d_in] with x_stride between tokens
    void* y;             // [tokens, d_out]
    int64_t x_stride, tokens, d_in, d_out, threads;
};

namespace {

constexpr int ROWS = 4;                    // rows of weights that are multiplied together
constexpr int64_t SHARE = 64 << 10;        // elements of the weights that a thread takes at a time
constexpr int64_t WORTH_THREADS = 1 << 15;  // elements below which waking another thread costs more than it gains

template <int COUNT>
void multiply_rows(const Product& p, int64_t row, int64_t last, const float* wide) {
    const bf16 *weight = static_cast<const bf16*>(p.weight), *bias = static_cast<const bf16*>(p.bias);
    const bf16 *rows[COUNT], *later[COUNT];
    for (int r = 0; r < COUNT; r++) {
        rows[r] = weight + (row + r) * p.d_in;
        later[r] = weight + std::min(row + COUNT + r, last - 1) * p.d_in;
    }
    for (int64_t t = 0; t < p.tokens;) {
        const int tokens = std::min<int64_t>(p.tokens - t, TILE_TOKENS);
        float sums[TILE_TOKENS * COUNT];
        dots_of<COUNT>(tokens, rows, t == 0 ? later : nullptr, wide + t * p.d_in, p.d_in, p.d_in, sums, COUNT);
        for (int i = 0; i < tokens; i++, t++)
            for (int r = 0; r < COUNT; r++)
                store(static_cast<bf16*>(p.y) + t * p.d_out + row + r,
                      sums[i * COUNT + r] + (bias ? widen(bias[row + r]) : 0.0f));
    }
}

}  // namespace

extern "C" void product_bf16(const Product* product) {
    const Product& p = *product;
    const int64_t share = std::max<int64_t>(ROWS, SHARE / p.d_in / ROWS * ROWS), shares = (p.d_out + share - 1) / share;
#pragma omp parallel num_threads(p.threads) if (p.d_in * p.d_out >= WORTH_THREADS)
    {
        thread_local std::vector<float> kept;  // a copy of x per thread: to share one would cost a barrier
        if (int64_t(kept.size()) < p.tokens * p.d_in) kept.resize(p.tokens * p.d_in);
        float* wide = kept.data();
        for (int64_t t = 0; t < p.tokens; t++)
            widen_row(static_cast<const bf16*>(p.x) + t * p.x_stride, p.d_in, wide + t * p.d_in);
// dynamic, because a busy process may take more of one thread's core than of another's
#pragma omp for schedule(dynamic)
        for (int64_t s = 0; s < shares; s++) {
            const int64_t last = std::min((s + 1) * share, p.d_out);
            int64_t row = s * share;
            for (; row + ROWS <= last; row += ROWS) multiply_rows<ROWS>(p, row, last, wide);
            for (; row < last; row++) multiply_rows<1>(p, row, last, wide);
        }
    }
}

// Number of floats in the operators' vectors, which shows the level that they were compiled for
extern "C" int64_t vector_lanes() { return LANES; }
