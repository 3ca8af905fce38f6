/* Operations on single rows (tokens): embedding, normalisation, quantisation, rotation, activation.
 *
 * A piece of work is a whole row t, so that its result never depends on the others. Where the row's consumer is a
 * quantised product, whoever makes a row also quantises it, which saves a pass and a loop.
 */
#ifndef MINIPAGED_ROWS_H
#define MINIPAGED_ROWS_H

#include <math.h>

#include "linear.h"

/* q = round(x / scale), scale = max |x| / 127 in every group of 32, to nearest, ties to even. */
INLINE void quantise_row(const float *x, int width, const Quantised *out, int row) {
    const int groups = width / GROUP;
    int8_t *q = out->q + (int64_t)row * width;
    for (int g = 0; g < groups; g++) {
        vfloat largest = spread(0), v[GROUP / LANES];
        for (int i = 0; i < GROUP / LANES; i++) {
            v[i] = load(x + g * GROUP + i * LANES);
            largest = maximum(largest, (vfloat)((vint)v[i] & 0x7fffffff));
        }
        /* Anything smaller is taken as zero: its inverse would overflow. */
        float most = max_lanes(largest), scale = most / 127, inverse = most >= 0x1p-120f ? 127 / most : 0;
        vint sums = spread_int(0);
        for (int i = 0; i < GROUP / LANES; i++) {
            /* Adding 1.5 * 2**23 leaves the rounded integer in the low bits. */
            vint n = (vint)(v[i] * spread(inverse) + spread(12582912.0f)) - 0x4b400000;
            vsmall small = __builtin_convertvector(n, vsmall);
            memcpy(q + g * GROUP + i * LANES, &small, sizeof small);
            sums += n;
        }
        const int sum = sum_int_lanes(sums);
        /* A NaN or infinity anywhere must not vanish: it makes the scale NaN, and so every product of this row. */
        vfloat check = spread(0);
        for (int i = 0; i < GROUP / LANES; i++) check += v[i] - v[i];
        scale += sum_lanes(check);
        out->scale[(int64_t)row * groups + g] = scale;
        out->sum[(int64_t)row * groups + g] = scale * (float)sum;
    }
}

INLINE void quantise_if_wanted(const Command *c, const float *x, int width, int row) {
    if (c->quantised.q) quantise_row(x, width, &c->quantised, row);
}

INLINE float one_half(uint16_t bits) {
    uint16_t lanes[LANES] = {bits};
    return load_half(lanes)[0];
}

INLINE float one_bfloat(uint16_t bits) {
    uint16_t lanes[LANES] = {bits};
    return load_bfloat(lanes)[0];
}

static void embed(const Command *c, int t) {
    const int bytes = tile_bytes(c->kind, c->out), width = c->out;
    const int id = c->batch->token_ids[t], lane = id % TILE;
    const uint8_t *tile = (const uint8_t *)c->weight + (int64_t)(id / TILE) * bytes;
    float *out = (float *)c->output + (int64_t)t * width;
    for (int k = 0; k < width; k++) {
        const int g = k / GROUP, i = k % GROUP;
        if (c->kind == KIND_Q4 || c->kind == KIND_Q8) {
            const uint8_t *p = tile + g * (c->kind == KIND_Q4 ? Q4_BYTES : Q8_BYTES);
            uint16_t pair[2];
            memcpy(pair, p + 4 * lane, 4);
            float scale = one_half(pair[0]), minimum = one_half(pair[1]);
            uint8_t w = c->kind == KIND_Q8 ? p[64 + i / 4 * 64 + lane * 4 + i % 4]
                                           : p[64 + i % 16 / 4 * 64 + lane * 4 + i % 4] >> (i / 16 * 4) & 15;
            out[k] = scale * w + minimum;
        } else if (c->kind == KIND_F32) {
            out[k] = ((const float *)tile)[k * TILE + lane];
        } else {
            uint16_t bits = ((const uint16_t *)tile)[k * TILE + lane];
            out[k] = c->kind == KIND_F16 ? one_half(bits) : one_bfloat(bits);
        }
    }
}

/* 1 / sqrt(mean(x**2) + eps), in a fixed order. */
INLINE float inverse_rms(const float *x, int width, float eps) {
    vfloat squares = spread(0);
    int k = 0;
    for (; k + LANES <= width; k += LANES) squares = fma_(load(x + k), load(x + k), squares);
    float sum = sum_lanes(squares);
    for (; k < width; k++) sum += x[k] * x[k];
    return 1 / sqrtf(sum / (float)width + eps);
}

/* input [rows, in] + second (the residual, or NULL) -> extra (the sum) and its norm in output. */
static void rms_norm(const Command *c, int t) {
    const int width = c->in;
    const float *weight = c->weight;
    const float *x = (const float *)c->input + (int64_t)t * width;
    float *sum = (float *)c->extra + (int64_t)t * width, *out = (float *)c->output + (int64_t)t * width;
    if (c->second) {
        const float *residual = (const float *)c->second + (int64_t)t * width;
        for (int k = 0; k < width; k++) sum[k] = x[k] + residual[k];
        x = sum;
    }
    float factor = inverse_rms(x, width, c->eps);
    for (int k = 0; k < width; k++) out[k] = x[k] * factor * weight[k];
    quantise_if_wanted(c, out, width, t);
}

static void quantise(const Command *c, int t) {
    quantise_row((const float *)c->input + (int64_t)t * c->in_stride, c->in, &c->quantised, t);
}

/* input [rows, 2 out]: silu(first half) * second half, silu(x) = x / (1 + exp(-x)). */
static void silu_and_mul(const Command *c, int t) {
    const int width = c->out;
    const float *gate = (const float *)c->input + (int64_t)t * 2 * width, *up = gate + width;
    float *out = (float *)c->output + (int64_t)t * width;
    int k = 0;
    for (; k + LANES <= width; k += LANES) {
        vfloat g = load(gate + k);
        store(out + k, g / (1 + exponential(-g)) * load(up + k));
    }
    if (k < width) {
        float rest[LANES] = {0};
        memcpy(rest, gate + k, (width - k) * sizeof(float));
        store(rest, load(rest) / (1 + exponential(-load(rest))));
        for (int i = 0; k + i < width; i++) out[k + i] = rest[i] * up[k + i];
    }
    quantise_if_wanted(c, out, width, t);
}

/* The rows of the input that sample, in order. */
static void take_rows(const Command *c, int t) {
    const float *x = (const float *)c->input + (int64_t)c->batch->sampled[t] * c->in;
    memcpy((float *)c->output + (int64_t)t * c->in, x, c->in * sizeof(float));
    quantise_if_wanted(c, x, c->in, t);
}

INLINE uint16_t to_half(float x) {
#if defined(__AVX2__)
    return (uint16_t)_cvtss_sh(x, 0);
#elif defined(__aarch64__)
    __fp16 half = (__fp16)x;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
#else
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* subnormal: let the addition of 0.5 round at the right bit */
        float scaled;
        memcpy(&scaled, &magnitude, 4);
        scaled += 0.5f;
        memcpy(&magnitude, &scaled, 4);
        return (uint16_t)(sign | (magnitude - 0x3f000000));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
#endif
}

INLINE uint16_t to_bfloat(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Write `count` numbers to the cache, `step` elements apart. */
INLINE void store_kv(void *cache, int kind, int64_t at, int64_t step, const float *x, int count) {
    float *floats = (float *)cache + at;
    uint16_t *halves = (uint16_t *)cache + at;
    switch (kind) {
    case KIND_F32:
        for (int i = 0; i < count; i++) floats[i * step] = x[i];
        break;
    case KIND_F16:
        for (int i = 0; i < count; i++) halves[i * step] = to_half(x[i]);
        break;
    default:
        for (int i = 0; i < count; i++) halves[i * step] = to_bfloat(x[i]);
    }
}

/* Where the elements of one block, layer and KV head begin: K, or V. */
INLINE int64_t cache_offset(const Command *c, int64_t block, int is_value, int head) {
    return (((block * c->num_layers + c->layer) * 2 + is_value) * c->num_kv_heads + head) * c->block_size * c->head_dim;
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

/* qkv (output, rotated in place) [rows, (query heads + 2 KV heads) head_dim]; second: rope table [positions, head_dim];
 * weight, bias: norms of q and k, or NULL. K goes to its block transposed, [head_dim, block_size], V as [block_size,
 * head_dim], so that attention finds the positions in the lanes of K and the elements in those of V. */
static void rope_and_cache(const Command *c, int t) {
    const int dim = c->head_dim, heads = c->num_query_heads, kv_heads = c->num_kv_heads;
    float *row = (float *)c->output + (int64_t)t * (heads + 2 * kv_heads) * dim;
    const float *rope_row = (const float *)c->second + (int64_t)c->batch->positions[t] * dim;
    for (int h = 0; h < heads; h++) rotate_head(row + h * dim, dim, rope_row, c->weight, c->eps);
    const int64_t slot = c->batch->slots[t], block = slot / c->block_size, place = slot % c->block_size;
    for (int h = 0; h < kv_heads; h++) {
        float *key = row + (heads + h) * dim, *value = key + kv_heads * dim;
        rotate_head(key, dim, rope_row, c->bias, c->eps);
        const int64_t k_at = cache_offset(c, block, 0, h), v_at = cache_offset(c, block, 1, h);
        store_kv(c->cache, c->kind, k_at + place, c->block_size, key, dim);
        store_kv(c->cache, c->kind, v_at + place * dim, 1, value, dim);
    }
}

#endif
