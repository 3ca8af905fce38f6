// What kernels on tensor cores share: the element type of a build, products of its fragments, and packing.
//
// ELEMENT is __half or __nv_bfloat16. Fragments are those of mma.m16n8k16: with g = lane / 4 and q = lane % 4, a thread
// holds of the sum [16, 8] the elements (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1).
#pragma once

#include "ptx.cuh"
#include "types.cuh"

constexpr int kChunk = 8;  // elements in a 16-byte access

__device__ __forceinline__ void multiply_add(float* sum, const unsigned* a, const unsigned* b, __half) {
    mma_m16n8k16_f16(sum, a, b, sum);
}

__device__ __forceinline__ void multiply_add(float* sum, const unsigned* a, const unsigned* b, __nv_bfloat16) {
    mma_m16n8k16_bf16(sum, a, b, sum);
}

// sum[16, 8] += a[16, 16] b[16, 8]
__device__ __forceinline__ void multiply_add(float* sum, const unsigned* a, const unsigned* b) {
    multiply_add(sum, a, b, ELEMENT{});
}

__device__ __forceinline__ unsigned pack(float low, float high, __half) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

__device__ __forceinline__ unsigned pack(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// Two numbers, rounded, in the 32 bits of two neighbouring elements.
__device__ __forceinline__ unsigned pack(float low, float high) { return pack(low, high, ELEMENT{}); }

__device__ __forceinline__ float2 unpack(unsigned pair, __half) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

__device__ __forceinline__ float2 unpack(unsigned pair, __nv_bfloat16) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}

// The two numbers in the 32 bits of two neighbouring elements.
__device__ __forceinline__ float2 unpack(unsigned pair) { return unpack(pair, ELEMENT{}); }
