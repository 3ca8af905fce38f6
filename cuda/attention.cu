// Paged attention: causal attention of each token over its sequence's positions, decode and chunked prefill in one
// launch.
//
//   query         ELEMENT [num_tokens, num_query_heads, HEAD_DIM]
//   cache         ELEMENT, blocks of all layers; within a head [block_size, HEAD_DIM]. In elements: `block_stride` from
//                 block to block; K's first head of this layer begins `key_offset` into block 0, and the next one
//                 `key_head_stride` further on; V likewise
//   kv_extents    int32 [num_tokens]: how many tokens' KV of its sequence a token sees, its own as the last; consecutive
//                 within a sequence. A position below is a place among those, counted from 0: it need not be where the
//                 token stands in the text
//   cu_seqlens    int32 [num_sequences + 1], from any first token on: some sequences of a step may be a launch of their own
//   rows          int32 [num_sequences]; block_tables int32 [.., table_width]
//   out           ELEMENT [num_tokens, num_query_heads, HEAD_DIM]
//   partials      float32 [num_sequences, num_query_heads, max_splits, HEAD_DIM + 4]: sum, then maximum and total weight
//   window        how many positions up to its own a token sees; 0: all
//
// HEAD_DIM is a macro of the build: 64, 80, 96, 128 or 256. Query head h reads KV head h / group.
//
// Arithmetic. The positions are cut into splits of KV_SPLIT and these into tiles of kTile, both counted from position
// 0. A split is a flash-attention loop over its tiles (online softmax, arXiv:2205.14135); the results of the splits are
// merged in order (arXiv:2311.01282). One warp computes 16 rows by mma.m16n8k16, and a row's numbers come from its own
// row alone: tiles and splits that it does not see change nothing, to the bit. So a token's result depends neither on
// batch nor on chunking, nor on which of the kernels and ways below computed it. (One thing is the caller's: an
// infinity or NaN in the V of a position that another row of the tile sees reaches the rows that do not see it, for 0 *
// infinity is NaN. Its sequence has failed.)
//
// A tile of queries is `tokens` tokens of one sequence x the `heads` of one KV group = up to 16 * warps rows, so that K
// and V are read once per group. Groups of more heads than that take several tiles.
//
// Grid: x tiles of queries, an upper bound, the last first (they read most): with num_tokens those of the launch,
//       num_tokens / tokens + num_sequences;
//       y KV heads * ceil(group / rows of a tile); z splits, `max_splits`.
// A sequence with one token is decoded: block z takes split z; with more than one split they go to `partials`, and
// attention_combine merges them. Of a longer chunk block z = 0 takes all splits, and the merged result stays in shared
// memory.
//
//   kernel             warps   threads   KV stages   for
//   attention_decode     1        32         3       batches in which every sequence has one token
//   attention            4 (2)   128 (64)    2       all others (HEAD_DIM 256)
//
// Dynamic shared memory: 2 pitch (2 kTile stages + rows) + 4 rows (HEAD_DIM + 4) bytes with pitch = HEAD_DIM + 8: a row
// is an odd number of 16-byte chunks, so that ldmatrix meets no bank twice. HEAD_DIM 128: 65,024 in decode, 86,016
// otherwise; 256: 67,200 and 83,968.
//
// Bytes moved, decode: 4 HEAD_DIM per position and KV head, the floor (batch 64, 2,048 positions, 8 heads of 128 on 4.8
// TB/s: 112 us), and 2 group / KV_SPLIT of that to write and read partials (group 4: 1.6 %). A block has 2 stages of 16
// KB in flight.
//
// Budget: attention_decode: 224 registers, 0 bytes of shared memory
// Budget: attention: 224 registers, 0 bytes of shared memory
// Budget: attention_combine: 64 registers, 0 bytes of shared memory

#include "tensor_core.cuh"

#ifndef HEAD_DIM
#error "define HEAD_DIM as 64, 80, 96, 128 or 256"
#endif
#ifndef KV_SPLIT
#define KV_SPLIT 512
#endif

constexpr int kTile = HEAD_DIM <= 128 ? 32 : 16;  // positions
constexpr int kPitch = HEAD_DIM + kChunk;         // elements from row to row in shared memory
constexpr int kChunks = HEAD_DIM / kChunk;
static_assert(HEAD_DIM % 16 == 0 && KV_SPLIT % kTile == 0, "whole fragments, whole tiles");

// The attention of one row over the positions that were read so far, in shared memory and in `partials`.
struct __align__(16) Record {
    float sums[HEAD_DIM];  // of V, each position times its weight 2^(score - maximum)
    float maximum;         // of the scores
    float total;           // of the weights
    float unused[2];
};
constexpr int kRecord = sizeof(Record) / sizeof(float), kRecordParts = kRecord / 4;

// The maximum of no scores: minus infinity.
__device__ __forceinline__ float nothing() { return __uint_as_float(0xff800000u); }

// What an accumulated result with maximum `old` is multiplied by when the maximum rises to `rise`.
__device__ __forceinline__ float rescale(float old, float rise) {
    return exp2_approx(old - (rise == nothing() ? 0.0f : rise));
}

// One number of the merged splits and the same number of the next split, each scaled to the maximum of both. All that
// merges splits goes through this function, so that decode and prefill round alike.
__device__ __forceinline__ float merge(float merged, float merged_scale, float split, float split_scale) {
    return __fmaf_rn(split, split_scale, __fmul_rn(merged, merged_scale));
}

__device__ __forceinline__ unsigned pack_quotients(float low, float high, float divisor) {
    return pack(__fdiv_rn(low, divisor), __fdiv_rn(high, divisor));
}

__device__ __forceinline__ int first_visible(int position, int window) {
    return window > 0 ? max(0, position + 1 - window) : 0;
}

struct Geometry {
    int num_sequences, num_query_heads, num_kv_heads, block_size, table_width, window, max_splits;
    long long block_stride, key_offset, key_head_stride, value_offset, value_head_stride;
    float scale;
};

// The sequence that a tile of queries belongs to: sequence s has the tiles from (cu_seqlens[s] - cu_seqlens[0]) /
// tokens + s on.
__device__ __forceinline__ int sequence_of(
    int tile, const int* __restrict__ cu_seqlens, int num_sequences, int tokens) {
    int low = 0, high = num_sequences - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if ((cu_seqlens[middle] - cu_seqlens[0]) / tokens + middle <= tile) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// Positions from `begin` up to, not including, `end`.
struct Range {
    int begin, end;

    __device__ __forceinline__ bool contains(int position) const { return position >= begin && position < end; }
};

// The queries of a block and the positions that it reads for them. Row r of the tile is query head first_head + r %
// heads of token first_token + r / heads; rows from num_rows on are empty. A warp computes 16 rows.
struct QueryTile {
    int sequence, kv_head;
    int first_head, heads;
    int first_token, first_position;
    int num_tokens, num_rows;
    bool is_decoded;  // the sequence has one token in this step
    Range read;
    bool is_split;  // `read` is one of several splits, and the result goes to `partials`

    // Finds the queries by the block's place in the grid. Returns false if there are none.
    template <int kRows>
    __device__ __forceinline__ bool find_queries(const int* __restrict__ cu_seqlens, const Geometry& g) {
        const int group = g.num_query_heads / g.num_kv_heads, tiles_of_group = (group + kRows - 1) / kRows;
        const int first_in_group = blockIdx.y % tiles_of_group * kRows;
        kv_head = blockIdx.y / tiles_of_group;
        heads = min(group - first_in_group, kRows), first_head = kv_head * group + first_in_group;

        const int tokens = max(1, kRows / group);
        const int tile = gridDim.x - 1 - blockIdx.x;
        sequence = sequence_of(tile, cu_seqlens, g.num_sequences, tokens);
        const int sequence_start = cu_seqlens[sequence], sequence_end = cu_seqlens[sequence + 1];
        const int first_tile_of_sequence = (sequence_start - cu_seqlens[0]) / tokens + sequence;
        first_token = sequence_start + (tile - first_tile_of_sequence) * tokens;
        num_tokens = min(tokens, sequence_end - first_token), num_rows = num_tokens * heads;
        is_decoded = sequence_end - sequence_start == 1;
        return num_tokens > 0;
    }

    // Finds the positions that any of the queries sees.
    __device__ __forceinline__ void find_positions(const int* __restrict__ kv_extents, const Geometry& g) {
        first_position = kv_extents[first_token] - 1;
        const int last_position = first_position + num_tokens - 1;
        read = {first_visible(first_position, g.window), last_position + 1};
        is_split = is_decoded && read.begin / KV_SPLIT != last_position / KV_SPLIT;
    }

    // Leaves to this block the split of its own, blockIdx.z.
    __device__ __forceinline__ void take_split() {
        read.begin = max(read.begin, static_cast<int>(blockIdx.z) * KV_SPLIT);
        read.end = min(read.end, (static_cast<int>(blockIdx.z) + 1) * KV_SPLIT);
    }

    // Where a row stands among all heads of all tokens, [num_tokens, num_query_heads].
    __device__ __forceinline__ long long head_of(int row, int num_query_heads) const {
        return static_cast<long long>(first_token + row / heads) * num_query_heads + first_head + row % heads;
    }

    // The positions that a row sees; an empty row sees none.
    __device__ __forceinline__ Range seen_by(int row, int window) const {
        const int position = first_position + row / heads;
        return {first_visible(position, window), row < num_rows ? position + 1 : 0};
    }
};

// ---- The phases: load, score, softmax, accumulate, merge, store ----
//
// Scores and sums are in the fragments of mma.m16n8k16. With g = lane / 4 and q = lane % 4, element [i][2 half + e] of a
// thread is in row g + 8 half of its warp's 16 rows and in column 8 i + 2 q + e: four threads share a row.

using Scores = float[kTile / 8][4];  // a thread's part of [16 rows, kTile positions]

// Load: starts copying the queries of the tile, [kRows][kPitch]; empty rows become zeros.
template <int kRows>
__device__ __forceinline__ void load_queries(
    ELEMENT* queries, const ELEMENT* __restrict__ query, const QueryTile& tile, int num_query_heads) {
    constexpr int kThreads = kRows * 2;
    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
        const int row = i / kChunks, chunk = i % kChunks;
        const bool is_row = row < tile.num_rows;
        const long long head = is_row ? tile.head_of(row, num_query_heads) : 0;
        cp_async_16_zfill(queries + row * kPitch + chunk * kChunk, query + head * HEAD_DIM + chunk * kChunk, is_row);
    }
}

// Load: a ring of kStages tiles of K and V, [kStages][K, V][kTile][kPitch], that are copied ahead of their use.
template <int kThreads, int kStages>
struct KvTiles {
    ELEMENT* const stages;
    const ELEMENT* const cache;       // stands for the source of what is not read
    const ELEMENT* const head_cache;  // K of this layer and KV head at offset 0 of block 0
    const int* const table;           // the sequence's row of the block tables
    const long long block_stride;
    const long long value_distance;  // from an element of K to the same one of V
    const int block_size;
    const Range read;

    __device__ __forceinline__ int first() const { return read.begin / kTile; }
    __device__ __forceinline__ int end() const { return (read.end + kTile - 1) / kTile; }
    __device__ __forceinline__ const ELEMENT* keys(int tile) const {
        return stages + tile % kStages * 2 * kTile * kPitch;
    }
    __device__ __forceinline__ const ELEMENT* values(int tile) const { return keys(tile) + kTile * kPitch; }

    // Starts copying a tile, through the block table. Positions that the block does not read become zeros, because
    // their slots may hold NaN.
    __device__ __forceinline__ void start(int tile) const {
        if (tile < end()) {
            ELEMENT* const stage = stages + tile % kStages * 2 * kTile * kPitch;
            // Each lane looks up the place of one position, and all lanes take it from there.
            const int position = tile * kTile + (int)(threadIdx.x % 32) % kTile;
            long long place = -1;
            if (read.contains(position)) {
                const int block = table[position / block_size];
                place = block * block_stride + static_cast<long long>(position % block_size) * HEAD_DIM;
            }
#pragma unroll 4
            for (int i = 0; i < (kTile * kChunks + kThreads - 1) / kThreads; i++) {
                const int index = i * kThreads + threadIdx.x, row = index / kChunks, chunk = index % kChunks;
                const long long source = __shfl_sync(0xffffffff, place, row % kTile);
                if (kTile * kChunks % kThreads != 0 && row >= kTile) continue;
                const bool is_read = source >= 0;
                const ELEMENT* const key = is_read ? head_cache + source + chunk * kChunk : cache;
                ELEMENT* const target = stage + row * kPitch + chunk * kChunk;
                cp_async_16_zfill(target, key, is_read);
                cp_async_16_zfill(target + kTile * kPitch, is_read ? key + value_distance : cache, is_read);
            }
        }
        cp_async_commit();  // also without a copy: the wait below counts groups
    }

    __device__ __forceinline__ void start_first() const {
        for (int i = 0; i < kStages - 1; i++) start(first() + i);
    }

    // Waits until a tile has arrived for all threads, and starts copying the one that is kStages - 1 further on.
    __device__ __forceinline__ void advance_to(int tile) const {
        if constexpr (kStages > 2) {
            cp_async_wait<kStages - 2>();
            __syncthreads();  // the tile has arrived, and all have done with the one whose place is filled next
            start(tile + kStages - 1);
        } else {
            if (tile > first()) __syncthreads();
            start(tile + 1);
            cp_async_wait<1>();
            __syncthreads();
        }
    }
};

// Score: scores [16, kTile] = the warp's rows of queries [kRows][kPitch] times keys [kTile][kPitch] transposed.
__device__ __forceinline__ void score(Scores& scores, const ELEMENT* queries, const ELEMENT* keys) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTile / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) scores[i][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        unsigned a[4];
        ldmatrix_x4(a, queries + (threadIdx.x / 32 * 16 + lane % 16) * kPitch + k * 16 + lane / 16 * 8);
#pragma unroll
        for (int i = 0; i < kTile / 8; i += 2) {
            unsigned b[4];
            ldmatrix_x4(b, keys + (i * 8 + lane / 16 * 8 + lane % 8) * kPitch + k * 16 + lane / 8 % 2 * 8);
            multiply_add(scores[i], a, b);
            multiply_add(scores[i + 1], a, b + 2);
        }
    }
}

// Score: multiplies by `scale`; positions that the thread's two rows do not see get the score minus infinity.
__device__ __forceinline__ void scale_and_mask(Scores& scores, const Range (&seen)[2], int first_position, float scale) {
#pragma unroll
    for (int i = 0; i < kTile / 8; i++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int position = first_position + i * 8 + (int)(threadIdx.x % 32) % 4 * 2 + e % 2;
            scores[i][e] = seen[e / 2].contains(position) ? __fmul_rn(scores[i][e], scale) : nothing();
        }
    }
}

// A thread's part of the attention of its warp's 16 rows over the split that is being read.
struct SplitState {
    float sums[HEAD_DIM / 8][4];  // [16, HEAD_DIM]
    float maximum[2];             // of rows g and g + 8, the same in the four threads of a row
    float total[2];               // of the weights in this thread's columns alone

    __device__ __forceinline__ void init() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[i][e] = 0.0f;
        maximum[0] = maximum[1] = nothing();
        total[0] = total[1] = 0.0f;
    }

    // Softmax: raises the maxima to those of the scores, scales what was accumulated to them, and turns the scores into
    // weights, in place.
    __device__ __forceinline__ void softmax(Scores& scores) {
        float rise[2] = {maximum[0], maximum[1]};
#pragma unroll
        for (int i = 0; i < kTile / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) rise[e / 2] = fmaxf(rise[e / 2], scores[i][e]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            rise[half] = fmaxf(rise[half], __shfl_xor_sync(0xffffffff, rise[half], 1));
            rise[half] = fmaxf(rise[half], __shfl_xor_sync(0xffffffff, rise[half], 2));
            const float factor = rescale(maximum[half], rise[half]);
            maximum[half] = rise[half];
            total[half] = __fmul_rn(total[half], factor);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++) {
                sums[i][half * 2] = __fmul_rn(sums[i][half * 2], factor);
                sums[i][half * 2 + 1] = __fmul_rn(sums[i][half * 2 + 1], factor);
            }
        }
#pragma unroll
        for (int i = 0; i < kTile / 8; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                scores[i][e] = rescale(scores[i][e], maximum[e / 2]);
                total[e / 2] = __fadd_rn(total[e / 2], scores[i][e]);
            }
        }
    }

    // Accumulate: sums [16, HEAD_DIM] += weights [16, kTile] values [kTile][kPitch]
    __device__ __forceinline__ void accumulate(const Scores& weights, const ELEMENT* values) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < kTile / 16; k++) {
            const float *left = weights[k * 2], *right = weights[k * 2 + 1];
            const unsigned a[4] = {
                pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]), pack(right[2], right[3])};
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i += 2) {
                unsigned b[4];
                ldmatrix_x4_trans(b, values + (k * 16 + lane / 8 % 2 * 8 + lane % 8) * kPitch + i * 8 + lane / 16 * 8);
                multiply_add(sums[i], a, b);
                multiply_add(sums[i + 1], a, b + 2);
            }
        }
    }

    // Merge: adds the split, which ends here, to the warp's rows of the results [kRows] in shared memory.
    __device__ __forceinline__ void merge_into(Record* results) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            total[half] = __fadd_rn(total[half], __shfl_xor_sync(0xffffffff, total[half], 1));
            total[half] = __fadd_rn(total[half], __shfl_xor_sync(0xffffffff, total[half], 2));
            Record& result = results[threadIdx.x / 32 * 16 + half * 8 + lane / 4];
            const float merged_maximum = fmaxf(result.maximum, maximum[half]);
            const float merged_scale = rescale(result.maximum, merged_maximum);
            const float split_scale = rescale(maximum[half], merged_maximum);
            __syncwarp();  // the maximum has been read by all four threads of the row
            if (lane % 4 == 0) {
                result.maximum = merged_maximum;
                result.total = merge(result.total, merged_scale, total[half], split_scale);
            }
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++) {
                float2* const place = reinterpret_cast<float2*>(result.sums + i * 8 + lane % 4 * 2);
                place->x = merge(place->x, merged_scale, sums[i][half * 2], split_scale);
                place->y = merge(place->y, merged_scale, sums[i][half * 2 + 1], split_scale);
            }
        }
        __syncwarp();
    }
};

// Merge: the warp's rows of the results [kRows] before the first split.
__device__ __forceinline__ void init_results(Record* results, int warp) {
    for (int i = threadIdx.x % 32; i < 16 * kRecord; i += 32) {
        reinterpret_cast<float*>(results)[warp * 16 * kRecord + i] = i % kRecord == HEAD_DIM ? nothing() : 0.0f;
    }
}

// Store: the results of a warp's 16 rows from `first_row` on, which are heads of one token, as split blockIdx.z of
// partials [num_sequences, num_query_heads, max_splits].
__device__ __forceinline__ void store_partials(
    Record* __restrict__ partials, const Record* results, int first_row, const QueryTile& tile, const Geometry& g) {
    for (int i = threadIdx.x % 32; i < 16 * kRecordParts; i += 32) {
        const int row = first_row + i / kRecordParts, part = i % kRecordParts;
        if (row >= tile.num_rows) continue;
        const long long head = static_cast<long long>(tile.sequence) * g.num_query_heads + tile.first_head + row;
        Record* const record = partials + (head * g.max_splits + blockIdx.z);
        reinterpret_cast<float4*>(record)[part] = reinterpret_cast<const float4*>(results + row)[part];
    }
}

// Store: sums / total of a warp's 16 rows from `first_row` on to out [num_tokens, num_query_heads, HEAD_DIM].
__device__ __forceinline__ void store_quotients(
    ELEMENT* __restrict__ out, const Record* results, int first_row, const QueryTile& tile, int num_query_heads) {
    for (int i = threadIdx.x % 32; i < 16 * kChunks; i += 32) {
        const int row = first_row + i / kChunks, chunk = i % kChunks;
        if (row >= tile.num_rows) continue;
        const Record& result = results[row];
        const float4 low = *reinterpret_cast<const float4*>(result.sums + chunk * kChunk);
        const float4 high = *reinterpret_cast<const float4*>(result.sums + chunk * kChunk + 4);
        const uint4 packed = make_uint4(
            pack_quotients(low.x, low.y, result.total), pack_quotients(low.z, low.w, result.total),
            pack_quotients(high.x, high.y, result.total), pack_quotients(high.z, high.w, result.total));
        ELEMENT* const place = out + tile.head_of(row, num_query_heads) * HEAD_DIM + chunk * kChunk;
        *reinterpret_cast<uint4*>(place) = packed;
    }
}

template <int kWarps, int kStages>
__device__ __forceinline__ void attend(
    const ELEMENT* __restrict__ query, const ELEMENT* __restrict__ cache, const int* __restrict__ kv_extents,
    const int* __restrict__ cu_seqlens, const int* __restrict__ rows, const int* __restrict__ block_tables,
    ELEMENT* __restrict__ out, float* __restrict__ partials, const Geometry& g) {
    constexpr int kRows = kWarps * 16;
    extern __shared__ __align__(16) ELEMENT shared[];
    ELEMENT* const stages = shared;                                               // [kStages][K, V][kTile][kPitch]
    ELEMENT* const queries = stages + kStages * 2 * kTile * kPitch;               // [kRows][kPitch]
    Record* const results = reinterpret_cast<Record*>(queries + kRows * kPitch);  // [kRows], the splits merged so far

    QueryTile queried;
    if (!queried.find_queries<kRows>(cu_seqlens, g)) return;
    queried.find_positions(kv_extents, g);
    if (queried.is_split) {
        queried.take_split();
        if (queried.read.begin >= queried.read.end) return;
    } else if (blockIdx.z > 0) {
        return;
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_row = warp * 16;
    const bool is_idle = first_row >= queried.num_rows;
    const Range seen[2] = {
        queried.seen_by(first_row + lane / 4, g.window), queried.seen_by(first_row + lane / 4 + 8, g.window)};
    const float scale = __fmul_rn(g.scale, 1.4426950408889634f);  // times log2(e): weights are powers of two
    load_queries<kRows>(queries, query, queried, g.num_query_heads);
    init_results(results, warp);

    const ELEMENT* const head_cache = cache + g.key_offset + queried.kv_head * g.key_head_stride;
    const long long value_distance =
        g.value_offset - g.key_offset + queried.kv_head * (g.value_head_stride - g.key_head_stride);
    const int* const table = block_tables + static_cast<long long>(rows[queried.sequence]) * g.table_width;
    const KvTiles<kWarps * 32, kStages> tiles = {stages, cache, head_cache, table, g.block_stride, value_distance,
                                                 g.block_size, queried.read};
    SplitState split;
    split.init();
    tiles.start_first();
    for (int tile = tiles.first(); tile < tiles.end(); tile++) {
        tiles.advance_to(tile);
        if (is_idle) continue;
        Scores scores;
        score(scores, queries, tiles.keys(tile));
        scale_and_mask(scores, seen, tile * kTile, scale);
        split.softmax(scores);
        split.accumulate(scores, tiles.values(tile));
        if ((tile + 1) % (KV_SPLIT / kTile) == 0 || tile + 1 == tiles.end()) {
            split.merge_into(results);
            split.init();
        }
    }
    cp_async_wait<0>();
    if (is_idle) return;
    if (queried.is_split) {
        store_partials(reinterpret_cast<Record*>(partials), results, first_row, queried, g);
    } else {
        store_quotients(out, results, first_row, queried, g.num_query_heads);
    }
}

#define ATTENTION_PARAMETERS                                                                                      \
    const ELEMENT *__restrict__ query, const ELEMENT *__restrict__ cache, const int *__restrict__ kv_extents,     \
        const int *__restrict__ cu_seqlens, const int *__restrict__ rows, const int *__restrict__ block_tables, \
        ELEMENT *__restrict__ out, float *__restrict__ partials, int num_sequences, int num_query_heads,          \
        int num_kv_heads, int block_size, int table_width, int window, int max_splits, long long block_stride,    \
        long long key_offset, long long key_head_stride, long long value_offset, long long value_head_stride,     \
        float scale

#define GEOMETRY                                                                                                  \
    {num_sequences, num_query_heads, num_kv_heads,    block_size,   table_width,       window, max_splits,        \
     block_stride,  key_offset,      key_head_stride, value_offset, value_head_stride, scale}

extern "C" __global__ void __launch_bounds__(32, 8) attention_decode(ATTENTION_PARAMETERS) {
    const Geometry geometry = GEOMETRY;
    attend<1, 3>(query, cache, kv_extents, cu_seqlens, rows, block_tables, out, partials, geometry);
}

constexpr int kWarps = HEAD_DIM <= 128 ? 4 : 2;

extern "C" __global__ void __launch_bounds__(kWarps * 32, 2) attention(ATTENTION_PARAMETERS) {
    const Geometry geometry = GEOMETRY;
    attend<kWarps, 2>(query, cache, kv_extents, cu_seqlens, rows, block_tables, out, partials, geometry);
}

// Merges the splits of decoded tokens in order. Grid: x num_sequences, y num_query_heads; block: HEAD_DIM / 4 threads,
// four elements each. Bytes moved: the partials, once.
extern "C" __global__ void __launch_bounds__(HEAD_DIM / 4) attention_combine(
    const float* __restrict__ partials, const int* __restrict__ kv_extents, const int* __restrict__ cu_seqlens,
    ELEMENT* __restrict__ out, int num_query_heads, int window, int max_splits) {
    const int sequence = blockIdx.x, head = blockIdx.y, token = cu_seqlens[sequence];
    if (cu_seqlens[sequence + 1] - token != 1) return;
    const int position = kv_extents[token] - 1;
    const int first_split = first_visible(position, window) / KV_SPLIT, last_split = position / KV_SPLIT;
    if (first_split == last_split) return;

    const float* record = partials + (static_cast<long long>(sequence) * num_query_heads + head) * max_splits * kRecord;
    float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float maximum = nothing(), total = 0.0f;
    for (int split = first_split; split <= last_split; split++) {
        const float4 sums = reinterpret_cast<const float4*>(record + split * kRecord)[threadIdx.x];
        const float2 state = *reinterpret_cast<const float2*>(record + split * kRecord + HEAD_DIM);
        const float rise = fmaxf(maximum, state.x);
        const float merged_scale = rescale(maximum, rise), split_scale = rescale(state.x, rise);
        maximum = rise;
        total = merge(total, merged_scale, state.y, split_scale);
        merged.x = merge(merged.x, merged_scale, sums.x, split_scale);
        merged.y = merge(merged.y, merged_scale, sums.y, split_scale);
        merged.z = merge(merged.z, merged_scale, sums.z, split_scale);
        merged.w = merge(merged.w, merged_scale, sums.w, split_scale);
    }
    const uint2 packed =
        make_uint2(pack_quotients(merged.x, merged.y, total), pack_quotients(merged.z, merged.w, total));
    reinterpret_cast<uint2*>(out + (static_cast<long long>(token) * num_query_heads + head) * HEAD_DIM)[threadIdx.x] =
        packed;
}
