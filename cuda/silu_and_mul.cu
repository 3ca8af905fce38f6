// silu_and_mul: out = gate / (1 + exp(-gate)) * up.
//
//   gate_up  ELEMENT [T, 2 * size], the gates first; size * sizeof(ELEMENT) is a multiple of 16
//   out      ELEMENT [T, size]
//
// Grid: (T, ceil(size / elements of a block)) blocks of 256 threads. A thread owns 16 bytes of the output.
// Bytes moved: 3 * T * size * sizeof(ELEMENT): 176 MB for 2048 tokens of 14336 float16, 37 us at 4.8 TB/s.
//
// Budget: silu_and_mul: 40 registers, 0 bytes of shared memory

#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) silu_and_mul(
    const ELEMENT* __restrict__ gate_up, ELEMENT* __restrict__ out, int size) {
    using Row = Vector<ELEMENT>;
    const int i = (blockIdx.y * blockDim.x + threadIdx.x) * Row::size;
    if (i >= size) return;
    const ELEMENT* gates = gate_up + static_cast<long long>(blockIdx.x) * 2 * size;
    const Row gate = *reinterpret_cast<const Row*>(gates + i);
    Row row = *reinterpret_cast<const Row*>(gates + size + i);
#pragma unroll
    for (int j = 0; j < Row::size; j++) {
        const float x = to_float(gate.elements[j]);
        row.elements[j] = from_float<ELEMENT>(x / (1.0f + __expf(-x)) * to_float(row.elements[j]));
    }
    *reinterpret_cast<Row*>(out + static_cast<long long>(blockIdx.x) * size + i) = row;
}
