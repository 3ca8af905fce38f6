// What compiled kernels see of the emulator. README.md tells how it works.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>

#include <vector_functions.h>

// Kernels compiled in check mode are instrumented; the emulator's own code in their translation unit is not.
#define EMULATOR_UNCHECKED __attribute__((noinline, no_sanitize("thread", "undefined")))

namespace emulator {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

using Site = std::source_location;

// Where the calling thread stands. The same for all of a kernel's body, hence `const`.
[[gnu::const]] uint3 thread_index();
[[gnu::const]] uint3 block_index();
[[gnu::const]] dim3 block_dim();
[[gnu::const]] dim3 grid_dim();
[[gnu::const]] unsigned lane();

// __syncthreads and its relatives: waits for the block, then returns how many threads brought a true predicate.
int barrier(bool predicate, const Site& site);

// A warp instruction: waits until every lane of `mask` has come with the same `name`; then the last one runs `combine`
// on the arguments of all lanes (null for lanes outside the mask).
using Combine = void (*)(void* const arguments[kWarpSize], unsigned mask);
void collective(const char* name, unsigned mask, void* argument, Combine combine, const Site& site);

// __syncwarp: a collective that also orders memory.
void warp_barrier(unsigned mask, const Site& site);

// Shared memory of the running block. Static arrays are told apart by `key`.
void* dynamic_shared();
void* static_shared(const void* key, size_t size, size_t alignment);

// cp.async: reads `source_bytes` now, writes `bytes` (zeros beyond the source) when the thread waits for the group.
void copy_async(void* shared, const void* global, unsigned bytes, unsigned source_bytes, const Site& site);
void copy_async_commit();
void copy_async_wait(unsigned groups_still_running);

// Memory accesses that the instrumentation does not see.
enum class Access : uint8_t { read, write, atomic };
void touch(const void* address, size_t bytes, Access access, const void* program_counter);

// Reports a fault of the calling thread and ends the launch.
[[noreturn]] void fault(const char* what, const Site& site);

}  // namespace emulator
