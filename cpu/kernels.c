/* The commands of a forward pass as loops, for one instruction set: compiled several times, KERNELS naming each. */

#include "attention.h"
#include "gated_linear.h"
#include "sampling.h"
#include "team.h"

/* A piece of an operation on rows is some that lie together. */
static int row_pieces(const Command *c, int num_threads) {
    const int share = share_of(c->rows, num_threads);
    return (c->rows + share - 1) / share;
}

static void run_row(const Command *c, int row) {
    switch (c->op) {
    case OP_EMBED: embed(&c->embed, row); break;
    case OP_RMS_NORM: rms_norm(&c->rms_norm, row); break;
    case OP_QUANTISE: quantise(&c->quantise, row); break;
    case OP_ROPE_AND_CACHE: rope_and_cache(&c->rope_and_cache, row); break;
    case OP_TAKE: take_row(&c->take, row); break;
    case OP_SAMPLE: sample(&c->sample, row); break;
    }
}

static int pieces(const void *commands, int index, int num_threads) {
    const Command *c = (const Command *)commands + index;
    switch (c->op) {
    case OP_LINEAR: return linear_pieces(&c->linear, num_threads);
    case OP_GATED_LINEAR: return gated_linear_pieces(&c->gated_linear, num_threads);
    case OP_ATTENTION: return attention_pieces(&c->attention, num_threads);
    default: return row_pieces(c, num_threads);
    }
}

static void run(const void *commands, int index, int piece, int num_threads) {
    const Command *c = (const Command *)commands + index;
    switch (c->op) {
    case OP_LINEAR: linear(&c->linear, piece, num_threads); return;
    case OP_GATED_LINEAR: gated_linear(&c->gated_linear, piece, num_threads); return;
    case OP_ATTENTION: attention(&c->attention, piece, num_threads); return;
    }
    const int share = share_of(c->rows, num_threads);
    for (int row = piece * share; row < c->rows && row < (piece + 1) * share; row++) run_row(c, row);
}

Loops KERNELS(const Command *commands, int count) { return (Loops){commands, count, pieces, run}; }
