/* Causal attention of every token over its sequence's positions 0..p (the last `window` of them) in the paged cache.
 *
 * input: q [rows, in_stride], head h at h * head_dim; output [rows, query heads * head_dim]. A piece of work is up to
 * QUERIES tokens of one sequence and some KV heads; its rows are those tokens' query heads, KV head after KV head. K is
 * [head_dim, block_size] in its block: a vector's lanes are positions, and scores need no sum across lanes. V is
 * [block_size, head_dim].
 *
 * Online softmax (arXiv:2205.14135), tile after tile of SPAN positions counted from position 0. Up to ROWS rows go
 * through a tile together, so that what is loaded of K and V serves all of them from registers. Each row's numbers come
 * from its own row alone, in order of position: a token goes through the same operations in prefill and in decode,
 * whoever shares its piece of work. Slots that a row does not see are never read as numbers for it.
 *
 * Bytes moved: a sequence's K and V once for every QUERIES tokens; 4 * head_dim operations per row and position.
 */
#ifndef MINIPAGED_ATTENTION_H
#define MINIPAGED_ATTENTION_H

#include "rows.h"

enum { QUERIES = 8, HEADS = 8, KV_HEADS = 8, ROWS = 4, SPAN = 64, MAX_HEAD_DIM = 256, MAX_BLOCK = 64 };
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
    int64_t head;   /* bytes from there to the KV head in turn */
    int first, end; /* blocks [first, end) of the tile are there */
    int base;       /* position of the first slot */
    int size;       /* positions of a block */
    int vectors;    /* per block: ceil(size / LANES) */
} Span;

/* Asks for the tile that comes next, little by little between products: blocks lie far apart, where no processor looks
 * ahead, and many lines asked for at once would be waited for. */
typedef struct {
    const Span *span;
    int block, is_value, offset, bytes;
} Ahead;

INLINE void look_ahead(Ahead *ahead) {
    if (ahead->block >= ahead->span->end) return;
    const char *begin = ahead->is_value ? ahead->span->values[ahead->block] : ahead->span->keys[ahead->block];
    for (int i = 0; i < 512; i += 64) prefetch(begin + ahead->offset + i);
    ahead->offset += 512;
    if (ahead->offset < ahead->bytes) return;
    ahead->offset = 0;
    ahead->block += ahead->is_value;
    ahead->is_value ^= 1;
}

INLINE vfloat load_element(const char *p, int64_t at, const int kind) {
    return kind == KIND_F32   ? load((const float *)p + at)
           : kind == KIND_F16 ? load_half((const uint16_t *)p + at)
                              : load_bfloat((const uint16_t *)p + at);
}

/* scores[r] = scale * (q_r . k) for `count` vectors of positions, the first of which is `vector`. */
INLINE void score_vectors(const Span *span, Ahead *ahead, int dim, float scale, const Row *rows, int vector,
                          float (*scores)[MAX_SCORES], const int num_rows, const int count, const int kind) {
    const char *keys[4];
    vfloat sums[ROWS][4];
    for (int v = 0; v < count; v++) {
        const int at = vector + v, block = at / span->vectors, offset = at % span->vectors * LANES;
        keys[v] = span->keys[block] + span->head + offset * (kind == KIND_F32 ? 4 : 2);
        for (int r = 0; r < num_rows; r++) sums[r][v] = spread(0);
    }
#pragma GCC unroll 4
    for (int i = 0; i < dim; i++) {
        vfloat key[4];
        for (int v = 0; v < count; v++) key[v] = load_element(keys[v], (int64_t)i * span->size, kind);
        for (int r = 0; r < num_rows; r++)
            for (int v = 0; v < count; v++) sums[r][v] = fma_(key[v], spread(rows[r].query[i]), sums[r][v]);
        if (i % 4 == 0) look_ahead(ahead);
    }
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < count; v++) store(scores[r] + (vector + v) * LANES, sums[r][v] * spread(scale));
}

INLINE void score_rows(const Span *span, Ahead *ahead, int dim, float scale, const Row *rows, int vector, int end,
                       float (*scores)[MAX_SCORES], const int num_rows, const int kind) {
    if (LANES == 16 || num_rows <= 2) /* the registers hold so many sums */
        for (; vector + 4 <= end; vector += 4)
            score_vectors(span, ahead, dim, scale, rows, vector, scores, num_rows, 4, kind);
    for (; vector + 2 <= end; vector += 2)
        score_vectors(span, ahead, dim, scale, rows, vector, scores, num_rows, 2, kind);
    for (; vector < end; vector++) score_vectors(span, ahead, dim, scale, rows, vector, scores, num_rows, 1, kind);
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
    row->total *= spread(keep);
    row->largest = largest;
    for (int at = vector; at < end; at++) {
        const vfloat weight = exponential(load(scores + at * LANES) - spread(shift));
        store(scores + at * LANES, weight);
        row->total += weight;
    }
    return keep;
}

/* acc += weights * V for the tile's positions [low, high), counted from its first, and `count` vectors of elements,
 * whose sums stay in registers. */
INLINE void add_vectors(const Span *span, Ahead *ahead, int dim, int element, const Row *rows,
                        float (*weights)[MAX_SCORES], int low, int high, const int num_rows, const int count,
                        const int kind) {
    vfloat sums[ROWS][4];
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < count; v++) sums[r][v] = load(rows[r].acc + element + v * LANES);
    for (int block = low / span->size; block * span->size < high; block++) {
        const int base = block * span->size, first = block * span->vectors * LANES;
        const int end = high - base < span->size ? high - base : span->size;
#pragma GCC unroll 4
        for (int j = low > base ? low - base : 0; j < end; j++) {
            vfloat value[4];
            for (int v = 0; v < count; v++)
                value[v] = load_element(span->values[block] + span->head, (int64_t)j * dim + element + v * LANES, kind);
            for (int r = 0; r < num_rows; r++)
                for (int v = 0; v < count; v++) sums[r][v] = fma_(value[v], spread(weights[r][first + j]), sums[r][v]);
            if (j % 4 == 0) look_ahead(ahead);
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < count; v++) store(rows[r].acc + element + v * LANES, sums[r][v]);
}

/* The same for all elements. */
INLINE void add_positions(const Span *span, Ahead *ahead, int dim, const Row *rows, float (*weights)[MAX_SCORES],
                          int low, int high, const int num_rows, const int kind) {
    if (low >= high) return;
    const int together = LANES == 8 ? 2 : 4;
    int i = 0;
    for (; i + together * LANES <= dim; i += together * LANES)
        add_vectors(span, ahead, dim, i, rows, weights, low, high, num_rows, together, kind);
    for (; i + LANES <= dim; i += LANES) add_vectors(span, ahead, dim, i, rows, weights, low, high, num_rows, 1, kind);
    for (; i < dim; i++)
        for (int r = 0; r < num_rows; r++)
            for (int at = low; at < high; at++) {
                const int block = at / span->size, j = at % span->size;
                const float value = load_element(span->values[block] + span->head, (int64_t)j * dim + i, kind)[0];
                rows[r].acc[i] += value * weights[r][block * span->vectors * LANES + j];
            }
}

/* Positions that all rows see are added for all of them at once; before and after come each row's own, in order. */
INLINE void add_rows(const Span *span, Ahead *ahead, int dim, const Row *rows, float (*weights)[MAX_SCORES],
                     const int num_rows, const int kind) {
    const int num_positions = SPAN / span->size * span->size;
    int low[ROWS], high[ROWS], common_low = 0, common_high = num_positions;
    for (int r = 0; r < num_rows; r++) {
        low[r] = rows[r].from > span->base ? rows[r].from - span->base : 0;
        high[r] = rows[r].position - span->base < num_positions ? rows[r].position - span->base + 1 : num_positions;
        if (low[r] > common_low) common_low = low[r];
        if (high[r] < common_high) common_high = high[r];
    }
    const int has_common = common_low < common_high;
    for (int r = 0; r < num_rows; r++)
        add_positions(span, ahead, dim, rows + r, weights + r, low[r], has_common ? common_low : high[r], 1, kind);
    if (!has_common) return;
    add_positions(span, ahead, dim, rows, weights, common_low, common_high, num_rows, kind);
    for (int r = 0; r < num_rows; r++)
        add_positions(span, ahead, dim, rows + r, weights + r, common_high, high[r], 1, kind);
}

/* By hand: the compiler cannot know that x is nothing that the loops around these read. */
INLINE void multiply_row(float *x, float factor, int dim) {
    int i = 0;
    for (; i + LANES <= dim; i += LANES) store(x + i, load(x + i) * spread(factor));
    for (; i < dim; i++) x[i] *= factor;
}

INLINE void divide_row(float *x, float divisor, int dim) {
    int i = 0;
    for (; i + LANES <= dim; i += LANES) store(x + i, load(x + i) / spread(divisor));
    for (; i < dim; i++) x[i] /= divisor;
}

/* One tile for up to ROWS rows. */
INLINE void attend_rows(const Command *c, const Span *span, Ahead *ahead, Row *rows, const int num_rows,
                        const int kind) {
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
    score_rows(span, ahead, dim, c->scale, rows, vector, end_vector, scores, num_rows, kind);
    for (int r = 0; r < num_rows; r++) {
        const float keep = weigh_row(span, rows + r, scores[r], vector, end_vector);
        if (keep != 1) multiply_row(rows[r].acc, keep, dim);
    }
    add_rows(span, ahead, dim, rows, scores, num_rows, kind);
}

typedef void AttendRows(const Command *, const Span *, Ahead *, Row *);

#define ATTEND_ROWS(N, KIND)                                                                                       \
    static __attribute__((noinline)) void attend_##N##_##KIND(const Command *c, const Span *s, Ahead *a, Row *r) { \
        attend_rows(c, s, a, r, N, KIND_##KIND);                                                                   \
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

/* Pieces are numbered through sequences, their blocks of tokens, and shares of the KV heads. */
typedef struct {
    int sequence, number;        /* number: among the sequence's pieces */
    int first_head, end_head;    /* KV heads [first_head, end_head) */
    int first, end;              /* tokens [first, end) of the step */
    int first_block, last_block; /* that they see, by their place in the table */
} Piece;

INLINE int token_blocks(const Command *c, int sequence) {
    const int tokens = c->batch->query_starts[sequence + 1] - c->batch->query_starts[sequence];
    return (tokens + QUERIES - 1) / QUERIES;
}

/* KV heads of a piece. Those of a block lie together, and are best read together, if that leaves enough pieces. */
INLINE int heads_together(const Command *c, int num_threads) {
    int blocks = 0;
    for (int s = 0; s < c->batch->num_sequences; s++) blocks += token_blocks(c, s);
    if (blocks < 8 * num_threads) return 1;
    return c->num_kv_heads < KV_HEADS ? c->num_kv_heads : KV_HEADS;
}

INLINE int sequence_pieces(const Command *c, int sequence, int heads) {
    return token_blocks(c, sequence) * ((c->num_kv_heads + heads - 1) / heads);
}

INLINE int attention_pieces(const Command *c, int num_threads) {
    const int heads = heads_together(c, num_threads);
    int pieces = 0;
    for (int s = 0; s < c->batch->num_sequences; s++) pieces += sequence_pieces(c, s, heads);
    return pieces;
}

INLINE int first_seen(const Command *c, int position) {
    return c->window && position >= c->window ? position - c->window + 1 : 0;
}

/* The piece with the given number, counted from the first of sequence s on; 0 if there are not so many. */
INLINE int find_piece(const Command *c, int s, int number, int heads, Piece *piece) {
    const BatchHeader *batch = c->batch;
    for (; s < batch->num_sequences && number >= sequence_pieces(c, s, heads); s++)
        number -= sequence_pieces(c, s, heads);
    if (s == batch->num_sequences) return 0;
    const int shares = (c->num_kv_heads + heads - 1) / heads, first_head = number % shares * heads;
    const int end_head = first_head + heads < c->num_kv_heads ? first_head + heads : c->num_kv_heads;
    const int first = batch->query_starts[s] + number / shares * QUERIES, limit = batch->query_starts[s + 1];
    const int end = first + QUERIES < limit ? first + QUERIES : limit;
    const int first_block = first_seen(c, batch->positions[first]) / c->block_size;
    const int last_block = batch->positions[end - 1] / c->block_size;
    *piece = (Piece){s, number, first_head, end_head, first, end, first_block, last_block};
    return 1;
}

/* The tile with the given number, as far as the piece sees it. */
INLINE void find_span(const Command *c, const Piece *piece, int tile, Span *span) {
    const int32_t *table = c->batch->tables + c->batch->rows[piece->sequence] * c->batch->table_stride;
    const int blocks = SPAN / c->block_size, element = c->kind == KIND_F32 ? 4 : 2, column = tile * blocks;
    span->base = column * c->block_size;
    span->size = c->block_size;
    span->vectors = (c->block_size + LANES - 1) / LANES;
    span->first = piece->first_block > column ? piece->first_block - column : 0;
    span->end = piece->last_block < column + blocks ? piece->last_block + 1 - column : blocks;
    for (int b = span->first; b < span->end; b++) {
        span->keys[b] = (const char *)c->cache + cache_offset(c, table[column + b], 0, piece->first_head) * element;
        span->values[b] = (const char *)c->cache + cache_offset(c, table[column + b], 1, piece->first_head) * element;
    }
}

static void attention(const Command *c, int index, int num_threads) {
    const int dim = c->head_dim, group = c->num_query_heads / c->num_kv_heads, blocks = SPAN / c->block_size;
    const int heads = heads_together(c, num_threads);
    Piece piece, next; /* next: most likely this thread's */
    find_piece(c, 0, index, heads, &piece);
    if (!find_piece(c, piece.sequence, piece.number + num_threads, heads, &next)) next = piece;
    const int block_bytes = c->block_size * dim * (c->kind == KIND_F32 ? 4 : 2);
    Row rows[KV_HEADS][QUERIES * HEADS];
    for (int g0 = 0; g0 < group; g0 += HEADS) { /* so many query heads at a time that `rows` is bounded */
        int count = 0;
        for (int t = piece.first; t < piece.end; t++)
            for (int g = g0; g < group && g < g0 + HEADS; g++, count++)
                for (int head = piece.first_head; head < piece.end_head; head++) {
                    const int h = head * group + g, position = c->batch->positions[t];
                    float *out = (float *)c->output + ((int64_t)t * c->num_query_heads + h) * dim;
                    memset(out, 0, dim * sizeof(float));
                    const float *query = (const float *)c->input + (int64_t)t * c->in_stride + h * dim;
                    rows[head - piece.first_head][count] =
                        (Row){query, out, spread(0), -INFINITY, first_seen(c, position), position};
                }
        Span spans[2];
        const int last = piece.last_block / blocks;
        int tile = piece.first_block / blocks, now = 0;
        find_span(c, &piece, tile, &spans[now]);
        for (; tile <= last; tile++, now ^= 1) {
            Span *then = &spans[now ^ 1];
            if (tile < last)
                find_span(c, &piece, tile + 1, then);
            else
                find_span(c, &next, next.first_block / blocks, then);
            Ahead ahead = {then, then->first, 0, 0, block_bytes * (piece.end_head - piece.first_head)};
            for (int head = 0; head < piece.end_head - piece.first_head; head++) {
                spans[now].head = (int64_t)head * block_bytes;
                for (int r = 0; r < count; r += ROWS)
                    attend_function(count - r < ROWS ? count - r : ROWS, c->kind)(c, &spans[now], &ahead,
                                                                                  rows[head] + r);
            }
        }
        for (int head = 0; head < piece.end_head - piece.first_head; head++)
            for (int r = 0; r < count; r++) {
                const Row *row = &rows[head][r];
                divide_row(row->acc, sum_lanes(row->total), dim);
            }
    }
}

#endif
