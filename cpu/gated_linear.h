/* output[t] = silu(x[t] gate.T + bias) * (x[t] up.T + bias), [rows, out], silu(x) = x / (1 + exp(-x));
 * arXiv:2002.05202.
 *
 * The weight is the tiles of gate, then those of up (see linear.h), each padded to whole tiles; bias float32 [2 out],
 * the gate's first. A unit of work is a GROUP of output columns: the products stay in the cache, and where a quantised
 * product follows the group is quantised as soon as it is there, so that the wide rows between the two never go to
 * memory.
 */
#ifndef MINIPAGED_GATED_LINEAR_H
#define MINIPAGED_GATED_LINEAR_H

#include "rows.h"

enum { GROUP_TILES = GROUP / TILE };

INLINE int gated_linear_units(const GatedLinear *c) { return (c->out + GROUP - 1) / GROUP; }

INLINE int gated_linear_pieces(const GatedLinear *c, int num_threads) {
    const int share = share_of(gated_linear_units(c), num_threads);
    return (gated_linear_units(c) + share - 1) / share;
}

/* Products of a group of columns [column, column + width) become outputs: of each token, those of gate and of up. */
INLINE void finish_group(const GatedLinear *c, float (*products)[2][GROUP], int column, int width, int token, int tokens) {
    float bias[2][GROUP] = {{0}};
    if (c->bias)
        for (int half = 0; half < 2; half++)
            memcpy(bias[half], c->bias + half * c->out + column, width * sizeof(float));
    float out[TOKENS][GROUP]; /* of all tokens before any is quantised: neither then waits for the other */
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < GROUP; i += LANES) {
            vfloat gate = load(products[t][0] + i), up = load(products[t][1] + i);
            if (c->bias) gate += load(bias[0] + i), up += load(bias[1] + i);
            store(out[t] + i, gate / (1 + exponential(-gate)) * up);
        }
    for (int t = 0; t < tokens; t++) {
        if (c->output) memcpy(c->output + (int64_t)(token + t) * c->out + column, out[t], width * sizeof(float));
        if (c->made.q) quantise_group(out[t], c->out, &c->made, token + t, column / GROUP);
    }
}

static void gated_linear(const GatedLinear *c, int piece, int num_threads) {
    const int units = gated_linear_units(c), share = share_of(units, num_threads);
    const int end = (piece + 1) * share < units ? (piece + 1) * share : units, tiles = (c->out + TILE - 1) / TILE;
    const int64_t bytes = tile_bytes(c->kind, c->in);
    const int near = (int)(NEAR_BYTES / (2 * GROUP_TILES * bytes)) + 1; /* units that stay cached for all tokens */
    float products[TOKENS][2][GROUP] = {{{0}}};                         /* the last group may have a tile less */
    const Linear part = {.rows = c->rows, .kind = c->kind, .in = c->in, .out = 2 * GROUP, .stride = c->stride,
                         .input = c->input, .quantised = c->quantised, .output = products[0][0]};
    for (int first = piece * share; first < end; first += near)
        for (int token = 0, tokens; token < c->rows; token += tokens) {
            Multiply *multiply = multiply_function(c->rows - token, &tokens);
            for (int unit = first; unit < end && unit < first + near; unit++) {
                for (int half = 0; half < 2; half++)
                    for (int i = 0; i < GROUP_TILES && unit * GROUP_TILES + i < tiles; i++) {
                        const int tile = half * tiles + unit * GROUP_TILES + i;
                        multiply(&part, &(Block){c->weight + tile * bytes, token, 0, half * GROUP + i * TILE});
                    }
                const int column = unit * GROUP;
                finish_group(c, products, column, c->out - column < GROUP ? c->out - column : GROUP, token, tokens);
            }
        }
}

#endif
