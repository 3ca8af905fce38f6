// rope_and_cache: rotates q and k at their positions (RoFormer, arXiv:2104.09864), writes k and v into their slots.
//
//   qkv        ELEMENT [T, num_query_heads + 2 * num_kv_heads, HEAD_DIM]
//   rope       float32 [max_model_len, HEAD_DIM / 2, 2]: cosine and sine
//   positions  int32 [T]
//   slots      int64 [T]: block * block_size + offset within the block
//   q_norm, k_norm  float32 [HEAD_DIM], weights of an RMSNorm of each head before the rotation, or null: no norm
//   query      ELEMENT [T, num_query_heads, HEAD_DIM]
//   cache      ELEMENT, blocks of all layers; within a head [block_size, HEAD_DIM]. In elements: `block_stride` from block
//              to block; K's first head of this layer begins `key_offset` into block 0, and the next one `key_head_stride`
//              further on; V likewise
//
// Element i and element i + HEAD_DIM / 2 of a head are the two coordinates of a plane. HEAD_DIM is a multiple of 4, at most
// 256.
//
// Grid: (T, ceil(heads / 4)) blocks of 128 threads. A warp owns one head of one token; a lane two planes next to each other,
// and again 64 planes further on.
//
// Bytes moved: 2 * T * heads * HEAD_DIM * sizeof(ELEMENT) and the rows of the table: 50 MB for 2048 tokens of 48 heads of 128
// float16, 11 us at 4.8 TB/s.
//
// Budget: rope_and_cache: 40 registers, 0 bytes of shared memory

#include "types.cuh"

struct __align__(2 * sizeof(ELEMENT)) Pair {
    ELEMENT elements[2];
};

extern "C" __global__ void __launch_bounds__(128) rope_and_cache(
    const ELEMENT* __restrict__ qkv, const float* __restrict__ rope, const int* __restrict__ positions,
    const long long* __restrict__ slots, const float* __restrict__ q_norm, const float* __restrict__ k_norm,
    ELEMENT* __restrict__ query, ELEMENT* __restrict__ cache, int num_query_heads, int num_kv_heads,
    int block_size, long long block_stride, long long key_offset, long long key_head_stride, long long value_offset,
    long long value_head_stride, float eps) {
    constexpr int kPlanes = HEAD_DIM / 2;
    constexpr int kSteps = (kPlanes + 63) / 64;
    const int token = blockIdx.x, head = blockIdx.y * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= num_query_heads + 2 * num_kv_heads) return;
    const bool is_query = head < num_query_heads, is_value = head >= num_query_heads + num_kv_heads;

    const long long num_heads = num_query_heads + 2 * num_kv_heads;
    const ELEMENT* in = qkv + (token * num_heads + head) * HEAD_DIM;
    float first[kSteps][2], second[kSteps][2];
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
        const int plane = step * 64 + lane * 2;
        if (plane >= kPlanes) continue;
        const Pair a = *reinterpret_cast<const Pair*>(in + plane);
        const Pair b = *reinterpret_cast<const Pair*>(in + plane + kPlanes);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            first[step][j] = to_float(a.elements[j]);
            second[step][j] = to_float(b.elements[j]);
        }
    }

    const float* norm = is_query ? q_norm : k_norm;
    if (!is_value && norm != nullptr) {
        float squares = 0.0f;
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            if (step * 64 + lane * 2 >= kPlanes) continue;
#pragma unroll
            for (int j = 0; j < 2; j++) squares += first[step][j] * first[step][j] + second[step][j] * second[step][j];
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, distance);
        const float scale = rsqrtf(squares / HEAD_DIM + eps);
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            const int plane = step * 64 + lane * 2;
            if (plane >= kPlanes) continue;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                first[step][j] *= scale * norm[plane + j];
                second[step][j] *= scale * norm[plane + kPlanes + j];
            }
        }
    }

    ELEMENT* out;
    if (is_query) {
        out = query + (static_cast<long long>(token) * num_query_heads + head) * HEAD_DIM;
    } else {
        const long long slot = slots[token], block = slot / block_size, offset = slot % block_size;
        const int kv_head = (head - num_query_heads) % num_kv_heads;
        const long long plane = is_value ? value_offset + kv_head * value_head_stride : key_offset + kv_head * key_head_stride;
        out = cache + block * block_stride + plane + offset * HEAD_DIM;
    }
    const float* angles = rope + static_cast<long long>(positions[token]) * HEAD_DIM;
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
        const int plane = step * 64 + lane * 2;
        if (plane >= kPlanes) continue;
        const float4 angle = is_value ? make_float4(1.0f, 0.0f, 1.0f, 0.0f) : *reinterpret_cast<const float4*>(angles + plane * 2);
        const float cosines[2] = {angle.x, angle.z}, sines[2] = {angle.y, angle.w};
        Pair a, b;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float x = first[step][j], y = second[step][j];
            a.elements[j] = from_float<ELEMENT>(is_value ? x : x * cosines[j] - y * sines[j]);
            b.elements[j] = from_float<ELEMENT>(is_value ? y : y * cosines[j] + x * sines[j]);
        }
        *reinterpret_cast<Pair*>(out + plane) = a;
        *reinterpret_cast<Pair*>(out + plane + kPlanes) = b;
    }
}
