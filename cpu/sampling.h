/* One token from one row of logits, by the rules of minipaged/ops/reference/sampling.py.
 *
 * What top-k and top-p keep is a prefix of the tokens in descending order of their logits, ties by smaller id. Its end
 * is found by radix selection: a histogram over the upper bits of the logits, then over the next bits of those in the
 * bucket where the prefix ends. So nothing is sorted, and three passes are enough for any distribution.
 */
#ifndef MINIPAGED_SAMPLING_H
#define MINIPAGED_SAMPLING_H

#include <float.h>
#include <math.h>

#include "command.h"
#include "simd.h"

/* Tokens whose key is above `key`, and the first `ties` of those that have it. */
typedef struct {
    uint32_t key;
    int64_t ties;
} Prefix;

/* An unsigned integer that orders as the logit does; +inf counts as the largest number, -0 as 0. */
INLINE uint32_t order_key(float logit) {
    float x = (logit > FLT_MAX ? FLT_MAX : logit) + 0.0f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

enum { STRETCH = 64 };

/* Without branches, so that the compiler makes vectors of it. */
INLINE int any_key_matches(const float *logits, int count, uint32_t known, uint32_t key) {
    uint32_t matches = 0;
    for (int i = 0; i < count; i++) matches |= (order_key(logits[i]) & known) == key;
    return matches != 0;
}

INLINE int any_weight_reaches(const float *weights, int count, float floor) {
    uint32_t reaches = 0;
    for (int i = 0; i < count; i++) reaches |= weights[i] >= floor;
    return reaches != 0;
}

/* The shortest prefix of `count` tokens, or (count < 0) whose weights reach `mass`. Tokens that weigh less than `floor`
 * are known not to be in it, which spares looking at most of the vocabulary. */
static Prefix select_prefix(const float *logits, const float *weights, int size, int64_t count, double mass,
                            float floor) {
    enum { BUCKETS = 4096 };
    static const int shifts[] = {20, 8, 0}, widths[] = {12, 12, 8};
    int32_t counts[BUCKETS];
    double masses[BUCKETS];
    uint32_t key = 0, known = 0; /* the bits of the last key found so far, and which they are */
    int64_t before = 0;          /* tokens, and their weight, in the buckets above */
    double before_mass = 0;
    for (int level = 0; level < 3; level++) {
        const int shift = shifts[level], buckets = 1 << widths[level];
        memset(counts, 0, buckets * sizeof *counts);
        memset(masses, 0, buckets * sizeof *masses);
        for (int begin = 0; begin < size; begin += STRETCH) {
            const int end = begin + STRETCH < size ? begin + STRETCH : size;
            if (!any_weight_reaches(weights + begin, end - begin, floor)) continue;
            if (known && !any_key_matches(logits + begin, end - begin, known, key)) continue;
            for (int i = begin; i < end; i++) {
                const uint32_t k = order_key(logits[i]);
                if ((k & known) != key || weights[i] < floor) continue;
                counts[k >> shift & (buckets - 1)]++;
                masses[k >> shift & (buckets - 1)] += weights[i];
            }
        }
        int bucket = buckets - 1, last = -1;
        for (; bucket >= 0; bucket--) {
            if (!counts[bucket]) continue;
            last = bucket; /* where the prefix ends if rounding kept it from reaching the mass */
            if (count >= 0 ? before + counts[bucket] >= count : before_mass + masses[bucket] >= mass) break;
            before += counts[bucket];
            before_mass += masses[bucket];
        }
        if (bucket < 0) {
            before -= counts[last];
            before_mass -= masses[last];
            bucket = last;
        }
        key |= (uint32_t)bucket << shift;
        known |= (uint32_t)(buckets - 1) << shift;
        if (level == 2) {
            int64_t ties = counts[bucket];
            if (count >= 0) {
                if (count - before < ties) ties = count - before;
            } else {
                const double each = masses[bucket] / counts[bucket], needed = ceil((mass - before_mass) / each);
                if (needed < (double)ties) ties = needed < 1 ? 1 : (int64_t)needed;
            }
            return (Prefix){key, ties};
        }
    }
    return (Prefix){0, size}; /* not reached: the third level returns */
}

/* Is this token, met in id order, within the prefix? `met` counts the ties seen. */
INLINE int is_kept(const Prefix *prefix, float logit, int64_t *met) {
    const uint32_t key = order_key(logit);
    return key > prefix->key || (key == prefix->key && (*met)++ < prefix->ties);
}

/* Of at most STRETCH weights, always in the same order. */
INLINE double sum_stretch(const float *weights, int count) {
    double sums[8] = {0};
    int i = 0;
    for (; i + 8 <= count; i += 8)
        for (int lane = 0; lane < 8; lane++) sums[lane] += weights[i + lane];
    for (; i < count; i++) sums[0] += weights[i];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

static double sum_weights(const float *weights, int size) {
    double total = 0;
    for (int i = 0; i < size; i += STRETCH) total += sum_stretch(weights + i, size - i < STRETCH ? size - i : STRETCH);
    return total;
}

/* A weight that at least `count` tokens reach: the count-th largest of the stretches' maxima; 0 if there are fewer. */
static float common_weight(const float *weights, int size, int count) {
    enum { MOST = 4096 };
    float maxima[MOST];
    const int stretches = size / STRETCH;
    if (count > stretches || stretches > MOST) return 0;
    for (int s = 0; s < stretches; s++) {
        maxima[s] = 0;
        for (int i = 0; i < STRETCH; i++) {
            const float weight = weights[s * STRETCH + i];
            maxima[s] = weight > maxima[s] ? weight : maxima[s];
        }
    }
    for (int low = 0, high = stretches - 1; low < high;) { /* Hoare's selection, descending */
        const float pivot = maxima[(low + high) / 2];
        int i = low, j = high;
        while (i <= j) {
            while (maxima[i] > pivot) i++;
            while (maxima[j] < pivot) j--;
            if (i <= j) {
                const float swapped = maxima[i];
                maxima[i++] = maxima[j];
                maxima[j--] = swapped;
            }
        }
        if (count - 1 <= j)
            high = j;
        else if (count - 1 >= i)
            low = i;
        else
            break;
    }
    return maxima[count - 1];
}

/* Zero the weights outside the prefix; returns the sum of the others. */
static double keep_prefix(const float *logits, float *weights, int size, const Prefix *prefix) {
    int64_t met = 0;
    for (int i = 0; i < size; i++)
        if (!is_kept(prefix, logits[i], &met)) weights[i] = 0;
    return sum_weights(weights, size);
}

INLINE vfloat weigh(vfloat logits, float peak, float temperature) {
    const vfloat limited = choose(logits > spread(FLT_MAX), spread(FLT_MAX), logits);
    return exponential((limited - spread(peak)) / spread(temperature));
}

static void sample(const Sample *c, int row) {
    const int size = c->vocab_size;
    const float *logits = c->logits + (int64_t)row * size;
    float *weights = c->scratch + (int64_t)row * size;
    int32_t *chosen = c->output + row;

    /* Logic first, in vectors; then the first token that has the largest logit. */
    vfloat largest = spread(-INFINITY);
    vint nans = spread_int(0), finites = spread_int(0);
    int i = 0, best = 0;
    for (; i + LANES <= size; i += LANES) {
        const vfloat x = load(logits + i);
        nans |= x != x;
        finites |= (vfloat)((vint)x & 0x7fffffff) <= spread(FLT_MAX);
        largest = maximum(x, largest);
    }
    float highest = max_lanes(largest);
    int is_nan = any_lane(nans), any_finite = any_lane(finites);
    for (; i < size; i++) {
        is_nan |= logits[i] != logits[i];
        any_finite |= fabsf(logits[i]) <= FLT_MAX;
        if (logits[i] > highest) highest = logits[i];
    }
    while (best < size - 1 && logits[best] != highest) best++;
    *chosen = is_nan || !any_finite ? -1 : best;
    const float temperature = c->temperature[row];
    if (*chosen < 0 || temperature == 0) return;

    const float peak = logits[best] > FLT_MAX ? FLT_MAX : logits[best];
    for (i = 0; i + LANES <= size; i += LANES) store(weights + i, weigh(load(logits + i), peak, temperature));
    if (i < size) store_lanes(weights + i, weigh(load_lanes(logits + i, size - i), peak, temperature), size - i);
    const int32_t top_k = c->top_k[row];
    const float top_p = c->top_p[row], min_p = c->min_p[row];
    double total;
    if (top_k < size) {
        const Prefix prefix = select_prefix(logits, weights, size, top_k, 0, common_weight(weights, size, top_k));
        total = keep_prefix(logits, weights, size, &prefix);
    } else {
        total = sum_weights(weights, size);
    }
    if (top_p < 1) {
        const double mass = (double)top_p * total;
        /* All tokens below this together weigh less than what the prefix leaves; those of no weight are out already. */
        float floor = (float)((total - mass) / size) * 0.999f;
        if (floor < FLT_MIN) floor = FLT_MIN;
        const Prefix prefix = select_prefix(logits, weights, size, -1, mass, floor);
        total = keep_prefix(logits, weights, size, &prefix);
    }
    if (min_p > 0) {
        for (i = 0; i < size; i++) weights[i] = weights[i] < min_p ? 0 : weights[i];
        total = sum_weights(weights, size);
    }
    const double target = c->uniforms[row] * total;
    double cumulative = 0;
    int begin = 0;
    for (; begin + STRETCH < size; begin += STRETCH) {
        const double sum = sum_stretch(weights + begin, STRETCH);
        if (cumulative + sum > target) break;
        cumulative += sum;
    }
    for (i = begin; i < size; i++) {
        cumulative += weights[i];
        if (weights[i] > 0) *chosen = i; /* the last that has weight, should rounding let nothing exceed the target */
        if (cumulative > target) return;
    }
}

#endif
