// All inline PTX of the project, each instruction in a function of its own. On the host, where tests run the kernels, the
// same functions come from the emulator (tests/ops/cuda/emulator/ptx.h). Fragments of matrices are laid out as in the PTX ISA
// (9.7.14, "Matrix fragments for mma.m16n8k16" and "ldmatrix").
#pragma once

#ifdef CUDA_EMULATOR
#include "ptx.h"
#else

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// ---- Tensor cores ----

// 2 or 4 matrices of 8 x 8 16-bit elements from shared memory: lane 8 i + r gives the address (a multiple of 16) of row r
// of matrix i; fragments[i] receives its elements [lane / 4][2 (lane % 4)] and the next one; _trans: of the transpose.
__device__ __forceinline__ void ldmatrix_x2(unsigned* fragments, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragments[0]), "=r"(fragments[1])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(unsigned* fragments, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned* fragments, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragments[0]), "=r"(fragments[1])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned* fragments, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// D = A B + C with A [16, 16] by rows, B [16, 8] by columns, C and D [16, 8] in float32. d may be c.
__device__ __forceinline__ void mma_m16n8k16_f16(float* d, const unsigned* a, const unsigned* b, const float* c) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
                   "f"(c[3]));
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float* d, const unsigned* a, const unsigned* b, const float* c) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
                   "f"(c[3]));
}

// ---- Asynchronous copies from global to shared memory, 16 bytes each, past the L1 cache ----

__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
// Writes zeros and does not read if not `valid`.
__device__ __forceinline__ void cp_async_16_zfill(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
// The copies since the last commit become a group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most so many of this thread's latest groups still run. Other threads see the data after a barrier.
template <int groups_still_running>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(groups_still_running) : "memory");
}

// ---- Arithmetic ----

// 2^x to about two units in the last place; -infinity gives 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
