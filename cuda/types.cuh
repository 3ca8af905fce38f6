// The element type that a file is compiled for, -DELEMENT=__half, __nv_bfloat16 or float, and its vectors of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounded to the nearest, ties to even.
template <typename To>
__device__ __forceinline__ To from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

// Read and written with one instruction.
template <typename T>
struct __align__(16) Vector {
    static constexpr int size = 16 / sizeof(T);
    T elements[size];
};
