// LoRA of one projection group on a CPU: every segment of a batch, each adapter at its own rank, in one call.
//
// Rows are read where the AdapterTable says (64-byte units from the pool's start), accumulated in fp32. Every output is
// summed by one thread in an order that depends on nothing but the shape, so results have equal bits for any number of
// threads and any batch around a token.

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int AHEAD = 8;  // rows of B to ask for before they are needed

// x in fp32, every whole block in the order that `load` gives the weights
template <typename W>
void widen_row(const W* x, int width, float* out) {
    int k = 0;
    for (; k + BLOCK <= width; k += BLOCK) {
        pair block = load(x + k);
        std::memcpy(out + k, &block, sizeof block);
    }
    for (; k < width; k++) out[k] = widen(x[k]);
}

// out[token * out_stride + row] = x[token] . rows[row]; asks for the rows `later` meanwhile
template <int ROWS, int TOKENS, typename W>
void dots(const W* const* rows, const W* const* later, const float* x, int64_t x_stride, int width, float* out, int64_t out_stride) {
    pair acc[ROWS][TOKENS] = {};
    int k = 0;
    for (; k + BLOCK <= width; k += BLOCK) {
        pair xs[TOKENS];
        for (int t = 0; t < TOKENS; t++) xs[t] = load(x + t * x_stride + k);
        for (int r = 0; r < ROWS; r++) {
            pair w = load(rows[r] + k);
            __builtin_prefetch(later[r] + k);
            if (sizeof(W) == 4) __builtin_prefetch(later[r] + k + LANES);
            for (int t = 0; t < TOKENS; t++) {
                acc[r][t].a += w.a * xs[t].a;
                acc[r][t].b += w.b * xs[t].b;
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < TOKENS; t++) {
            float sum = total(acc[r][t]);
            for (int j = k; j < width; j++) sum += widen(rows[r][j]) * x[t * x_stride + j];
            out[t * out_stride + r] = sum;
        }
}

// y[token][0 .. BLOCKS * BLOCK) += scale * xa[token] . rows
template <int BLOCKS, int TOKENS, typename W>
void add_columns(const W* pool, const int32_t* offsets, int64_t unit, int column, int rank, const float* xa,
                 int64_t xa_stride, float scale, W* y, int64_t y_stride) {
    pair acc[TOKENS][BLOCKS] = {};
    for (int j = 0; j < rank; j++) {
        const W* row = pool + offsets[j] * unit + column;
        const W* later = pool + offsets[std::min(j + AHEAD, rank - 1)] * unit + column;
        for (int v = 0; v < BLOCKS; v++) {
            __builtin_prefetch(later + v * BLOCK);
            if (sizeof(W) == 4) __builtin_prefetch(later + v * BLOCK + LANES);
        }
        pair w[BLOCKS];
        for (int v = 0; v < BLOCKS; v++) w[v] = load(row + v * BLOCK);
        for (int t = 0; t < TOKENS; t++) {
            float factor = xa[t * xa_stride + j];
            for (int v = 0; v < BLOCKS; v++) {
                acc[t][v].a += factor * w[v].a;
                acc[t][v].b += factor * w[v].b;
            }
        }
    }
    for (int t = 0; t < TOKENS; t++)
        for (int v = 0; v < BLOCKS; v++) {
            W* at = y + t * y_stride + v * BLOCK;
            store(at, load(at) + acc[t][v] * scale);
        }
}

template <typename W>
void add_tail(const W* pool, const int32_t* offsets, int64_t unit, int column, int columns, int rank, const float* xa,
              float scale, W* y) {
    for (int c = 0; c < columns; c++) {
        float sum = 0;
        for (int j = 0; j < rank; j++) sum += xa[j] * widen(pool[offsets[j] * unit + column + c]);
        store(y + c, widen(y[c]) + scale * sum);
    }
}

}  // namespace

extern "C" {

struct Call {
    const void* pool;
    const int32_t* rank;        // [slots] with table_stride between slots, [projections] inside
    const float* scale;         // likewise
    const int32_t* first;       // likewise, two per projection
    const int32_t* row_offset;
    const int32_t* seg_start;
    const int32_t* seg_slot;
    const void* x;
    void* y[3];
    float* xa;                  // [tokens, projections, capacity]
    float* wide;                // [tokens, d_in]
    int64_t y_stride[3];
    int64_t d_out[3];
    int64_t x_stride, d_in, table_stride, projections, segments, capacity, threads;
};
}

namespace {

constexpr int ROW_BLOCK = 16;      // A rows of one item of work
constexpr int COLUMN_BLOCK = 128;  // B columns of one item

struct Item {
    int32_t segment, projection, at;
};

template <typename W>
void shrink(const Call& call, const Item& item) {
    const int64_t unit = 64 / sizeof(W);
    const int64_t entry = call.seg_slot[item.segment] * call.table_stride + item.projection;
    const int rank = std::min<int64_t>(call.rank[entry], call.capacity);
    const int32_t* offsets = call.row_offset + call.first[entry * 2];
    const W* pool = static_cast<const W*>(call.pool);
    const int64_t xa_stride = call.projections * call.capacity;
    const int last = std::min(item.at + ROW_BLOCK, rank), begin = call.seg_start[item.segment],
              end = call.seg_start[item.segment + 1], width = call.d_in;
    for (int j = item.at; j < last;) {
        const W *rows[4], *later[4];
        const int n = last - j >= 4 ? 4 : 1;
        for (int r = 0; r < n; r++) {
            rows[r] = pool + offsets[j + r] * unit;
            later[r] = pool + offsets[std::min(j + n + r, rank - 1)] * unit;
        }
        for (int t = begin; t < end;) {
            const float* x = call.wide + t * call.d_in;
            float* out = call.xa + t * xa_stride + item.projection * call.capacity + j;
            if (end - t >= 4) {
                n == 4 ? dots<4, 4, W>(rows, later, x, call.d_in, width, out, xa_stride)
                       : dots<1, 4, W>(rows, later, x, call.d_in, width, out, xa_stride);
                t += 4;
            } else {
                n == 4 ? dots<4, 1, W>(rows, later, x, call.d_in, width, out, xa_stride)
                       : dots<1, 1, W>(rows, later, x, call.d_in, width, out, xa_stride);
                t += 1;
            }
        }
        j += n;
    }
}

template <typename W>
void expand(const Call& call, const Item& item) {
    const int64_t unit = 64 / sizeof(W);
    const int p = item.projection;
    const int64_t entry = call.seg_slot[item.segment] * call.table_stride + p;
    const int rank = std::min<int64_t>(call.rank[entry], call.capacity);
    const int32_t* offsets = call.row_offset + call.first[entry * 2 + 1];
    const W* pool = static_cast<const W*>(call.pool);
    const int64_t xa_stride = call.projections * call.capacity, y_stride = call.y_stride[p];
    const float scale = call.scale[entry];
    const int last = std::min<int64_t>(item.at + COLUMN_BLOCK, call.d_out[p]);
    const int begin = call.seg_start[item.segment], end = call.seg_start[item.segment + 1];
    for (int t = begin; t < end;) {
        const float* xa = call.xa + t * xa_stride + p * call.capacity;
        W* y = static_cast<W*>(call.y[p]) + t * y_stride;
        const int n = end - t >= 2 ? 2 : 1;
        int c = item.at;
        for (; c + 4 * BLOCK <= last; c += 4 * BLOCK)
            n == 2 ? add_columns<4, 2, W>(pool, offsets, unit, c, rank, xa, xa_stride, scale, y + c, y_stride)
                   : add_columns<4, 1, W>(pool, offsets, unit, c, rank, xa, xa_stride, scale, y + c, y_stride);
        for (; c + BLOCK <= last; c += BLOCK)
            n == 2 ? add_columns<1, 2, W>(pool, offsets, unit, c, rank, xa, xa_stride, scale, y + c, y_stride)
                   : add_columns<1, 1, W>(pool, offsets, unit, c, rank, xa, xa_stride, scale, y + c, y_stride);
        if (c < last)
            for (int i = 0; i < n; i++)
                add_tail<W>(pool, offsets, unit, c, last - c, rank, xa + i * xa_stride, scale, y + i * y_stride + c);
        t += n;
    }
}

template <typename W>
void run(const Call& call) {
    std::vector<Item> rows, columns;
    std::vector<int32_t> segments;
    int64_t work = 0;
    for (int s = 0; s < call.segments; s++) {
        if (call.seg_slot[s] < 0 || call.seg_start[s] == call.seg_start[s + 1]) continue;
        segments.push_back(s);
        for (int p = 0; p < call.projections; p++) {
            const int64_t entry = call.seg_slot[s] * call.table_stride + p;
            const int rank = std::min<int64_t>(call.rank[entry], call.capacity);
            if (!rank) continue;
            for (int j = 0; j < rank; j += ROW_BLOCK) rows.push_back({s, p, j});
            for (int c = 0; c < call.d_out[p]; c += COLUMN_BLOCK) columns.push_back({s, p, c});
            work += rank * (call.d_in + call.d_out[p]);
        }
    }
    // below a few thousand elements, waking another thread costs more than it brings
    const int threads = work < 16384 ? 1 : int(call.threads);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int i = 0; i < int(segments.size()); i++)
            for (int t = call.seg_start[segments[i]]; t < call.seg_start[segments[i] + 1]; t++) {
                const W* x = static_cast<const W*>(call.x) + t * call.x_stride;
                widen_row(x, call.d_in, call.wide + t * call.d_in);
            }
#pragma omp for schedule(dynamic)
        for (int i = 0; i < int(rows.size()); i++) shrink<W>(call, rows[i]);
#pragma omp for schedule(dynamic)
        for (int i = 0; i < int(columns.size()); i++) expand<W>(call, columns[i]);
    }
}

}  // namespace

extern "C" void grouped_lora_f32(const Call* call) { run<float>(*call); }
extern "C" void grouped_lora_bf16(const Call* call) { run<bf16>(*call); }
