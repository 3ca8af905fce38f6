/* Operations on single rows (tokens): embedding, normalisation, quantisation, rotation.
 *
 * Each works on a whole row t, so that its result never depends on the others. Where the row's consumer is a quantised
 * product, whoever makes a row also quantises it, which saves a pass and a loop, and does not write it as floats unless
 * somebody reads them.
 */
#ifndef MINIPAGED_ROWS_H
#define MINIPAGED_ROWS_H

#include <math.h>

#include "linear.h"

/* q = round(x / scale), scale = max |x| / 127, to nearest, ties to even, for one group of a row of `width`. */
INLINE void quantise_group(const float *x, int width, const Quantised *out, int row, int group) {
    const int64_t at = (int64_t)row * (width / GROUP) + group;
    vint bits = spread_int(0); /* of |x|, which order as the numbers do; NaN is the largest */
    vfloat v[GROUP / LANES];
    for (int i = 0; i < GROUP / LANES; i++) {
        v[i] = load(x + i * LANES);
        bits = maximum_int(bits, (vint)v[i] & 0x7fffffff);
    }
    const int32_t most_bits = max_int_lanes(bits);
    float most;
    memcpy(&most, &most_bits, 4);
    /* Anything smaller is taken as zero: its inverse would overflow. */
    const float inverse = most >= 0x1p-120f ? 127 / most : 0;
    vuint sums = {0}; /* unsigned: what becomes of NaN may overflow */
    for (int i = 0; i < GROUP / LANES; i++) {
        /* Adding 1.5 * 2**23 leaves the rounded integer in the low bits. */
        const vint n = (vint)(v[i] * spread(inverse) + spread(12582912.0f)) - 0x4b400000;
        const vsmall small = __builtin_convertvector(n, vsmall);
        memcpy(out->q + at * GROUP + i * LANES, &small, sizeof small);
        sums += (vuint)n;
    }
    /* A NaN or infinity anywhere must not vanish: it makes the scale NaN, and so every product of this row. */
    const float scale = most / 127 + (most - most);
    out->scale[at] = scale;
    out->sum[at] = scale * (float)sum_int_lanes((vint)sums);
}

INLINE float one_half(uint16_t bits) {
    uint16_t lanes[LANES] = {bits};
    return load_half(lanes)[0];
}

INLINE float one_bfloat(uint16_t bits) {
    uint16_t lanes[LANES] = {bits};
    return load_bfloat(lanes)[0];
}

static void embed(const Embed *c, int t) {
    const int width = c->width, bytes = tile_bytes(c->kind, width);
    const int id = c->batch->token_ids[t], lane = id % TILE;
    const uint8_t *tile = c->table + (int64_t)(id / TILE) * bytes;
    float *out = c->output + (int64_t)t * width;
    const uint16_t *halves = (const uint16_t *)tile + lane;
    switch (c->kind) {
    case KIND_Q4:
    case KIND_Q8:
        for (int g = 0; g < width / GROUP; g++) {
            const uint8_t *p = tile + g * (c->kind == KIND_Q4 ? Q4_BYTES : Q8_BYTES);
            uint16_t pair[2];
            memcpy(pair, p + 4 * lane, 4);
            const float scale = one_half(pair[0]), minimum = one_half(pair[1]);
            for (int i = 0; i < GROUP; i++) {
                const uint8_t w = c->kind == KIND_Q8 ? p[64 + i / 4 * 64 + lane * 4 + i % 4]
                                                     : p[64 + i % 16 / 4 * 64 + lane * 4 + i % 4] >> (i / 16 * 4) & 15;
                out[g * GROUP + i] = scale * w + minimum;
            }
        }
        break;
    case KIND_F32:
        for (int k = 0; k < width; k++) out[k] = ((const float *)tile)[k * TILE + lane];
        break;
    case KIND_F16:
        for (int k = 0; k < width; k++) out[k] = one_half(halves[k * TILE]);
        break;
    default:
        for (int k = 0; k < width; k++) out[k] = one_bfloat(halves[k * TILE]);
    }
}

/* 1 / sqrt(mean(x**2) + eps), in a fixed order. */
INLINE float inverse_rms(const float *x, int width, float eps) {
    vfloat squares[4] = {spread(0), spread(0), spread(0), spread(0)}; /* sums that do not wait for one another */
    int k = 0;
    for (; k + LANES <= width; k += LANES) {
        vfloat *sum = &squares[k / LANES % 4];
        *sum = fma_(load(x + k), load(x + k), *sum);
    }
    float sum = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; k < width; k++) sum += x[k] * x[k];
    return 1 / sqrtf(sum / (float)width + eps);
}

/* output = input / sqrt(mean(input**2) + eps) * weight, [rows, width]. */
static void rms_norm(const RmsNorm *c, int t) {
    const int width = c->width;
    const float *weight = c->weight, *x = c->input + (int64_t)t * width;
    const float factor = inverse_rms(x, width, c->eps);
    float group[GROUP], *out = c->output ? c->output + (int64_t)t * width : NULL;
    int k = 0;
    for (; k + GROUP <= width; k += GROUP) {
        float *normed = c->output ? out + k : group;
        for (int i = 0; i < GROUP; i += LANES)
            store(normed + i, load(x + k + i) * spread(factor) * load(weight + k + i));
        if (c->made.q) quantise_group(normed, width, &c->made, t, k / GROUP);
    }
    for (; k < width; k++) out[k] = x[k] * factor * weight[k]; /* rows that are quantised have whole groups */
}

static void quantise(const Quantise *c, int t) {
    const float *x = c->input + (int64_t)t * c->stride;
    for (int g = 0; g < c->width / GROUP; g++) quantise_group(x + g * GROUP, c->width, &c->made, t, g);
}

/* Output row n is the input row of the n-th token whose logits are wanted. */
static void take_row(const Take *c, int n) {
    const float *x = c->input + (int64_t)c->batch->sampled[n] * c->width;
    memcpy(c->output + (int64_t)n * c->width, x, c->width * sizeof(float));
}

/* Bytes from where a block's K or V of one head begins to element i of a slot. K lies transposed, [head_dim,
 * block_size], so that attention finds positions in the lanes of a vector; V as [block_size, head_dim], so that it
 * finds elements there. In bfloat16 two neighbours lie together, which one instruction multiplies at a time: of K two
 * elements, [head_dim / 2, block_size, 2], of V two slots, [block_size / 2, head_dim, 2], and after them the last slot
 * of an odd number. */
INLINE int64_t key_offset(int size, int slot, int i, const int kind) {
    if (kind == KIND_BF16) return ((int64_t)(i / 2) * size + slot) * 4 + i % 2 * 2;
    return ((int64_t)i * size + slot) * element_bytes(kind);
}

INLINE int64_t value_offset(int size, int dim, int slot, int i, const int kind) {
    if (kind == KIND_BF16 && (slot ^ 1) < size) return ((int64_t)(slot / 2) * dim + i) * 4 + slot % 2 * 2;
    return ((int64_t)slot * dim + i) * element_bytes(kind);
}

/* A vector of numbers, rounded, as LANES elements of the cache. */
INLINE void store_elements(char *p, vfloat numbers, const int kind) {
    if (kind == KIND_F32) {
        store((float *)p, numbers);
        return;
    }
    const vhalf rounded = kind == KIND_F16 ? float_to_half(numbers) : float_to_bfloat(numbers);
    memcpy(p, &rounded, sizeof rounded);
}

/* A slot of a block, for one KV head. */
typedef struct {
    char *keys, *values; /* where the head's K and V begin */
    int size, dim;       /* block_size and head_dim */
    int number;          /* of the slot in the block */
} Slot;

/* Write K and V of one token and KV head, `dim` numbers each. */
INLINE void store_kv(const Slot *slot, const float *key, const float *value, const int kind) {
    const int size = slot->size, dim = slot->dim, number = slot->number, bytes = element_bytes(kind);
    const int pair = kind == KIND_BF16 ? 2 : 1; /* elements of K that lie together; head_dim is even */
    for (int i = 0; i < dim; i += LANES) {
        const int width = dim - i < LANES ? dim - i : LANES;
        char k[LANES * sizeof(float)], v[LANES * sizeof(float)];
        store_elements(k, load_lanes(key + i, width), kind);
        store_elements(v, load_lanes(value + i, width), kind);
        for (int j = 0; j < width; j += pair)
            memcpy(slot->keys + key_offset(size, number, i + j, kind), k + j * bytes, pair * bytes);
        if (kind != KIND_BF16 || (number ^ 1) == size)
            memcpy(slot->values + value_offset(size, dim, number, i, kind), v, width * bytes);
        else
            for (int j = 0; j < width; j++)
                memcpy(slot->values + value_offset(size, dim, number, i + j, kind), v + j * bytes, bytes);
    }
}

/* Where the K of one block and KV head begins, and where its V. */
INLINE char *keys_of(const KVCache *cache, int64_t block, int head) {
    return cache->keys + block * cache->block_stride + head * cache->key_head_stride;
}

INLINE char *values_of(const KVCache *cache, int64_t block, int head) {
    return cache->values + block * cache->block_stride + head * cache->value_head_stride;
}

/* Normalise (if asked) and rotate one head in place: element i with i + half, by row[i] = cos, row[half + i] = sin. */
INLINE void rotate_head(float *head, int dim, const float *rope_row, const float *norm, float eps) {
    if (norm) {
        float factor = inverse_rms(head, dim, eps);
        for (int i = 0; i < dim; i++) head[i] = head[i] * factor * norm[i];
    }
    const int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[half + i], cosine = rope_row[i], sine = rope_row[half + i];
        head[i] = a * cosine - b * sine;
        head[half + i] = b * cosine + a * sine;
    }
}

/* Rotate q and k of token t in place, and write its k and v into their slot. */
static void rope_and_cache(const RopeAndCache *c, int t) {
    const KVCache *cache = &c->cache;
    const int dim = cache->head_dim, heads = c->num_query_heads, kv_heads = cache->num_kv_heads;
    float *row = c->output + (int64_t)t * (heads + 2 * kv_heads) * dim;
    const float *rope_row = c->rope + (int64_t)c->batch->positions[t] * dim;
    for (int h = 0; h < heads; h++) rotate_head(row + h * dim, dim, rope_row, c->q_norm, c->eps);
    const int64_t slot = c->batch->slots[t], block = slot / cache->block_size;
    for (int h = 0; h < kv_heads; h++) {
        float *key = row + (heads + h) * dim, *value = key + kv_heads * dim;
        rotate_head(key, dim, rope_row, c->k_norm, c->eps);
        const Slot place = {keys_of(cache, block, h), values_of(cache, block, h), cache->block_size, dim,
                            (int)(slot % cache->block_size)};
        switch (cache->kind) {
        case KIND_F32: store_kv(&place, key, value, KIND_F32); break;
        case KIND_F16: store_kv(&place, key, value, KIND_F16); break;
        default: store_kv(&place, key, value, KIND_BF16);
        }
    }
}

#endif
