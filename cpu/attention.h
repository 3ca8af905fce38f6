/* Causal attention of every token over its sequence's positions 0..p (the last `window` of them) in the paged cache.
 *
 * input: q [rows, in_stride], head h at h * head_dim; output [rows, query heads * head_dim]. A piece of work is a KV head
 * and up to QUERIES tokens of one sequence: each K/V block is read, and converted to float32, once for all their query
 * heads. K is [head_dim, block_size] in its block: a vector's lanes are positions and scores need no sum across lanes.
 * V is [block_size, head_dim].
 *
 * Online softmax, block after block from the first the token attends to: every token goes through the same operations in
 * prefill and in decode, whoever shares its piece of work. Slots after the position are never read as numbers.
 */
#ifndef MINIPAGED_ATTENTION_H
#define MINIPAGED_ATTENTION_H

#include "rows.h"

enum { QUERIES = 8, MAX_HEAD_DIM = 256, MAX_BLOCK = 64 };

/* A block's K or V as float32; in place where it is float32 already. */
INLINE const float *as_float(const Command *c, int64_t at, int count, float *buffer) {
    if (c->kind == KIND_F32) return (const float *)c->cache + at;
    const uint16_t *p = (const uint16_t *)c->cache + at;
    for (int i = 0; i < count; i += LANES) store(buffer + i, c->kind == KIND_F16 ? load_half(p + i) : load_bfloat(p + i));
    return buffer;
}

/* Ask for a block's K or V while another block is worked on: blocks lie far apart, where no processor looks ahead. */
INLINE void prefetch_block(const Command *c, int64_t at) {
    const int element = c->kind == KIND_F32 ? 4 : 2;
    const char *begin = (const char *)c->cache + at * element;
    for (int i = 0; i < c->block_size * c->head_dim * element; i += 64) __builtin_prefetch(begin + i);
}

typedef struct {
    const float *query;
    float *acc; /* [head_dim] */
    float largest, total;
    int position;
} Row;

/* Scores of one row against a block's positions, LANES at a time: scores[j] = scale * (q . k_j). */
INLINE void score_rows(const Command *c, const float *keys, Row *const *rows, const int count, float (*scores)[MAX_BLOCK]) {
    const int dim = c->head_dim, size = c->block_size;
    for (int j = 0; j < size; j += LANES) {
        vfloat sums[4];
        for (int r = 0; r < count; r++) sums[r] = spread(0);
        for (int i = 0; i < dim; i++) {
            vfloat key = load(keys + i * size + j);
            for (int r = 0; r < count; r++) sums[r] = fma_(key, spread(rows[r]->query[i]), sums[r]);
        }
        for (int r = 0; r < count; r++) store(scores[r] + j, sums[r] * spread(c->scale));
    }
}

/* Turn a block's scores of positions [low, high) into weights, relative to the largest score so far; the others weigh
 * nothing. Returns by how much the row's sums so far shrink. */
INLINE float weigh_block(const Command *c, Row *row, float *scores, int low, int high) {
    vfloat most = spread(-INFINITY), sum = spread(0);
    for (int j = 0; j < c->block_size; j += LANES) {
        const vint at = lane_numbers() + j;
        const vfloat score = choose((at >= low) & (at < high), load(scores + j), spread(-INFINITY));
        store(scores + j, score);
        most = maximum(score, most);
    }
    const float here = max_lanes(most), largest = here > row->largest ? here : row->largest;
    const float shift = largest == -INFINITY ? 0 : largest; /* minus infinity or NaN so far: weights of 0 or NaN */
    for (int j = 0; j < c->block_size; j += LANES) {
        const vfloat weight = exponential(load(scores + j) - spread(shift));
        store(scores + j, weight);
        sum += weight;
    }
    const float keep = largest == row->largest ? 1 : exponential(spread(row->largest - largest))[0];
    row->total = row->total * keep + sum_lanes(sum);
    row->largest = largest;
    return keep;
}

/* acc = acc * keep + the weighted values, for `count` vectors of elements that stay in registers. */
INLINE void add_vectors(float *acc, float keep, const float *weights, const float *values, int dim, int low, int high,
                        const int count) {
    vfloat sums[8];
    for (int v = 0; v < count; v++) sums[v] = load(acc + v * LANES) * spread(keep);
    for (int j = low; j < high; j++)
        for (int v = 0; v < count; v++)
            sums[v] = fma_(load(values + j * dim + v * LANES), spread(weights[j]), sums[v]);
    for (int v = 0; v < count; v++) store(acc + v * LANES, sums[v]);
}

INLINE void add_values(float *acc, float keep, const float *weights, const float *values, int dim, int low, int high) {
    int i = 0;
    for (; i + 8 * LANES <= dim; i += 8 * LANES) add_vectors(acc + i, keep, weights, values + i, dim, low, high, 8);
    for (; i + 4 * LANES <= dim; i += 4 * LANES) add_vectors(acc + i, keep, weights, values + i, dim, low, high, 4);
    for (; i + LANES <= dim; i += LANES) add_vectors(acc + i, keep, weights, values + i, dim, low, high, 1);
    for (; i < dim; i++) {
        float sum = acc[i] * keep;
        for (int j = low; j < high; j++) sum += values[j * dim + i] * weights[j];
        acc[i] = sum;
    }
}

INLINE void attend(const Command *c, int sequence, int head, int first, int end) {
    const int dim = c->head_dim, size = c->block_size, group = c->num_query_heads / c->num_kv_heads;
    const BatchHeader *batch = c->batch;
    const int32_t *table = batch->tables + batch->rows[sequence] * batch->table_stride;
    float key_buffer[MAX_BLOCK * MAX_HEAD_DIM], value_buffer[MAX_BLOCK * MAX_HEAD_DIM], scores[4][MAX_BLOCK];
    Row rows[QUERIES * 8];
    for (int g0 = 0; g0 < group; g0 += 8) { /* at most 8 query heads at a time, so that `rows` is bounded */
        int count = 0, last = 0, start = INT32_MAX;
        for (int t = first; t < end; t++) {
            const int position = batch->positions[t];
            const int from = c->window && position >= c->window ? position - c->window + 1 : 0;
            if (position > last) last = position;
            if (from < start) start = from;
            for (int g = g0; g < group && g < g0 + 8; g++) {
                const int h = head * group + g;
                float *out = (float *)c->output + ((int64_t)t * c->num_query_heads + h) * dim;
                memset(out, 0, dim * sizeof(float));
                rows[count++] = (Row){(const float *)c->input + (int64_t)t * c->in_stride + h * dim, out, -INFINITY, 0,
                                      position};
            }
        }
        for (int column = start / size; column <= last / size; column++) {
            const float *keys = as_float(c, cache_offset(c, table[column], 0, head), size * dim, key_buffer);
            const float *values = as_float(c, cache_offset(c, table[column], 1, head), size * dim, value_buffer);
            if (column < last / size) {
                prefetch_block(c, cache_offset(c, table[column + 1], 0, head));
                prefetch_block(c, cache_offset(c, table[column + 1], 1, head));
            }
            const int base = column * size;
            for (int r = 0; r < count;) {
                Row *some[4];
                int n = 0;
                for (; r < count && n < 4; r++) {
                    const int from = c->window && rows[r].position >= c->window ? rows[r].position - c->window + 1 : 0;
                    if (rows[r].position >= base && from < base + size) some[n++] = &rows[r];
                }
                switch (n) {
                case 1: score_rows(c, keys, some, 1, scores); break;
                case 2: score_rows(c, keys, some, 2, scores); break;
                case 3: score_rows(c, keys, some, 3, scores); break;
                case 4: score_rows(c, keys, some, 4, scores); break;
                }
                int low[4], high[4];
                float keep[4];
                for (int i = 0; i < n; i++) { /* all rows first: what one waits for, the others fill */
                    const int position = some[i]->position;
                    const int from = c->window && position >= c->window ? position - c->window + 1 : 0;
                    low[i] = from > base ? from - base : 0;
                    high[i] = position - base + 1 < size ? position - base + 1 : size;
                    keep[i] = weigh_block(c, some[i], scores[i], low[i], high[i]);
                }
                for (int i = 0; i < n; i++)
                    add_values(some[i]->acc, keep[i], scores[i], values, dim, low[i], high[i]);
            }
        }
        for (int r = 0; r < count; r++)
            for (int i = 0; i < dim; i++) rows[r].acc[i] /= rows[r].total;
    }
}

/* Pieces are numbered through sequences, their blocks of tokens, and KV heads. */
INLINE int sequence_pieces(const Command *c, int sequence) {
    const int tokens = c->batch->query_starts[sequence + 1] - c->batch->query_starts[sequence];
    return (tokens + QUERIES - 1) / QUERIES * c->num_kv_heads;
}

INLINE int attention_pieces(const Command *c) {
    int pieces = 0;
    for (int s = 0; s < c->batch->num_sequences; s++) pieces += sequence_pieces(c, s);
    return pieces;
}

static void attention(const Command *c, int piece) {
    int s = 0;
    for (; piece >= sequence_pieces(c, s); s++) piece -= sequence_pieces(c, s);
    const int first = c->batch->query_starts[s] + piece / c->num_kv_heads * QUERIES, limit = c->batch->query_starts[s + 1];
    attend(c, s, piece % c->num_kv_heads, first, first + QUERIES < limit ? first + QUERIES : limit);
}

#endif
