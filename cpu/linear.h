/* out[t][o] = sum over k of x[t][k] * w[o][k] + bias[o] + residual[t][o], float32 [rows, out], for packed w; the
 * bias or the residual may be missing.
 *
 * Packed matrices, tile after tile of TILE = 16 output rows (the last one padded with zeros), so that a vector's lanes
 * are output rows:
 *   Q4   per tile and group of 32 inputs, 320 bytes: 16 x (scale, minimum) float16; then 4 vectors of 16 x 4 bytes, of
 *        which the low nibbles of vector v are the inputs 4v..4v+3 and the high ones 16+4v..16+4v+3
 *   Q8   likewise 576 bytes: 16 x (scale, minimum); then 8 vectors of 16 x 4 bytes, inputs 4v..4v+3
 *   F32, F16, BF16   per tile: [in][16] elements
 * A quantised weight is scale * w + minimum with w an unsigned integer. Activations are signed bytes with a scale per
 * group, so a group's products are summed exactly, in integers:
 *   sum of x w = x_scale * (scale * (sum of q w) + minimum * (sum of q))
 *
 * A piece of work is some tiles; in a tile, blocks of tokens whose accumulators stay in registers while the weights,
 * unpacked once for all tokens of the block, stream by. Every output is accumulated group after group (or input after
 * input) in one lane, whatever the number of tokens: batch size, neighbours and threads never change a bit. Bytes
 * moved: the matrix once (from the cache for every further block of tokens), the residual and the output once; one
 * token takes at least bytes / bandwidth, many take rows * in * out products at 64 bytes per instruction where the
 * processor has VNNI.
 */
#ifndef MINIPAGED_LINEAR_H
#define MINIPAGED_LINEAR_H

#include "command.h"
#include "simd.h"

enum { PARTS = TILE / LANES };                           /* vectors per 16 output rows */
enum { TOKENS = LANES == 16 ? 12 : LANES == 8 ? 4 : 2 }; /* tokens of a block: what the registers hold */
enum { NEAR_BYTES = 256 * 1024 };                        /* a part of the second-level cache */
enum { AHEAD = 6144 }; /* bytes by which weights are asked for before they are needed */
enum { Q4_BYTES = 64 + 4 * 64, Q8_BYTES = 64 + 8 * 64 };

/* Of F32, F16 and BF16. */
INLINE int element_bytes(int kind) { return kind == KIND_F32 ? 4 : 2; }

INLINE int tile_bytes(int kind, int in) {
    switch (kind) {
    case KIND_Q4: return in / GROUP * Q4_BYTES;
    case KIND_Q8: return in / GROUP * Q8_BYTES;
    default: return in * TILE * element_bytes(kind);
    }
}

/* What is computed at a time: tokens from `token` on by one tile of the weight. */
typedef struct {
    const uint8_t *tile;
    int token;
    int row, column; /* of the output, where the products of the first token go */
} Block;

/* Write the accumulators of a block's tokens to LANES columns of the output from `column` on, those that exist. */
INLINE void write_block(const Linear *c, const Block *block, int column, vfloat *acc, const int tokens) {
    const int width = c->out - column < LANES ? c->out - column : LANES;
    if (width <= 0) return;
    const int64_t at = (int64_t)block->row * c->out + column;
    if (c->bias) {
        const vfloat bias = load_lanes(c->bias + column, width);
        for (int t = 0; t < tokens; t++) acc[t] += bias;
    }
    if (c->residual) {
        const float *residual = c->residual + at;
        for (int t = 0; t < tokens; t++, residual += c->out) acc[t] += load_lanes(residual, width);
    }
    float *out = c->output + at;
    for (int t = 0; t < tokens; t++, out += c->out) store_lanes(out, acc[t], width);
}

INLINE void quantised_block(const Linear *c, const Block *block, const int part, const int tokens, const int is_q4) {
    const int groups = c->in / GROUP, bytes = is_q4 ? Q4_BYTES : Q8_BYTES, token = block->token;
    const int8_t *q = c->quantised.q + (int64_t)token * c->in;
    const float *scales = c->quantised.scale + (int64_t)token * groups;
    const float *sums = c->quantised.sum + (int64_t)token * groups;
    const uint8_t *tile = block->tile;
    vfloat acc[TOKENS];
    for (int t = 0; t < tokens; t++) acc[t] = spread(0);
    for (int g = 0; g < groups; g++, tile += bytes) {
        const uint8_t *p = tile + part * 4 * LANES;
        if (token == 0 && part == 0) /* the first to come by */
            for (int i = 0; i < bytes; i += 64) prefetch(tile + AHEAD + i);
        vuint both;
        memcpy(&both, p, sizeof both);
        vfloat scale = half_to_float(low_halves(both)), minimum = half_to_float(low_halves(both >> 16));
        vbyte w[8];
        if (is_q4) {
            for (int v = 0; v < 4; v++) {
                vuint packed = (vuint)load_bytes(p + 64 + v * 64);
                w[v] = (vbyte)(packed & 0x0f0f0f0f);
                w[v + 4] = (vbyte)(packed >> 4 & 0x0f0f0f0f);
            }
        } else {
            for (int v = 0; v < 8; v++) w[v] = load_bytes(p + 64 + v * 64);
        }
        for (int t = 0; t < tokens; t++) {
            const int8_t *x = q + (int64_t)t * c->in + g * GROUP;
            vint sum = spread_int(0);
            for (int v = 0; v < 8; v++) {
                int32_t quad;
                memcpy(&quad, x + 4 * v, 4);
                sum = dot4(sum, w[v], quad, is_q4);
            }
            const int at = t * groups + g;
            acc[t] = fma_(minimum, spread(sums[at]), acc[t]);
            acc[t] = fma_(__builtin_convertvector(sum, vfloat), scale * spread(scales[at]), acc[t]);
        }
    }
    write_block(c, block, block->column + part * LANES, acc, tokens);
}

INLINE void float_block(const Linear *c, const Block *block, const int part, const int tokens, const int kind) {
    const float *x = c->input + (int64_t)block->token * c->stride;
    const uint8_t *tile = block->tile;
    vfloat acc[TOKENS];
    for (int t = 0; t < tokens; t++) acc[t] = spread(0);
    for (int k = 0; k < c->in; k++) {
        const int at = k * TILE + part * LANES;
        if (block->token == 0 && part == 0) prefetch(tile + AHEAD + (int64_t)k * TILE * element_bytes(kind));
        vfloat w = kind == KIND_F32   ? load((const float *)tile + at)
                   : kind == KIND_F16 ? load_half((const uint16_t *)tile + at)
                                      : load_bfloat((const uint16_t *)tile + at);
        for (int t = 0; t < tokens; t++) acc[t] = fma_(w, spread(x[(int64_t)t * c->stride + k]), acc[t]);
    }
    write_block(c, block, block->column + part * LANES, acc, tokens);
}

INLINE void multiply_block(const Linear *c, const Block *block, const int tokens) {
    for (int part = 0; part < PARTS; part++) {
        switch (c->kind) {
        case KIND_Q4: quantised_block(c, block, part, tokens, 1); break;
        case KIND_Q8: quantised_block(c, block, part, tokens, 0); break;
        case KIND_F32: float_block(c, block, part, tokens, KIND_F32); break;
        case KIND_F16: float_block(c, block, part, tokens, KIND_F16); break;
        case KIND_BF16: float_block(c, block, part, tokens, KIND_BF16); break;
        }
    }
}

/* One function per number of tokens, so that each has its accumulators in registers. */
#define MULTIPLY(N)                                                                          \
    static __attribute__((noinline)) void multiply_##N(const Linear *c, const Block *block) { \
        multiply_block(c, block, N);                                                         \
    }
MULTIPLY(1)
MULTIPLY(2)
#if LANES >= 8
MULTIPLY(4)
#endif
#if LANES >= 16
MULTIPLY(3)
MULTIPLY(6)
MULTIPLY(8)
MULTIPLY(12)
#endif

typedef void Multiply(const Linear *, const Block *);

/* The function for as many of the tokens that are left as registers hold; how many goes to `tokens`. */
INLINE Multiply *multiply_function(int left, int *tokens) {
    static const struct {
        int tokens;
        Multiply *function;
    } functions[] = {
#if LANES >= 16
        {12, multiply_12}, {8, multiply_8}, {6, multiply_6}, {4, multiply_4}, {3, multiply_3},
#elif LANES >= 8
        {4, multiply_4},
#endif
        {2, multiply_2},   {1, multiply_1},
    };
    int i = 0;
    while (functions[i].tokens > left) i++;
    *tokens = functions[i].tokens;
    return functions[i].function;
}

/* Pieces of work are shares of `count` units, a few for every thread so that a slow one does less. */
INLINE int share_of(int count, int num_threads) {
    const int share = count / (num_threads * 8);
    return share > 1 ? share : 1;
}

INLINE int linear_tiles(const Linear *c) { return (c->out + TILE - 1) / TILE; }

INLINE int linear_pieces(const Linear *c, int num_threads) {
    const int share = share_of(linear_tiles(c), num_threads);
    return (linear_tiles(c) + share - 1) / share;
}

static void linear(const Linear *c, int piece, int num_threads) {
    const int tiles = linear_tiles(c), share = share_of(tiles, num_threads);
    const int end = (piece + 1) * share < tiles ? (piece + 1) * share : tiles;
    const int64_t bytes = tile_bytes(c->kind, c->in);
    const int near = (int)(NEAR_BYTES / bytes) + 1; /* tiles that stay in the cache for all tokens */
    for (int first = piece * share; first < end; first += near)
        for (int token = 0, tokens; token < c->rows; token += tokens) {
            Multiply *multiply = multiply_function(c->rows - token, &tokens);
            for (int tile = first; tile < end && tile < first + near; tile++)
                multiply(c, &(Block){c->weight + tile * bytes, token, token, tile * TILE});
        }
}

#endif
