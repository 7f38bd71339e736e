// CPU operators for the parts of a decoder layer between its matrix products: RMS norm, rotary embedding, cache writes,
// decode attention over the paged cache, SiLU. They compute in fp32, and round to memory's type where torch rounds.
//
// The order of a row's sums depends on the row alone, so its bits are the same for any number of threads and any batch.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

extern "C" {

// One layer's attention. Cache: [slots, kv_heads, head_dim]; a slot is block * block_tokens + place in the block.
struct Layer {
    void *keys, *values;
    const void *q_norm, *k_norm;  // [head_dim] weights of norms over each head, or null
    int64_t heads, kv_heads, head_dim, block_tokens;
    int64_t window;  // positions visible to a token, itself included; 0: all
    float scaling, norm_eps;
};

// One pass. Tokens 0 .. rows are decode rows; of the others only keys and values are written.
struct Pass {
    const void *cos, *sin;      // [tokens, head_dim]
    const int64_t* slots;       // [tokens], below 0: not written
    const int32_t* table;       // [rows, table_stride]
    const int32_t* contexts;    // [rows], this token included
    float* scratch;             // [pieces of all rows, heads, head_dim in whole blocks + 2]
    int64_t tokens, rows, table_stride, threads;
};
}

namespace {

constexpr int MAX_HEAD = 512;          // widest head
constexpr int PIECE = 64;              // context positions of one work item
constexpr int64_t WORTH_THREADS = 16384;  // elements below which waking another thread costs more than it gains

// e^x within 2 ulp; below -87 as at -87, NaN stays NaN
inline vec exponential(vec x) {
    const vec low = all(-87.0f), high = all(88.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const vec magic = all(12582912.0f);  // added, a number loses its fraction
    const vec shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
    const vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * (vec)(((uvec)shifted - (uvec)magic + 127u) << 23);
}

template <typename W>
void norm_row(const W* x, const W* weight, int width, float eps, W* out) {
    pair squares = {};
    for (int k = 0; k < width; k += BLOCK) {
        pair block = load(x + k, width - k);
        squares = squares + block * block;
    }
    const float factor = 1.0f / std::sqrt(total(squares) / width + eps);
    for (int k = 0; k < width; k += BLOCK) {
        pair unit = rounded(x, load(x + k, width - k) * factor);
        store(out + k, load(weight + k, width - k) * unit, width - k);
    }
}

template <typename W>
void norm_rows(const W* x, const W* weight, int64_t rows, int64_t width, float eps, W* out, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * width >= WORTH_THREADS)
    for (int64_t t = 0; t < rows; t++) norm_row(x + t * width, weight, width, eps, out + t * width);
}

// out[t] = silu(x[t, :width]) * x[t, width:]
template <typename W>
void silu_rows(const W* x, int64_t rows, int64_t width, W* out, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * width >= WORTH_THREADS)
    for (int64_t t = 0; t < rows; t++) {
        const W *gate = x + t * 2 * width, *up = gate + width;
        for (int64_t k = 0; k < width; k += BLOCK) {
            const int count = std::min<int64_t>(BLOCK, width - k);
            const pair g = load(gate + k, count);
            const pair silu = rounded(x, {g.a / (exponential(-g.a) + 1.0f), g.b / (exponential(-g.b) + 1.0f)});
            store(out + t * width + k, silu * load(up + k, count), count);
        }
    }
}

// Norms one head in place, if there is a weight, then rotates it by half its width
template <typename W>
void rotate(W* head, const W* cos, const W* sin, const W* norm, const Layer& layer) {
    const int half = layer.head_dim / 2;
    if (norm) norm_row(head, norm, layer.head_dim, layer.norm_eps, head);
    for (int k = 0; k < half; k += BLOCK) {
        const int count = half - k;
        const pair low = load(head + k, count), high = load(head + half + k, count);
        const pair low_cos = rounded(head, low * load(cos + k, count));
        const pair low_sin = rounded(head, high * load(sin + k, count));
        const pair high_cos = rounded(head, high * load(cos + half + k, count));
        const pair high_sin = rounded(head, low * load(sin + half + k, count));
        store(head + k, low_cos + low_sin * -1.0f, count);
        store(head + half + k, high_cos + high_sin, count);
    }
}

template <typename W>
void place_token(const Layer& layer, const Pass& pass, W* qkv, int64_t t) {
    const int64_t dim = layer.head_dim, kv_width = layer.kv_heads * dim;
    W *q = qkv + t * (layer.heads * dim + 2 * kv_width), *k = q + layer.heads * dim;
    const W *cos = static_cast<const W*>(pass.cos) + t * dim, *sin = static_cast<const W*>(pass.sin) + t * dim;
    for (int h = 0; h < layer.heads; h++) rotate(q + h * dim, cos, sin, static_cast<const W*>(layer.q_norm), layer);
    for (int h = 0; h < layer.kv_heads; h++) rotate(k + h * dim, cos, sin, static_cast<const W*>(layer.k_norm), layer);
    if (pass.slots[t] < 0) return;
    std::memcpy(static_cast<W*>(layer.keys) + pass.slots[t] * kv_width, k, kv_width * sizeof(W));
    std::memcpy(static_cast<W*>(layer.values) + pass.slots[t] * kv_width, k + kv_width, kv_width * sizeof(W));
}

struct Item {
    int32_t row, begin, end;  // context positions
    int64_t piece;            // offset in the scratch
};

// Pieces begin at multiples of PIECE from the sequence's start
std::vector<Item> cut(const Layer& layer, const Pass& pass) {
    std::vector<Item> items;
    for (int row = 0; row < pass.rows; row++) {
        const int end = pass.contexts[row], begin = layer.window ? std::max<int64_t>(0, end - layer.window) : 0;
        for (int at = begin / PIECE * PIECE; at < end; at += PIECE)
            items.push_back({row, std::max(at, begin), std::min(at + PIECE, end), int64_t(items.size())});
    }
    return items;
}

// Loops over a head's blocks. BLOCKS: their number, if the width is a multiple of a block; 0: computed from the width.
template <int BLOCKS>
inline int blocks(int dim) {
    return BLOCKS ? BLOCKS : (dim + BLOCK - 1) / BLOCK;
}
template <int BLOCKS, typename W>
inline pair part(const W* at, int block, int dim) {
    return BLOCKS ? load(at + block * BLOCK) : load(at + block * BLOCK, dim - block * BLOCK);
}

// scores[i] = scaling * q . k of each position; `keys` has whole vectors
template <int BLOCKS, typename W>
inline void score(const W* const* keys, int count, const W* q, int dim, float scaling, float* scores) {
    pair wide[MAX_HEAD / BLOCK];
    for (int b = 0; b < blocks<BLOCKS>(dim); b++) wide[b] = part<BLOCKS>(q, b, dim);
    for (int i = 0; i < count; i += LANES) {
        vec sums[LANES];
        for (int j = 0; j < LANES; j++) {
            pair sum = {};
            for (int b = 0; b < blocks<BLOCKS>(dim); b++) sum = sum + part<BLOCKS>(keys[i + j], b, dim) * wide[b];
            sums[j] = sum.a + sum.b;
        }
        put(scores + i, totals(sums) * scaling);
    }
}

// out = sum of the values, each by its weight; whole blocks, in the order of memory's elements
template <int BLOCKS, typename W>
inline void weigh(const W* const* values, int count, const float* weights, int dim, float* out) {
    pair sums[MAX_HEAD / BLOCK] = {};
    for (int i = 0; i < count; i++)
        for (int b = 0; b < blocks<BLOCKS>(dim); b++) sums[b] = sums[b] + part<BLOCKS>(values[i], b, dim) * weights[i];
    for (int b = 0; b < blocks<BLOCKS>(dim); b++) store(out + b * BLOCK, sums[b]);
}

// Replaces scores by e^(score - maximum); elements from `count` on in the last vector become zero
struct Softmax {
    float most, sum;
};
inline Softmax soften(float* scores, int count) {
    const float least = -std::numeric_limits<float>::infinity();
    const int padded = (count + LANES - 1) / LANES * LANES;
    for (int i = count; i < padded; i++) scores[i] = least;
    float most = least;
    vec lanes = all(least);
    for (int i = 0; i < padded; i += LANES) {
        const vec some = get(scores + i);
        lanes = some > lanes ? some : lanes;
    }
    for (int i = 0; i < LANES; i++) most = std::max(most, lanes[i]);
    for (int i = 0; i < padded; i += LANES) put(scores + i, exponential(get(scores + i) - most));
    for (int i = count; i < padded; i++) scores[i] = 0;
    pair sum = {};
    for (int i = 0; i < padded; i += LANES) sum.a += get(scores + i);
    return {most, total(sum)};
}

// Result of a piece in the scratch, per head: the weighted values in whole blocks, the maximum and the sum
inline int64_t part_size(const Layer& layer) { return blocks<0>(layer.head_dim) * BLOCK + 2; }

// All heads over one piece of one row's context
template <int BLOCKS, typename W>
void attend(const Layer& layer, const Pass& pass, const W* qkv, const Item& item) {
    const int dim = layer.head_dim, group = layer.heads / layer.kv_heads, count = item.end - item.begin;
    const int64_t kv_width = layer.kv_heads * dim, size = part_size(layer);
    const W *key_rows[PIECE], *value_rows[PIECE];
    for (int i = 0; i < PIECE; i++) {
        const int at = item.begin + std::min(i, count - 1);
        const int64_t slot = pass.table[item.row * pass.table_stride + at / layer.block_tokens] * layer.block_tokens +
                             at % layer.block_tokens;
        key_rows[i] = static_cast<const W*>(layer.keys) + slot * kv_width;
        value_rows[i] = static_cast<const W*>(layer.values) + slot * kv_width;
    }
    for (int i = 0; i < count; i++)
        for (int64_t k = 0; k < kv_width; k += 64 / sizeof(W)) __builtin_prefetch(value_rows[i] + k);
    const W* q = qkv + item.row * (layer.heads * dim + 2 * kv_width);
    float* out = pass.scratch + item.piece * layer.heads * size;
    for (int h = 0; h < layer.heads; h++, out += size) {
        float weights[PIECE];
        score<BLOCKS>(key_rows, count, q + h * dim, dim, layer.scaling, weights);
        const Softmax found = soften(weights, count);
        weigh<BLOCKS>(value_rows, count, weights, dim, out);
        out[size - 2] = found.most;
        out[size - 1] = found.sum;
        if (h % group == group - 1)
            for (int i = 0; i < PIECE; i++) key_rows[i] += dim, value_rows[i] += dim;
    }
}

template <typename W>
void attend(const Layer& layer, const Pass& pass, const W* qkv, const Item& item) {
    if (layer.head_dim == 64) return attend<64 / BLOCK>(layer, pass, qkv, item);
    if (layer.head_dim == 128) return attend<128 / BLOCK>(layer, pass, qkv, item);
    attend<0>(layer, pass, qkv, item);
}

// The pieces of one head of one row, in their order
template <typename W>
void combine(const Layer& layer, const Pass& pass, int64_t first, int64_t pieces, int head, W* out) {
    const int64_t size = part_size(layer), stride = layer.heads * size;
    float* parts = pass.scratch + first * stride + head * size;
    float most = parts[size - 2], sum = 0;
    for (int64_t i = 1; i < pieces; i++) most = std::max(most, parts[i * stride + size - 2]);
    for (int64_t i = 0; i < pieces; i++) {
        float* factor = parts + i * stride + size - 2;
        *factor = std::exp(*factor - most);
        sum += *factor * parts[i * stride + size - 1];
    }
    for (int64_t k = 0; k < layer.head_dim; k += BLOCK) {
        pair block = {};
        for (int64_t i = 0; i < pieces; i++) block = block + load(parts + i * stride + k) * parts[i * stride + size - 2];
        store(out + k, block * (1.0f / sum), layer.head_dim - k);
    }
}

template <typename W>
void run(const Layer& layer, const Pass& pass, W* qkv, W* out) {
    const std::vector<Item> items = cut(layer, pass);
    std::vector<int64_t> first(pass.rows + 1, int64_t(items.size()));
    for (int64_t i = int64_t(items.size()) - 1; i >= 0; i--) first[items[i].row] = i;
    const int64_t work = (items.size() * PIECE + pass.tokens) * layer.heads * layer.head_dim;
#pragma omp parallel num_threads(pass.threads) if (work >= WORTH_THREADS)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < pass.tokens; t++) place_token(layer, pass, qkv, t);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < int64_t(items.size()); i++) attend(layer, pass, qkv, items[i]);
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < pass.rows; row++)
            for (int64_t h = 0; h < layer.heads; h++)
                combine(layer, pass, first[row], first[row + 1] - first[row], h,
                        out + (row * layer.heads + h) * layer.head_dim);
    }
}

}  // namespace

extern "C" {

void attention_f32(const Layer* layer, const Pass* pass, void* qkv, void* out) {
    run(*layer, *pass, static_cast<float*>(qkv), static_cast<float*>(out));
}
void attention_bf16(const Layer* layer, const Pass* pass, void* qkv, void* out) {
    run(*layer, *pass, static_cast<bf16*>(qkv), static_cast<bf16*>(out));
}
void rms_norm_f32(const float* x, const float* weight, int64_t rows, int64_t width, float eps, float* out, int64_t threads) {
    norm_rows(x, weight, rows, width, eps, out, threads);
}
void rms_norm_bf16(const bf16* x, const bf16* weight, int64_t rows, int64_t width, float eps, bf16* out, int64_t threads) {
    norm_rows(x, weight, rows, width, eps, out, threads);
}
void silu_mul_f32(const float* x, int64_t rows, int64_t width, float* out, int64_t threads) {
    silu_rows(x, rows, width, out, threads);
}
void silu_mul_bf16(const bf16* x, int64_t rows, int64_t width, bf16* out, int64_t threads) {
    silu_rows(x, rows, width, out, threads);
}
}
