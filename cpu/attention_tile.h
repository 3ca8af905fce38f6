/* One tile of attention: some rows of queries over TILE_POSITIONS positions of their sequence, whose blocks a KVTile
 * names.
 *
 * Online softmax (arXiv:2205.14135): a row's largest score, sum of weights and weighted sum of V go on from tile to
 * tile. Up to QUERY_ROWS rows go through a tile together, so that what is loaded of K and V serves them all from
 * registers. Each row's numbers come from its own row alone, in order of position: a token goes through the same
 * operations in prefill and in decode, whoever shares its tile. Slots that a row does not see may hold anything, NaN
 * included, and never enter its numbers.
 *
 * K is [head_dim, block_size] in its block: a vector's lanes are positions, and scores need no sum across lanes. V is
 * [block_size, head_dim]. In bfloat16 both lie in pairs (rows.h), and queries and weights are rounded to it too: one
 * instruction multiplies and adds a pair in every lane, where the processor has it, at twice the speed of float32.
 */
#ifndef MINIPAGED_ATTENTION_TILE_H
#define MINIPAGED_ATTENTION_TILE_H

#include "rows.h"

enum { QUERY_ROWS = 4, TILE_POSITIONS = 64, MAX_HEAD_DIM = 256 };
/* Each block begins a vector of its own, so blocks of a single position take a vector each. One vector more than that
 * keeps the rows of an array of scores from falling onto the same set of the cache. */
enum { MAX_SCORES = (TILE_POSITIONS + 1) * LANES };

/* A query head of a token, and what its softmax has come to after the tiles so far. */
typedef struct {
    const float *query;
    float *acc;         /* [head_dim]: weighted sum of V, in the output */
    vfloat total;       /* sum of the weights, a part of it in every lane */
    float largest;      /* score */
    int from, position; /* sees positions [from, position] */
} QueryRow;

/* Where the blocks of a tile are. */
typedef struct {
    const char *keys[TILE_POSITIONS], *values[TILE_POSITIONS]; /* of the first KV head */
    int64_t key_head, value_head; /* bytes from there to the KV head in turn */
    int first, end; /* blocks [first, end) of the tile are named */
    int base;       /* position of the first slot */
    int size;       /* positions of a block, at most TILE_POSITIONS */
    int vectors;    /* per block: ceil(size / LANES) */
} KVTile;

/* Prefetches the tile that comes next, a little after every few products: blocks lie far apart, where no processor
 * prefetches by itself, and many requests at once would make the products wait. */
typedef struct {
    const KVTile *tile;
    int block, is_value;
    int64_t offset, bytes[2]; /* of a block: K, V */
} Ahead;

INLINE void look_ahead(Ahead *ahead) {
    if (ahead->block >= ahead->tile->end) return;
    const char *begin = ahead->is_value ? ahead->tile->values[ahead->block] : ahead->tile->keys[ahead->block];
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

/* Rows at a tile: arrays with an entry for each of the rows. Functions take how many rows there are, and the element
 * type, as constants beside it, so that every loop over rows unrolls. */
typedef struct {
    const KVTile *tile;
    Ahead *ahead;
    int dim; /* head_dim */
    float scale;
    QueryRow *rows;
    const QueryPairs *queries;    /* the rows' queries once more, where K is in bfloat16 */
    float (*scores)[MAX_SCORES];  /* then weights, block after block, each from a vector of its own on */
    WeightPairs *weights;         /* the weights once more, where V is in bfloat16 */
} Work;

/* Scores scale * (q . k) for `count` vectors of positions, the first of which is `vector`. */
INLINE void score_vectors(const Work *w, int vector, const int count, const int num_rows, const int kind) {
    const KVTile *tile = w->tile;
    const char *keys[4];
    vfloat sums[QUERY_ROWS][4];
    for (int v = 0; v < count; v++) {
        const int at = vector + v, block = at / tile->vectors, offset = at % tile->vectors * LANES;
        keys[v] = tile->keys[block] + tile->key_head + key_offset(tile->size, offset, 0, kind);
        for (int r = 0; r < num_rows; r++) sums[r][v] = spread(0);
    }
    if (kind == KIND_BF16) {
#pragma GCC unroll 4
        for (int i = 0; i < w->dim / 2; i++) {
            vuint key[4];
            for (int v = 0; v < count; v++) key[v] = load_pairs(keys[v] + (int64_t)i * tile->size * 4);
            for (int r = 0; r < num_rows; r++)
                for (int v = 0; v < count; v++) sums[r][v] = dot2(sums[r][v], key[v], w->queries[r][i]);
            if (i % 2 == 0) look_ahead(w->ahead);
        }
    } else {
#pragma GCC unroll 4
        for (int i = 0; i < w->dim; i++) {
            vfloat key[4];
            for (int v = 0; v < count; v++) key[v] = load_element(keys[v], (int64_t)i * tile->size, kind);
            for (int r = 0; r < num_rows; r++)
                for (int v = 0; v < count; v++) sums[r][v] = fma_(key[v], spread(w->rows[r].query[i]), sums[r][v]);
            if (i % 4 == 0) look_ahead(w->ahead);
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < count; v++) store(w->scores[r] + (vector + v) * LANES, sums[r][v] * spread(w->scale));
}

/* Scores of the vectors [vector, end), as many at a time as the registers hold sums. */
INLINE void score_rows(const Work *w, int vector, int end, const int num_rows, const int kind) {
    if (LANES == 16 || num_rows <= 2)
        for (; vector + 4 <= end; vector += 4) score_vectors(w, vector, 4, num_rows, kind);
    for (; vector + 2 <= end; vector += 2) score_vectors(w, vector, 2, num_rows, kind);
    for (; vector < end; vector++) score_vectors(w, vector, 1, num_rows, kind);
}

/* Turn a row's scores of vectors [vector, end) into weights relative to its largest score so far, 0 for positions that
 * it does not see. Returns the factor by which its sums so far shrink. */
INLINE float weigh_row(const KVTile *tile, QueryRow *row, float *scores, int vector, int end) {
    vfloat most = spread(-INFINITY);
    const int first_position = tile->base + vector / tile->vectors * tile->size;
    const int end_position = tile->base + end / tile->vectors * tile->size;
    const int sees_all = row->from <= first_position && row->position + 1 >= end_position && tile->size % LANES == 0;
    for (int at = vector; at < end; at++) {
        vfloat score = load(scores + at * LANES);
        if (!sees_all) {
            const int block = at / tile->vectors, offset = at % tile->vectors * LANES;
            const vint slot = lane_numbers() + offset, position = slot + (tile->base + block * tile->size);
            const vint is_seen = (slot < tile->size) & (position >= row->from) & (position <= row->position);
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

/* sums += the weights of a pair of positions, the first of which is number `at` of the weights, times V. */
INLINE void add_pair(const Work *w, const vuint *values, int at, vfloat (*sums)[4], const int count,
                     const int num_rows) {
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < count; v++) sums[r][v] = dot2(sums[r][v], values[v], w->weights[r][at / 2]);
}

/* acc += weights * V for the tile's positions [low, high), counted from its first, and `count` vectors of elements from
 * `element` on, whose sums stay in registers. */
INLINE void add_vectors(const Work *w, int element, int low, int high, const int count, const int num_rows,
                        const int kind) {
    const KVTile *tile = w->tile;
    const int dim = w->dim;
    vfloat sums[QUERY_ROWS][4];
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < count; v++) sums[r][v] = load(w->rows[r].acc + element + v * LANES);
    for (int block = low / tile->size; block * tile->size < high; block++) {
        const char *values = tile->values[block] + tile->value_head;
        const int base = block * tile->size, at = block * tile->vectors * LANES;
        const int begin = low > base ? low - base : 0, end = high - base < tile->size ? high - base : tile->size;
        if (kind == KIND_BF16) {
            int j = begin;
            if (j % 2 && j < end) { /* the second of a pair, whose first is not seen: no number is made of it */
                vuint value[4];
                for (int v = 0; v < count; v++)
                    value[v] = load_pairs(values + ((int64_t)(j / 2) * dim + element + v * LANES) * 4) & 0xffff0000;
                add_pair(w, value, at + j, sums, count, num_rows);
                j++;
            }
#pragma GCC unroll 2
            for (; j + 1 < end; j += 2) {
                vuint value[4];
                for (int v = 0; v < count; v++)
                    value[v] = load_pairs(values + ((int64_t)(j / 2) * dim + element + v * LANES) * 4);
                add_pair(w, value, at + j, sums, count, num_rows);
                if (j % 4 == 0) look_ahead(w->ahead);
            }
            if (j < end) { /* the first of a pair, or the last slot of an odd number */
                vuint value[4];
                for (int v = 0; v < count; v++) {
                    const char *p = values + value_offset(tile->size, dim, j, element + v * LANES, kind);
                    value[v] = j + 1 < tile->size ? load_pairs(p) & 0xffff : load_lone(p);
                }
                add_pair(w, value, at + j, sums, count, num_rows);
            }
        } else {
#pragma GCC unroll 4
            for (int j = begin; j < end; j++) {
                vfloat value[4];
                for (int v = 0; v < count; v++)
                    value[v] = load_element(values, (int64_t)j * dim + element + v * LANES, kind);
                for (int r = 0; r < num_rows; r++)
                    for (int v = 0; v < count; v++)
                        sums[r][v] = fma_(value[v], spread(w->scores[r][at + j]), sums[r][v]);
                if (j % 4 == 0) look_ahead(w->ahead);
            }
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < count; v++) store(w->rows[r].acc + element + v * LANES, sums[r][v]);
}

/* The same for all elements, and for `num_rows` rows from row `first` on. */
INLINE void add_positions(const Work *all, int first, int low, int high, const int num_rows, const int kind) {
    if (low >= high) return;
    Work w = *all;
    w.rows += first, w.scores += first, w.weights += first;
    const KVTile *tile = w.tile;
    const int dim = w.dim, together = LANES == 8 ? 2 : 4;
    int i = 0;
    for (; i + together * LANES <= dim; i += together * LANES)
        add_vectors(&w, i, low, high, together, num_rows, kind);
    for (; i + LANES <= dim; i += LANES) add_vectors(&w, i, low, high, 1, num_rows, kind);
    for (; i < dim; i++)
        for (int r = 0; r < num_rows; r++)
            for (int at = low; at < high; at++) {
                const int block = at / tile->size, j = at % tile->size;
                const char *p = tile->values[block] + tile->value_head + value_offset(tile->size, dim, j, i, kind);
                const vfloat value = kind == KIND_BF16 ? load_bfloat((const uint16_t *)p) : load_element(p, 0, kind);
                w.rows[r].acc[i] += value[0] * w.scores[r][block * tile->vectors * LANES + j];
            }
}

/* Positions that all rows see are added for all of them at once; before and after come each row's own, in order. */
INLINE void add_rows(const Work *w, const int num_rows, const int kind) {
    const KVTile *tile = w->tile;
    const int num_positions = TILE_POSITIONS / tile->size * tile->size;
    int low[QUERY_ROWS], high[QUERY_ROWS], common_low = 0, common_high = num_positions;
    for (int r = 0; r < num_rows; r++) {
        const QueryRow *row = w->rows + r;
        low[r] = row->from > tile->base ? row->from - tile->base : 0;
        high[r] = row->position - tile->base < num_positions ? row->position - tile->base + 1 : num_positions;
        if (low[r] > common_low) common_low = low[r];
        if (high[r] < common_high) common_high = high[r];
    }
    if (kind == KIND_BF16) { /* a pair is taken whole or is a row's own, whoever shares the tile */
        common_low += common_low % tile->size % 2;
        common_high -= common_high % tile->size % 2;
    }
    const int has_common = common_low < common_high;
    for (int r = 0; r < num_rows; r++) add_positions(w, r, low[r], has_common ? common_low : high[r], 1, kind);
    if (!has_common) return;
    add_positions(w, 0, common_low, common_high, num_rows, kind);
    for (int r = 0; r < num_rows; r++) add_positions(w, r, common_high, high[r], 1, kind);
}

/* In explicit vectors: where the compiler cannot prove that x overlaps nothing else that is read nearby, it would
 * multiply one element at a time. */
INLINE void multiply_row(float *x, float factor, int dim) {
    int i = 0;
    for (; i + LANES <= dim; i += LANES) store(x + i, load(x + i) * spread(factor));
    for (; i < dim; i++) x[i] *= factor;
}

/* Take up to QUERY_ROWS rows through one tile. */
INLINE void attend_rows(const Attention *c, const KVTile *tile, Ahead *ahead, QueryRow *rows, const QueryPairs *queries,
                        const int num_rows, const int kind) {
    const int dim = c->cache.head_dim, size = tile->size;
    int from = rows[0].from, to = rows[0].position;
    for (int r = 1; r < num_rows; r++) {
        if (rows[r].from < from) from = rows[r].from;
        if (rows[r].position > to) to = rows[r].position;
    }
    const int end_position = tile->base + TILE_POSITIONS / size * size;
    if (from >= end_position || to < tile->base) return;
    const int first = from > tile->base ? (from - tile->base) / size : 0;
    const int end = to < end_position ? (to - tile->base) / size + 1 : TILE_POSITIONS / size;

    float scores[QUERY_ROWS][MAX_SCORES];
    WeightPairs weights[QUERY_ROWS];
    const Work w = {tile, ahead, dim, c->scale, rows, queries, scores, weights};
    const int vector = first * tile->vectors, end_vector = end * tile->vectors;
    score_rows(&w, vector, end_vector, num_rows, kind);
    for (int r = 0; r < num_rows; r++) {
        const float keep = weigh_row(tile, rows + r, scores[r], vector, end_vector);
        if (keep != 1) multiply_row(rows[r].acc, keep, dim);
    }
    if (kind == KIND_BF16)
        for (int r = 0; r < num_rows; r++)
            round_to_pairs(scores[r], vector * LANES, end_vector * LANES, weights[r]);
    add_rows(&w, num_rows, kind);
}

typedef void AttendRows(const Attention *, const KVTile *, Ahead *, QueryRow *, const QueryPairs *);

#define ATTEND_ROWS(N, KIND)                                                                                        \
    static __attribute__((noinline)) void attend_##N##_##KIND(const Attention *c, const KVTile *tile, Ahead *ahead, \
                                                              QueryRow *rows, const QueryPairs *queries) {          \
        attend_rows(c, tile, ahead, rows, queries, N, KIND_##KIND);                                                 \
    }
ATTEND_ROWS(1, F32) ATTEND_ROWS(2, F32) ATTEND_ROWS(3, F32) ATTEND_ROWS(4, F32)
ATTEND_ROWS(1, F16) ATTEND_ROWS(2, F16) ATTEND_ROWS(3, F16) ATTEND_ROWS(4, F16)
ATTEND_ROWS(1, BF16) ATTEND_ROWS(2, BF16) ATTEND_ROWS(3, BF16) ATTEND_ROWS(4, BF16)

INLINE AttendRows *attend_function(int num_rows, int kind) {
    static AttendRows *const functions[3][QUERY_ROWS] = {
        [KIND_F32] = {attend_1_F32, attend_2_F32, attend_3_F32, attend_4_F32},
        [KIND_F16] = {attend_1_F16, attend_2_F16, attend_3_F16, attend_4_F16},
        [KIND_BF16] = {attend_1_BF16, attend_2_BF16, attend_3_BF16, attend_4_BF16},
    };
    return functions[kind][num_rows - 1];
}

#endif
