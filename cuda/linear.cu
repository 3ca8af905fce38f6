// linear: out = x @ weight.T + bias + residual, the sums in float32. linear_*_float32, for logits, and linear_*_gated
// take no residual; linear_*_gated makes silu(gate) * up of the sums.
//
//   x         ELEMENT [num_rows, depth]
//   weight    ELEMENT [num_columns, depth]; depth is a multiple of 8, so that rows start at multiples of 16 bytes
//   bias      float32 [num_columns] or null
//   residual  ELEMENT [num_rows, num_columns], num_columns being even; or null
//   out       ELEMENT [num_rows, num_columns]; of linear_*_float32 float32; of linear_*_gated ELEMENT
//             [num_rows, num_columns / 2]
//
// For linear_*_gated the rows of gate and up alternate in weight and bias: 2i is gate i, 2i + 1 is up i. So one thread
// has both sums, and silu(z) = z / (1 + exp(-z)) of the one times the other costs no pass of its own.
//
// Grid: one block of 128 threads per tile of the output, in one dimension: ceil(num_rows / tile rows) *
// ceil(num_columns / tile columns). Tiles that follow each other share columns within a group of kGroup tile rows, so
// that what they read stays in L2. Dynamic shared memory: a ring of stages, each with the tile's rows of x and of
// weight over `depth` elements.
//
//   kernel                      tile (rows x columns)   depth   stages   shared memory   a warp owns
//   linear_few                        16 x 32            128       6        73,728 B       16 x 8
//   linear_few_float32, _gated        16 x 64            128       4        81,920 B       16 x 16
//   linear_some                       64 x 32             64       6        73,728 B       16 x 32
//   linear_some_float32, _gated       64 x 128            64       4        98,304 B       32 x 64
//   linear_many*                     128 x 128            64       3        98,304 B       64 x 64
//
// A block streams stages by cp.async; the 16-byte chunks of a row are permuted by XOR with the row number, so that
// neither these writes nor ldmatrix meet a bank twice. Rows, columns and depth beyond the end are filled with zeros.
//
// Every output element is one chain of mma.m16n8k16 along the depth, from 0 up, whatever the tile: a row's result has
// the same bits for any num_rows and in any company, and the choice among few, some and many is free. Bias and residual
// are added after that, in this order, and the result is rounded once.
//
// Bytes moved: few and some read the weight once, 2 * num_columns * depth, the floor for num_rows up to some hundred;
// many is bound by the tensor cores, 2 * num_rows * num_columns * depth operations. The residual is as large as out: 17
// MB for 2048 rows of 4096, 3.5 us at 4.8 TB/s; a kernel that added it afterwards would also read and write the sums
// once more. few and some ask for it before their first product, many, whose registers are taken, after its last.
//
// Llama 3 8B on an H200 (4.8 TB/s, 132 multiprocessors), by arithmetic: a latency of 700 ns at full bandwidth takes 3.4
// MB in flight. 227 KB of shared memory hold 3 narrow blocks of linear_few or 2 wide ones, and a block keeps (stages -
// 1) * columns * depth * 2 bytes of weight requested, 40 KB or 48 KB.
//
//   columns x depth   floor (us)   tile   blocks   at once   requested (MB)
//     4096 x 4096          7       16 x 32    128       128          5.2
//     6144 x 4096         10       16 x 32    192       192          7.9
//     4096 x 14336        24       16 x 32    128       128          5.2
//    28672 x 4096         49       16 x 64    448       264         13.0
//   128256 x 4096        219       16 x 64   2004       264         13.0
//
// So bytes in flight suffice everywhere, also when a last wave of blocks is a third full. Two other limits come near:
//
// - With one narrow block on a multiprocessor a stage of 8 KB is due every 225 ns, about 400 cycles, in which a warp
//   does 8 products that wait for each other, about 33 cycles each. So all fragments of a stage are loaded before the
//   first product, and the next copies are started between the products: about 350 cycles by the instructions that
//   ptxas makes. A load before each product would take twice that.
// - x comes from L2 once per tile. At 16 rows that is half of the weight's bytes for a narrow tile, a quarter for a
//   wide one; for linear_some at 64 rows twice and half. So tiles are wide where the columns are enough to give every
//   multiprocessor some.
//
// With 99 KB of shared memory (sm_86, 89, 120) a multiprocessor holds one block.
//
// Budget: linear_few: 112 registers, 0 bytes of shared memory
// Budget: linear_few_*: 136 registers, 0 bytes of shared memory
// Budget: linear_some: 128 registers, 0 bytes of shared memory
// Budget: linear_some_*: 176 registers, 0 bytes of shared memory
// Budget: linear_many*: 248 registers, 0 bytes of shared memory

#include "tensor_core.cuh"

constexpr int kThreads = 128;
constexpr int kGroup = 8;  // tile rows

// What a block computes, what a warp of it, and how the depth is streamed.
template <int rows, int columns, int warp_rows, int warp_columns, int depth, int stages>
struct Tile {
    static constexpr int kRows = rows, kColumns = columns, kWarpRows = warp_rows, kWarpColumns = warp_columns;
    static constexpr int kDepth = depth, kStages = stages;
    static_assert(rows / warp_rows * (columns / warp_columns) * 32 == kThreads, "the warps cover the tile");
};

using Few = Tile<16, 32, 16, 8, 128, 6>;
using FewWide = Tile<16, 64, 16, 16, 128, 4>;
using Some = Tile<64, 32, 16, 32, 64, 6>;
using SomeWide = Tile<64, 128, 32, 64, 64, 4>;
using Many = Tile<128, 128, 64, 64, 64, 3>;

enum class Ending { kStore, kGate };

// Where a chunk of a row of a tile stands, in elements.
template <int kDepth>
__device__ __forceinline__ int swizzled(int row, int chunk) {
    return row * kDepth + (chunk ^ (row & 7)) * kChunk;
}

// Copies tiles of kRows rows from `first` on of a matrix [end, depth], step by step along the depth. A thread has the
// same chunk of every kPassRows'th row.
template <int kRows, int kDepth>
struct TileCopy {
    static constexpr int kChunks = kDepth / kChunk, kPassRows = kThreads / kChunks;
    static_assert(kRows % kPassRows == 0 && kPassRows % 8 == 0, "whole passes, and the same permutation in each");

    const ELEMENT* source;  // the thread's first chunk in the next step
    int rows_left, column, depth, target;

    __device__ __forceinline__ TileCopy(const ELEMENT* matrix, int first, int end, int depth_) : depth(depth_) {
        const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
        source = matrix + static_cast<long long>(first + row) * depth + chunk * kChunk;
        rows_left = end - first - row;
        column = chunk * kChunk;
        target = swizzled<kDepth>(row, chunk);
    }

    __device__ __forceinline__ void start_next(ELEMENT* tile) {
#pragma unroll
        for (int i = 0; i < kRows / kPassRows; i++) {
            const bool is_inside = i * kPassRows < rows_left && column < depth;
            const ELEMENT* const place = source + static_cast<long long>(i * kPassRows) * depth;
            cp_async_16_zfill(tile + target + i * kPassRows * kDepth, place, is_inside);  // outside nothing is read
        }
        source += kDepth, column += kDepth;
    }
};

__device__ __forceinline__ void store_pair(ELEMENT* out, float low, float high) {
    *reinterpret_cast<unsigned*>(out) = pack(low, high);
}
__device__ __forceinline__ void store_pair(float* out, float low, float high) {
    *reinterpret_cast<float2*>(out) = make_float2(low, high);
}

__device__ __forceinline__ float silu_and_mul(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

template <typename Shape, Ending kEnding, typename Output>
__device__ __forceinline__ void linear(
    const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ weight, const float* __restrict__ bias,
    const ELEMENT* __restrict__ residual, Output* __restrict__ out, int num_rows, int num_columns, int depth) {
    constexpr int kRows = Shape::kRows, kColumns = Shape::kColumns, kDepth = Shape::kDepth, kStages = Shape::kStages;
    constexpr int kWarpRows = Shape::kWarpRows, kWarpColumns = Shape::kWarpColumns;
    constexpr int kTilesDown = kWarpRows / 16, kTilesAcross = kWarpColumns / 8, kFragments = kDepth / 16;
    // How many fragments along the depth are loaded before they are multiplied. A narrow warp has few chains of
    // products, and nothing else to do while it waits for a load.
    constexpr int kAhead = kWarpRows == 16 ? kFragments : 1;
    constexpr int kStageElements = (kRows + kColumns) * kDepth;
    extern __shared__ __align__(16) ELEMENT stages[];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_row = warp % (kRows / kWarpRows) * kWarpRows,
              warp_column = warp / (kRows / kWarpRows) * kWarpColumns;

    const int tile_rows = (num_rows + kRows - 1) / kRows, tile_columns = (num_columns + kColumns - 1) / kColumns;
    const int group = blockIdx.x / (kGroup * tile_columns), in_group = blockIdx.x % (kGroup * tile_columns);
    const int group_rows = min(kGroup, tile_rows - group * kGroup);
    const int first_row = (group * kGroup + in_group % group_rows) * kRows;
    const int first_column = in_group / group_rows * kColumns;

    TileCopy<kRows, kDepth> x_copy(x, first_row, num_rows, depth);
    TileCopy<kColumns, kDepth> weight_copy(weight, first_column, num_columns, depth);
    int filled = 0;  // the stage that is filled next
    auto copy_stage = [&] {
        x_copy.start_next(stages + filled * kStageElements);
        weight_copy.start_next(stages + filled * kStageElements + kRows * kDepth);
        cp_async_commit();
        filled = filled + 1 < kStages ? filled + 1 : 0;
    };

    // The thread's sums are those of pairs of columns from own_column on, 8 apart, in rows from own_row on, 8 apart.
    const long long own_row = first_row + warp_row + lane / 4;
    const int own_column = first_column + warp_column + lane % 4 * 2;

    // What of the residual is added to them: asked for all at once, and before the products where registers hold both.
    constexpr bool kIsEarly = kTilesDown * kTilesAcross <= 4;
    unsigned residuals[kTilesDown][kTilesAcross][2];
    auto load_residuals = [&] {
#pragma unroll
        for (int i = 0; i < kTilesDown; i++)
#pragma unroll
            for (int j = 0; j < kTilesAcross; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const long long row = own_row + i * 16 + half * 8;
                    const int column = own_column + j * 8;
                    if (row >= num_rows || column >= num_columns) continue;
                    residuals[i][j][half] = *reinterpret_cast<const unsigned*>(residual + row * num_columns + column);
                }
    };

    float sums[kTilesDown][kTilesAcross][4];
#pragma unroll
    for (int i = 0; i < kTilesDown; i++)
#pragma unroll
        for (int j = 0; j < kTilesAcross; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[i][j][e] = 0.0f;

#pragma unroll
    for (int i = 0; i < kStages - 1; i++) copy_stage();
    if (kIsEarly && residual) load_residuals();
    for (int start = 0, stage = 0; start < depth; start += kDepth, stage = stage + 1 < kStages ? stage + 1 : 0) {
        cp_async_wait<kStages - 2>();
        __syncthreads();  // this step has arrived for all, and all have done with the one whose place is filled next

        const ELEMENT* const x_tile = stages + stage * kStageElements;
        const ELEMENT* const weight_tile = x_tile + kRows * kDepth;
#pragma unroll
        for (int first = 0; first < kFragments; first += kAhead) {
            unsigned a[kAhead][kTilesDown][4], b[kAhead][kTilesAcross][2];
#pragma unroll
            for (int ahead = 0; ahead < kAhead; ahead++) {
                const int k = first + ahead;
#pragma unroll
                for (int i = 0; i < kTilesDown; i++) {
                    const int row = warp_row + i * 16 + lane % 16;
                    ldmatrix_x4(a[ahead][i], x_tile + swizzled<kDepth>(row, k * 2 + lane / 16));
                }
                if constexpr (kTilesAcross == 1) {
                    const int row = warp_column + lane % 8;
                    ldmatrix_x2(b[ahead][0], weight_tile + swizzled<kDepth>(row, k * 2 + lane / 8 % 2));
                } else {
#pragma unroll
                    for (int j = 0; j < kTilesAcross; j += 2) {
                        unsigned pair[4];
                        const int row = warp_column + j * 8 + lane / 16 * 8 + lane % 8;
                        ldmatrix_x4(pair, weight_tile + swizzled<kDepth>(row, k * 2 + lane / 8 % 2));
                        b[ahead][j][0] = pair[0], b[ahead][j][1] = pair[1];
                        b[ahead][j + 1][0] = pair[2], b[ahead][j + 1][1] = pair[3];
                    }
                }
            }
            if (first == 0) copy_stage();  // here its instructions fill the waits of the products
#pragma unroll
            for (int ahead = 0; ahead < kAhead; ahead++)
#pragma unroll
                for (int i = 0; i < kTilesDown; i++)
#pragma unroll
                    for (int j = 0; j < kTilesAcross; j++) multiply_add(sums[i][j], a[ahead][i], b[ahead][j]);
        }
    }
    if (!kIsEarly && residual) load_residuals();
    cp_async_wait<0>();

#pragma unroll
    for (int j = 0; j < kTilesAcross; j++) {
        const int column = own_column + j * 8;
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
                const long long row = own_row + i * 16 + half * 8;
                if (row >= num_rows) continue;
                float low = sums[i][j][half * 2] + low_bias, high = sums[i][j][half * 2 + 1] + high_bias;
                if constexpr (kEnding == Ending::kGate) {
                    out[row * (num_columns / 2) + column / 2] = from_float<Output>(silu_and_mul(low, high));
                    continue;
                }
                if (residual) {
                    const float2 added = unpack(residuals[i][j][half]);
                    low += added.x, high += added.y;
                }
                Output* place = out + row * num_columns + column;
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

#define KERNEL(name, Shape)                                                                                      \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) name(                                              \
        const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ weight, const float* __restrict__ bias,       \
        const ELEMENT* __restrict__ residual, ELEMENT* __restrict__ out, int num_rows, int num_columns,          \
        int depth) {                                                                                             \
        linear<Shape, Ending::kStore, ELEMENT>(x, weight, bias, residual, out, num_rows, num_columns, depth);    \
    }

#define KERNEL_WITHOUT_RESIDUAL(name, Shape, ending, Output)                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) name(                                              \
        const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ weight, const float* __restrict__ bias,       \
        Output* __restrict__ out, int num_rows, int num_columns, int depth) {                                    \
        linear<Shape, ending, Output>(x, weight, bias, nullptr, out, num_rows, num_columns, depth);              \
    }

KERNEL(linear_few, Few)
KERNEL(linear_some, Some)
KERNEL(linear_many, Many)
KERNEL_WITHOUT_RESIDUAL(linear_few_float32, FewWide, Ending::kStore, float)
KERNEL_WITHOUT_RESIDUAL(linear_some_float32, SomeWide, Ending::kStore, float)
KERNEL_WITHOUT_RESIDUAL(linear_many_float32, Many, Ending::kStore, float)
KERNEL_WITHOUT_RESIDUAL(linear_few_gated, FewWide, Ending::kGate, ELEMENT)
KERNEL_WITHOUT_RESIDUAL(linear_some_gated, SomeWide, Ending::kGate, ELEMENT)
KERNEL_WITHOUT_RESIDUAL(linear_many_gated, Many, Ending::kGate, ELEMENT)
