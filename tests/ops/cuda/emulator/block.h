// The running block: what scheduler.cpp and memory.cpp share. One block runs at a time, on one OS thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "emulator.h"

namespace emulator {

enum class State : uint8_t { ready, at_barrier, in_collective, returned };

struct Thread {
    void* stack_pointer;  // while another thread runs
    char* stack_begin;
    char* stack_end;
    uint3 index;
    unsigned number;  // within the block
    State state;
    const Site* waits_at;
    const char* waits_for;

    unsigned warp() const { return number / kWarpSize; }
    unsigned lane() const { return number % kWarpSize; }
};

// Lanes that wait for the rest of `mask`.
struct Gathering {
    const char* name;
    unsigned mask;
    unsigned arrived;
    Site site;
};

struct Warp {
    unsigned existing;  // lanes
    unsigned returned;  // lanes
    unsigned barriers;  // passed __syncwarp
    void* arguments[kWarpSize];
    std::vector<Gathering> gatherings;
};

struct Block {
    uint3 index;
    unsigned number;  // within the grid, plus 1
    std::vector<Warp> warps;
    std::vector<Thread> threads;
    unsigned num_returned;
    // __syncthreads
    unsigned barriers;  // passed
    unsigned num_waiting;
    int votes;
    int votes_of_last_barrier;
    Site barrier_site;
};

struct Allocation {
    uintptr_t begin;
    size_t size;
    const char* name;
};

enum Order : unsigned { forward, reverse, shuffled };

// What Python asks for; the same fields in the same order as in emulated.py.
struct Launch {
    unsigned grid[3];
    unsigned block[3];
    size_t first_block, end_block;  // those that run, in the order x, y, z
    size_t dynamic_shared;
    size_t shared_limit;
    Order order;
    uint64_t seed;
    double cpu_seconds;  // until the watchdog ends the launch
    unsigned checks;     // whether the kernel was compiled in check mode
    const Allocation* allocations;  // by address
    size_t num_allocations;
    char** stacks;  // where the process keeps the address of the threads' stacks; null there: to be allocated
    // Results
    char* report;
    size_t report_size;
    size_t shared_used;
};

extern Launch* launch;
extern Block block;
extern Thread* current;  // null while no kernel code runs

// Appends a line to the report, once per kind and program counter.
void report(const char* kind, const void* program_counter, const std::string& what);
// Ends the launch. Called by the running thread, which never continues.
[[noreturn]] void stop();

std::string who(const Thread& thread);
std::string where(const Site& site);
std::string where(const void* program_counter);  // "{0x…}", an offset that Python looks up in the debug information

// memory.cpp
void start_launch_memory();
void end_launch_memory();
void start_block_memory();
void thread_returns(Thread& thread);  // checks that none of its copies is left

}  // namespace emulator
