/* Causal attention of every token over the KV that it sees: that of the first `kv_extents[t]` tokens of its sequence, or
 * the last `window` of them. A position here is a place among those, counted from 0.
 *
 * input: q [rows, in_stride], head h at h * head_dim; output [rows, query heads * head_dim]. A piece of work is up to
 * QUERIES tokens of one sequence and some KV heads; its rows are those tokens' query heads, KV head after KV head. They
 * go through the sequence's positions tile after tile (attention_tile.h), counted from position 0. Where a quantised
 * product follows, a finished row is quantised at once.
 *
 * Bytes moved: a sequence's K and V once for every QUERIES tokens; 4 * head_dim operations per row and position.
 */
#ifndef MINIPAGED_ATTENTION_H
#define MINIPAGED_ATTENTION_H

#include "attention_tile.h"

/* Of a piece of work at most, the query heads of a KV head so many at a time. */
enum { QUERIES = 8, KV_HEADS = 8, HEADS = 8 };

/* Pieces are numbered through sequences, their blocks of tokens, and shares of the KV heads. */
typedef struct {
    int sequence, number;        /* number: among the sequence's pieces */
    int first_head, end_head;    /* KV heads [first_head, end_head) */
    int first, end;              /* tokens [first, end) of the step */
    int first_block, last_block; /* that they see, by their place in the table */
} Piece;

INLINE int token_blocks(const Attention *c, int sequence) {
    const int tokens = c->batch->cu_seqlens[sequence + 1] - c->batch->cu_seqlens[sequence];
    return (tokens + QUERIES - 1) / QUERIES;
}

/* KV heads of a piece. Those of a block lie together, and are best read together, if that leaves enough pieces. */
INLINE int heads_together(const Attention *c, int num_threads) {
    int blocks = 0;
    for (int s = 0; s < c->batch->num_sequences; s++) blocks += token_blocks(c, s);
    if (blocks < 8 * num_threads) return 1;
    return c->cache.num_kv_heads < KV_HEADS ? c->cache.num_kv_heads : KV_HEADS;
}

INLINE int sequence_pieces(const Attention *c, int sequence, int heads) {
    return token_blocks(c, sequence) * ((c->cache.num_kv_heads + heads - 1) / heads);
}

INLINE int attention_pieces(const Attention *c, int num_threads) {
    const int heads = heads_together(c, num_threads);
    int pieces = 0;
    for (int s = 0; s < c->batch->num_sequences; s++) pieces += sequence_pieces(c, s, heads);
    return pieces;
}

INLINE int first_seen(const Attention *c, int position) {
    return c->window && position >= c->window ? position - c->window + 1 : 0;
}

/* The piece with the given number, counted from the first of sequence s on; 0 if there are not so many. */
INLINE int find_piece(const Attention *c, int s, int number, int heads, Piece *piece) {
    const BatchHeader *batch = c->batch;
    for (; s < batch->num_sequences && number >= sequence_pieces(c, s, heads); s++)
        number -= sequence_pieces(c, s, heads);
    if (s == batch->num_sequences) return 0;
    const int shares = (c->cache.num_kv_heads + heads - 1) / heads, first_head = number % shares * heads;
    const int end_head = first_head + heads < c->cache.num_kv_heads ? first_head + heads : c->cache.num_kv_heads;
    const int first = batch->cu_seqlens[s] + number / shares * QUERIES, limit = batch->cu_seqlens[s + 1];
    const int end = first + QUERIES < limit ? first + QUERIES : limit;
    const int first_block = first_seen(c, batch->kv_extents[first] - 1) / c->cache.block_size;
    const int last_block = (batch->kv_extents[end - 1] - 1) / c->cache.block_size;
    *piece = (Piece){s, number, first_head, end_head, first, end, first_block, last_block};
    return 1;
}

/* The tile with the given number, as far as the piece sees it. */
INLINE void find_tile(const Attention *c, const Piece *piece, int number, KVTile *tile) {
    const int32_t *table = c->batch->block_tables + c->batch->rows[piece->sequence] * c->batch->table_stride;
    const int size = c->cache.block_size, blocks = TILE_POSITIONS / size, column = number * blocks;
    tile->base = column * size;
    tile->size = size;
    tile->vectors = (size + LANES - 1) / LANES;
    tile->first = piece->first_block > column ? piece->first_block - column : 0;
    tile->end = piece->last_block < column + blocks ? piece->last_block + 1 - column : blocks;
    for (int b = tile->first; b < tile->end; b++) {
        tile->keys[b] = keys_of(&c->cache, table[column + b], piece->first_head);
        tile->values[b] = values_of(&c->cache, table[column + b], piece->first_head);
    }
}

/* Query head h of token t, before the first tile. */
INLINE QueryRow begin_row(const Attention *c, int t, int h) {
    const int dim = c->cache.head_dim, position = c->batch->kv_extents[t] - 1;
    const float *query = c->input + (int64_t)t * c->stride + h * dim;
    float *acc = c->output + ((int64_t)t * c->num_query_heads + h) * dim;
    memset(acc, 0, dim * sizeof(float));
    return (QueryRow){query, acc, spread(0), -INFINITY, first_seen(c, position), position};
}

INLINE void finish_row(const Attention *c, const QueryRow *row) {
    const int dim = c->cache.head_dim, width = c->num_query_heads * dim;
    multiply_row(row->acc, 1 / sum_lanes(row->total), dim);
    if (!c->made.q) return;
    const int64_t at = row->acc - c->output;
    for (int i = 0; i < dim; i += GROUP) /* a head is whole groups */
        quantise_group(row->acc + i, width, &c->made, (int)(at / width), (int)(at % width + i) / GROUP);
}

static void attention(const Attention *c, int index, int num_threads) {
    const int group = c->num_query_heads / c->cache.num_kv_heads, blocks = TILE_POSITIONS / c->cache.block_size;
    const int most_heads = heads_together(c, num_threads);
    Piece piece, next; /* next: most likely this thread's */
    find_piece(c, 0, index, most_heads, &piece);
    if (!find_piece(c, piece.sequence, piece.number + num_threads, most_heads, &next)) next = piece;
    const int heads = piece.end_head - piece.first_head;
    const int64_t key_stride = c->cache.key_head_stride, value_stride = c->cache.value_head_stride;
    QueryRow rows[KV_HEADS][QUERIES * HEADS];
    QueryPairs queries[KV_HEADS][QUERIES * HEADS]; /* the same queries, where K is in bfloat16 */
    for (int g0 = 0; g0 < group; g0 += HEADS) { /* so many query heads at a time that `rows` is bounded */
        const int together = group - g0 < HEADS ? group - g0 : HEADS, count = (piece.end - piece.first) * together;
        for (int t = piece.first; t < piece.end; t++)
            for (int head = 0; head < heads; head++)
                for (int g = 0; g < together; g++) {
                    const int r = (t - piece.first) * together + g;
                    rows[head][r] = begin_row(c, t, (piece.first_head + head) * group + g0 + g);
                    if (c->cache.kind == KIND_BF16)
                        round_to_pairs(rows[head][r].query, 0, c->cache.head_dim, queries[head][r]);
                }
        KVTile tiles[2];
        const int last = piece.last_block / blocks;
        int number = piece.first_block / blocks, now = 0;
        find_tile(c, &piece, number, &tiles[now]);
        for (; number <= last; number++, now ^= 1) {
            KVTile *then = &tiles[now ^ 1];
            if (number < last)
                find_tile(c, &piece, number + 1, then);
            else
                find_tile(c, &next, next.first_block / blocks, then);
            Ahead ahead = {then, then->first, 0, 0, {key_stride * heads, value_stride * heads}};
            for (int head = 0; head < heads; head++) {
                tiles[now].key_head = head * key_stride, tiles[now].value_head = head * value_stride;
                for (int r = 0; r < count; r += QUERY_ROWS) {
                    const int num_rows = count - r < QUERY_ROWS ? count - r : QUERY_ROWS;
                    AttendRows *attend = attend_function(num_rows, c->cache.kind);
                    attend(c, &tiles[now], &ahead, rows[head] + r, queries[head] + r);
                }
            }
        }
        for (int head = 0; head < heads; head++)
            for (int r = 0; r < count; r++) finish_row(c, &rows[head][r]);
    }
}

#endif
