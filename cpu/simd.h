/* Vectors of LANES float32 or int32, for the instruction set that this file is compiled for.
 *
 * Everything else is written with these, in GCC and Clang's vector extensions. Only what those cannot say (fused
 * multiply-add, products of bytes and of bfloat16, half precision) has a version per instruction set. Results differ
 * between instruction sets at most by how fused multiply-add and products of bfloat16 round; on one machine only one of
 * them is used.
 */
#ifndef MINIPAGED_SIMD_H
#define MINIPAGED_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512BW__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef uint32_t vuint __attribute__((vector_size(4 * LANES)));
typedef uint16_t vhalf __attribute__((vector_size(2 * LANES)));
typedef uint8_t vbyte __attribute__((vector_size(4 * LANES)));
typedef int8_t vsmall __attribute__((vector_size(LANES))); /* one byte for every lane */

/* Into the second-level cache: requests to the first are too few at a time for memory to keep up. */
INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }

INLINE vfloat load(const float *p) {
    vfloat v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vfloat v) { memcpy(p, &v, sizeof v); }

/* The first `width` lanes from memory, zero in the others; and to memory. */
INLINE vfloat load_lanes(const float *p, int width) {
    if (width == LANES) return load(p);
    float lanes[LANES] = {0};
    memcpy(lanes, p, width * sizeof(float));
    return load(lanes);
}

INLINE void store_lanes(float *p, vfloat v, int width) {
    if (width == LANES) {
        store(p, v);
        return;
    }
    float lanes[LANES];
    store(lanes, v);
    memcpy(p, lanes, width * sizeof(float));
}

INLINE vfloat spread(float x) { return x - (vfloat){0}; }

INLINE vint spread_int(int32_t x) { return x - (vint){0}; }

INLINE vbyte load_bytes(const void *p) {
    vbyte v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vfloat choose(vint condition, vfloat yes, vfloat no) {
    return (vfloat)((condition & (vint)yes) | (~condition & (vint)no));
}

/* a > b ? a : b in every lane: b where one of them is NaN. */
INLINE vfloat maximum(vfloat a, vfloat b) {
#if defined(__AVX512BW__)
    return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vfloat)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

/* a < b ? a : b likewise. */
INLINE vfloat minimum(vfloat a, vfloat b) { return -maximum(-a, -b); }

INLINE vint maximum_int(vint a, vint b) {
#if defined(__AVX512BW__)
    return (vint)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vint)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    vint larger = a > b;
    return (larger & a) | (~larger & b);
#endif
}

/* The halves of a vector are combined again and again until one lane is left: the same order everywhere. */
INLINE float sum_lanes(vfloat v) {
#if defined(__AVX512BW__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lanes[LANES];
    store(lanes, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}

/* Modulo 2**32. */
INLINE int32_t sum_int_lanes(vint v) {
#if defined(__AVX512BW__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    uint32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += (uint32_t)v[i];
    return (int32_t)sum;
#endif
}

INLINE int32_t max_int_lanes(vint v) {
#if defined(__AVX512BW__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

INLINE int any_lane(vint v) {
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= v[i];
    return any != 0;
}

INLINE float max_lanes(vfloat v) {
#if defined(__AVX512BW__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float lanes[LANES];
    store(lanes, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
#endif
}

/* 0, 1, 2, ... */
INLINE vint lane_numbers(void) {
    vint v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

/* a * b + c, rounded once where the processor can. */
INLINE vfloat fma_(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512BW__)
    return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vfloat)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* IEEE half precision, exactly. */
INLINE vfloat half_to_float(vhalf h) {
#if defined(__AVX512BW__)
    return (vfloat)_mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
    return (vfloat)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
    return (vfloat)vcvt_f32_f16((float16x4_t)h);
#else
    vuint bits = __builtin_convertvector(h, vuint);
    vuint sign = (bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    /* Scaling by a power of two moves the exponent and renormalises subnormal numbers; infinity and NaN stay. */
    vfloat scaled = (vfloat)(magnitude << 13) * spread(0x1p112f);
    vuint special = (vuint)(magnitude >= 0x7c00);
    return (vfloat)(sign | (((magnitude << 13) | 0x7f800000) & special) | ((vuint)scaled & ~special));
#endif
}

INLINE vfloat load_half(const uint16_t *p) {
    vhalf h;
    memcpy(&h, p, sizeof h);
    return half_to_float(h);
}

INLINE vfloat load_bfloat(const uint16_t *p) {
    vhalf h;
    memcpy(&h, p, sizeof h);
    return (vfloat)(__builtin_convertvector(h, vuint) << 16);
}

/* To nearest, ties to even; NaN stays NaN. */
INLINE vhalf float_to_half(vfloat x) {
#if defined(__AVX512BW__)
    return (vhalf)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
    return (vhalf)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    return (vhalf)vcvt_f16_f32((float32x4_t)x);
#else
    const vuint bits = (vuint)x, sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    const vuint normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const vuint subnormal = (vuint)((vfloat)magnitude + 0.5f) - 0x3f000000; /* the addition rounds at the right bit */
    const vuint is_small = (vuint)(magnitude < 0x38800000), is_nan = (vuint)(magnitude > 0x7f800000);
    const vuint is_infinite = (vuint)(magnitude >= 0x477ff000) & ~is_nan;
    const vuint finite = (subnormal & is_small) | (normal & ~is_small);
    const vuint half = (0x7e00 & is_nan) | (0x7c00 & is_infinite) | (finite & ~is_nan & ~is_infinite);
    return __builtin_convertvector(sign | half, vhalf);
#endif
}

/* Likewise. */
INLINE vhalf float_to_bfloat(vfloat x) {
    const vuint bits = (vuint)x, is_nan = (vuint)((bits & 0x7fffffff) > 0x7f800000);
    const vuint rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    return __builtin_convertvector((quiet & is_nan) | (rounded & ~is_nan), vhalf);
}

/* Likewise, but what is smaller than 2**-126 may become 0. */
INLINE vhalf round_to_bfloat(vfloat x) {
#if defined(__AVX512BF16__)
    return (vhalf)_mm512_cvtneps_pbh((__m512)x);
#else
    return float_to_bfloat(x);
#endif
}

/* A pair of numbers in bfloat16 in every lane, the first in the low bits. */
INLINE vuint load_pairs(const void *p) {
    vuint v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Pairs whose second number is 0. */
INLINE vuint load_lone(const void *p) {
    vhalf h;
    memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, vuint);
}

/* acc + the sum of the two products of each lane's pair with the pair x. */
INLINE vfloat dot2(vfloat acc, vuint pairs, uint32_t x) {
#if defined(__AVX512BF16__)
    return (vfloat)_mm512_dpbf16_ps((__m512)acc, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int32_t)x));
#else
    const vuint both = (vuint)spread_int((int32_t)x);
    acc = fma_((vfloat)(pairs << 16), (vfloat)(both << 16), acc);
    return fma_((vfloat)(pairs & 0xffff0000), (vfloat)(both & 0xffff0000), acc);
#endif
}

INLINE vhalf low_halves(vuint v) {
#if defined(__AVX512BW__)
    return (vhalf)_mm512_cvtepi32_epi16((__m512i)v);
#else
    return __builtin_convertvector(v & 0xffff, vhalf);
#endif
}

/* Per lane: acc + the sum of four products of the lane's unsigned bytes with the four signed bytes of x. Exact.
 * `small`: the unsigned bytes are at most 127, so that the sum of two products fits 16 bits. */
INLINE vint dot4(vint acc, vbyte w, int32_t x, const int small) {
#if defined(__AVX512VNNI__) && LANES == 16
    (void)small;
    return (vint)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
    __m512i y = _mm512_set1_epi32(x), u = (__m512i)w;
    if (small)
        return acc + (vint)_mm512_madd_epi16(_mm512_maddubs_epi16(u, y), _mm512_set1_epi16(1));
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(u, _mm512_set1_epi16(255)),
                                     _mm512_srai_epi16(_mm512_slli_epi16(y, 8), 8));
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(y, 8));
    return acc + (vint)_mm512_add_epi32(even, odd);
#elif defined(__AVX2__)
    __m256i y = _mm256_set1_epi32(x), u = (__m256i)w;
    if (small)
        return acc + (vint)_mm256_madd_epi16(_mm256_maddubs_epi16(u, y), _mm256_set1_epi16(1));
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)),
                                     _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(y, 8));
    return acc + (vint)_mm256_add_epi32(even, odd);
#elif defined(__ARM_FEATURE_DOTPROD)
    /* The instruction wants signed bytes on both sides: w = (w - 128) + 128, and 128 x = -(-128 x). */
    int8x16_t y = (int8x16_t)vdupq_n_s32(x);
    if (small) return (vint)vdotq_s32((int32x4_t)acc, (int8x16_t)w, y);
    int32x4_t less = vdotq_s32((int32x4_t)acc, (int8x16_t)(w ^ 128), y);
    return (vint)vsubq_s32(less, vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(-128), y));
#else
    (void)small;
    vuint words = (vuint)w;
    int8_t bytes[4];
    memcpy(bytes, &x, 4);
    acc += (vint)(words & 255) * spread_int(bytes[0]);
    acc += (vint)(words >> 8 & 255) * spread_int(bytes[1]);
    acc += (vint)(words >> 16 & 255) * spread_int(bytes[2]);
    return acc + (vint)(words >> 24) * spread_int(bytes[3]);
#endif
}

/* e**x to about 2 units in the last place: 2**n p(r), with x = n ln 2 + r (Cody and Waite) and p of degree 5, which is
 * off by at most 1.1e-7 of the result on |r| <= ln 2 / 2. Underflows to 0 below -87, finite above 88; NaN stays NaN. */
INLINE vfloat exponential(vfloat x) {
    const vfloat clamped = minimum(spread(88.0f), maximum(spread(-87.0f), x));
    const vfloat rounded = fma_(clamped, spread(1.44269504f), spread(12582912.0f)); /* n in the low bits */
    const vfloat n = rounded - 12582912.0f;
    vfloat r = fma_(n, spread(-0.693359375f), clamped);
    r = fma_(n, spread(2.12194440e-4f), r);
    vfloat p = spread(0.008312521f);
    p = fma_(p, r, spread(0.041890159f));
    p = fma_(p, r, spread(0.16667114f));
    p = fma_(p, r, spread(0.49999231f));
    p = fma_(p, r, spread(1.0f));
    p = fma_(p, r, spread(1.0f));
    const vfloat power = (vfloat)((vint)((vuint)rounded << 23) + 0x3f800000);
    return (vfloat)(~(x < spread(-87.0f)) & (vint)(p * power));
}

#endif
