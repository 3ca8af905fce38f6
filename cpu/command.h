/* What Python asks of the kernels: a list of commands, each one operation of the forward pass.
 *
 * Python (minipaged/ops/cpu/commands.py) fills an array of `Command`, which must match COMMAND_DTYPE there, and a
 * `BatchHeader`. Arrays are float32 and row-major unless stated. T is the number of tokens, N of rows that sample, K of
 * inputs.
 */
#ifndef MINIPAGED_COMMAND_H
#define MINIPAGED_COMMAND_H

#include <stdint.h>

enum { TILE = 16 };   /* output rows that are interleaved in a packed matrix */
enum { GROUP = 32 };  /* inputs that share a scale and a minimum */

/* Element types of packed matrices and of the KV cache. */
enum { KIND_F32, KIND_F16, KIND_BF16, KIND_Q4, KIND_Q8 };

enum { OP_EMBED, OP_RMS_NORM, OP_QUANTISE, OP_LINEAR, OP_GATED_LINEAR, OP_ROPE_CACHE, OP_ATTENTION, OP_TAKE,
       OP_SAMPLE };

/* A row of activations, quantised for a product with a Q4 or Q8 matrix: x = scale * q in every group. */
typedef struct {
    int8_t *q;     /* [rows, K] */
    float *scale;  /* [rows, K / GROUP] */
    float *sum;    /* [rows, K / GROUP]: scale * (sum of q over the group), which multiplies the weights' minimum */
} Quantised;

/* The tokens of a step: what the kernels read of ops/base.py's Batch. */
typedef struct {
    const int32_t *token_ids, *positions, *kv_extents;
    const int64_t *slots;
    const int32_t *cu_seqlens, *rows, *tables, *sampled;
    int64_t table_stride, num_sequences;
} BatchHeader;

/* Where one layer's KV lies: what the kernels need of KVLayout (minipaged/kv/layout.py). Strides are bytes. */
typedef struct {
    char *keys, *values;  /* of block 0 and KV head 0 */
    int64_t block_stride, key_head_stride, value_head_stride;
} KVLayer;

typedef struct {
    int32_t op;
    int32_t kind;          /* of the matrix, or of the KV cache */
    int32_t rows;          /* T or N */
    int32_t in, out;       /* width of input and output rows */
    int32_t in_stride;     /* elements from one input row to the next */
    int32_t num_query_heads, num_kv_heads, head_dim, block_size, window; /* window 0: none */
    float eps, scale;
    const void *input, *second, *weight, *bias, *third;
    void *output;          /* NULL where only the quantised form of the rows is wanted */
    void *extra, *scratch;
    KVLayer kv;
    Quantised quantised;   /* the input's quantised form; q is NULL for none */
    Quantised made;        /* where the output's quantised form goes; q is NULL for none */
    const BatchHeader *batch;
} Command;

#endif
