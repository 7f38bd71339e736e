// What a decoder layer computes between its matrix products, on a CPU: RMS norm, rotary embedding, the cache's writes,
// decode attention over the paged cache, SiLU. Rounded to memory's type where torch rounds, computed in fp32.
//
// Every row's result is computed in an order that depends on nothing but the row, so it has equal bits for any number
// of threads and any batch around it.

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
    int64_t window;  // positions that a token sees, itself included; 0: all
    float scaling, norm_eps;
};

// One pass. Tokens 0 .. rows are decode rows; the others' keys and values are only written.
struct Pass {
    const void *cos, *sin;      // [tokens, head_dim]
    const int64_t* slots;       // [tokens], below 0: not to be written
    const int32_t* table;       // [rows, table_stride]
    const int32_t* contexts;    // [rows], this token included
    float* scratch;             // [pieces of all rows, heads, head_dim + 2]
    int64_t tokens, rows, table_stride, threads;
};
}

namespace {

constexpr int PIECE = 64;              // context positions of one item of work
constexpr int64_t WORTH_THREADS = 16384;  // elements below which waking another thread costs more than it brings

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

// One head in place: normed if there is a weight, then rotated by half its width
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
    int64_t piece;            // where in the scratch
};

// The pieces are cut at multiples of PIECE from the sequence's start
std::vector<Item> cut(const Layer& layer, const Pass& pass) {
    std::vector<Item> items;
    for (int row = 0; row < pass.rows; row++) {
        const int end = pass.contexts[row], begin = layer.window ? std::max<int64_t>(0, end - layer.window) : 0;
        for (int at = begin / PIECE * PIECE; at < end; at += PIECE)
            items.push_back({row, std::max(at, begin), std::min(at + PIECE, end), int64_t(items.size())});
    }
    return items;
}

// scores[i] = scaling * q . k of each position, every 32 elements of a head summed in the same lanes
template <typename W>
inline void score(const W* const* keys, int count, const W* q, int dim, float scaling, float* scores) {
    for (int i = 0; i < count; i++) {
        pair sum = {};
        for (int k = 0; k < dim; k += BLOCK) sum = sum + load(keys[i] + k, dim - k) * load(q + k, dim - k);
        scores[i] = total(sum) * scaling;
    }
}

// out[0 .. dim) = sum of the values, each by its weight
template <typename W>
inline void weigh(const W* const* values, int count, const float* weights, int dim, float* out) {
    for (int k = 0; k < dim; k += BLOCK) {
        pair sum = {};
        for (int i = 0; i < count; i++) sum = sum + load(values[i] + k, dim - k) * weights[i];
        float block[BLOCK];
        std::memcpy(block, &sum, sizeof sum);
        for (int i = 0; i < std::min(BLOCK, dim - k); i++) out[k + i] = block[place(values[0], i)];
    }
}

// All heads over one piece of one row's context; scratch gets per head the weighted values, the maximum and the sum
template <typename W>
void attend(const Layer& layer, const Pass& pass, const W* qkv, const Item& item) {
    const int dim = layer.head_dim, group = layer.heads / layer.kv_heads, count = item.end - item.begin;
    const int64_t kv_width = layer.kv_heads * dim;
    const W *key_rows[PIECE], *value_rows[PIECE];
    for (int i = 0; i < count; i++) {
        const int at = item.begin + i;
        const int64_t slot = pass.table[item.row * pass.table_stride + at / layer.block_tokens] * layer.block_tokens +
                             at % layer.block_tokens;
        key_rows[i] = static_cast<const W*>(layer.keys) + slot * kv_width;
        value_rows[i] = static_cast<const W*>(layer.values) + slot * kv_width;
        for (int64_t k = 0; k < kv_width; k += 64 / sizeof(W)) __builtin_prefetch(value_rows[i] + k);
    }
    const W* q = qkv + item.row * (layer.heads * dim + 2 * kv_width);
    float* out = pass.scratch + item.piece * layer.heads * (dim + 2);
    for (int h = 0; h < layer.heads; h++, out += dim + 2) {
        float weights[PIECE];
        score(key_rows, count, q + h * dim, dim, layer.scaling, weights);
        float most = -std::numeric_limits<float>::infinity(), sum = 0;
        for (int i = 0; i < count; i++) most = std::max(most, weights[i]);
        for (int i = count; i < PIECE; i++) weights[i] = 0;
        for (int i = 0; i < count; i += LANES) {
            vec some;
            std::memcpy(&some, weights + i, sizeof some);
            some = exponential(some - most);
            std::memcpy(weights + i, &some, sizeof some);
        }
        for (int i = 0; i < count; i++) sum += weights[i];
        weigh(value_rows, count, weights, dim, out);
        out[dim] = most;
        out[dim + 1] = sum;
        if (h % group == group - 1)
            for (int i = 0; i < count; i++) key_rows[i] += dim, value_rows[i] += dim;
    }
}

// The pieces of one head of one row, in their order
template <typename W>
void combine(const Layer& layer, const Pass& pass, int64_t first, int64_t pieces, int head, W* out) {
    const int dim = layer.head_dim;
    const int64_t stride = layer.heads * (dim + 2);
    const float* parts = pass.scratch + first * stride + head * (dim + 2);
    float most = parts[dim], sum = 0;
    for (int64_t i = 1; i < pieces; i++) most = std::max(most, parts[i * stride + dim]);
    for (int64_t i = 0; i < pieces; i++) sum += std::exp(parts[i * stride + dim] - most) * parts[i * stride + dim + 1];
    for (int k = 0; k < dim; k += BLOCK) {
        float block[BLOCK] = {};
        for (int64_t i = 0; i < pieces; i++) {
            const float factor = std::exp(parts[i * stride + dim] - most) / sum;
            for (int j = 0; j < std::min(BLOCK, dim - k); j++) block[j] += factor * parts[i * stride + k + j];
        }
        for (int j = 0; j < std::min(BLOCK, dim - k); j++) store(out + k + j, block[j]);
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
