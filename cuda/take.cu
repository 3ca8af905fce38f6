// take: out[t] = x[indices[t]], rows of activations or logits.
//
//   x        int32 [rows, words]: whatever is in them, 4 bytes at a time, for rows of logits need not be a multiple of 16
//   indices  int32 [T], each in [0, rows)
//   out      int32 [T, words]
//
// Grid: (T, ceil(words / 1024)) blocks of 256 threads. A thread copies four words, 256 apart, all of them under way at
// once.
// Bytes moved: 8 * T * words: 2 MB for the last hidden states of 256 sequences of 4096 float16, 0.9 us at 4.8 TB/s.
//
// Budget: take: 32 registers, 0 bytes of shared memory

extern "C" __global__ void __launch_bounds__(256) take(
    const int* __restrict__ x, const int* __restrict__ indices, int* __restrict__ out, int words) {
    const int* const source = x + static_cast<long long>(indices[blockIdx.x]) * words;
    int* const target = out + static_cast<long long>(blockIdx.x) * words;
    const int first = blockIdx.y * 1024 + threadIdx.x;
    int held[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (first + i * 256 < words) held[i] = source[first + i * 256];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (first + i * 256 < words) target[first + i * 256] = held[i];
    }
}
