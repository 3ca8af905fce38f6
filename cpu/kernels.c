/* The commands of a forward pass as loops, for one instruction set: compiled several times, KERNELS naming each. */

#include "attention.h"
#include "gated_linear.h"
#include "sampling.h"
#include "team.h"

static int pieces(const void *commands, int index, int num_threads) {
    const Command *c = (const Command *)commands + index;
    switch (c->op) {
    case OP_LINEAR: return linear_pieces(c, num_threads);
    case OP_GATED_LINEAR: return gated_linear_pieces(c, num_threads);
    case OP_ATTENTION: return attention_pieces(c);
    default: return c->rows;
    }
}

static void run(const void *commands, int index, int piece, int num_threads) {
    const Command *c = (const Command *)commands + index;
    switch (c->op) {
    case OP_EMBED: embed(c, piece); break;
    case OP_RMS_NORM: rms_norm(c, piece); break;
    case OP_QUANTISE: quantise(c, piece); break;
    case OP_LINEAR: linear(c, piece, num_threads); break;
    case OP_GATED_LINEAR: gated_linear(c, piece, num_threads); break;
    case OP_ROPE_CACHE: rope_and_cache(c, piece); break;
    case OP_ATTENTION: attention(c, piece, num_threads); break;
    case OP_TAKE: take_rows(c, piece); break;
    case OP_SAMPLE: sample(c, piece); break;
    }
}

Loops KERNELS(const Command *commands, int count) { return (Loops){commands, count, pieces, run}; }
