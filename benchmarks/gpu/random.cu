// Random numbers for benchmarks: uniform in [-scale, scale), as bfloat16. Element i depends on i and the seed alone.
//
// Any grid; 2 bytes written per element.

extern "C" __global__ void fill_uniform(unsigned short* out, long long size, float scale, unsigned int seed) {
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
        // Two rounds of a multiply-xorshift hash.
        unsigned long long x = static_cast<unsigned long long>(i) * 0x9E3779B97F4A7C15ull + seed;
        x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
        x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
        const float value = (static_cast<int>(x >> 40) - (1 << 23)) * (scale / (1 << 23));
        union {
            float number;
            unsigned int bits;
        } word;
        word.number = value;
        out[i] = static_cast<unsigned short>((word.bits + 0x8000u) >> 16);
    }
}
