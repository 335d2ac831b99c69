// CUDA on a CPU: what generated kernels use of CUDA, for `cuda_on_cpu.py`. The threads of a block are coroutines that take turns
// whenever one has to wait: for others at a barrier or a shuffle, or for memory that it polls.

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

using std::isinf, std::isnan, std::max, std::min;
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Size { unsigned x, y, z; };
static Size threadIdx, blockIdx, blockDim, gridDim;

// Where threads wait for each other: `generation` counts how often all that are expected have arrived.
struct CpuMeeting {
    unsigned expected = 0, arrived = 0, generation = 0;

    void end_if_complete() {
        if (arrived > 0 && arrived == expected) {
            arrived = 0;
            generation++;
        }
    }
};

// What the lanes of a warp show each other, in turns between two places: who writes the third time knows that all have read what
// was written the first time.
struct CpuWarp {
    CpuMeeting turn;
    unsigned long long words[2][32];
    unsigned operands[2][32][6];
};

struct CpuBlock {
    Size index;
    CpuMeeting all;
    std::vector<CpuWarp> warps;
    std::map<unsigned, CpuMeeting> named;
    CpuMeeting *cluster;
    char *shared;
    int some;
};

struct CpuThread {
    unsigned number;
    CpuBlock *block;
    CpuThread *next, *previous;  // in the ring of those that have not ended
    bool has_begun;
    ucontext_t context;
    jmp_buf state;
};

static CpuThread *cpu_current;
static jmp_buf cpu_main;
static void (*cpu_body)();
static unsigned cpu_shared_bytes;
static int cpu_cluster_step;  // bytes from a block's shared memory to that of the next one of its cluster

static void cpu_go_on_with(CpuThread *next) {
    cpu_current = next;
    threadIdx = {next->number, 0, 0};
    blockIdx = next->block->index;
    if (next->has_begun) {
        _longjmp(next->state, 1);
    }
    next->has_begun = true;
    setcontext(&next->context);
}

static void cpu_yield() {
    if (_setjmp(cpu_current->state) == 0) {
        cpu_go_on_with(cpu_current->next);
    }
}

static void cpu_meet(CpuMeeting &meeting) {
    const unsigned generation = meeting.generation;
    meeting.arrived++;
    meeting.end_if_complete();
    while (meeting.generation == generation) {
        if (cpu_current->next == cpu_current) {
            std::fprintf(stderr, "the last thread waits for others\n");
            std::abort();
        }
        cpu_yield();
    }
}

static CpuWarp &cpu_warp() { return cpu_current->block->warps[threadIdx.x / 32]; }

static void cpu_thread() {
    cpu_body();
    CpuThread *const own = cpu_current;
    for (CpuMeeting *meeting : {&own->block->all, own->block->cluster, &cpu_warp().turn}) {  // nobody expects it any more
        meeting->expected--;
        meeting->end_if_complete();
    }
    if (own->next == own) {
        _longjmp(cpu_main, 1);
    }
    own->previous->next = own->next;
    own->next->previous = own->previous;
    cpu_go_on_with(own->next);
}

// Memory below 4 GiB, since an address in shared memory has 32 bits.
static char *cpu_low_memory(size_t bytes) {
    for (size_t at = 0x20000000; at < 0xc0000000; at += 0x1000000) {
        void *const found = mmap((void *)at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == (void *)at) {
            return (char *)found;
        }
        munmap(found, bytes);
    }
    std::abort();
}

// Runs the threads of some blocks at the same time.
static void cpu_run(std::vector<CpuBlock> &blocks, unsigned threads) {
    constexpr size_t stack = 256 * 1024;
    const size_t count = blocks.size() * threads;
    std::vector<CpuThread> all(count);
    char *const stacks = (char *)mmap(
        nullptr, count * stack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0
    );
    for (size_t i = 0; i < count; i++) {
        CpuThread &thread = all[i];
        thread.number = i % threads;
        thread.block = &blocks[i / threads];
        thread.next = &all[(i + 1) % count];
        thread.previous = &all[(i + count - 1) % count];
        thread.has_begun = false;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = stacks + i * stack;
        thread.context.uc_stack.ss_size = stack;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, cpu_thread, 0);
    }
    if (_setjmp(cpu_main) == 0) {
        cpu_go_on_with(&all[0]);
    }
    munmap(stacks, count * stack);
}

// Launches a kernel: its blocks one after the other, or `together`. Then those along z form a cluster.
static void cpu_launch(void (*body)(), Size grid, unsigned threads, unsigned shared, bool together) {
    cpu_body = body;
    cpu_shared_bytes = shared;
    gridDim = grid;
    blockDim = {threads, 1, 1};
    const unsigned count = grid.x * grid.y * grid.z;
    const unsigned at_a_time = together ? count : 1;
    const size_t memory_bytes = (size_t(shared) + 1023) / 1024 * 1024;  // of a block, aligned as wide as kernels ask for
    char *const memory = shared > 0 ? cpu_low_memory(memory_bytes * at_a_time) : nullptr;
    const unsigned cluster_count = grid.x * grid.y;
    cpu_cluster_step = int(cluster_count * memory_bytes);
    for (unsigned first = 0; first < count; first += at_a_time) {
        std::vector<CpuBlock> blocks(at_a_time);
        std::vector<CpuMeeting> clusters(cluster_count);
        for (unsigned i = 0; i < at_a_time; i++) {
            const unsigned number = first + i;
            CpuBlock &block = blocks[i];
            block.index = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
            block.all.expected = threads;
            block.cluster = &clusters[number % cluster_count];
            block.cluster->expected += threads;
            block.warps.resize((threads + 31) / 32);
            block.shared = memory + i * memory_bytes;
            for (unsigned thread = 0; thread < threads; thread++) {
                block.warps[thread / 32].turn.expected++;
            }
        }
        cpu_run(blocks, threads);
    }
    if (memory != nullptr) {
        munmap(memory, memory_bytes * at_a_time);
    }
}

static char *cpu_shared() { return cpu_current->block->shared; }

// What threads tell each other.
static void __syncthreads() { cpu_meet(cpu_current->block->all); }
static void __syncwarp() { cpu_meet(cpu_warp().turn); }
static void cpu_meet_cluster() { cpu_meet(*cpu_current->block->cluster); }
static unsigned cpu_address_in(unsigned block, unsigned own) {
    return own + (int(block) - int(blockIdx.z)) * cpu_cluster_step;
}
static void cpu_meet(unsigned number, unsigned threads) {
    CpuMeeting &meeting = cpu_current->block->named[number];
    meeting.expected = threads;
    cpu_meet(meeting);
}
template <typename T> T __shfl_sync(unsigned, T value, int lane) {
    CpuWarp &warp = cpu_warp();
    unsigned long long(&words)[32] = warp.words[warp.turn.generation % 2];
    static_assert(sizeof(T) <= sizeof(words[0]));
    std::memcpy(&words[threadIdx.x % 32], &value, sizeof(T));
    cpu_meet(warp.turn);
    std::memcpy(&value, &words[lane % 32], sizeof(T));
    return value;
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int step) {
    return __shfl_sync(mask, value, threadIdx.x % 32 ^ step);
}
template <typename T> T __shfl_up_sync(unsigned mask, T value, int step) {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(mask, value, lane < step ? lane : lane - step);
}
static unsigned __ballot_sync(unsigned, int bit) {
    CpuWarp &warp = cpu_warp();
    unsigned long long(&words)[32] = warp.words[warp.turn.generation % 2];
    words[threadIdx.x % 32] = bit != 0;
    cpu_meet(warp.turn);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) {
        bits |= unsigned(words[lane]) << lane;
    }
    return bits;
}
static unsigned __reduce_add_sync(unsigned, unsigned value) {
    unsigned sum = 0;
    for (int lane = 0; lane < 32; lane++) {
        sum += __shfl_sync(0xffffffffu, value, lane);
    }
    return sum;
}
static unsigned __reduce_max_sync(unsigned, unsigned value) {
    unsigned largest = 0;
    for (int lane = 0; lane < 32; lane++) {
        largest = std::max(largest, __shfl_sync(0xffffffffu, value, lane));
    }
    return largest;
}
static int __any_sync(unsigned mask, int bit) { return __ballot_sync(mask, bit) != 0; }
static int __syncthreads_or(int one) {
    int &some = cpu_current->block->some;
    __syncthreads();
    some = 0;
    __syncthreads();
    some |= one != 0;
    __syncthreads();
    return some;
}
static void __nanosleep(unsigned) { cpu_yield(); }
static void __threadfence() {}
static int atomicAdd(int *to, int value) { return std::exchange(*to, *to + value); }
static unsigned atomicInc(unsigned *to, unsigned most) { return std::exchange(*to, *to >= most ? 0 : *to + 1); }
static int atomicOr(int *to, int bits) { return std::exchange(*to, *to | bits); }

// Numbers and their bits.
template <typename To, typename From> To cpu_bits(const From &from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}
static float __int_as_float(int bits) { return cpu_bits<float>(bits); }
static float __uint_as_float(unsigned bits) { return cpu_bits<float>(bits); }
static unsigned __float_as_uint(float x) { return cpu_bits<unsigned>(x); }
static int __float_as_int(float x) { return cpu_bits<int>(x); }
static unsigned long cpu_above_32_bits;  // of shared memory whose size the kernel's source says; of other memory 0
static unsigned long __cvta_generic_to_shared(const void *x) {
    cpu_above_32_bits = (unsigned long)x >> 32 << 32;
    return (unsigned long)x;
}
static void *__cvta_shared_to_generic(unsigned long x) { return (void *)(cpu_above_32_bits | unsigned(x)); }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static float __fdividef(float x, float y) { return x / y; }
static int __float2int_rn(float x) { return int(rintf(x)); }
static unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
static int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(unsigned(bits)); }
template <typename T> T __ldcg(const T *from) { return *from; }
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static float cpu_half(unsigned short bits) { return float(cpu_bits<_Float16>(bits)); }
static unsigned short cpu_to_half(float value) { return cpu_bits<unsigned short>(_Float16(value)); }
static float cpu_brain(unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }
static unsigned short cpu_to_brain(float value) {
    const unsigned bits = __float_as_uint(value);
    return isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static unsigned cpu_pair(unsigned short high, unsigned short low) { return unsigned(high) << 16 | low; }
template <typename Decode, typename Encode>
unsigned cpu_fma_pair(Decode decode, Encode encode, unsigned a, unsigned b, unsigned c) {
    // One rounding, as the product of two 16-bit floats and the sum with a third are exact in double but for the last bits.
    const auto half = [&](int shift) {
        return encode(float(double(decode(a >> shift)) * decode(b >> shift) + double(decode(c >> shift))));
    };
    return cpu_pair(half(16), half(0));
}
static unsigned cpu_permute(unsigned a, unsigned b, unsigned selector) {
    unsigned result = 0;
    for (int i = 0; i < 4; i++, selector >>= 4) {
        const unsigned byte = unsigned((((unsigned long long)(b) << 32) | a) >> 8 * (selector & 7)) & 0xff;
        result |= (selector & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return result;
}
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) { return cpu_permute(a, b, selector & 0x7777u); }

// Products of tensor cores: sums[16 × 8] += a[16 × 4 words] · b[4 words × 8], the words of 16-bit floats or of bytes.
template <typename Sum, typename Multiply>
void cpu_product(Multiply multiply, Sum (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    CpuWarp &warp = cpu_warp();
    unsigned(&operands)[32][6] = warp.operands[warp.turn.generation % 2];
    const int lane = threadIdx.x % 32;
    const unsigned own[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(operands[lane], own, sizeof own);
    cpu_meet(warp.turn);
    for (int part = 0; part < 4; part++) {
        const unsigned *rows = operands[(lane & ~3) | part];
        for (int i = 0; i < 8; i++) {
            const int half = i / 4, column = i / 2 % 2, bottom = i % 2;
            multiply(sums[2 * bottom + column], rows[2 * half + bottom], operands[(lane % 4 * 2 + column) * 4 + part][4 + half]);
        }
    }
}
static void cpu_add_halves(float &sum, unsigned a, unsigned b) {
    sum = fmaf(cpu_half(a), cpu_half(b), sum);
    sum = fmaf(cpu_half(a >> 16), cpu_half(b >> 16), sum);
}
static void cpu_add_brains(float &sum, unsigned a, unsigned b) {
    sum = fmaf(cpu_brain(a), cpu_brain(b), sum);
    sum = fmaf(cpu_brain(a >> 16), cpu_brain(b >> 16), sum);
}
static void cpu_add_bytes(int &sum, unsigned a, unsigned b) {
    for (int byte = 0; byte < 32; byte += 8) {
        sum += (signed char)(a >> byte) * (signed char)(b >> byte);
    }
}

// Memory by address. Who reads what others write gives them a turn first, since it may poll.
template <typename T, typename Address> T &cpu_at(Address address) { return *(T *)(size_t)(address); }
template <typename T, typename Address> T cpu_poll(Address address) {
    cpu_yield();
    return cpu_at<T>(address);
}
template <typename To, typename From> void cpu_copy(To to, From from, int bytes, int wanted) {
    std::memset((void *)(size_t)(to), 0, bytes);
    std::memcpy((void *)(size_t)(to), (const void *)(size_t)(from), wanted);
}

// A barrier in shared memory (`mbarrier`): a round is over when all have arrived and all announced bytes are there.
struct CpuBarrier {
    unsigned char expected, pending;
    unsigned short rounds;
    int missing;  // bytes that were announced, less those that have come

    void end_if_complete() {
        if (pending == 0 && missing == 0) {
            pending = expected;
            rounds++;
        }
    }
};
static void cpu_start_barrier(unsigned at, int arrivals) {
    cpu_at<CpuBarrier>(at) = {(unsigned char)(arrivals), (unsigned char)(arrivals), 0, 0};
}
static void cpu_arrive(unsigned at, int bytes = 0) {
    CpuBarrier &barrier = cpu_at<CpuBarrier>(at);
    barrier.pending--;
    barrier.missing += bytes;
    barrier.end_if_complete();
}
template <typename From> void cpu_copy_bulk(unsigned to, From from, int bytes, unsigned at) {
    cpu_copy(to, from, bytes, bytes);
    CpuBarrier &barrier = cpu_at<CpuBarrier>(at);
    barrier.missing -= bytes;
    barrier.end_if_complete();
}
static bool cpu_is_over(unsigned at, unsigned parity) {
    cpu_yield();
    return cpu_at<CpuBarrier>(at).rounds % 2 != parity;
}
__attribute__((error("an instruction that the CPU has no text for"))) void cpu_unknown();
