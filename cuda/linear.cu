// linear: out = x @ weight.T + bias, the sums in float32.
//
//   x       ELEMENT [num_rows, depth]
//   weight  ELEMENT [num_columns, depth]; depth is a multiple of 8, so that every row starts at a multiple of 16 bytes
//   bias    float32 [num_columns] or null
//   out     ELEMENT (linear_*) or float32 (linear_*_float32, for logits) [num_rows, num_columns]
//
// Grid: one block per tile of the output, in one dimension: ceil(num_rows / tile rows) * ceil(num_columns / tile
// columns). Tiles that follow each other share columns within a group of GROUP tile rows, so that what they read stays
// in L2. Dynamic shared memory: a ring of stages, each with the tile's rows of x and of weight over `kDepth` elements.
//
//   kernel        tile (rows x columns)   depth   stages   threads   shared memory   a warp owns
//   linear_few        16 x 32              128       6       128        73,728 B      16 x 8
//   linear_some       64 x 32               64       6       128        73,728 B      16 x 32
//   linear_many      128 x 128              64       3       128        98,304 B      64 x 64
//
// A block streams stages by cp.async; the 16-byte chunks of a row are permuted by XOR with the row number, so that
// neither these writes nor ldmatrix meet a bank twice. Rows, columns and depth beyond the end are filled with zeros.
//
// Every output element is one chain of mma.m16n8k16 along the depth, from 0 up, whatever the tile: a row's result has
// the same bits for any num_rows and in any company, and the choice among the three kernels is free.
//
// Bytes moved: few and some read the weight once, 2 * num_columns * depth, the floor for num_rows up to some hundred
// (4096 x 4096 on 4.8 TB/s: 7 us); a block keeps 5 stages of 8 KB (few) or 4 KB (some) of it in flight. `many` is bound
// by the tensor cores: 2 * num_rows * num_columns * depth operations.
//
// Budget: linear_few: 96 registers, 0 bytes of shared memory
// Budget: linear_few_float32: 96 registers, 0 bytes of shared memory
// Budget: linear_some: 96 registers, 0 bytes of shared memory
// Budget: linear_some_float32: 96 registers, 0 bytes of shared memory
// Budget: linear_many: 240 registers, 0 bytes of shared memory
// Budget: linear_many_float32: 240 registers, 0 bytes of shared memory

#include "tensor_core.cuh"

constexpr int kThreads = 128;
constexpr int kGroup = 8;  // tile rows

// Where a chunk of a row of a tile stands, in elements.
template <int kDepth>
__device__ __forceinline__ int swizzled(int row, int chunk) {
    return row * kDepth + (chunk ^ (row & 7)) * kChunk;
}

// Start copying rows [first, first + kRows) of a matrix [end, depth], elements [start, start + kDepth) of each.
template <int kRows, int kDepth>
__device__ __forceinline__ void copy_tile(
    ELEMENT* tile, const ELEMENT* __restrict__ matrix, int first, int end, int start, int depth) {
    constexpr int kChunks = kDepth / kChunk;
    static_assert(kRows * kChunks % kThreads == 0, "every thread copies the same number of chunks");
#pragma unroll
    for (int i = 0; i < kRows * kChunks / kThreads; i++) {
        const int index = i * kThreads + threadIdx.x, row = index / kChunks, chunk = index % kChunks;
        const int column = start + chunk * kChunk;
        const bool is_inside = first + row < end && column < depth;
        const long long offset = is_inside ? static_cast<long long>(first + row) * depth + column : 0;
        cp_async_16_zfill(tile + swizzled<kDepth>(row, chunk), matrix + offset, is_inside);
    }
}

__device__ __forceinline__ void store_pair(ELEMENT* out, float low, float high) {
    *reinterpret_cast<unsigned*>(out) = pack(low, high);
}
__device__ __forceinline__ void store_pair(float* out, float low, float high) {
    *reinterpret_cast<float2*>(out) = make_float2(low, high);
}

template <typename Output, int kRows, int kColumns, int kWarpRows, int kWarpColumns, int kDepth, int kStages>
__device__ __forceinline__ void linear(
    const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ weight, const float* __restrict__ bias,
    Output* __restrict__ out, int num_rows, int num_columns, int depth) {
    constexpr int kTilesDown = kWarpRows / 16, kTilesAcross = kWarpColumns / 8;
    constexpr int kStageElements = (kRows + kColumns) * kDepth;
    static_assert(kRows / kWarpRows * (kColumns / kWarpColumns) * 32 == kThreads, "the warps cover the tile");
    extern __shared__ __align__(16) ELEMENT stages[];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_row = warp % (kRows / kWarpRows) * kWarpRows,
              warp_column = warp / (kRows / kWarpRows) * kWarpColumns;

    const int tile_rows = (num_rows + kRows - 1) / kRows, tile_columns = (num_columns + kColumns - 1) / kColumns;
    const int group = blockIdx.x / (kGroup * tile_columns), in_group = blockIdx.x % (kGroup * tile_columns);
    const int group_rows = min(kGroup, tile_rows - group * kGroup);
    const int first_row = (group * kGroup + in_group % group_rows) * kRows;
    const int first_column = in_group / group_rows * kColumns;

    const int num_steps = (depth + kDepth - 1) / kDepth;
    auto copy_stage = [&](int step) {
        if (step < num_steps) {
            ELEMENT* stage = stages + step % kStages * kStageElements;
            copy_tile<kRows, kDepth>(stage, x, first_row, num_rows, step * kDepth, depth);
            copy_tile<kColumns, kDepth>(
                stage + kRows * kDepth, weight, first_column, num_columns, step * kDepth, depth);
        }
        cp_async_commit();  // also without a copy: the wait below counts groups
    };

    float sums[kTilesDown][kTilesAcross][4];
#pragma unroll
    for (int i = 0; i < kTilesDown; i++)
#pragma unroll
        for (int j = 0; j < kTilesAcross; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[i][j][e] = 0.0f;

    for (int step = 0; step < kStages - 1; step++) copy_stage(step);
    for (int step = 0; step < num_steps; step++) {
        cp_async_wait<kStages - 2>();
        __syncthreads();  // this step has arrived for all, and all have done with the one whose place is filled next
        copy_stage(step + kStages - 1);

        const ELEMENT* x_tile = stages + step % kStages * kStageElements;
        const ELEMENT* weight_tile = x_tile + kRows * kDepth;
#pragma unroll
        for (int k = 0; k < kDepth / 16; k++) {
            unsigned a[kTilesDown][4], b[kTilesAcross][2];
#pragma unroll
            for (int i = 0; i < kTilesDown; i++) {
                ldmatrix_x4(a[i], x_tile + swizzled<kDepth>(warp_row + i * 16 + lane % 16, k * 2 + lane / 16));
            }
            if constexpr (kTilesAcross == 1) {
                ldmatrix_x2(b[0], weight_tile + swizzled<kDepth>(warp_column + lane % 8, k * 2 + lane / 8 % 2));
            } else {
#pragma unroll
                for (int j = 0; j < kTilesAcross; j += 2) {
                    unsigned pair[4];
                    const int row = warp_column + j * 8 + lane / 16 * 8 + lane % 8;
                    ldmatrix_x4(pair, weight_tile + swizzled<kDepth>(row, k * 2 + lane / 8 % 2));
                    b[j][0] = pair[0], b[j][1] = pair[1], b[j + 1][0] = pair[2], b[j + 1][1] = pair[3];
                }
            }
#pragma unroll
            for (int i = 0; i < kTilesDown; i++)
#pragma unroll
                for (int j = 0; j < kTilesAcross; j++) multiply_add(sums[i][j], a[i], b[j]);
        }
    }
    cp_async_wait<0>();

#pragma unroll
    for (int j = 0; j < kTilesAcross; j++) {
        const int column = first_column + warp_column + j * 8 + lane % 4 * 2;
        if (column >= num_columns) continue;
        const bool is_pair = num_columns % 2 == 0;  // else rows start at odd addresses, and the last column is alone
        const bool has_second = column + 1 < num_columns;
        // Also without a bias 0 is added: it makes a negative zero positive, as zeros beyond the depth may or may not
        // have done.
        const float low_bias = bias ? bias[column] : 0.0f, high_bias = bias && has_second ? bias[column + 1] : 0.0f;
#pragma unroll
        for (int i = 0; i < kTilesDown; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = first_row + warp_row + i * 16 + half * 8 + lane / 4;
                if (row >= num_rows) continue;
                Output* place = out + static_cast<long long>(row) * num_columns + column;
                const float low = sums[i][j][half * 2] + low_bias, high = sums[i][j][half * 2 + 1] + high_bias;
                if (is_pair) {
                    store_pair(place, low, high);
                } else {
                    *place = from_float<Output>(low);
                    if (has_second) place[1] = from_float<Output>(high);
                }
            }
        }
    }
}

#define LINEAR_PARAMETERS(Output)                                                                      \
    const ELEMENT *__restrict__ x, const ELEMENT *__restrict__ weight, const float *__restrict__ bias, \
        Output *__restrict__ out, int num_rows, int num_columns, int depth

extern "C" __global__ void __launch_bounds__(128) linear_few(LINEAR_PARAMETERS(ELEMENT)) {
    linear<ELEMENT, 16, 32, 16, 8, 128, 6>(x, weight, bias, out, num_rows, num_columns, depth);
}
extern "C" __global__ void __launch_bounds__(128) linear_few_float32(LINEAR_PARAMETERS(float)) {
    linear<float, 16, 32, 16, 8, 128, 6>(x, weight, bias, out, num_rows, num_columns, depth);
}
extern "C" __global__ void __launch_bounds__(128) linear_some(LINEAR_PARAMETERS(ELEMENT)) {
    linear<ELEMENT, 64, 32, 16, 32, 64, 6>(x, weight, bias, out, num_rows, num_columns, depth);
}
extern "C" __global__ void __launch_bounds__(128) linear_some_float32(LINEAR_PARAMETERS(float)) {
    linear<float, 64, 32, 16, 32, 64, 6>(x, weight, bias, out, num_rows, num_columns, depth);
}
extern "C" __global__ void __launch_bounds__(128) linear_many(LINEAR_PARAMETERS(ELEMENT)) {
    linear<ELEMENT, 128, 128, 64, 64, 64, 3>(x, weight, bias, out, num_rows, num_columns, depth);
}
extern "C" __global__ void __launch_bounds__(128) linear_many_float32(LINEAR_PARAMETERS(float)) {
    linear<float, 128, 128, 64, 64, 64, 3>(x, weight, bias, out, num_rows, num_columns, depth);
}
