// In place of NVIDIA's crt/host_defines.h, which is not in the runtime wheel: the qualifiers of CUDA C++ for g++.
#pragma once

#define __host__
#define __device__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __no_return__ __attribute__((noreturn))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __grid_constant__
#define __device_builtin__
#define __cudart_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __specialization_static static
#define CUDARTAPI

// Markers that compiler.py finds in the preprocessed text: it lists the kernels and rewrites shared memory.
#define __global__ CUDA_GLOBAL
#define __launch_bounds__(...) CUDA_BOUNDS[__VA_ARGS__]
#define __shared__ CUDA_SHARED

// vector_functions.h includes the host's runtime API for nothing that is needed here.
#define __CUDA_RUNTIME_API_H__
