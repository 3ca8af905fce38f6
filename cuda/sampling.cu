// Choosing tokens, by the rules of minipaged/ops/reference/sampling.py: penalties, biases, one draw per row,
// log-probabilities.
//
//   logits  float32 [num_rows, vocab_size]; other arguments stand at the kernels
//
// Grid: one block per row (`penalise`: a thread per entry). A block owns its row, a warp a contiguous span of it, in
// steps of 32 tokens, one per lane, so that every access of a warp is one of 128 bytes at any vocab_size.
//
// Weights are integers, round-down(2^44 exp(..)) with 2^44 for the most likely token, and sums of integers do not
// depend on their order: a row's token has the same bits in any batch and on any GPU that computes expf alike. A sum of
// 2^18 weights is off by less than 2^-26 of the most likely token's.
//
// What top-k and top-p keep is a prefix of the tokens in descending order of logits, ties by smaller id. Its end is
// found by radix selection: a histogram over the upper 8 bits of the logits, then over the next bits of those in the
// bucket where the prefix ends, four times. So nothing is sorted.
//
// Bytes moved: a greedy row is read once, 4 * vocab_size (64 rows of 128k tokens: 33 MB, 7 us on 4.8 TB/s; one row: 512
// KB by one SM). A draw reads the row twice more, top-k and top-p 6 times each, from L2; that is bound by the some 40
// instructions per token and pass, not by bytes: by arithmetic 20 us per pass over 128k tokens, for all rows at once.
// Log-probabilities read the row twice, the most likely tokens some six times more. A penalty moves 8 bytes and a
// sector of 32, read and written (256 rows of 2,000 tokens: 37 MB, 8 us); a bias as much, and each row reads the rows
// of all biases, from L2.
//
// Budget: sample: 64 registers, 2384 bytes of shared memory
// Budget: logprobs: 64 registers, 2644 bytes of shared memory
// Budget: penalise: 32 registers, 0 bytes of shared memory
// Budget: add_bias: 32 registers, 0 bytes of shared memory

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kLoads = 4;
constexpr unsigned kAll = 0xffffffff;
constexpr float kLargest = 3.402823466e38f;
constexpr float kUnit = 17592186044416.0f;  // 2^44, the weight of the most likely token
constexpr int kDigits = 256;
constexpr int kMaxTop = 64;  // log-probabilities returned per row: MAX_LOGPROBS of minipaged/params.py

using Amount = unsigned long long;

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ float nan() { return __uint_as_float(0x7fc00000u); }
__device__ __forceinline__ float limited(float logit) { return logit > kLargest ? kLargest : logit; }

// An integer that orders as the logit does; +inf counts as the largest number, -0 as 0.
__device__ __forceinline__ unsigned order_key(float logit) {
    const unsigned bits = __float_as_uint(__fadd_rn(limited(logit), 0.0f));
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Tokens whose key is above `key`, and those that have it up to the id `last`.
struct Prefix {
    unsigned key;
    int last;
};

__device__ __forceinline__ bool is_kept(Prefix prefix, float logit, int id) {
    const unsigned key = order_key(logit);
    return key > prefix.key || (key == prefix.key && id <= prefix.last);
}

struct Scratch {
    Amount histogram[kDigits];
    Amount sums[kWarps];
    float peaks[kWarps];
    int ids[kWarps];
    unsigned flags[kWarps];
    Amount before;  // select: in the buckets above the one where the prefix ends
    int bucket;
    int located;
};

// A row of logits; a warp visits a contiguous span of it.
struct Row {
    const float* logits;
    int size;

    __device__ __forceinline__ int span() const { return (size + kThreads - 1) / kThreads * 32; }  // tokens of a warp
    __device__ __forceinline__ int begin() const { return min(size, static_cast<int>(threadIdx.x) / 32 * span()); }
    __device__ __forceinline__ int end() const { return min(size, begin() + span()); }

    // visit(logit, id) for every token of the warp's span, with four loads in flight.
    template <typename Visit>
    __device__ __forceinline__ void for_each(Visit visit) const {
        for (int id = begin() + static_cast<int>(threadIdx.x) % 32; id < end(); id += 32 * kLoads) {
            float loaded[kLoads];
#pragma unroll
            for (int i = 0; i < kLoads; i++) loaded[i] = id + 32 * i < end() ? logits[id + 32 * i] : 0.0f;
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                if (id + 32 * i < end()) visit(loaded[i], id + 32 * i);
            }
        }
    }
};

// What a first look at a row tells.
struct Peak {
    float logit;
    int id;  // the smallest that has it
    bool has_nan, has_finite;
};

__device__ __forceinline__ Peak find_peak(const Row& row, Scratch& scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float peak = negative_infinity();
    int best = row.size;
    unsigned flags = 0;  // 1: NaN, 2: finite
    row.for_each([&](float logit, int id) {
        flags |= (logit != logit ? 1 : 0) | (fabsf(logit) <= kLargest ? 2 : 0);
        if (logit > peak || best == row.size) peak = logit, best = id;
    });
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(kAll, peak, distance);
        const int other_best = __shfl_xor_sync(kAll, best, distance);
        if (other > peak || (other == peak && other_best < best)) peak = other, best = other_best;
        flags |= __shfl_xor_sync(kAll, flags, distance);
    }
    if (lane == 0) scratch.peaks[warp] = peak, scratch.ids[warp] = best, scratch.flags[warp] = flags;
    __syncthreads();
    peak = scratch.peaks[0], best = scratch.ids[0], flags = scratch.flags[0];
    for (int i = 1; i < kWarps; i++) {
        if (scratch.peaks[i] > peak) peak = scratch.peaks[i], best = scratch.ids[i];
        flags |= scratch.flags[i];
    }
    return {peak, best, (flags & 1) != 0, (flags & 2) != 0};
}

// The sum of amount(logit, id) over the row; that of each warp's span stays in scratch.sums. Between two calls there is
// another barrier.
template <typename Function>
__device__ __forceinline__ Amount sum(const Row& row, Scratch& scratch, Function amount) {
    const int lane = threadIdx.x % 32;
    Amount total = 0;
    row.for_each([&](float logit, int id) { total += amount(logit, id); });
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(kAll, total, distance);
    if (lane == 0) scratch.sums[threadIdx.x / 32] = total;
    __syncthreads();
    total = 0;
    for (int i = 0; i < kWarps; i++) total += scratch.sums[i];
    return total;
}

// The first id at which the cumulative amount exceeds `target`, which is below the sum. After `sum` of the same
// amounts.
template <typename Function>
__device__ __forceinline__ int locate(const Row& row, Scratch& scratch, Amount target, Function amount) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Amount before = 0;
    for (int i = 0; i < warp; i++) before += scratch.sums[i];
    if (before <= target && before + scratch.sums[warp] > target) {
        for (int start = row.begin();; start += 32) {
            const int id = start + lane;
            Amount cumulative = id < row.end() ? amount(row.logits[id], id) : 0;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const Amount below = __shfl_up_sync(kAll, cumulative, distance);
                if (lane >= distance) cumulative += below;
            }
            const unsigned exceeding = __ballot_sync(kAll, before + cumulative > target);
            if (exceeding) {
                if (lane == 0) scratch.located = start + __ffs(exceeding) - 1;
                break;
            }
            before += __shfl_sync(kAll, cumulative, 31);
        }
    }
    __syncthreads();
    return scratch.located;
}

// The shortest prefix of what `kept` keeps whose amounts reach `wanted` (> 0, at most the sum of all). Equal logits
// have equal amounts; amounts of 0 may stand for tokens known not to be in the prefix.
template <typename Function>
__device__ __forceinline__ Prefix
select(const Row& row, Scratch& scratch, Prefix kept, Amount wanted, Function amount) {
    const int lane = threadIdx.x % 32;
    unsigned key = 0, known = 0;  // the bits of the last key found so far, and which they are
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < kDigits; i += kThreads) scratch.histogram[i] = 0;
        __syncthreads();
        row.for_each([&](float logit, int id) {
            const unsigned k = order_key(logit);
            if ((k & known) != key || !is_kept(kept, logit, id)) return;
            const Amount some = amount(logit, id);
            if (some) atomicAdd(&scratch.histogram[k >> shift & (kDigits - 1)], some);
        });
        __syncthreads();
        if (threadIdx.x < 32) {  // a lane has 8 buckets, the first lane the highest
            const int highest = kDigits - 1 - 8 * lane;
            Amount mine = 0;
            for (int i = 0; i < 8; i++) mine += scratch.histogram[highest - i];
            Amount cumulative = mine;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const Amount above = __shfl_up_sync(kAll, cumulative, distance);
                if (lane >= distance) cumulative += above;
            }
            if (cumulative >= wanted && cumulative - mine < wanted) {
                Amount before = cumulative - mine;
                int bucket = highest;
                while (before + scratch.histogram[bucket] < wanted) before += scratch.histogram[bucket--];
                scratch.before = before, scratch.bucket = bucket;
            }
        }
        __syncthreads();
        wanted -= scratch.before;
        key |= static_cast<unsigned>(scratch.bucket) << shift;
        known |= static_cast<unsigned>(kDigits - 1) << shift;
    }
    // What is still wanted comes from the first of the tokens that have the key.
    auto tie = [&](float logit, int id) -> Amount {
        return order_key(logit) == key && is_kept(kept, logit, id) ? amount(logit, id) : 0;
    };
    sum(row, scratch, tie);
    return {key, locate(row, scratch, wanted - 1, tie)};
}

// The first word of Philox4x32-10 (doi:10.1145/2063384.2063405) with counter (position, sample_index, 0, 0) under the seed.
__device__ __forceinline__ unsigned philox(unsigned long long seed, unsigned sample_index, unsigned position) {
    unsigned c0 = position, c1 = sample_index, c2 = 0, c3 = 0;
    unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0;
}

// token_ids int32 [num_rows]: one draw per row, -1 where the logits hold NaN or nothing finite. The other arrays are
// those of SamplingBatch, [num_rows] each.
extern "C" __global__ void __launch_bounds__(kThreads, 2) sample(
    const float* __restrict__ logits, const float* __restrict__ temperatures, const int* __restrict__ top_k,
    const float* __restrict__ top_p, const float* __restrict__ min_p, const unsigned long long* __restrict__ seeds,
    const unsigned* __restrict__ sample_index, const unsigned* __restrict__ positions, int* __restrict__ token_ids,
    int vocab_size) {
    __shared__ Scratch scratch;
    const int index = blockIdx.x;
    const Row row = {logits + static_cast<long long>(index) * vocab_size, vocab_size};
    const Peak peak = find_peak(row, scratch);
    const float temperature = temperatures[index];
    if (peak.has_nan || !peak.has_finite || temperature == 0.0f) {
        if (threadIdx.x == 0) token_ids[index] = peak.has_nan || !peak.has_finite ? -1 : peak.id;
        return;
    }

    const float highest = limited(peak.logit);
    auto weigh = [=](float logit) { return expf(__fdiv_rn(__fadd_rn(limited(logit), -highest), temperature)); };
    auto integer = [=](float weight) { return static_cast<Amount>(__fmul_rn(weight, kUnit)); };

    Prefix kept = {0, vocab_size};
    if (top_k[index] < vocab_size) {
        kept = select(row, scratch, kept, top_k[index], [](float, int) -> Amount { return 1; });
    }
    if (top_p[index] < 1.0f) {
        const Amount total = sum(row, scratch, [=](float logit, int id) -> Amount {
            return is_kept(kept, logit, id) ? integer(weigh(logit)) : 0;
        });
        const Amount wanted =
            max(static_cast<Amount>(1), static_cast<Amount>(ceil(static_cast<double>(top_p[index]) * total)));
        const Amount least =
            (total - wanted) / vocab_size;  // all tokens below it together weigh less than what is left out
        kept = select(row, scratch, kept, wanted, [=](float logit, int) -> Amount {
            const Amount weight = integer(weigh(logit));
            return weight < least ? 0 : weight;
        });
    }
    const float floor = min_p[index];
    auto amount = [=](float logit, int id) -> Amount {
        const float weight = weigh(logit);
        return weight >= floor && is_kept(kept, logit, id) ? integer(weight) : 0;
    };
    const Amount total = sum(row, scratch, amount);
    // Whole numbers: the cumulative sum exceeds u * total just if it exceeds its integer part; u is the word / 2^32.
    const Amount word = philox(seeds[index], sample_index[index], positions[index]);
    const int chosen = locate(row, scratch, __umul64hi(total, word << 32), amount);
    if (threadIdx.x == 0) token_ids[index] = chosen;
}

// chosen float32 [num_rows]: log-softmax of logits at token_ids; top_ids int32, top_logprobs float32 [num_rows,
// num_top]: the most likely tokens and theirs, ties by smaller id; num_top is at most kMaxTop and vocab_size. NaN and
// -1 where the token id is -1, or the logits hold NaN or nothing above -inf.
extern "C" __global__ void __launch_bounds__(kThreads, 2) logprobs(
    const float* __restrict__ logits, const int* __restrict__ token_ids, float* __restrict__ chosen,
    int* __restrict__ top_ids, float* __restrict__ top_logprobs, int vocab_size, int num_top) {
    __shared__ Scratch scratch;
    __shared__ int ids[kMaxTop];
    __shared__ int num_ids;
    const int index = blockIdx.x, token_id = token_ids[index];
    const Row row = {logits + static_cast<long long>(index) * vocab_size, vocab_size};
    int* const top_id = top_ids + static_cast<long long>(index) * num_top;
    float* const top_logprob = top_logprobs + static_cast<long long>(index) * num_top;
    const Peak peak = find_peak(row, scratch);
    if (token_id < 0 || peak.has_nan || peak.logit == negative_infinity()) {
        if (threadIdx.x == 0) chosen[index] = nan();
        for (int i = threadIdx.x; i < num_top; i += kThreads) top_id[i] = -1, top_logprob[i] = nan();
        return;
    }

    const float highest = limited(peak.logit);
    const Amount total = sum(row, scratch, [=](float logit, int) -> Amount {
        return static_cast<Amount>(__fmul_rn(expf(__fadd_rn(limited(logit), -highest)), kUnit));
    });
    const double normaliser = log(static_cast<double>(total) / kUnit);
    auto logprob = [&](int id) {
        return static_cast<float>(static_cast<double>(__fadd_rn(limited(row.logits[id]), -highest)) - normaliser);
    };
    if (threadIdx.x == 0) chosen[index] = logprob(token_id);
    if (num_top == 0) return;

    if (threadIdx.x == 0) num_ids = 0;
    const Prefix kept = select(row, scratch, {0, vocab_size}, num_top, [](float, int) -> Amount { return 1; });
    row.for_each([&](float logit, int id) {
        if (is_kept(kept, logit, id)) ids[atomicAdd(&num_ids, 1)] = id;
    });
    __syncthreads();
    for (int i = threadIdx.x; i < num_top; i += kThreads) {
        const int id = ids[i];
        const unsigned key = order_key(row.logits[id]);
        int rank = 0;
        for (int j = 0; j < num_top; j++) {
            const unsigned other = order_key(row.logits[ids[j]]);
            rank += other > key || (other == key && ids[j] < id);
        }
        top_id[rank] = id, top_logprob[rank] = logprob(id);
    }
}

// Penalties, in place. The arrays are those of Penalties: rows int32 [P], starts int32 [P + 1], token_ids and counts
// int32 [E], the others float32 [P]. Grid: ceil(E / 512); a thread owns an entry, whose token no other entry of its row
// has.
extern "C" __global__ void __launch_bounds__(kThreads) penalise(
    float* __restrict__ logits, const int* __restrict__ rows, const int* __restrict__ starts,
    const int* __restrict__ token_ids, const int* __restrict__ counts, const float* __restrict__ repetition,
    const float* __restrict__ presence, const float* __restrict__ frequency, int num_rows, int vocab_size) {
    const int entry = blockIdx.x * kThreads + threadIdx.x;
    if (entry >= starts[num_rows]) return;
    int index = 0;  // the last row that starts at or before the entry, by halving [index, end)
    for (int end = num_rows; end - index > 1;) {
        const int middle = (index + end) / 2;
        if (starts[middle] <= entry) {
            index = middle;
        } else {
            end = middle;
        }
    }
    const int count = counts[entry];
    float* const logit = logits + static_cast<long long>(rows[index]) * vocab_size + token_ids[entry];
    float x = *logit;
    x = x > 0.0f ? __fdiv_rn(x, repetition[index]) : __fmul_rn(x, repetition[index]);
    x = __fadd_rn(x, -__fmul_rn(frequency[index], static_cast<float>(count)));
    *logit = __fadd_rn(x, -__fmul_rn(presence[index], count > 0 ? 1.0f : 0.0f));
}

// Biases, in place and in the order of the entries, of which one token may have several: rows and token_ids int32,
// values float32 [num_entries]. Grid: num_rows; one warp per row looks through all entries.
extern "C" __global__ void __launch_bounds__(32) add_bias(
    float* __restrict__ logits, const int* __restrict__ rows, const int* __restrict__ token_ids,
    const float* __restrict__ values, int num_entries, int vocab_size) {
    float* const row = logits + static_cast<long long>(blockIdx.x) * vocab_size;
    const int lane = threadIdx.x;
    for (int start = 0; start < num_entries; start += 32) {
        const int entry = start + lane;
        const bool is_mine = entry < num_entries && rows[entry] == static_cast<int>(blockIdx.x);
        const unsigned mine = __ballot_sync(kAll, is_mine);
        if (!mine) continue;
        const int id = is_mine ? token_ids[entry] : -1;
        const float value = is_mine ? values[entry] : 0.0f;
        float x = is_mine ? row[id] : 0.0f;
        bool is_first = is_mine;  // of the lanes that have this token: it adds for all of them
        for (unsigned left = mine; left; left &= left - 1) {
            const int other = __ffs(left) - 1, other_id = __shfl_sync(kAll, id, other);
            const float other_value = __shfl_sync(kAll, value, other);
            if (other_id != id) continue;
            x = __fadd_rn(x, other_value);
            is_first = is_first && other >= lane;
        }
        __syncwarp();  // every lane has read its logit
        if (is_first) row[id] = x;
        __syncwarp();
    }
}
