/* One tile of attention: some rows of queries over the SPAN positions whose blocks a Span names.
 *
 * Online softmax (arXiv:2205.14135): a row's largest score, sum of weights and weighted sum of V go on from tile to
 * tile. Up to ROWS rows go through a tile together, so that what is loaded of K and V serves them all from registers.
 * Each row's numbers come from its own row alone, in order of position: a token goes through the same operations in
 * prefill and in decode, whoever shares its tile. Slots that a row does not see are never read as numbers for it.
 *
 * K is [head_dim, block_size] in its block: a vector's lanes are positions, and scores need no sum across lanes. V is
 * [block_size, head_dim]. In bfloat16 both lie in pairs (rows.h), and queries and weights are rounded to it too: one
 * instruction multiplies and adds a pair in every lane, where the processor has it, at twice the speed of float32.
 */
#ifndef MINIPAGED_ATTENTION_TILE_H
#define MINIPAGED_ATTENTION_TILE_H

#include "rows.h"

enum { ROWS = 4, SPAN = 64, MAX_HEAD_DIM = 256 };
/* Blocks of a single position take a vector each; the one more keeps rows off one cache set. */
enum { MAX_SCORES = (SPAN + 1) * LANES };

/* What a row has come to after the tiles so far. */
typedef struct {
    const float *query;
    float *acc;         /* [head_dim]: weighted sum of V, in the output */
    vfloat total;       /* of the weights, one sum per lane */
    float largest;      /* score */
    int from, position; /* sees positions [from, position] */
} Row;

/* Where the blocks of a tile are. */
typedef struct {
    const char *keys[SPAN], *values[SPAN];
    int64_t key_head, value_head; /* bytes from there to the KV head in turn */
    int first, end; /* blocks [first, end) of the tile are there */
    int base;       /* position of the first slot */
    int size;       /* positions of a block, at most SPAN */
    int vectors;    /* per block: ceil(size / LANES) */
} Span;

/* Asks for the tile that comes next, little by little between products: blocks lie far apart, where no processor looks
 * ahead, and many lines asked for at once would be waited for. */
typedef struct {
    const Span *span;
    int block, is_value, offset;
    int bytes[2]; /* of a block: K, V */
} Ahead;

INLINE void look_ahead(Ahead *ahead) {
    if (ahead->block >= ahead->span->end) return;
    const char *begin = ahead->is_value ? ahead->span->values[ahead->block] : ahead->span->keys[ahead->block];
    for (int i = 0; i < 512; i += 64) prefetch(begin + ahead->offset + i);
    ahead->offset += 512;
    if (ahead->offset < ahead->bytes[ahead->is_value]) return;
    ahead->offset = 0;
    ahead->block += ahead->is_value;
    ahead->is_value ^= 1;
}

INLINE vfloat load_element(const char *p, int64_t at, const int kind) {
    return kind == KIND_F32 ? load((const float *)p + at) : load_half((const uint16_t *)p + at);
}

/* Numbers in bfloat16, two and two in 32 bits: of a query, and of the weights of a tile's positions. */
typedef uint32_t QueryPairs[MAX_HEAD_DIM / 2];
typedef uint32_t WeightPairs[MAX_SCORES / 2];

INLINE void round_to_pairs(const float *numbers, int first, int end, uint32_t *pairs) {
    for (int i = first; i < end; i += LANES) {
        const vhalf rounded = round_to_bfloat(load_lanes(numbers + i, end - i < LANES ? end - i : LANES));
        memcpy((char *)pairs + 2 * i, &rounded, sizeof rounded);
    }
}

/* scores[r] = scale * (q_r . k) for `count` vectors of positions, the first of which is `vector`. */
INLINE void score_vectors(const Span *span, Ahead *ahead, int dim, float scale, const Row *rows,
                          const QueryPairs *queries, int vector, float (*scores)[MAX_SCORES], const int num_rows,
                          const int count, const int kind) {
    const char *keys[4];
    vfloat sums[ROWS][4];
    for (int v = 0; v < count; v++) {
        const int at = vector + v, block = at / span->vectors, offset = at % span->vectors * LANES;
        keys[v] = span->keys[block] + span->key_head + key_offset(span->size, offset, 0, kind);
        for (int r = 0; r < num_rows; r++) sums[r][v] = spread(0);
    }
    if (kind == KIND_BF16) {
#pragma GCC unroll 4
        for (int i = 0; i < dim / 2; i++) {
            vuint key[4];
            for (int v = 0; v < count; v++) key[v] = load_pairs(keys[v] + (int64_t)i * span->size * 4);
            for (int r = 0; r < num_rows; r++)
                for (int v = 0; v < count; v++) sums[r][v] = dot2(sums[r][v], key[v], queries[r][i]);
            if (i % 2 == 0) look_ahead(ahead);
        }
    } else {
#pragma GCC unroll 4
        for (int i = 0; i < dim; i++) {
            vfloat key[4];
            for (int v = 0; v < count; v++) key[v] = load_element(keys[v], (int64_t)i * span->size, kind);
            for (int r = 0; r < num_rows; r++)
                for (int v = 0; v < count; v++) sums[r][v] = fma_(key[v], spread(rows[r].query[i]), sums[r][v]);
            if (i % 4 == 0) look_ahead(ahead);
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < count; v++) store(scores[r] + (vector + v) * LANES, sums[r][v] * spread(scale));
}

INLINE void score_rows(const Span *span, Ahead *ahead, int dim, float scale, const Row *rows,
                       const QueryPairs *queries, int vector, int end, float (*scores)[MAX_SCORES],
                       const int num_rows, const int kind) {
    if (LANES == 16 || num_rows <= 2) /* the registers hold so many sums */
        for (; vector + 4 <= end; vector += 4)
            score_vectors(span, ahead, dim, scale, rows, queries, vector, scores, num_rows, 4, kind);
    for (; vector + 2 <= end; vector += 2)
        score_vectors(span, ahead, dim, scale, rows, queries, vector, scores, num_rows, 2, kind);
    for (; vector < end; vector++)
        score_vectors(span, ahead, dim, scale, rows, queries, vector, scores, num_rows, 1, kind);
}

/* Turn a row's scores of vectors [vector, end) into weights relative to its largest score so far, 0 for positions that
 * it does not see. Returns by how much its sums so far shrink. */
INLINE float weigh_row(const Span *span, Row *row, float *scores, int vector, int end) {
    vfloat most = spread(-INFINITY);
    const int first_position = span->base + vector / span->vectors * span->size;
    const int end_position = span->base + end / span->vectors * span->size;
    const int sees_all = row->from <= first_position && row->position + 1 >= end_position && span->size % LANES == 0;
    for (int at = vector; at < end; at++) {
        vfloat score = load(scores + at * LANES);
        if (!sees_all) {
            const int block = at / span->vectors, offset = at % span->vectors * LANES;
            const vint slot = lane_numbers() + offset, position = slot + (span->base + block * span->size);
            const vint is_seen = (slot < span->size) & (position >= row->from) & (position <= row->position);
            score = choose(is_seen, score, spread(-INFINITY));
            store(scores + at * LANES, score);
        }
        most = maximum(score, most);
    }
    const float here = max_lanes(most), largest = here > row->largest ? here : row->largest;
    const float shift = largest == -INFINITY ? 0 : largest; /* minus infinity or NaN so far: weights of 0 or NaN */
    const float keep = largest == row->largest ? 1 : exponential(spread(row->largest - largest))[0];
    vfloat total = row->total * spread(keep);
    row->largest = largest;
    for (int at = vector; at < end; at++) {
        const vfloat weight = exponential(load(scores + at * LANES) - spread(shift));
        store(scores + at * LANES, weight);
        total += weight;
    }
    row->total = total;
    return keep;
}

/* sums += a pair of positions' weights * V. */
INLINE void add_pairs(const vuint *values, const WeightPairs *pairs, int at, vfloat (*sums)[4], const int num_rows,
                      const int count) {
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < count; v++) sums[r][v] = dot2(sums[r][v], values[v], pairs[r][at]);
}

/* acc += weights * V for the tile's positions [low, high), counted from its first, and `count` vectors of elements,
 * whose sums stay in registers. */
INLINE void add_vectors(const Span *span, Ahead *ahead, int dim, int element, const Row *rows,
                        float (*weights)[MAX_SCORES], const WeightPairs *pairs, int low, int high, const int num_rows,
                        const int count, const int kind) {
    vfloat sums[ROWS][4];
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < count; v++) sums[r][v] = load(rows[r].acc + element + v * LANES);
    for (int block = low / span->size; block * span->size < high; block++) {
        const char *values = span->values[block] + span->value_head;
        const int base = block * span->size, at = block * span->vectors * LANES;
        const int begin = low > base ? low - base : 0, end = high - base < span->size ? high - base : span->size;
        if (kind == KIND_BF16) {
            int j = begin;
            if (j % 2 && j < end) { /* the second of a pair; nothing is read as a number that is not seen */
                vuint value[4];
                for (int v = 0; v < count; v++)
                    value[v] = load_pairs(values + ((int64_t)(j / 2) * dim + element + v * LANES) * 4) & 0xffff0000;
                add_pairs(value, pairs, (at + j) / 2, sums, num_rows, count);
                j++;
            }
#pragma GCC unroll 2
            for (; j + 1 < end; j += 2) {
                vuint value[4];
                for (int v = 0; v < count; v++)
                    value[v] = load_pairs(values + ((int64_t)(j / 2) * dim + element + v * LANES) * 4);
                add_pairs(value, pairs, (at + j) / 2, sums, num_rows, count);
                if (j % 4 == 0) look_ahead(ahead);
            }
            if (j < end) { /* the first of a pair, or alone */
                vuint value[4];
                for (int v = 0; v < count; v++) {
                    const char *p = values + value_offset(span->size, dim, j, element + v * LANES, kind);
                    value[v] = j + 1 < span->size ? load_pairs(p) & 0xffff : load_lone(p);
                }
                add_pairs(value, pairs, (at + j) / 2, sums, num_rows, count);
            }
        } else {
#pragma GCC unroll 4
            for (int j = begin; j < end; j++) {
                vfloat value[4];
                for (int v = 0; v < count; v++)
                    value[v] = load_element(values, (int64_t)j * dim + element + v * LANES, kind);
                for (int r = 0; r < num_rows; r++)
                    for (int v = 0; v < count; v++) sums[r][v] = fma_(value[v], spread(weights[r][at + j]), sums[r][v]);
                if (j % 4 == 0) look_ahead(ahead);
            }
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < count; v++) store(rows[r].acc + element + v * LANES, sums[r][v]);
}

/* The same for all elements. */
INLINE void add_positions(const Span *span, Ahead *ahead, int dim, const Row *rows, float (*weights)[MAX_SCORES],
                          const WeightPairs *pairs, int low, int high, const int num_rows, const int kind) {
    if (low >= high) return;
    const int together = LANES == 8 ? 2 : 4;
    int i = 0;
    for (; i + together * LANES <= dim; i += together * LANES)
        add_vectors(span, ahead, dim, i, rows, weights, pairs, low, high, num_rows, together, kind);
    for (; i + LANES <= dim; i += LANES)
        add_vectors(span, ahead, dim, i, rows, weights, pairs, low, high, num_rows, 1, kind);
    for (; i < dim; i++)
        for (int r = 0; r < num_rows; r++)
            for (int at = low; at < high; at++) {
                const int block = at / span->size, j = at % span->size;
                const char *p = span->values[block] + span->value_head + value_offset(span->size, dim, j, i, kind);
                const vfloat value = kind == KIND_BF16 ? load_bfloat((const uint16_t *)p) : load_element(p, 0, kind);
                rows[r].acc[i] += value[0] * weights[r][block * span->vectors * LANES + j];
            }
}

/* Positions that all rows see are added for all of them at once; before and after come each row's own, in order. */
INLINE void add_rows(const Span *span, Ahead *ahead, int dim, const Row *rows, float (*weights)[MAX_SCORES],
                     const WeightPairs *pairs, const int num_rows, const int kind) {
    const int num_positions = SPAN / span->size * span->size;
    int low[ROWS], high[ROWS], common_low = 0, common_high = num_positions;
    for (int r = 0; r < num_rows; r++) {
        low[r] = rows[r].from > span->base ? rows[r].from - span->base : 0;
        high[r] = rows[r].position - span->base < num_positions ? rows[r].position - span->base + 1 : num_positions;
        if (low[r] > common_low) common_low = low[r];
        if (high[r] < common_high) common_high = high[r];
    }
    if (kind == KIND_BF16) { /* a pair is taken whole or is a row's own, whoever shares the tile */
        common_low += common_low % span->size % 2;
        common_high -= common_high % span->size % 2;
    }
    const int has_common = common_low < common_high;
    for (int r = 0; r < num_rows; r++)
        add_positions(span, ahead, dim, rows + r, weights + r, pairs + r, low[r], has_common ? common_low : high[r], 1,
                      kind);
    if (!has_common) return;
    add_positions(span, ahead, dim, rows, weights, pairs, common_low, common_high, num_rows, kind);
    for (int r = 0; r < num_rows; r++)
        add_positions(span, ahead, dim, rows + r, weights + r, pairs + r, common_high, high[r], 1, kind);
}

/* By hand: the compiler cannot know that x is nothing that the loops around these read. */
INLINE void multiply_row(float *x, float factor, int dim) {
    int i = 0;
    for (; i + LANES <= dim; i += LANES) store(x + i, load(x + i) * spread(factor));
    for (; i < dim; i++) x[i] *= factor;
}

/* One tile for up to ROWS rows. */
INLINE void attend_rows(const Command *c, const Span *span, Ahead *ahead, Row *rows, const QueryPairs *queries,
                        const int num_rows, const int kind) {
    const int dim = c->head_dim, size = span->size;
    int from = rows[0].from, to = rows[0].position;
    for (int r = 1; r < num_rows; r++) {
        if (rows[r].from < from) from = rows[r].from;
        if (rows[r].position > to) to = rows[r].position;
    }
    const int end_position = span->base + SPAN / size * size;
    if (from >= end_position || to < span->base) return;
    const int first = from > span->base ? (from - span->base) / size : 0;
    const int end = to < end_position ? (to - span->base) / size + 1 : SPAN / size;

    float scores[ROWS][MAX_SCORES];
    const int vector = first * span->vectors, end_vector = end * span->vectors;
    score_rows(span, ahead, dim, c->scale, rows, queries, vector, end_vector, scores, num_rows, kind);
    for (int r = 0; r < num_rows; r++) {
        const float keep = weigh_row(span, rows + r, scores[r], vector, end_vector);
        if (keep != 1) multiply_row(rows[r].acc, keep, dim);
    }
    WeightPairs weights[ROWS];
    if (kind == KIND_BF16)
        for (int r = 0; r < num_rows; r++)
            round_to_pairs(scores[r], vector * LANES, end_vector * LANES, weights[r]);
    add_rows(span, ahead, dim, rows, scores, weights, num_rows, kind);
}

typedef void AttendRows(const Command *, const Span *, Ahead *, Row *, const QueryPairs *);

#define ATTEND_ROWS(N, KIND)                                                                                     \
    static __attribute__((noinline)) void attend_##N##_##KIND(const Command *c, const Span *s, Ahead *a, Row *r, \
                                                              const QueryPairs *q) {                             \
        attend_rows(c, s, a, r, q, N, KIND_##KIND);                                                              \
    }
ATTEND_ROWS(1, F32) ATTEND_ROWS(2, F32) ATTEND_ROWS(3, F32) ATTEND_ROWS(4, F32)
ATTEND_ROWS(1, F16) ATTEND_ROWS(2, F16) ATTEND_ROWS(3, F16) ATTEND_ROWS(4, F16)
ATTEND_ROWS(1, BF16) ATTEND_ROWS(2, BF16) ATTEND_ROWS(3, BF16) ATTEND_ROWS(4, BF16)

INLINE AttendRows *attend_function(int num_rows, int kind) {
    static AttendRows *const functions[3][ROWS] = {
        [KIND_F32] = {attend_1_F32, attend_2_F32, attend_3_F32, attend_4_F32},
        [KIND_F16] = {attend_1_F16, attend_2_F16, attend_3_F16, attend_4_F16},
        [KIND_BF16] = {attend_1_BF16, attend_2_BF16, attend_3_BF16, attend_4_BF16},
    };
    return functions[kind][num_rows - 1];
}

#endif
