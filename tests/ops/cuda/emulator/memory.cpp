// Shared memory, cp.async, and the check mode: a record of the last accesses to every byte of shared and global memory.
//
// In check mode kernels are compiled with -fsanitize=thread, which makes the compiler call __tsan_* at each access; but
// those functions are the ones below, not ThreadSanitizer's. The same holds for __ubsan_*.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include <sys/mman.h>

#include "block.h"

extern "C" {
__attribute__((visibility("hidden"))) extern const char __ehdr_start;
__attribute__((visibility("hidden"))) extern const char _end;
}

namespace emulator {
namespace {

constexpr size_t kSharedCapacity = 256 << 10;
constexpr size_t kRedZone = 64;  // between shared arrays, in check mode
constexpr uintptr_t kNear = 64 << 10;  // a wild address this close to an allocation is said to be beyond its end
constexpr int kPoison = 0xff;  // NaN in every floating-point type, -1 in integers

// When an access happened, and by whom.
struct Stamp {
    unsigned block;  // Block::number; 0: never
    unsigned thread;
    unsigned barriers;       // that the block had passed
    unsigned warp_barriers;  // that the warp had passed
};

// The last accesses to one byte.
struct Cell {
    Stamp write;
    Stamp reads[2];  // of two warps, if two have read it
    const void* write_at;
    const void* read_at;
    unsigned block;  // of shared memory: the block that the rest is about
    bool initialised;
    bool in_flight;
    bool atomic;  // the write
};

// Zero-filled on demand by the operating system: most cells are never looked at.
class Cells {
public:
    explicit Cells(size_t count) : bytes_(count * sizeof(Cell)) {
        void* memory =
            mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) std::abort();
        cells_ = static_cast<Cell*>(memory);
    }
    Cells(Cells&& other) : cells_(std::exchange(other.cells_, nullptr)), bytes_(other.bytes_) {}
    ~Cells() {
        if (cells_) munmap(cells_, bytes_);
    }
    Cell& operator[](size_t index) { return cells_[index]; }

private:
    Cell* cells_;
    size_t bytes_;
};

struct Array {
    const void* key;  // null: the dynamic one
    size_t begin;
    size_t size;
};

struct Copy {
    char* shared;
    unsigned bytes;
    unsigned group;
    char data[16];
    const void* program_counter;
};

struct Copies {
    std::vector<Copy> running;
    unsigned group;  // that the next copy belongs to
};

alignas(1024) char shared[kSharedCapacity];
size_t shared_end;
std::vector<Array> arrays;
std::vector<Copies> copies;  // by thread
std::vector<Cells> global_cells;  // by allocation
size_t last_allocation;

// What other blocks had published through an atomic when the running block read it.
struct Publication {
    unsigned thread;
    unsigned barriers;
};
std::map<uintptr_t, std::map<unsigned, Publication>> published;  // by address and block
std::map<unsigned, Publication> seen;                            // by block

Cells& shared_cells() {
    static Cells cells(kSharedCapacity);
    return cells;
}

Stamp now() { return {block.number, current->number, block.barriers, block.warps[current->warp()].barriers}; }

bool before(const Stamp& earlier) {
    if (earlier.block == 0 || (earlier.block == block.number && earlier.thread == current->number)) return true;
    if (earlier.block != block.number) {
        const auto found = seen.find(earlier.block);
        return found != seen.end() &&
               (earlier.barriers < found->second.barriers || earlier.thread == found->second.thread);
    }
    if (earlier.barriers != block.barriers) return true;
    const unsigned warp = earlier.thread / kWarpSize;
    return warp == current->warp() && earlier.warp_barriers != block.warps[warp].barriers;
}

void report_race(const char* kind, const char* memory, const void* here, const Stamp& other, const void* there) {
    const Thread& thread = block.threads[other.thread];
    char text[80];
    std::snprintf(text, sizeof text, "block %u thread (%u, %u, %u)", other.block - 1, thread.index.x, thread.index.y,
                  thread.index.z);
    report(kind, here,
           std::string("race in ") + memory + ": " + who(*current) + " " + kind + " " + text +
               " with no barrier between; at " + where(here) + " and " + where(there));
}

void record_read(Cell& cell, const char* memory, const void* here) {
    if (!before(cell.write)) report_race("reads what was written by", memory, here, cell.write, cell.write_at);
    const Stamp stamp = now();
    const auto same_warp = [&](const Stamp& other) {
        return other.block == stamp.block && other.thread / kWarpSize == stamp.thread / kWarpSize;
    };
    const auto replaceable = [&](const Stamp& other) {
        return other.block == 0 || (other.block == stamp.block && other.barriers != stamp.barriers) || same_warp(other);
    };
    cell.read_at = here;
    const bool first_is_mine = cell.reads[0].block == stamp.block && cell.reads[0].thread == stamp.thread;
    if (first_is_mine || cell.reads[0].block == 0) cell.reads[0] = stamp;
    else if (replaceable(cell.reads[1]) || same_warp(cell.reads[0])) cell.reads[1] = stamp;
    else if (replaceable(cell.reads[0])) cell.reads[0] = stamp;
}

void record_write(Cell& cell, const char* memory, const void* here, bool atomic) {
    if (!(atomic && cell.atomic) && !before(cell.write)) {
        report_race("overwrites what was written by", memory, here, cell.write, cell.write_at);
    }
    for (const Stamp& read : cell.reads) {
        if (!before(read)) report_race("overwrites what is being read by", memory, here, read, cell.read_at);
    }
    cell.write = now();
    cell.write_at = here;
    cell.initialised = true;
    cell.atomic = atomic;
}

std::string describe(size_t bytes, Access access) {
    const char* names[] = {"read", "write", "atomic operation"};
    return std::to_string(bytes) + "-byte " + names[static_cast<int>(access)];
}

[[noreturn]] void out_of_bounds(const void* here, const std::string& what) {
    report("bounds", here, what + "; " + who(*current) + " at " + where(here));
    stop();
}

Cell& shared_cell(size_t offset) {
    Cell& cell = shared_cells()[offset];
    if (cell.block != block.number) {
        cell = Cell{};
        cell.block = block.number;
    }
    return cell;
}

void check_shared(size_t offset, size_t bytes, Access access, const void* here) {
    const bool inside = std::any_of(arrays.begin(), arrays.end(), [&](const Array& array) {
        return offset >= array.begin && offset + bytes <= array.begin + array.size;
    });
    if (!inside) {
        out_of_bounds(here, "shared memory out of bounds: " + describe(bytes, access) + " at offset " +
                                std::to_string(offset) + ", outside of every array");
    }
    for (size_t i = offset; i < offset + bytes; i++) {
        Cell& cell = shared_cell(i);
        if (cell.in_flight) {
            report("in flight", here, "shared memory touched while a cp.async into it is in flight; " + who(*current) +
                                          " at " + where(here));
        }
        if (access != Access::write && !cell.initialised) {
            report("uninitialised", here, "read of uninitialised shared memory; " + who(*current) + " at " + where(here));
        }
        if (access == Access::read) record_read(cell, "shared memory", here);
        else record_write(cell, "shared memory", here, access == Access::atomic);
    }
}

void check_global(uintptr_t address, size_t bytes, Access access, const void* here) {
    const Allocation* const begin = launch->allocations;
    const Allocation* const end = begin + launch->num_allocations;
    const Allocation* found = begin + last_allocation;
    if (found >= end || address < found->begin || address - found->begin >= found->size) {
        found = std::upper_bound(begin, end, address, [](uintptr_t a, const Allocation& b) { return a < b.begin; });
        if (found == begin || address + bytes > found[-1].begin + found[-1].size) {
            if (found != begin && address - found[-1].begin - found[-1].size < kNear) {
                out_of_bounds(here, "global memory out of bounds: " + describe(bytes, access) + " " +
                                        std::to_string(address - found[-1].begin - found[-1].size) +
                                        " bytes past the end of " + found[-1].name);
            }
            if (found != end && found->begin - address < kNear) {
                out_of_bounds(here, "global memory out of bounds: " + describe(bytes, access) + " " +
                                        std::to_string(found->begin - address) + " bytes before " + found->name);
            }
            char text[24];
            std::snprintf(text, sizeof text, "%#zx", address);
            out_of_bounds(here, "wild " + describe(bytes, access) + " at address " + text);
        }
        last_allocation = --found - begin;
    }
    if (address + bytes > found->begin + found->size) {
        out_of_bounds(here, "global memory out of bounds: " + describe(bytes, access) + " across the end of " + found->name);
    }
    if (access == Access::atomic) {
        auto& publications = published[address];
        for (const auto& [other, publication] : publications) {
            Publication& known = seen[other];
            if (publication.barriers >= known.barriers) known = publication;
        }
        publications[block.number] = {current->number, block.barriers};
    }
    Cells& cells = global_cells[found - begin];
    for (size_t i = address - found->begin; i < address - found->begin + bytes; i++) {
        if (access == Access::read) record_read(cells[i], found->name, here);
        else record_write(cells[i], found->name, here, access == Access::atomic);
    }
}

void check(const void* pointer, size_t bytes, Access access, const void* here, bool aligned) {
    if (!current) return;
    const char* const address = static_cast<const char*>(pointer);
    if (address >= current->stack_begin && address < current->stack_end) return;
    if (aligned && reinterpret_cast<uintptr_t>(address) % bytes) {
        out_of_bounds(here, "misaligned " + describe(bytes, access));
    }
    if (address >= shared && address < shared + kSharedCapacity) return check_shared(address - shared, bytes, access, here);
    if (address >= &__ehdr_start && address < &_end) return;  // constants of the kernel
    check_global(reinterpret_cast<uintptr_t>(address), bytes, access, here);
}

size_t add_array(const void* key, size_t size, size_t alignment) {
    const size_t begin = (shared_end + (launch->checks ? kRedZone : 0) + alignment - 1) / alignment * alignment;
    if (begin + size > kSharedCapacity) std::abort();
    arrays.push_back({key, begin, size});
    shared_end = begin + size;
    std::memset(shared + begin, kPoison, size);
    return begin;
}

void finish(Copies& of_thread, unsigned first_kept_group) {
    size_t count = 0;
    for (const Copy& copy : of_thread.running) {
        if (copy.group >= first_kept_group) break;
        count++;
        if (launch->checks) {
            const size_t offset = copy.shared - shared;
            for (size_t i = offset; i < offset + copy.bytes; i++) shared_cell(i).in_flight = false;
            check(copy.shared, copy.bytes, Access::write, copy.program_counter, false);
        }
        std::memcpy(copy.shared, copy.data, copy.bytes);
    }
    of_thread.running.erase(of_thread.running.begin(), of_thread.running.begin() + count);
}

}  // namespace

// ---- For the scheduler ----

void start_launch_memory() {
    launch->shared_used = 0;
    last_allocation = 0;
    published.clear();
    if (!launch->checks) return;
    for (size_t i = 0; i < kSharedCapacity; i++) shared_cells()[i].block = 0;
    for (size_t i = 0; i < launch->num_allocations; i++) global_cells.emplace_back(launch->allocations[i].size + 1);
}

void end_launch_memory() { global_cells.clear(); }

void start_block_memory() {
    seen.clear();
    arrays.clear();
    shared_end = 0;
    add_array(nullptr, launch->dynamic_shared, 1024);
    copies.assign(block.threads.size(), {});
}

void thread_returns(Thread& thread) {
    const Copies& mine = copies[thread.number];
    if (mine.running.empty()) return;
    report("in flight", mine.running.front().program_counter,
           "a thread returns while its cp.async is in flight; " + who(thread) + ", copy from " +
               where(mine.running.front().program_counter));
}

// ---- For kernels ----

void* dynamic_shared() { return shared + arrays.front().begin; }

void* static_shared(const void* key, size_t size, size_t alignment) {
    for (const Array& array : arrays) {
        if (array.key == key) return shared + array.begin;
    }
    const size_t begin = add_array(key, size, std::max<size_t>(alignment, 16));
    size_t used = 0;
    for (const Array& array : arrays) used += array.size;
    launch->shared_used = std::max(launch->shared_used, used);
    if (used > launch->shared_limit) {
        report("shared", nullptr, "the block takes " + std::to_string(used) + " bytes of shared memory, more than " +
                                      std::to_string(launch->shared_limit));
        stop();
    }
    return shared + begin;
}

void copy_async(void* to, const void* from, unsigned bytes, unsigned source_bytes, const Site& site) {
    const void* here = __builtin_return_address(0);
    char* const destination = static_cast<char*>(to);
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes) {
        fault("cp.async: an address is not a multiple of the size", site);
    }
    if (destination < shared || destination >= shared + kSharedCapacity) {
        fault("cp.async: the destination is not in shared memory", site);
    }
    if (launch->checks) {
        if (source_bytes) check(from, source_bytes, Access::read, here, false);
        check(to, bytes, Access::write, here, false);
        for (unsigned i = 0; i < bytes; i++) shared_cell(destination - shared + i).in_flight = true;
    }
    Copies& mine = copies[current->number];
    Copy copy{destination, bytes, mine.group, {}, here};
    std::memcpy(copy.data, from, source_bytes);
    mine.running.push_back(copy);
    std::memset(to, kPoison, bytes);
}

void copy_async_commit() { copies[current->number].group++; }

void copy_async_wait(unsigned groups_still_running) {
    Copies& mine = copies[current->number];
    finish(mine, mine.group > groups_still_running ? mine.group - groups_still_running : 0);
}

void touch(const void* address, size_t bytes, Access access, const void* program_counter) {
    if (launch->checks) check(address, bytes, access, program_counter, true);
}

namespace {

[[noreturn]] void undefined(const char* what, const void* here) {
    if (!current) std::abort();
    report("undefined behaviour", here, std::string(what) + "; " + who(*current) + " at " + where(here));
    stop();
}

}  // namespace
}  // namespace emulator

// ---- Called by instrumented code ----

using emulator::Access;

#define INSTRUMENTED(bytes)                                                                                       \
    extern "C" void __tsan_read##bytes(void* address) {                                                          \
        emulator::check(address, bytes, Access::read, __builtin_return_address(0), true);                         \
    }                                                                                                             \
    extern "C" void __tsan_write##bytes(void* address) {                                                         \
        emulator::check(address, bytes, Access::write, __builtin_return_address(0), true);                        \
    }                                                                                                             \
    extern "C" void __tsan_unaligned_read##bytes(void* address) {                                                \
        emulator::check(address, bytes, Access::read, __builtin_return_address(0), false);                        \
    }                                                                                                             \
    extern "C" void __tsan_unaligned_write##bytes(void* address) {                                               \
        emulator::check(address, bytes, Access::write, __builtin_return_address(0), false);                       \
    }
INSTRUMENTED(1)
INSTRUMENTED(2)
INSTRUMENTED(4)
INSTRUMENTED(8)
INSTRUMENTED(16)
extern "C" void __tsan_read_range(void* address, size_t bytes) {
    emulator::check(address, bytes, Access::read, __builtin_return_address(0), false);
}
extern "C" void __tsan_write_range(void* address, size_t bytes) {
    emulator::check(address, bytes, Access::write, __builtin_return_address(0), false);
}
extern "C" void __tsan_init() {}

#define UNDEFINED(handler, what)                                             \
    extern "C" void __ubsan_handle_##handler(void*, void*, void*) {          \
        emulator::undefined(what, __builtin_return_address(0));              \
    }
UNDEFINED(type_mismatch_v1, "misaligned access, or one through a null pointer")
UNDEFINED(out_of_bounds, "index beyond the bounds of an array")
UNDEFINED(shift_out_of_bounds, "shift by too many bits")
UNDEFINED(add_overflow, "signed addition overflows")
UNDEFINED(sub_overflow, "signed subtraction overflows")
UNDEFINED(mul_overflow, "signed multiplication overflows")
UNDEFINED(negate_overflow, "signed negation overflows")
UNDEFINED(divrem_overflow, "integer division by zero, or overflow of one")
