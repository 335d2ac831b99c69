// Runs a launch: every GPU thread is a fiber, a threadgroup's fibers take turns on one core, and threadgroups spread
// over the cores.
//
// A thread that neither waits at a barrier nor in a SIMD operation runs to its end, and the next one starts on the same
// stack. Faults abandon the threadgroup: nothing on a fiber's stack needs destroying.
#include "launch.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "context_switch.h"

namespace metal_runtime {
namespace {

constexpr u64 SMALL_LAUNCH = 512;

enum ThreadState : u32 { READY, AT_BARRIER, AT_SIMD, FINISHED };

struct Progress {
    const Launch *launch;
    std::atomic<u64> next{0};
    std::atomic<bool> stopped{false};
    std::mutex lock;
    u64 group_count;
    u64 stride, start;  // the order of the threadgroups: (index * stride + start) % group_count
};

struct Worker {
    Group group;
    Thread threads[MAX_THREADS];
    Simdgroup simdgroups[MAX_THREADS / SIMD_WIDTH];
    u32 ready_simdgroups;
    u32 simdgroup;  // the one that ran last
    u32 at_barrier;
    u32 finished;
    u64 random;  // 0: threads run in order
    Progress *progress;
    void *main_stack_pointer;
    std::vector<void *> stacks;
    std::vector<void *> free_stacks;
    u32 epoch = 1;
    alignas(64) u8 memory[THREADGROUP_MEMORY];
    ThreadgroupCell cells[THREADGROUP_MEMORY];
};

Worker &worker_of(const Thread *thread) { return *static_cast<Worker *>(thread->group->worker); }

u32 draw(Worker &worker) {
    worker.random ^= worker.random << 13;
    worker.random ^= worker.random >> 7;
    worker.random ^= worker.random << 17;
    return static_cast<u32>(worker.random >> 32);
}

// The first bit set at or after a random place, or after `from` where threads run in order.
u32 pick_bit(u32 mask, u32 from) {
    const u32 rotated = from ? (mask >> from) | (mask << (32 - from)) : mask;
    return (static_cast<u32>(__builtin_ctz(rotated)) + from) & 31;
}

Thread *next_ready(Worker &worker) {
    if (worker.ready_simdgroups == 0) return nullptr;
    const bool shuffled = worker.random != 0;
    const u32 index = pick_bit(worker.ready_simdgroups, shuffled ? draw(worker) & 31 : worker.simdgroup);
    Simdgroup &simdgroup = worker.simdgroups[index];
    const u32 lane = pick_bit(simdgroup.ready, shuffled ? draw(worker) & 31 : 0);
    simdgroup.ready &= ~(1u << lane);
    if (simdgroup.ready == 0) worker.ready_simdgroups &= ~(1u << index);
    worker.simdgroup = index;
    return simdgroup.lanes + lane;
}

void make_ready(Worker &worker, Thread &thread) {
    thread.state = READY;
    thread.simdgroup->ready |= 1u << thread.lane;
    worker.ready_simdgroups |= 1u << thread.simdgroup->index;
}

void fiber_main();

void *take_stack(Worker &worker) {
    if (worker.free_stacks.empty()) {
        constexpr uptr BATCH = 64;
        void *memory = mmap(nullptr, (BATCH + 1) * STACK_SIZE, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            fputs("metal_emulator: no memory for the stacks of GPU threads\n", stderr);
            abort();
        }
        const uptr first = (reinterpret_cast<uptr>(memory) + STACK_SIZE - 1) & ~(STACK_SIZE - 1);
        for (uptr index = BATCH; index-- > 0;) {
            void *stack = reinterpret_cast<void *>(first + index * STACK_SIZE);
            // A thread that overflows its stack stops here instead of in its neighbour's.
            mprotect(stack, 4096, PROT_NONE);
            worker.stacks.push_back(stack);
            worker.free_stacks.push_back(stack);
        }
    }
    void *stack = worker.free_stacks.back();
    worker.free_stacks.pop_back();
    return stack;
}

// What to load to run `thread`: its saved context, or a fresh one on a free stack.
void *context_of(Worker &worker, Thread &thread) {
    if (thread.stack == nullptr) {
        thread.stack = take_stack(worker);
        Thread **owner = stack_owner(reinterpret_cast<uptr>(thread.stack));
        *owner = &thread;
        thread.stack_pointer = prepare_context(owner, fiber_main);
    }
    return thread.stack_pointer;
}

[[noreturn]] void abandon_group(Worker &worker) {
    void *unused;
    switch_context(&unused, worker.main_stack_pointer);
    __builtin_unreachable();
}

void write_position(char *text, size_t size, const Position &position, const Position &extent) {
    if (extent.y == 1 && extent.z == 1) {
        snprintf(text, size, "%u", position.x);
    } else {
        snprintf(text, size, "(%u, %u, %u)", position.x, position.y, position.z);
    }
}

void write_report(Thread *thread, const char *what) {
    const Worker &worker = worker_of(thread);
    Progress &progress = *worker.progress;
    const std::lock_guard<std::mutex> guard(progress.lock);
    if (progress.stopped.exchange(true)) return;
    const Launch &launch = *progress.launch;
    const Group &group = worker.group;
    const Position in_grid{group.position.x * launch.threads.x + thread->position.x,
                           group.position.y * launch.threads.y + thread->position.y,
                           group.position.z * launch.threads.z + thread->position.z};
    char grid_text[64], group_text[64], thread_text[64];
    write_position(grid_text, sizeof grid_text, in_grid, launch.grid);
    write_position(group_text, sizeof group_text, group.position, launch.groups);
    write_position(thread_text, sizeof thread_text, thread->position, launch.threads);
    snprintf(launch.report, launch.report_size, "%s: %s; thread %s of threadgroup %s (thread %s in the grid)",
             launch.kernel, what, thread_text, group_text, grid_text);
}

[[noreturn]] void fault(Thread *thread, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    write_report(thread, text);
    abandon_group(worker_of(thread));
}

const char *kind_name(u32 kind) { return kind == READ ? "read" : "write"; }

[[noreturn]] void access_fault(Thread *thread, const Region *region, const char *space, u32 kind, i64 offset, u32 size,
                               u32 alignment) {
    const i64 index = offset / static_cast<i64>(size);
    if (region->base == nullptr) {
        fault(thread, "%s of %s buffer '%s', which is not bound", kind_name(kind), space, region->name);
    }
    if (alignment != 0) {
        fault(thread, "misaligned %s of %s '%s': %u bytes at byte offset %lld need an alignment of %u", kind_name(kind),
              space, region->name, size, static_cast<long long>(offset), alignment);
    }
    if (kind == READ && offset >= 0 && static_cast<u64>(offset) + size <= region->length) {
        fault(thread, "read of %s '%s' [%lld], which no thread has written", space, region->name,
              static_cast<long long>(index));
    }
    fault(thread, "out-of-bounds %s of %s '%s' [%lld]: it holds %llu elements of %u bytes", kind_name(kind), space,
          region->name, static_cast<long long>(index), static_cast<unsigned long long>(region->length / size), size);
}

[[noreturn]] void race(Thread *thread, const Region *region, const char *space, u32 kind, i64 offset, u32 size,
                       u32 other_kind, u32 other_group, u32 other_thread) {
    const bool same_group = other_group == (thread->group->linear & 0x3fff);
    char other[64];
    if (other_thread == thread->index && same_group) {
        snprintf(other, sizeof other, "another thread");
    } else if (same_group) {
        snprintf(other, sizeof other, "thread %u of the threadgroup", other_thread);
    } else {
        snprintf(other, sizeof other, "thread %u of another threadgroup", other_thread);
    }
    const long long index = offset / static_cast<i64>(size);
    fault(thread, "race on %s '%s' [%lld]: %s by thread %u and %s by %s, with no barrier between", space, region->name,
          index, kind_name(kind), thread->index, kind_name(other_kind), other);
}

// Nothing can run although some threads wait: they wait for threads that returned or that wait elsewhere.
[[noreturn]] void report_divergence(Worker &worker) {
    Thread *waiting = nullptr;
    for (u32 i = 0; i < worker.group.count; ++i) {
        Thread &thread = worker.threads[i];
        if (thread.state == AT_SIMD) {
            waiting = &thread;
            break;
        }
        if (thread.state == AT_BARRIER && waiting == nullptr) waiting = &thread;
    }
    const bool simd = waiting->state == AT_SIMD;
    const Thread *members = simd ? waiting->simdgroup->lanes : worker.threads;
    const u32 count = simd ? waiting->simdgroup->count : worker.group.count;
    u32 here = 0, returned = 0, elsewhere = 0, other_site = 0;
    for (u32 i = 0; i < count; ++i) {
        if (members[i].state == FINISHED) {
            ++returned;
        } else if (members[i].state == waiting->state && members[i].site == waiting->site) {
            ++here;
        } else {
            ++elsewhere;
            other_site = members[i].site;
        }
    }
    char others[96] = "";
    if (elsewhere != 0) snprintf(others, sizeof others, ", %u wait at line %u", elsewhere, other_site);
    fault(waiting, "%s in divergent flow: %u of %u threads wait at line %u, %u have returned%s",
          simd ? "SIMD operation" : "barrier", here, count, waiting->site, returned, others);
}

// Leaves the calling fiber, whose context is saved in `thread` unless it has finished.
void run_another(Worker &worker, Thread &thread) {
    Thread *next = next_ready(worker);
    if (next == nullptr) report_divergence(worker);
    if (next != &thread) switch_context(&thread.stack_pointer, context_of(worker, *next));
}

void threadgroup_barrier(Thread *thread, u32 flags, u32 site) {
    Worker &worker = worker_of(thread);
    Group &group = worker.group;
    thread->site = site;
    thread->state = AT_BARRIER;
    if (++worker.at_barrier < group.count) {
        run_another(worker, *thread);
        return;
    }
    for (u32 i = 0; i < group.count; ++i) {
        if (worker.threads[i].site != site) report_divergence(worker);
    }
    worker.at_barrier = 0;
    if (flags & MEM_THREADGROUP) ++group.epoch;
    if (flags & MEM_DEVICE) ++group.device_epoch;
    for (u32 i = 0; i < group.count; ++i) make_ready(worker, worker.threads[i]);
    run_another(worker, *thread);
}

bool simd_arrive(Thread *thread, u32 site) {
    Worker &worker = worker_of(thread);
    Simdgroup &simdgroup = *thread->simdgroup;
    thread->site = site;
    thread->state = AT_SIMD;
    simdgroup.waiting += 1;
    if (simdgroup.waiting < simdgroup.count) {
        run_another(worker, *thread);
        return false;
    }
    for (u32 lane = 0; lane < simdgroup.count; ++lane) {
        if (simdgroup.lanes[lane].site != site) report_divergence(worker);
    }
    return true;
}

void simd_release(Thread *thread) {
    Worker &worker = worker_of(thread);
    Simdgroup &simdgroup = *thread->simdgroup;
    simdgroup.waiting = 0;
    for (u32 lane = 0; lane < simdgroup.count; ++lane) {
        if (simdgroup.lanes + lane != thread) make_ready(worker, simdgroup.lanes[lane]);
    }
    thread->state = READY;
}

void declare_array(Thread *thread, u32 array, const char *name, u64 bytes, u32 granule) {
    Group &group = *thread->group;
    if (array >= MAX_ARRAYS) fault(thread, "more than %u threadgroup arrays", MAX_ARRAYS);
    const u32 start = (group.memory_used + 15) & ~15u;
    if (start + bytes > THREADGROUP_MEMORY) {
        fault(thread, "threadgroup memory of %llu bytes exceeds the %u that a threadgroup has",
              static_cast<unsigned long long>(start + bytes), THREADGROUP_MEMORY);
    }
    group.memory_used = start + static_cast<u32>(bytes);
    if (group.launch->checks) memset(group.memory + start, 0xff, bytes);
    group.arrays[array] =
        Region{name, group.memory + start, bytes, 1, granule, nullptr, nullptr, group.cells + start};
}

void fiber_main() {
    Thread **owner = stack_owner(reinterpret_cast<uptr>(__builtin_frame_address(0)));
    for (;;) {
        Thread *thread = *owner;
        Worker &worker = worker_of(thread);
        worker.progress->launch->entry(*worker.progress->launch, *thread);
        thread->state = FINISHED;
        ++worker.finished;
        Thread *next = next_ready(worker);
        if (next != nullptr && next->stack == nullptr) {
            next->stack = thread->stack;
            *owner = next;
            continue;
        }
        if (next == nullptr && worker.finished < worker.group.count) report_divergence(worker);
        worker.free_stacks.push_back(thread->stack);
        void *unused;
        switch_context(&unused, next != nullptr ? next->stack_pointer : worker.main_stack_pointer);
    }
}

u32 edge(u32 group, u32 size, u32 grid) {
    const u32 left = grid - group * size;
    return left < size ? left : size;
}

void run_group(Worker &worker, u64 linear) {
    const Launch &launch = *worker.progress->launch;
    Group &group = worker.group;
    const u64 plane = static_cast<u64>(launch.groups.x) * launch.groups.y;
    const u32 rest = static_cast<u32>(linear % plane);
    group.launch = &launch;
    group.worker = &worker;
    group.position = Position{rest % launch.groups.x, rest / launch.groups.x, static_cast<u32>(linear / plane)};
    group.size = Position{edge(group.position.x, launch.threads.x, launch.grid.x),
                          edge(group.position.y, launch.threads.y, launch.grid.y),
                          edge(group.position.z, launch.threads.z, launch.grid.z)};
    group.count = group.size.x * group.size.y * group.size.z;
    group.linear = static_cast<u32>(linear);
    if (worker.epoch > 0xf0000000u) {
        memset(worker.cells, 0, sizeof worker.cells);
        worker.epoch = 1;
    }
    group.first_epoch = group.epoch = worker.epoch;
    group.device_epoch = 0;
    group.memory_used = 0;
    group.memory = worker.memory;
    group.cells = worker.cells;
    for (Region &array : group.arrays) array.base = nullptr;
    worker.at_barrier = worker.finished = worker.simdgroup = 0;
    const u32 simdgroups = (group.count + SIMD_WIDTH - 1) / SIMD_WIDTH;
    for (u32 index = 0; index < simdgroups; ++index) {
        const u32 count = edge(index, SIMD_WIDTH, group.count);
        worker.simdgroups[index] =
            Simdgroup{worker.threads + index * SIMD_WIDTH, count, ~0u >> (SIMD_WIDTH - count), 0, 0, index};
    }
    worker.ready_simdgroups = ~0u >> (32 - simdgroups);
    u32 index = 0;
    for (u32 z = 0; z < group.size.z; ++z) {
        for (u32 y = 0; y < group.size.y; ++y) {
            for (u32 x = 0; x < group.size.x; ++x, ++index) {
                Thread &thread = worker.threads[index];
                thread.stack = nullptr;
                thread.group = &group;
                thread.simdgroup = worker.simdgroups + index / SIMD_WIDTH;
                thread.index = index;
                thread.lane = index % SIMD_WIDTH;
                thread.position = Position{x, y, z};
                thread.state = READY;
            }
        }
    }
    if (Thread *first = next_ready(worker)) {
        switch_context(&worker.main_stack_pointer, context_of(worker, *first));
    }
    worker.epoch = group.epoch + 1;
}

// Workers keep their stacks from launch to launch.
std::mutex idle_lock;
std::vector<Worker *> idle_workers;

Worker *take_worker() {
    std::lock_guard<std::mutex> guard(idle_lock);
    if (idle_workers.empty()) return new Worker();
    Worker *worker = idle_workers.back();
    idle_workers.pop_back();
    return worker;
}

void give_back(Worker *worker) {
    std::lock_guard<std::mutex> guard(idle_lock);
    idle_workers.push_back(worker);
}

void work(Progress &progress) {
    Worker *worker = take_worker();
    worker->progress = &progress;
    while (!progress.stopped.load(std::memory_order_relaxed)) {
        const u64 turn = progress.next.fetch_add(1);
        if (turn >= progress.group_count) break;
        const u64 linear = (turn * progress.stride + progress.start) % progress.group_count;
        const u64 seed = progress.launch->seed;
        // Per threadgroup, so that a seed means the same order however the threadgroups fall on the cores.
        worker->random = seed ? (seed * 0x9e3779b97f4a7c15u + linear * 0xbf58476d1ce4e5b9u) | 1 : 0;
        run_group(*worker, linear);
    }
    worker->free_stacks = worker->stacks;
    give_back(worker);
}

u64 gcd(u64 a, u64 b) { return b == 0 ? a : gcd(b, a % b); }

struct Span {
    u8 *start;
    u8 *end;
    DeviceCell *cells;
};

u64 cell_bytes(const Span &span) { return ((span.end - span.start) / 2 + 2) * sizeof(DeviceCell); }

bool overlap(const Span &a, const Span &b) { return a.start < b.end && b.start < a.end; }

Span span_of(const Region &region) {
    return Span{region.base - (reinterpret_cast<uptr>(region.base) & 1), region.base + region.length, nullptr};
}

// Cells for the memory that some operand can write, and for every operand that overlaps it.
std::vector<Span> shadow_written_memory(const Launch &launch) {
    std::vector<Span> spans;
    for (bool grown = true; grown;) {
        grown = false;
        for (u32 i = 0; i < launch.region_count; ++i) {
            const Region &region = launch.regions[i];
            if (region.base == nullptr || region.length == 0) continue;
            Span merged = span_of(region);
            bool wanted = region.writable;
            std::vector<Span> others;
            for (const Span &span : spans) {
                if (!overlap(span, merged)) {
                    others.push_back(span);
                    continue;
                }
                wanted = true;
                grown = grown || merged.start < span.start || merged.end > span.end;
                merged.start = merged.start < span.start ? merged.start : span.start;
                merged.end = merged.end > span.end ? merged.end : span.end;
            }
            if (!wanted) continue;
            grown = grown || others.size() == spans.size();
            others.push_back(merged);
            spans.swap(others);
        }
    }
    for (Span &span : spans) {
        void *cells = mmap(nullptr, cell_bytes(span), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        span.cells = cells == MAP_FAILED ? nullptr : static_cast<DeviceCell *>(cells);
    }
    for (u32 i = 0; i < launch.region_count; ++i) {
        Region &region = launch.regions[i];
        for (const Span &span : spans) {
            if (region.base != nullptr && region.length != 0 && overlap(span, span_of(region))) {
                region.device_cells = span.cells;
                region.cells_start = span.start;
            }
        }
    }
    return spans;
}

}  // namespace
}  // namespace metal_runtime

extern "C" const metal_runtime::Scheduler metal_scheduler = {
    metal_runtime::threadgroup_barrier, metal_runtime::simd_arrive, metal_runtime::simd_release,
    metal_runtime::declare_array,       metal_runtime::fault,       metal_runtime::access_fault,
    metal_runtime::race,
};

// Runs a launch to its end; 1 if it faulted, with the report in launch->report.
extern "C" int metal_run(metal_runtime::Launch *launch) {
    using namespace metal_runtime;
    Progress progress;
    progress.launch = launch;
    progress.group_count = static_cast<u64>(launch->groups.x) * launch->groups.y * launch->groups.z;
    if (progress.group_count == 0) return 0;
    progress.stride = 1;
    progress.start = 0;
    if (launch->seed != 0) {
        progress.start = launch->seed % progress.group_count;
        progress.stride = launch->seed * 2654435761u % progress.group_count;
        while (gcd(progress.stride, progress.group_count) != 1) ++progress.stride;
    }
    const std::vector<Span> spans = launch->checks ? shadow_written_memory(*launch) : std::vector<Span>();
    // Another core would take longer to wake than a small launch takes.
    const u64 threads = progress.group_count * launch->threads.x * launch->threads.y * launch->threads.z;
    const u64 most = threads < SMALL_LAUNCH ? 1 : launch->workers;
    const u64 workers = most < progress.group_count ? most : progress.group_count;
    std::vector<std::thread> others;
    for (u64 i = 1; i < workers; ++i) others.emplace_back([&progress] { work(progress); });
    work(progress);
    for (std::thread &other : others) other.join();
    for (const Span &span : spans) {
        if (span.cells != nullptr) munmap(span.cells, cell_bytes(span));
    }
    return progress.stopped ? 1 : 0;
}
