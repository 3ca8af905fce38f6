// CUDA C++ for g++: included before every kernel file. Only what the kernels use; g++ names what else is missing.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "emulator.h"
#include "kernel.h"

#define CUDA_EMULATOR 1
#define __CUDA_ARCH__ 800  // after NVIDIA's headers, which must take their host branch

using std::max;
using std::min;

// ---- Where a thread stands ----

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_dim())
#define gridDim (emulator::grid_dim())
constexpr int warpSize = emulator::kWarpSize;

// ---- Barriers ----

inline void __syncthreads(emulator::Site site = emulator::Site::current()) { emulator::barrier(false, site); }
inline int __syncthreads_count(int predicate, emulator::Site site = emulator::Site::current()) {
    return emulator::barrier(predicate != 0, site);
}
inline int __syncthreads_or(int predicate, emulator::Site site = emulator::Site::current()) {
    return emulator::barrier(predicate != 0, site) != 0;
}
inline int __syncthreads_and(int predicate, emulator::Site site = emulator::Site::current()) {
    return emulator::barrier(predicate == 0, site) == 0;
}
inline void __syncwarp(unsigned mask = emulator::kAllLanes, emulator::Site site = emulator::Site::current()) {
    emulator::warp_barrier(mask, site);
}

// Blocks run one after the other; what atomics order between them, the check mode knows without fences.
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- Warp collectives ----

namespace emulator {

struct Shuffle {
    uint64_t given;
    uint64_t taken;
    unsigned source;  // lane
};

EMULATOR_UNCHECKED inline void combine_shuffles(void* const arguments[kWarpSize], unsigned mask) {
    for (unsigned lane = 0; lane < kWarpSize; lane++) {
        if (!(mask >> lane & 1)) continue;
        Shuffle& shuffle = *static_cast<Shuffle*>(arguments[lane]);
        const bool defined = mask >> shuffle.source & 1;
        shuffle.taken = defined ? static_cast<Shuffle*>(arguments[shuffle.source])->given : ~uint64_t{0};
    }
}

template <typename T>
EMULATOR_UNCHECKED T shuffle(unsigned mask, T value, unsigned source, const Site& site) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    Shuffle shuffle{0, 0, source};
    std::memcpy(&shuffle.given, &value, sizeof(T));
    collective("__shfl_sync", mask, &shuffle, combine_shuffles, site);
    std::memcpy(&value, &shuffle.taken, sizeof(T));
    return value;
}

struct Vote {
    bool predicate;
    unsigned ballot;
};

EMULATOR_UNCHECKED inline void combine_votes(void* const arguments[kWarpSize], unsigned mask) {
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < kWarpSize; lane++) {
        if (mask >> lane & 1) ballot |= unsigned{static_cast<Vote*>(arguments[lane])->predicate} << lane;
    }
    for (unsigned lane = 0; lane < kWarpSize; lane++) {
        if (mask >> lane & 1) static_cast<Vote*>(arguments[lane])->ballot = ballot;
    }
}

EMULATOR_UNCHECKED inline unsigned ballot(unsigned mask, bool predicate, const Site& site) {
    Vote vote{predicate, 0};
    collective("__ballot_sync", mask, &vote, combine_votes, site);
    return vote.ballot;
}

}  // namespace emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, emulator::Site site = emulator::Site::current()) {
    const unsigned lane = emulator::lane(), first = lane & ~(width - 1);
    return emulator::shuffle(mask, value, first | (source & (width - 1)), site);
}
template <typename T>
T __shfl_up_sync(
    unsigned mask, T value, unsigned delta, int width = warpSize, emulator::Site site = emulator::Site::current()) {
    const unsigned lane = emulator::lane(), first = lane & ~(width - 1);
    return emulator::shuffle(mask, value, lane - first >= delta ? lane - delta : lane, site);
}
template <typename T>
T __shfl_down_sync(
    unsigned mask, T value, unsigned delta, int width = warpSize, emulator::Site site = emulator::Site::current()) {
    const unsigned lane = emulator::lane(), end = (lane & ~(width - 1)) + width;
    return emulator::shuffle(mask, value, lane + delta < end ? lane + delta : lane, site);
}
template <typename T>
T __shfl_xor_sync(
    unsigned mask, T value, int lanes, int width = warpSize, emulator::Site site = emulator::Site::current()) {
    const unsigned lane = emulator::lane(), source = lane ^ lanes, end = (lane & ~(width - 1)) + width;
    return emulator::shuffle(mask, value, source < end ? source : lane, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, emulator::Site site = emulator::Site::current()) {
    return emulator::ballot(mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, emulator::Site site = emulator::Site::current()) {
    return emulator::ballot(mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, emulator::Site site = emulator::Site::current()) {
    return emulator::ballot(mask, predicate != 0, site) == mask;
}

// ---- Atomics: threads of the emulator never run at the same time, so a read and a write will do ----

namespace emulator {

template <typename T, typename Function>
EMULATOR_UNCHECKED T atomic(T* address, Function function) {
    touch(address, sizeof(T), Access::atomic, __builtin_return_address(0));
    const T old = *address;
    *address = function(old);
    return old;
}

}  // namespace emulator

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
    return emulator::atomic(address, [=](T old) { return static_cast<T>(old + value); });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
    return emulator::atomic(address, [=](T old) { return std::max(old, value); });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
    return emulator::atomic(address, [=](T old) { return std::min(old, value); });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
    return emulator::atomic(address, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
    return emulator::atomic(address, [=](T old) { return old == expected ? value : old; });
}

// ---- Loads and stores with cache hints ----

template <typename T>
T __ldg(const T* address) {
    return *address;
}
template <typename T>
T __ldcs(const T* address) {
    return *address;
}
template <typename T>
void __stcs(T* address, std::type_identity_t<T> value) {
    *address = value;
}

// ---- Arithmetic ----

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<uint64_t>(x) * y >> 32; }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return static_cast<unsigned __int128>(x) * y >> 64;
}

#define __trap() emulator::fault("__trap()", emulator::Site::current())
