/* What Python asks of the kernels: a list of commands, each one operation of the forward pass.
 *
 * There is a struct for every operation. Python (minipaged/ops/cpu/graph.py) fills them in by the offsets that
 * module.c exports, so that a field is described here and named there, and nowhere else. Arrays are float32 and
 * row-major unless stated. T is the number of tokens, N of tokens whose logits are wanted, K of inputs of a product.
 */
#ifndef MINIPAGED_COMMAND_H
#define MINIPAGED_COMMAND_H

#include <stdint.h>

enum { TILE = 16 };   /* output rows that are interleaved in a packed matrix */
enum { GROUP = 32 };  /* inputs that share a scale and a minimum */

/* Element types of packed matrices and of the KV cache. */
enum { KIND_F32, KIND_F16, KIND_BF16, KIND_Q4, KIND_Q8 };

/* Rows of activations, quantised for a product with a Q4 or Q8 matrix: x = scale * q in every group. */
typedef struct {
    int8_t *q;     /* [rows, K]; NULL for none */
    float *scale;  /* [rows, K / GROUP] */
    float *sum;    /* [rows, K / GROUP]: scale * (sum of q over the group), which multiplies the weights' minimum */
} Quantised;

/* The tokens of a step: what the kernels read of ops/base.py's Batch. */
typedef struct {
    const int32_t *token_ids, *positions, *kv_extents;
    const int64_t *slots;
    const int32_t *cu_seqlens, *rows, *block_tables, *sampled;
    int64_t table_stride, num_sequences;
} BatchHeader;

/* One layer of the KV cache: what the kernels need of KVLayout (minipaged/kv/layout.py). Strides are bytes. */
typedef struct {
    char *keys, *values; /* of KV head 0 in block 0 */
    int64_t block_stride, key_head_stride, value_head_stride;
    int32_t kind, num_kv_heads, head_dim, block_size;
} KVCache;

/* Every command begins with its operation and the number of rows that it makes, T or N. `width` is that of a row;
 * `stride` counts elements from one row of the input to the next. An output that is NULL is not wanted as floats;
 * `made` is where its quantised form goes, if that is wanted. */
enum { OP_EMBED, OP_RMS_NORM, OP_QUANTISE, OP_LINEAR, OP_GATED_LINEAR, OP_ROPE_AND_CACHE, OP_ATTENTION, OP_TAKE,
       OP_SAMPLE };

typedef struct {
    int32_t op, rows, kind, width;
    const uint8_t *table; /* a packed matrix */
    float *output;
    const BatchHeader *batch;
} Embed;

typedef struct {
    int32_t op, rows, width;
    float eps;
    const float *input, *weight;
    float *output;
    Quantised made;
} RmsNorm;

typedef struct {
    int32_t op, rows, width, stride;
    const float *input;
    Quantised made;
} Quantise;

typedef struct {
    int32_t op, rows, kind, in, out, stride;
    const float *input;  /* read where the weight is not quantised */
    Quantised quantised; /* the same rows, read where it is */
    const uint8_t *weight;
    const float *bias, *residual; /* either may be NULL */
    float *output;
} Linear;

typedef struct {
    int32_t op, rows, kind, in, out, stride; /* out: columns of the output, half of those of the weight */
    const float *input;
    Quantised quantised;
    const uint8_t *weight;
    const float *bias; /* or NULL */
    float *output;
    Quantised made;
} GatedLinear;

typedef struct {
    int32_t op, rows, num_query_heads;
    float eps;
    KVCache cache;
    const float *rope;            /* [positions, head_dim]: cosines, then sines */
    const float *q_norm, *k_norm; /* [head_dim], or NULL */
    float *output;                /* [rows, (query heads + 2 KV heads) head_dim]: q, k and v, rotated in place */
    const BatchHeader *batch;
} RopeAndCache;

typedef struct {
    int32_t op, rows, num_query_heads, stride, window; /* window 0: none */
    float scale;
    KVCache cache;
    const float *input; /* q [rows, stride], head h at h * head_dim */
    float *output;      /* [rows, query heads * head_dim], always wanted: sums over V grow in it */
    Quantised made;
    const BatchHeader *batch;
} Attention;

typedef struct {
    int32_t op, rows, width;
    const float *input;
    float *output;
    const BatchHeader *batch;
} Take;

typedef struct {
    int32_t op, rows, vocab_size;
    const float *logits; /* [rows, vocab_size] */
    const float *temperature, *top_p, *min_p; /* [rows] */
    const int32_t *top_k;                     /* [rows] */
    const double *uniforms;                   /* [rows]: a random number for each */
    float *scratch;                           /* [rows, vocab_size] */
    int32_t *output; /* [rows]: token ids, -1 where the logits hold NaN or nothing finite */
} Sample;

typedef union {
    struct {
        int32_t op, rows;
    };
    Embed embed;
    RmsNorm rms_norm;
    Quantise quantise;
    Linear linear;
    GatedLinear gated_linear;
    RopeAndCache rope_and_cache;
    Attention attention;
    Take take;
    Sample sample;
} Command;

#endif
