// Runs a grid on fibers: each CUDA thread has a stack of its own and runs until it must wait.
// x86-64 System V only, for the eight instructions of switch_stack and the first frame in prepare().

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <set>
#include <utility>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "block.h"
#include "kernel.h"

extern "C" void emulator_switch_stack(void** save, void* next);
asm(R"(
    .text
    .hidden emulator_switch_stack
    .globl emulator_switch_stack
    .type emulator_switch_stack, @function
emulator_switch_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
    .size emulator_switch_stack, . - emulator_switch_stack
)");

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start;

namespace emulator {

Launch* launch;
Block block;
Thread* current;

namespace {

constexpr size_t kStackSize = 128 << 10;
constexpr unsigned kMostFaults = 20;

const Kernel* kernel;
void** kernel_arguments;
void* scheduler_stack;
std::vector<unsigned> ready;  // numbers of threads
size_t first_ready;
uint64_t random_state;
bool stopped;
volatile sig_atomic_t expired;
unsigned num_faults;
std::set<std::pair<std::string, const void*>> reported;

uint64_t random_below(uint64_t bound) {  // xorshift64
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % bound;
}

void make_ready(Thread& thread) {
    thread.state = State::ready;
    ready.push_back(thread.number);
}

Thread& take_ready() {
    unsigned number;
    if (launch->order == reverse) {
        number = ready.back();
        ready.pop_back();
    } else {
        if (launch->order == shuffled) std::swap(ready[first_ready], ready[first_ready + random_below(ready.size() - first_ready)]);
        number = ready[first_ready++];
    }
    if (first_ready == ready.size()) {
        ready.clear();
        first_ready = 0;
    }
    return block.threads[number];
}

void yield() { emulator_switch_stack(&current->stack_pointer, scheduler_stack); }

void stop_if_expired() {
    if (!expired) return;
    report("watchdog", nullptr, "the launch takes too long; " + who(*current) + " was running");
    stop();
}

void run_thread() {
    kernel->call(kernel_arguments);
    Thread& thread = *current;
    thread_returns(thread);
    thread.state = State::returned;
    block.num_returned++;
    block.warps[thread.warp()].returned |= 1u << thread.lane();
    yield();
    __builtin_unreachable();
}

// ---- Signals: a thread that spins or crashes is reported and abandoned ----

const int kHandled[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction previous[sizeof kHandled / sizeof *kHandled];
struct sigaction previous_timer;
const int kTimerSignal = SIGRTMIN + 6;

void on_crash(int signal, siginfo_t* info, void*) {
    if (!current) {
        std::signal(signal, SIG_DFL);
        return;  // a fault of the emulator itself: the instruction runs again and ends the process
    }
    char text[100];
    std::snprintf(text, sizeof text, "%s at address %p; ", strsignal(signal), info->si_addr);
    report("crash", nullptr, text + who(*current) + " was running");
    stop();
}

void on_timer(int, siginfo_t*, void*) {
    // The first time only a flag is set, which the emulator's functions see. A second time means that the kernel calls
    // none of them, so that no state of the emulator is half changed.
    if (expired && current) stop_if_expired();
    expired = 1;
}

class Signals {
public:
    Signals() {
        static char stack[64 << 10];
        stack_t alternative{};
        alternative.ss_sp = stack;
        alternative.ss_size = sizeof stack;
        sigaltstack(&alternative, &previous_stack_);

        struct sigaction action {};
        action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
        action.sa_sigaction = on_crash;
        for (size_t i = 0; i < std::size(kHandled); i++) sigaction(kHandled[i], &action, &previous[i]);

        action.sa_sigaction = on_timer;
        sigaction(kTimerSignal, &action, &previous_timer);
        sigevent event{};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = kTimerSignal;
        event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
        timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_);
        itimerspec time{};
        time.it_value.tv_sec = static_cast<time_t>(launch->cpu_seconds);
        time.it_value.tv_nsec = static_cast<long>((launch->cpu_seconds - time.it_value.tv_sec) * 1e9);
        time.it_interval.tv_nsec = 100'000'000;
        timer_settime(timer_, 0, &time, nullptr);
    }

    ~Signals() {
        timer_delete(timer_);
        sigaction(kTimerSignal, &previous_timer, nullptr);
        for (size_t i = 0; i < std::size(kHandled); i++) sigaction(kHandled[i], &previous[i], nullptr);
        sigaltstack(&previous_stack_, nullptr);
    }

private:
    stack_t previous_stack_;
    timer_t timer_;
};

// ---- Running blocks ----

// Every library uses the same stacks: with their own ones, a hundred libraries would have more mappings than a process
// may have.
void allocate_stacks(size_t count) {
    char*& stacks = *launch->stacks;
    if (!stacks) {
        constexpr size_t kMost = 1024;
        void* memory = mmap(
            nullptr, kMost * kStackSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) std::abort();
        stacks = static_cast<char*>(memory);
        // An overflow is a crash, not a corruption.
        for (size_t i = 0; i < kMost; i++) mprotect(stacks + i * kStackSize, 4096, PROT_NONE);
    }
    block.threads.resize(count);
    for (size_t i = 0; i < count; i++) {
        block.threads[i].stack_begin = stacks + i * kStackSize;
        block.threads[i].stack_end = stacks + (i + 1) * kStackSize;
    }
}

void prepare(Thread& thread, unsigned number) {
    thread.number = number;
    const unsigned x = launch->block[0], y = launch->block[1];
    thread.index = make_uint3(number % x, number / x % y, number / (x * y));
    // Stacks begin at different offsets within a page: the same ones would all fall into the same sets of the L1 cache.
    void** top = reinterpret_cast<void**>(thread.stack_end - 64 - number % 32 * 128);
    *--top = nullptr;  // aligns the stack as a call would
    *--top = reinterpret_cast<void*>(run_thread);
    for (int saved_register = 0; saved_register < 6; saved_register++) *--top = nullptr;
    thread.stack_pointer = top;
    make_ready(thread);
}

void report_deadlock() {
    const Thread* waiting[2] = {nullptr, nullptr};
    unsigned counts[2] = {0, 0};
    for (const Thread& thread : block.threads) {
        if (thread.state == State::returned) continue;
        const int kind = thread.state == State::at_barrier ? 0 : 1;
        if (!counts[kind]++) waiting[kind] = &thread;
    }
    std::string text = "deadlock: " + std::to_string(block.num_returned) + " threads returned";
    for (int kind = 0; kind < 2; kind++) {
        if (!counts[kind]) continue;
        text += ", " + std::to_string(counts[kind]) + " wait in " + waiting[kind]->waits_for + " at " +
                where(*waiting[kind]->waits_at) + " (" + who(*waiting[kind]) + ")";
    }
    report("deadlock", nullptr, text);
    stopped = true;
}

void run_block(unsigned number) {
    const unsigned gx = launch->grid[0], gy = launch->grid[1];
    block.index = make_uint3(number % gx, number / gx % gy, number / (gx * gy));
    block.number = number + 1;
    block.num_returned = block.barriers = block.num_waiting = 0;
    const unsigned count = block.threads.size();
    block.warps.resize((count + kWarpSize - 1) / kWarpSize);
    for (unsigned i = 0; i < block.warps.size(); i++) {
        Warp& warp = block.warps[i];
        const unsigned lanes = std::min(count - i * kWarpSize, kWarpSize);
        warp.existing = kAllLanes >> (kWarpSize - lanes);
        warp.returned = warp.barriers = 0;
        warp.gatherings.clear();
    }
    start_block_memory();
    ready.clear();
    first_ready = 0;
    for (unsigned i = 0; i < count; i++) prepare(block.threads[i], i);

    while (!stopped && !ready.empty()) {
        current = &take_ready();
        emulator_switch_stack(&scheduler_stack, current->stack_pointer);
        current = nullptr;
    }
    if (!stopped && block.num_returned < count) report_deadlock();
}

std::string hexadecimal(unsigned value) {
    char text[16];
    std::snprintf(text, sizeof text, "0x%08x", value);
    return text;
}

bool same(const Site& a, const Site& b) {
    return a.line() == b.line() && a.column() == b.column() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

}  // namespace

// ---- For kernels ----

uint3 thread_index() { return current->index; }
uint3 block_index() { return block.index; }
dim3 block_dim() { return dim3(launch->block[0], launch->block[1], launch->block[2]); }
dim3 grid_dim() { return dim3(launch->grid[0], launch->grid[1], launch->grid[2]); }
unsigned lane() { return current->lane(); }

int barrier(bool predicate, const Site& site) {
    stop_if_expired();
    Thread& thread = *current;
    if (block.num_returned) fault("__syncthreads after threads of the block have returned", site);
    if (block.num_waiting == 0) {
        block.barrier_site = site;
        block.votes = 0;
    } else if (!same(block.barrier_site, site)) {
        fault(("divergent __syncthreads: other threads wait at " + where(block.barrier_site)).c_str(), site);
    }
    block.votes += predicate;
    if (++block.num_waiting < block.threads.size()) {
        thread.state = State::at_barrier;
        thread.waits_at = &site;
        thread.waits_for = "__syncthreads";
        yield();
    } else {
        block.num_waiting = 0;
        block.barriers++;
        block.votes_of_last_barrier = block.votes;
        for (Thread& each : block.threads) make_ready(each);
        yield();
    }
    return block.votes_of_last_barrier;
}

void collective(const char* name, unsigned mask, void* argument, Combine combine, const Site& site) {
    stop_if_expired();
    Thread& thread = *current;
    Warp& warp = block.warps[thread.warp()];
    const unsigned self = 1u << thread.lane();
    const auto complain = [&](const std::string& what) { fault((std::string(name) + ": " + what).c_str(), site); };
    if (!(mask & self)) complain("the calling lane is not in its own mask " + hexadecimal(mask));
    if (mask & ~warp.existing) complain("mask " + hexadecimal(mask) + " names lanes that the block does not have");
    if (mask & warp.returned) complain("mask " + hexadecimal(mask) + " names lanes that have returned");

    size_t index = warp.gatherings.size();
    for (size_t i = 0; i < warp.gatherings.size(); i++) {
        const Gathering& other = warp.gatherings[i];
        if (other.mask == mask) {
            index = i;
        } else if ((other.mask & self) && (other.arrived & mask)) {
            complain("mask " + hexadecimal(mask) + " waits for lanes that wait for this one with mask " +
                     hexadecimal(other.mask) + " at " + where(other.site));
        }
    }
    if (index == warp.gatherings.size()) warp.gatherings.push_back({name, mask, 0, site});
    Gathering& gathering = warp.gatherings[index];
    if (std::strcmp(gathering.name, name) != 0 || !same(gathering.site, site)) {
        complain(std::string("lanes of one warp diverge: others wait in ") + gathering.name + " at " + where(gathering.site));
    }

    warp.arguments[thread.lane()] = argument;
    gathering.arrived |= self;
    if (gathering.arrived != mask) {
        thread.state = State::in_collective;
        thread.waits_at = &site;
        thread.waits_for = name;
        yield();
        return;
    }
    warp.gatherings.erase(warp.gatherings.begin() + index);
    if (combine) combine(warp.arguments, mask);
    for (unsigned lane = 0; lane < kWarpSize; lane++) {
        if (mask >> lane & 1) make_ready(block.threads[thread.warp() * kWarpSize + lane]);
    }
    yield();
}

void warp_barrier(unsigned mask, const Site& site) {
    collective("__syncwarp", mask, nullptr, [](void* const*, unsigned) { block.warps[current->warp()].barriers++; }, site);
}

// ---- Reports ----

std::string who(const Thread& thread) {
    char text[100];
    std::snprintf(text, sizeof text, "block (%u, %u, %u) thread (%u, %u, %u)", block.index.x, block.index.y, block.index.z,
                  thread.index.x, thread.index.y, thread.index.z);
    return text;
}

std::string where(const Site& site) { return std::string(site.file_name()) + ":" + std::to_string(site.line()); }

std::string where(const void* program_counter) {
    char text[40];
    // The call itself, not the instruction after it.
    std::snprintf(text, sizeof text, "{0x%zx}", static_cast<const char*>(program_counter) - &__ehdr_start - 1);
    return text;
}

void report(const char* kind, const void* program_counter, const std::string& what) {
    if (!reported.insert({kind, program_counter}).second) return;
    if (num_faults++ >= kMostFaults) return;
    const size_t used = std::strlen(launch->report);
    std::snprintf(launch->report + used, launch->report_size - used, "%s\n", what.c_str());
}

void fault(const char* what, const Site& site) {
    report(what, nullptr, std::string(what) + "; " + who(*current) + " at " + where(site));
    stop();
}

void stop() {
    stopped = true;
    void* abandoned;
    emulator_switch_stack(&abandoned, scheduler_stack);
    __builtin_unreachable();
}

}  // namespace emulator

// Runs a kernel over its grid. Returns the number of faults; the report describes them, one a line.
extern "C" __attribute__((visibility("default"))) unsigned emulator_launch(const emulator::Kernel* kernel, void** arguments, emulator::Launch* launch) {
    using namespace emulator;
    emulator::kernel = kernel;
    emulator::launch = launch;
    kernel_arguments = arguments;
    stopped = false;
    expired = 0;
    num_faults = 0;
    reported.clear();
    random_state = launch->seed * 0x9e3779b97f4a7c15 | 1;
    allocate_stacks(size_t{launch->block[0]} * launch->block[1] * launch->block[2]);

    std::vector<unsigned> blocks(launch->end_block - launch->first_block);
    for (size_t i = 0; i < blocks.size(); i++) {
        blocks[i] = launch->first_block + (launch->order == reverse ? blocks.size() - 1 - i : i);
        if (launch->order == shuffled) std::swap(blocks[i], blocks[random_below(i + 1)]);
    }
    start_launch_memory();
    {
        Signals signals;
        for (size_t i = 0; i < blocks.size() && !stopped; i++) run_block(blocks[i]);
    }
    end_launch_memory();
    return num_faults;
}
