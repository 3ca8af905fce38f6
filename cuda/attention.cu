// Paged attention: causal attention of each token over its sequence's positions, decode and chunked prefill in one
// launch.
//
//   query         ELEMENT [num_tokens, num_query_heads, HEAD_DIM]
//   cache         ELEMENT, blocks of all layers; within a head [block_size, HEAD_DIM]. In elements: `block_stride` from
//                 block to block; K's first head of this layer begins `key_offset` into block 0, and the next one
//                 `key_head_stride` further on; V likewise
//   kv_extents    int32 [num_tokens]: how many tokens' KV of its sequence a token sees, its own as the last; consecutive
//                 within a sequence. A position is a place among those, from 0 on: it need not be where the token stands in
//                 the text
//   cu_seqlens  int32 [num_sequences + 1], from any first token on: some sequences of a step may be a launch of their own
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
// otherwise; 256: 75,776 and 83,968.
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
constexpr int kRecord = HEAD_DIM + 4;  // floats: weighted sum of V, maximum, total weight, two unused for alignment
static_assert(HEAD_DIM % 16 == 0 && KV_SPLIT % kTile == 0, "whole fragments, whole tiles");

// The maximum of no scores: minus infinity.
__device__ __forceinline__ float nothing() { return __uint_as_float(0xff800000u); }

// What an accumulated result with maximum `old` is multiplied by when the maximum rises to `rise`.
__device__ __forceinline__ float rescale(float old, float rise) {
    return exp2_approx(old - (rise == nothing() ? 0.0f : rise));
}

// One element of the ordered merge: everything here and in attention_combine that merges splits goes through this.
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

template <int kWarps, int kStages>
__device__ __forceinline__ void attend(
    const ELEMENT* __restrict__ query, const ELEMENT* __restrict__ cache, const int* __restrict__ kv_extents,
    const int* __restrict__ cu_seqlens, const int* __restrict__ rows, const int* __restrict__ block_tables,
    ELEMENT* __restrict__ out, float* __restrict__ partials, const Geometry& g) {
    constexpr int kThreads = kWarps * 32, kRows = kWarps * 16;
    extern __shared__ __align__(16) ELEMENT shared[];
    ELEMENT* const stages = shared;                                  // [kStages][K, V][kTile][kPitch]
    ELEMENT* const queries = stages + kStages * 2 * kTile * kPitch;  // [kRows][kPitch]
    float* const results =
        reinterpret_cast<float*>(queries + kRows * kPitch);  // [kRows][kRecord], the splits merged so far

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    // Which queries this block owns.
    const int group = g.num_query_heads / g.num_kv_heads, tiles_of_group = (group + kRows - 1) / kRows;
    const int kv_head = blockIdx.y / tiles_of_group, first_in_group = blockIdx.y % tiles_of_group * kRows;
    const int heads = min(group - first_in_group, kRows), first_head = kv_head * group + first_in_group;
    const int tokens = max(1, kRows / group);
    const int tile = gridDim.x - 1 - blockIdx.x;
    const int sequence = sequence_of(tile, cu_seqlens, g.num_sequences, tokens);
    const int sequence_start = cu_seqlens[sequence], sequence_end = cu_seqlens[sequence + 1];
    const int first_tile_of_sequence = (sequence_start - cu_seqlens[0]) / tokens + sequence;
    const int first_token = sequence_start + (tile - first_tile_of_sequence) * tokens;
    if (first_token >= sequence_end) return;
    const int num_tokens = min(tokens, sequence_end - first_token), num_rows = num_tokens * heads;

    // Which positions they see, and which of those this block takes.
    const int first_position = kv_extents[first_token] - 1, last_position = first_position + num_tokens - 1;
    const int visible_begin = first_visible(first_position, g.window), visible_end = last_position + 1;
    const bool is_decoded = sequence_end - sequence_start == 1;
    const bool is_split = is_decoded && visible_begin / KV_SPLIT != last_position / KV_SPLIT;
    int begin = visible_begin, end = visible_end;
    if (is_split) {
        begin = max(begin, static_cast<int>(blockIdx.z) * KV_SPLIT);
        end = min(end, (static_cast<int>(blockIdx.z) + 1) * KV_SPLIT);
        if (begin >= end) return;
    } else if (blockIdx.z > 0) {
        return;
    }

    // A row's place among all heads of all tokens.
    auto head_of = [&](int row) {
        return static_cast<long long>(first_token + row / heads) * g.num_query_heads + first_head + row % heads;
    };

    // Rows of queries; those beyond the last are zeros.
    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
        const int row = i / kChunks, chunk = i % kChunks;
        const bool is_row = row < num_rows;
        const long long head = is_row ? head_of(row) : 0;
        cp_async_16_zfill(queries + row * kPitch + chunk * kChunk, query + head * HEAD_DIM + chunk * kChunk, is_row);
    }
    for (int i = lane; i < 16 * kRecord; i += 32) {
        results[warp * 16 * kRecord + i] = i % kRecord == HEAD_DIM ? nothing() : 0.0f;
    }

    // K and V of a tile, through the block table. What no token of this block sees is zeros: slots may hold NaN.
    const int* const table = block_tables + static_cast<long long>(rows[sequence]) * g.table_width;
    const ELEMENT* const head_cache = cache + g.key_offset + kv_head * g.key_head_stride;
    const long long value_offset =  // from a key to its value
        g.value_offset - g.key_offset + kv_head * (g.value_head_stride - g.key_head_stride);
    const int first_tile = begin / kTile, end_tile = (end + kTile - 1) / kTile;
    auto copy_stage = [&](int tile) {
        if (tile < end_tile) {
            ELEMENT* const stage = stages + tile % kStages * 2 * kTile * kPitch;
            // Every lane looks up one position's place.
            const int position = tile * kTile + lane % kTile;
            long long place = -1;
            if (position >= begin && position < end) {
                const int block = table[position / g.block_size];
                place = block * g.block_stride + static_cast<long long>(position % g.block_size) * HEAD_DIM;
            }
#pragma unroll 4
            for (int i = 0; i < (kTile * kChunks + kThreads - 1) / kThreads; i++) {
                const int index = i * kThreads + threadIdx.x, row = index / kChunks, chunk = index % kChunks;
                const long long source = __shfl_sync(0xffffffff, place, row % kTile);
                if (kTile * kChunks % kThreads != 0 && row >= kTile) continue;
                const bool is_seen = source >= 0;
                const ELEMENT* const key = is_seen ? head_cache + source + chunk * kChunk : cache;
                ELEMENT* const target = stage + row * kPitch + chunk * kChunk;
                cp_async_16_zfill(target, key, is_seen);
                cp_async_16_zfill(target + kTile * kPitch, is_seen ? key + value_offset : cache, is_seen);
            }
        }
        cp_async_commit();  // also without a copy: the wait below counts groups
    };

    const float scale = __fmul_rn(g.scale, 1.4426950408889634f);  // times log2(e): weights are powers of two

    // The two rows of this thread and what they see.
    int row_begin[2], row_end[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = warp * 16 + half * 8 + lane / 4, position = first_position + row / heads;
        row_begin[half] = first_visible(position, g.window);
        row_end[half] = row < num_rows ? position + 1 : 0;
    }
    const bool is_idle = warp * 16 >= num_rows;

    float sums[HEAD_DIM / 8][4], maximum[2], total[2];
    auto start_split = [&] {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[i][e] = 0.0f;
        maximum[0] = maximum[1] = nothing();
        total[0] = total[1] = 0.0f;
    };

    start_split();
    for (int i = 0; i < kStages - 1; i++) copy_stage(first_tile + i);
    for (int tile = first_tile; tile < end_tile; tile++) {
        if constexpr (kStages > 2) {
            cp_async_wait<kStages - 2>();
            __syncthreads();  // the tile has arrived, and all have done with the one whose place is filled next
            copy_stage(tile + kStages - 1);
        } else {
            if (tile > first_tile) __syncthreads();
            copy_stage(tile + 1);
            cp_async_wait<1>();
            __syncthreads();
        }
        if (is_idle) continue;
        const ELEMENT* const keys = stages + tile % kStages * 2 * kTile * kPitch;
        const ELEMENT* const values = keys + kTile * kPitch;

        // scores [16, kTile] = queries keys.T
        float scores[kTile / 8][4];
#pragma unroll
        for (int i = 0; i < kTile / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) scores[i][e] = 0.0f;
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            unsigned a[4];
            ldmatrix_x4(a, queries + (warp * 16 + lane % 16) * kPitch + k * 16 + lane / 16 * 8);
#pragma unroll
            for (int i = 0; i < kTile / 8; i += 2) {
                unsigned b[4];
                ldmatrix_x4(b, keys + (i * 8 + lane / 16 * 8 + lane % 8) * kPitch + k * 16 + lane / 8 % 2 * 8);
                multiply_add(scores[i], a, b);
                multiply_add(scores[i + 1], a, b + 2);
            }
        }

        // Mask, scale, and the new maximum of each row: over the four threads that share it.
        float rise[2] = {maximum[0], maximum[1]};
#pragma unroll
        for (int i = 0; i < kTile / 8; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int position = tile * kTile + i * 8 + lane % 4 * 2 + e % 2;
                const bool is_visible = position >= row_begin[e / 2] && position < row_end[e / 2];
                scores[i][e] = is_visible ? __fmul_rn(scores[i][e], scale) : nothing();
                rise[e / 2] = fmaxf(rise[e / 2], scores[i][e]);
            }
        }
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

        // Weights, in place; then sums [16, HEAD_DIM] += weights values
#pragma unroll
        for (int i = 0; i < kTile / 8; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                scores[i][e] = rescale(scores[i][e], maximum[e / 2]);
                total[e / 2] = __fadd_rn(total[e / 2], scores[i][e]);
            }
        }
#pragma unroll
        for (int k = 0; k < kTile / 16; k++) {
            const float *left = scores[k * 2], *right = scores[k * 2 + 1];
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

        // At the end of a split, merge it into the result.
        if ((tile + 1) % (KV_SPLIT / kTile) != 0 && tile + 1 < end_tile) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            total[half] = __fadd_rn(total[half], __shfl_xor_sync(0xffffffff, total[half], 1));
            total[half] = __fadd_rn(total[half], __shfl_xor_sync(0xffffffff, total[half], 2));
            float* const result = results + (warp * 16 + half * 8 + lane / 4) * kRecord;
            const float merged_maximum = fmaxf(result[HEAD_DIM], maximum[half]);
            const float merged_scale = rescale(result[HEAD_DIM], merged_maximum);
            const float split_scale = rescale(maximum[half], merged_maximum);
            __syncwarp();  // the maximum has been read by all four threads of the row
            if (lane % 4 == 0) {
                result[HEAD_DIM] = merged_maximum;
                result[HEAD_DIM + 1] = merge(result[HEAD_DIM + 1], merged_scale, total[half], split_scale);
            }
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++) {
                float2* const place = reinterpret_cast<float2*>(result + i * 8 + lane % 4 * 2);
                place->x = merge(place->x, merged_scale, sums[i][half * 2], split_scale);
                place->y = merge(place->y, merged_scale, sums[i][half * 2 + 1], split_scale);
            }
        }
        __syncwarp();
        start_split();
    }
    cp_async_wait<0>();
    if (is_idle) return;

    if (is_split) {  // the rows of the one token are heads
        for (int i = lane; i < 16 * (kRecord / 4); i += 32) {
            const int row = warp * 16 + i / (kRecord / 4), part = i % (kRecord / 4);
            if (row >= num_rows) continue;
            const long long head = static_cast<long long>(sequence) * g.num_query_heads + first_head + row;
            float* const record = partials + (head * g.max_splits + blockIdx.z) * kRecord;
            reinterpret_cast<float4*>(record)[part] = reinterpret_cast<const float4*>(results + row * kRecord)[part];
        }
        return;
    }
    for (int i = lane; i < 16 * kChunks; i += 32) {
        const int row = warp * 16 + i / kChunks, chunk = i % kChunks;
        if (row >= num_rows) continue;
        const float* const result = results + row * kRecord;
        const float4 low = *reinterpret_cast<const float4*>(result + chunk * kChunk);
        const float4 high = *reinterpret_cast<const float4*>(result + chunk * kChunk + 4);
        const float total_weight = result[HEAD_DIM + 1];
        const uint4 packed = make_uint4(
            pack_quotients(low.x, low.y, total_weight), pack_quotients(low.z, low.w, total_weight),
            pack_quotients(high.x, high.y, total_weight), pack_quotients(high.z, high.w, total_weight));
        *reinterpret_cast<uint4*>(out + head_of(row) * HEAD_DIM + chunk * kChunk) = packed;
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
