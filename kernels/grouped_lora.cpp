// LoRA of one projection group on a CPU: all segments of a batch, each adapter at its own rank, in one call.
//
// Rows are read at the AdapterTable's offsets (64-byte units from the pool's start) and accumulated in fp32. One thread
// sums each output, in an order that depends on the shape alone, so a token's bits are the same for any number of
// threads and any batch.

#include <algorithm>
#include <vector>

#include "dots.h"
#include "vectors.h"

extern "C" {

// Arguments that all groups of a pass share
struct Segments {
    const int32_t* start;
    const int32_t* slot;
    float* xa;                  // [tokens, projections, capacity]
    float* wide;                // [tokens, d_in]
    int64_t count, capacity, threads;
};

struct Call {
    const void* pool;
    const int32_t* rank;        // [slots] with table_stride between slots, [projections] inside
    const float* scale;         // likewise
    const int32_t* first;       // likewise, two per projection
    const int32_t* row_offset;
    const Segments* segments;
    const void* x;
    void* y[3];
    int64_t y_stride[3];
    int64_t d_out[3];
    int64_t x_stride, d_in, table_stride, projections;
    // Rows of A that are multiplied with x, and outputs that are added to. Both are counted through the projections in
    // order. Outputs use all of xa, whether this call computed it or an earlier one.
    int64_t rows_begin, rows_end, columns_begin, columns_end;
};
}

namespace {

constexpr int AHEAD = 8;           // rows of B to prefetch
constexpr int ROW_BLOCK = 16;      // A rows of one work item
constexpr int COLUMN_BLOCK = 256;  // B columns of one item
constexpr int WIDE = REGISTERS / 4;  // blocks of columns that are summed together: half of the registers

struct Item {
    int32_t segment, projection, at, end;
};

// Addresses of an item's rows of A (side 0) or B (side 1)
template <typename W>
struct Rows {
    const W* pool;
    const int32_t* offsets;
    int rank;
    Rows(const Call& call, const Item& item, int side) : pool(static_cast<const W*>(call.pool)) {
        const int64_t entry = call.segments->slot[item.segment] * call.table_stride + item.projection;
        rank = std::min<int64_t>(call.rank[entry], call.segments->capacity);
        offsets = call.row_offset + call.first[entry * 2 + side];
    }
    const W* operator[](int j) const { return pool + offsets[j] * (64 / int64_t(sizeof(W))); }
};

// Rows that add_columns prefetches after its own: those of the next item, from a column on
template <typename W>
struct Ahead {
    Rows<W> rows;
    int column;
};

// y[token][0 .. BLOCKS * BLOCK) += scale * xa[token] . b
template <int BLOCKS, int TOKENS, typename W>
void add_columns(const Rows<W>& b, int column, const Ahead<W>& ahead, const float* xa, int64_t xa_stride, float scale,
                 W* y, int64_t y_stride) {
    pair acc[TOKENS][BLOCKS] = {};
    for (int j = 0; j < b.rank; j++) {
        const W* row = b[j] + column;
        const int far = j + AHEAD;
        const W* later = far < b.rank ? b[far] + column
                                      : ahead.rows[std::min(far - b.rank, ahead.rows.rank - 1)] + ahead.column;
        for (int v = 0; v < BLOCKS; v++) {
            __builtin_prefetch(later + v * BLOCK, 0, INTO_L2);
            if (sizeof(W) == 4) __builtin_prefetch(later + v * BLOCK + LANES, 0, INTO_L2);
        }
        pair w[BLOCKS];
        for (int v = 0; v < BLOCKS; v++) w[v] = load(row + v * BLOCK);
        for (int t = 0; t < TOKENS; t++)
            for (int v = 0; v < BLOCKS; v++) acc[t][v] = acc[t][v] + w[v] * xa[t * xa_stride + j];
    }
    for (int t = 0; t < TOKENS; t++)
        for (int v = 0; v < BLOCKS; v++) {
            W* at = y + t * y_stride + v * BLOCK;
            store(at, load(at) + acc[t][v] * scale);
        }
}

template <typename W>
void add_tail(const Rows<W>& b, int column, int columns, const float* xa, float scale, W* y) {
    for (int c = 0; c < columns; c++) {
        float sum = 0;
        for (int j = 0; j < b.rank; j++) sum += xa[j] * widen(b[j][column + c]);
        store(y + c, widen(y[c]) + scale * sum);
    }
}

template <typename W>
void shrink(const Call& call, const Item& item, const Item& next) {
    const Rows<W> a(call, item, 0), after(call, next, 0);
    const int64_t xa_stride = call.projections * call.segments->capacity;
    const int last = item.end, begin = call.segments->start[item.segment],
              end = call.segments->start[item.segment + 1], width = call.d_in;
    for (int j = item.at; j < last;) {
        const W *rows[4], *later[4];
        const int n = last - j >= 4 ? 4 : 1;
        for (int r = 0; r < n; r++) {
            const int ahead = j + n + r;
            rows[r] = a[j + r];
            later[r] = ahead < last ? a[ahead] : after[std::min(next.at + ahead - last, after.rank - 1)];
        }
        for (int t = begin; t < end;) {
            const float* x = call.segments->wide + t * call.d_in;
            float* out = call.segments->xa + t * xa_stride + item.projection * call.segments->capacity + j;
            const int tokens = std::min(end - t, TILE_TOKENS);
            const W* const* next_rows = t == begin ? later : nullptr;
            n == 4 ? dots_of<4>(tokens, rows, next_rows, x, call.d_in, width, out, xa_stride)
                   : dots_of<1>(tokens, rows, next_rows, x, call.d_in, width, out, xa_stride);
            t += tokens;
        }
        j += n;
    }
}

template <typename W>
void expand(const Call& call, const Item& item, const Item& next) {
    const int p = item.projection;
    const Rows<W> b(call, item, 1);
    const Ahead<W> ahead = {Rows<W>(call, next, 1), next.at};
    const int64_t xa_stride = call.projections * call.segments->capacity, y_stride = call.y_stride[p];
    const float scale = call.scale[call.segments->slot[item.segment] * call.table_stride + p];
    const int last = item.end;
    const int begin = call.segments->start[item.segment], end = call.segments->start[item.segment + 1];
    for (int t = begin; t < end;) {
        const float* xa = call.segments->xa + t * xa_stride + p * call.segments->capacity;
        W* y = static_cast<W*>(call.y[p]) + t * y_stride;
        const int n = end - t >= 2 ? 2 : 1;
        int c = item.at;
        if (n == 1)
            for (; c + WIDE * BLOCK <= last; c += WIDE * BLOCK)
                add_columns<WIDE, 1, W>(b, c, ahead, xa, xa_stride, scale, y + c, y_stride);
        for (; c + WIDE / 2 * BLOCK <= last; c += WIDE / 2 * BLOCK)
            n == 2 ? add_columns<WIDE / 2, 2, W>(b, c, ahead, xa, xa_stride, scale, y + c, y_stride)
                   : add_columns<WIDE / 2, 1, W>(b, c, ahead, xa, xa_stride, scale, y + c, y_stride);
        for (; c + BLOCK <= last; c += BLOCK)
            n == 2 ? add_columns<1, 2, W>(b, c, ahead, xa, xa_stride, scale, y + c, y_stride)
                   : add_columns<1, 1, W>(b, c, ahead, xa, xa_stride, scale, y + c, y_stride);
        if (c < last)
            for (int i = 0; i < n; i++) add_tail<W>(b, c, last - c, xa + i * xa_stride, scale, y + i * y_stride + c);
        t += n;
    }
}

struct Range {
    int64_t begin, end;
};
// Intersection of begin..end with `count` places from `first` on, relative to `first`
inline Range within(int64_t begin, int64_t end, int64_t first, int64_t count) {
    return {std::clamp<int64_t>(begin - first, 0, count), std::clamp<int64_t>(end - first, 0, count)};
}

// Ordered items, divided into one part per thread by the elements that they read
struct Items {
    std::vector<Item> items;
    std::vector<int64_t> ends;
    void clear() { items.clear(), ends.clear(); }
    void add(Item item, int64_t size) {
        items.push_back(item);
        ends.push_back(size + (ends.empty() ? 0 : ends.back()));
    }
    int64_t begin_of(int64_t part, int64_t parts) const {
        if (part == parts || items.empty()) return part ? int64_t(items.size()) : 0;
        return std::upper_bound(ends.begin(), ends.end(), ends.back() * part / parts) - ends.begin();
    }
    int64_t total() const { return ends.empty() ? 0 : ends.back(); }
    const Item& after(int64_t i) const { return items[std::min<int64_t>(i + 1, int64_t(items.size()) - 1)]; }
};

template <typename W>
void run(const Call& call) {
    // thread_local keeps its memory between calls, of which a step makes one per layer; the region's threads read it
    thread_local Items kept_rows, kept_columns;
    thread_local std::vector<int32_t> kept_segments;
    Items &rows = kept_rows, &columns = kept_columns;
    std::vector<int32_t>& segments = kept_segments;
    rows.clear(), columns.clear(), segments.clear();
    for (int s = 0; s < call.segments->count; s++) {
        if (call.segments->slot[s] < 0 || call.segments->start[s] == call.segments->start[s + 1]) continue;
        segments.push_back(s);
        int64_t row = 0, column = 0;  // first of the projection
        for (int p = 0; p < call.projections; p++) {
            const int64_t entry = call.segments->slot[s] * call.table_stride + p, d_out = call.d_out[p];
            const int64_t rank = std::min<int64_t>(call.rank[entry], call.segments->capacity);
            const Range j = within(call.rows_begin, call.rows_end, row, rank);
            const Range c = within(call.columns_begin, call.columns_end, column, rank ? d_out : 0);
            for (int at = j.begin; at < j.end; at += ROW_BLOCK) {
                const int end = std::min<int64_t>(at + ROW_BLOCK, j.end);
                rows.add({s, p, at, end}, (end - at) * call.d_in);
            }
            for (int at = c.begin; at < c.end; at += COLUMN_BLOCK) {
                const int end = std::min<int64_t>(at + COLUMN_BLOCK, c.end);
                columns.add({s, p, at, end}, rank * (end - at));
            }
            row += rank, column += d_out;
        }
    }
    if (rows.items.empty()) segments.clear();  // x is not needed
    if (rows.items.empty() && columns.items.empty()) return;
    // below a few thousand elements, waking another thread costs more than it gains
    const int64_t threads = rows.total() + columns.total() < 16384 ? 1 : call.segments->threads;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int i = 0; i < int(segments.size()); i++)
            for (int t = call.segments->start[segments[i]]; t < call.segments->start[segments[i] + 1]; t++) {
                const W* x = static_cast<const W*>(call.x) + t * call.x_stride;
                widen_row(x, call.d_in, call.segments->wide + t * call.d_in);
            }
#pragma omp for schedule(static)
        for (int64_t part = 0; part < threads; part++)
            for (int64_t i = rows.begin_of(part, threads); i < rows.begin_of(part + 1, threads); i++)
                shrink<W>(call, rows.items[i], rows.after(i));
#pragma omp for schedule(static)
        for (int64_t part = 0; part < threads; part++)
            for (int64_t i = columns.begin_of(part, threads); i < columns.begin_of(part + 1, threads); i++)
                expand<W>(call, columns.items[i], columns.after(i));
    }
}

}  // namespace

extern "C" void grouped_lora_f32(const Call* call) { run<float>(*call); }
extern "C" void grouped_lora_bf16(const Call* call) { run<bf16>(*call); }
extern "C" void grouped_lora_f16(const Call* call) { run<fp16>(*call); }
