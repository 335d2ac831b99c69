// What a compiled kernel library and the scheduler share: the state of a launch, its threadgroups and their threads.
#pragma once

namespace metal_runtime {

using u8 = __UINT8_TYPE__;
using u16 = __UINT16_TYPE__;
using u32 = __UINT32_TYPE__;
using u64 = __UINT64_TYPE__;
using i64 = __INT64_TYPE__;
using uptr = __UINTPTR_TYPE__;

constexpr u32 SIMD_WIDTH = 32;
constexpr u32 MAX_THREADS = 1024;
constexpr u32 MAX_ARRAYS = 32;
constexpr u32 THREADGROUP_MEMORY = 32768;

enum MemoryFlags : u32 { MEM_NONE = 0, MEM_DEVICE = 1, MEM_THREADGROUP = 2 };

struct Position {
    u32 x, y, z;
};

// The last write and the last reads of two bytes of device memory, each as
// group:14 thread:10 epoch:5 several:1 bytes:2; zero for none. A field that overflows hides races, and invents none.
struct DeviceCell {
    u32 write, read;
};

// The last write, or reads, of one scalar of threadgroup memory. `thread` carries the flags below.
struct Access {
    u32 epoch;
    u16 simd_epoch;
    u16 thread;
};
constexpr u16 SEVERAL_LANES = 0x4000;       // others of the same SIMD group read it too
constexpr u16 SEVERAL_SIMDGROUPS = 0x8000;  // so did threads of other SIMD groups
constexpr u16 THREAD_MASK = 0x3fff;

struct ThreadgroupCell {
    Access write, read;
};

// A bound buffer, or a threadgroup array.
struct Region {
    const char *name;
    u8 *base;  // null: nothing is bound
    u64 length;
    u32 writable;
    u32 granule;                 // of a threadgroup array: bytes of its scalar type
    DeviceCell *device_cells;    // null: no thread of the launch can write this memory
    u8 *cells_start;             // the address that device_cells[0] stands for
    ThreadgroupCell *threadgroup_cells;
};

struct Thread;
struct Group;

struct Simdgroup {
    Thread *lanes;
    u32 count;
    u32 ready;    // lanes that can run
    u32 waiting;  // lanes that have arrived at a SIMD operation
    u16 epoch;
    u32 index;
};

struct Thread {
    void *stack_pointer;
    void *stack;  // null: not started
    Group *group;
    Simdgroup *simdgroup;
    u32 index;
    u32 lane;
    Position position;
    u32 state;
    u32 site;  // the source line where it waits
    alignas(16) u8 exchange[64];
};

struct Launch;

struct Group {
    const Launch *launch;
    void *worker;
    Position position;
    Position size;
    u32 count;
    u32 linear;
    u32 first_epoch;
    u32 epoch;         // counts the barriers that order threadgroup memory
    u32 device_epoch;  // … that order device memory
    u32 memory_used;
    u8 *memory;
    ThreadgroupCell *cells;
    Region arrays[MAX_ARRAYS];
};

typedef void (*Entry)(const Launch &launch, const Thread &thread);

struct Launch {
    const char *kernel;
    Entry entry;
    Region *regions;
    u32 region_count;
    u32 checks;
    Position groups;
    Position threads;
    Position grid;  // threads in all; groups at its edges are smaller
    u32 workers;
    u64 seed;
    char *report;
    u64 report_size;
};

enum AccessKind : u32 { READ = 1, WRITE = 2, UPDATE = 3 };

// The scheduler's functions, handed to each kernel library when it is loaded.
struct Scheduler {
    void (*threadgroup_barrier)(Thread *, u32 flags, u32 site);
    bool (*simd_arrive)(Thread *, u32 site);  // true for the last lane, which then works for all and calls simd_release
    void (*simd_release)(Thread *);
    void (*declare_array)(Thread *, u32 array, const char *name, u64 bytes, u32 granule);
    void (*fault)(Thread *, const char *format, ...);
    void (*access_fault)(Thread *, const Region *, const char *space, u32 kind, i64 offset, u32 size, u32 alignment);
    void (*race)(Thread *, const Region *, const char *space, u32 kind, i64 offset, u32 size, u32 other_kind,
                 u32 other_group, u32 other_thread);
};

// Stacks are aligned to their size and hold, at a place that their own address gives, the thread that runs on them. The
// place differs from stack to stack so that a threadgroup's hot stack lines do not share one set of the cache.
constexpr uptr STACK_SIZE = 65536;

inline __attribute__((always_inline)) Thread **stack_owner(uptr address) {
    const uptr block = address & ~(STACK_SIZE - 1);
    const uptr colour = (block / STACK_SIZE * 5 % 60) * 64;
    return reinterpret_cast<Thread **>(block + STACK_SIZE - 64 - colour);
}

inline __attribute__((always_inline)) Thread &current() {
    return **stack_owner(reinterpret_cast<uptr>(__builtin_frame_address(0)));
}

}  // namespace metal_runtime
