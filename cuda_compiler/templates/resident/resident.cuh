// What the phases of a resident kernel share: one block for every multiprocessor goes through the program's steps. A barrier
// of the whole grid separates them; what one makes for the next one goes ahead of it, as mail.
//
// The weights depend on no step. So one warp of a block does nothing but fetch the block's parts of the weights into a
// ring of slots in shared memory, in the order of their use and far ahead: the memory stays busy while the blocks wait for
// each other. From sm_90 on the copy engine fetches, on sm_80 the warp's lanes do, asynchronously.

#kernel tables
#define BULK (__CUDA_ARCH__ >= 900)  // whether there is a copy engine

constexpr int warps = THREADS / WARP;  // that compute

// How a product's weight is shared out: a block takes a unit of rows at a time (or of rows and their gates, one half each),
// in chunks of columns that fit a slot. Two units of a block take turns, chunk by chunk.
struct Stream {
    int units;
    int unit_rows;
    int own_rows;  // of them; the others are their partners
    int rows;  // of the weight, without partners
    unsigned row_bytes;
    unsigned chunk_bytes;  // and from one row of a slot to the next
};

struct Step {
    int phase;
    int stream;  // -1 where a step streams no weight
    int weight;  // the operand that is streamed
    int operand[MAX_OPERANDS];
};

struct Operands {
    void *at[OPERANDS];
};

#kernel ring
#include "common/warp_jobs.cuh"

// The slots that are on their way, in order.
struct Flight {
    Pipeline first;
    int slots = 0;

    __device__ __forceinline__ Flight(const Pipeline &first) : first(first) {}

    // Waits until there are fewer than `most`, and one joins them.
    __device__ __forceinline__ void join(int most) {
        while (slots >= most) {
            first.wait_until_full();
            first.advance();
            slots--;
        }
        slots++;
    }
};

// The slots, and where in them somebody is: the warp that fills them, or a warp that uses them.
struct Ring : Pipeline {
    char *slots;

    __device__ __forceinline__ Ring(char *memory) : Ring(memory + SCRATCH_BYTES, slots_there()) {}
    __device__ __forceinline__ Ring(char *slots, int depth)
        : Pipeline(shared_address(slots + depth * SLOT_BYTES), depth), slots(slots) {}

    __device__ __forceinline__ static int slots_there() {
        unsigned bytes;
        asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
        return int(bytes - SCRATCH_BYTES - PACE_BYTES) / (SLOT_BYTES + 16);
    }

    __device__ __forceinline__ void initialize() const {
        Pipeline::initialize(BULK ? 1 : WARP, warps);
        if (threadIdx.x == 0) {
            start_barrier(pace(), 1);
        }
#if BULK
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }

    // The slot to use next, once it is full.
    __device__ __forceinline__ const char *wait() const {
        wait_until_full();
        return slots + current * SLOT_BYTES;
    }

    // As it will be when the current slot is given back.
    __device__ __forceinline__ Ring behind() const {
        Ring next = *this;
        next.advance();
        return next;
    }

    // Gives the current slot back, to be filled with what comes next.
    __device__ __forceinline__ void release() { hand_over(free()); }

    // No more slots are on their way at a time than keep the memory busy: with more, the few reads that a step waits for
    // would queue behind them. Between these two calls, by one thread that computes, it waits for slots and for little else,
    // and there may be more. They are the rounds of a barrier, of which an odd number is over in between.
    __device__ __forceinline__ void hurry() const { arrive_at(pace()); }
    __device__ __forceinline__ void calm_down() const { arrive_at(pace()); }
    __device__ __forceinline__ bool hurries() const { return is_over_at(pace(), 0); }
    __device__ __forceinline__ unsigned pace() const { return full + 16 * depth; }

    // Starts to fill the current slot, once it is free, with `bytes` of each row: a lane has a row, which begins at
    // `source`, or none.
    __device__ __forceinline__ void fetch(
        Flight &flight, const char *source, bool has_row, unsigned stride, unsigned bytes
    ) {
        const int lane = threadIdx.x % WARP;
        const unsigned signal = full + 8 * current;
        const unsigned target = full - (depth - current) * SLOT_BYTES;  // of `slots`, without registers for it
        const unsigned rows = __popc(__ballot_sync(0xffffffffu, has_row));
        flight.join(hurries() ? smaller(MOST_IN_FLIGHT, depth) : IN_FLIGHT);
        wait_until_free();
#if BULK
        if (lane == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                         :: "r"(signal), "r"(rows * bytes) : "memory");
        }
        __syncwarp();
        if (has_row) {
            // Weights are read once, and what is read again should stay in the L2 cache.
            unsigned long long policy;
            asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                         "[%0], [%1], %2, [%3], %4;"
                         :: "r"(target + lane * stride), "l"(source), "r"(bytes), "r"(signal), "l"(policy) : "memory");
        }
#else
        for (int row = 0; row < UNIT_ROWS; row++) {
            if (__shfl_sync(0xffffffffu, has_row, row)) {
                const unsigned long long start = __shfl_sync(0xffffffffu, (unsigned long long)(source), row);
                for (unsigned at = lane * 16; at < bytes; at += WARP * 16) {
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                                 :: "r"(target + row * stride + at), "l"(start + at) : "memory");
                }
            }
        }
        arrive_after_copies_at(signal);
#endif
        advance();
    }

    // Everything that the block's steps stream, by one warp.
    __device__ __forceinline__ void fill(const Operands &operands) {
        const int lane = threadIdx.x % WARP;
        Flight flight(*this);
        for (int step = 0; step < STEPS; step++) {
            if (steps[step].stream < 0) {
                continue;
            }
            const Stream stream = streams[steps[step].stream];
            const char *weight = static_cast<const char *>(operands.at[steps[step].weight]);
            // What a lane has of the first unit, and the row from which on units lack it.
            const bool partner = lane >= stream.own_rows;
            const int own = lane - (partner ? stream.own_rows : 0);
            const char *own_row = weight + (unsigned long long)(own + (partner ? stream.rows : 0)) * stream.row_bytes;
            const int end = lane < stream.unit_rows ? stream.rows - own : 0;
            for (int first = blockIdx.x; first < stream.units; first += 2 * gridDim.x) {
                for (unsigned begin = 0; begin < stream.row_bytes; begin += stream.chunk_bytes) {
                    const unsigned left = stream.row_bytes - begin;
                    for (int unit = first; unit < stream.units && unit <= first + int(gridDim.x); unit += gridDim.x) {
                        const int row = unit * stream.own_rows;
                        const char *source = own_row + (unsigned long long)row * stream.row_bytes + begin;
                        const unsigned bytes = left < stream.chunk_bytes ? left : stream.chunk_bytes;
                        fetch(flight, source, row < end, stream.chunk_bytes, bytes);
                    }
                }
            }
        }
    }
};

// What a warp finds out ahead of a step, for some steps at a time.
struct Ahead : Pipeline {
    char *memory;

    __device__ __forceinline__ Ahead(char *memory)
        : Pipeline(shared_address(memory + STEPS_AHEAD * EARLY_BYTES), STEPS_AHEAD), memory(memory) {}

    __device__ __forceinline__ void initialize() const { Pipeline::initialize(1, warps); }

    // The current step's memory.
    __device__ __forceinline__ char *now() const { return memory + current * EARLY_BYTES; }

    // Waits until it may be written, by the warp that looks ahead.
    __device__ __forceinline__ void claim() const { wait_until_free(); }
    __device__ __forceinline__ void finish() { hand_over(full); }

    // Waits until it may be read, by the warps that compute.
    __device__ __forceinline__ void wait() const { wait_until_full(); }

    // By them, too. A step that did not need it may not overtake it either: barriers know only odd from even rounds.
    __device__ __forceinline__ void release() {
        wait();
        hand_over(free());
    }
};

// Has the threads that compute and the warp that keeps the grid's barrier wait for each other.
template <int barrier>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" :: "n"(barrier), "n"(THREADS + WARP) : "memory");
}

constexpr int step_done = 2;
constexpr int grid_done = 3;

// The barrier between steps, by one warp of each block, so that no other waits for the memory system: no block goes on
// before all have come here, and what they wrote before is seen behind it. All blocks but the first add 1 to the counter,
// the first what makes its sign change once all have; so it needs no reset.
__device__ __forceinline__ void keep_barrier(void *memory) {
    unsigned *const counter = static_cast<unsigned *>(memory);
    // Nobody can have changed the sign yet, since this block has not arrived.
    unsigned sign = *static_cast<volatile unsigned *>(memory) & 0x80000000u;
    const unsigned amount = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
    for (int step = 0; step + 1 < STEPS; step++) {
        meet<step_done>();
        if (threadIdx.x % WARP == 0) {
            asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(amount) : "memory");
            unsigned now;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
            } while (((now ^ sign) & 0x80000000u) == 0);
        }
        sign ^= 0x80000000u;
        __syncwarp();
        meet<grid_done>();
    }
}

// The blocks of the grid as a step sees them, and what they have in common: the barrier's counter, the number of steps that
// earlier runs took, the box to send to next, and mail.
//
// Mail are the 16-bit values that a step sends to the next one, which may read them before the barrier between the two, but
// must write nothing before it that the last step still reads or writes. A box in which nothing lies yet holds zeros; so a
// value is written as its complement, which is never 0: a NaN that is computed has no sign. There are three boxes, one for
// what a step sends, one for what it reads, and one, which all have read, that it empties for the next step.
//
// Letters are values with a tag that says which step sent them, so that whoever waits for one sees when it is there.
struct Grid {
    unsigned *memory;
    unsigned base;
    int step = 0;
    int box;  // that this step sends to

    __device__ __forceinline__ Grid(void *memory)
        : memory(static_cast<unsigned *>(memory)), base(static_cast<unsigned *>(memory)[1]),
          box(static_cast<int *>(memory)[2]) {}

    __device__ __forceinline__ void arrive() const { meet<step_done>(); }

    // Waits until all blocks have done the step before.
    __device__ __forceinline__ void wait() const {
        if (step > 0) {
            meet<grid_done>();
        }
    }

    // Ends the step.
    __device__ __forceinline__ void leave() {
        box = box == 2 ? 0 : box + 1;
        const int at = (blockIdx.x * THREADS + threadIdx.x) * 8;
        for (int i = at; i < MAIL; i += gridDim.x * THREADS * 8) {
            *reinterpret_cast<uint4 *>(mail(box, i)) = make_uint4(0, 0, 0, 0);
        }
        if (step + 1 < STEPS) {
            arrive();
        }
    }

    __device__ __forceinline__ void finish() {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            memory[1] = base + STEPS;
            memory[2] = box;
        }
    }

    __device__ __forceinline__ unsigned short *mail(int box, int index) const {
        return reinterpret_cast<unsigned short *>(memory + 4) + box * MAIL + index;
    }

    template <typename T>
    __device__ __forceinline__ static unsigned short written(const T &value) {
        return ~reinterpret_cast<const unsigned short &>(value);
    }

    // To the next step.
    template <typename T>
    __device__ __forceinline__ void send(int index, const T &value) const {
        asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" :: "l"(mail(box, index)), "h"(written(value)) : "memory");
    }

    template <typename T>
    __device__ __forceinline__ void send(int index, const T (&values)[4]) const {
        asm volatile("st.relaxed.gpu.global.v4.u16 [%0], {%1, %2, %3, %4};"
                     :: "l"(mail(box, index)), "h"(written(values[0])), "h"(written(values[1])),
                        "h"(written(values[2])), "h"(written(values[3])) : "memory");
    }

    // Eight values from the last step, from `index` on, if they are `wanted`; whether all are there, or not wanted.
    template <typename Values>
    __device__ __forceinline__ bool receive(Values &values, int index, bool wanted = true) const {
        static_assert(sizeof(Values) == 16, "eight values of two bytes");
        uint4 &at = reinterpret_cast<uint4 &>(values);
        unsigned found[4] = {~at.x, ~at.y, ~at.z, ~at.w};
        asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n"
                     "@wanted ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                     : "+r"(found[0]), "+r"(found[1]), "+r"(found[2]), "+r"(found[3])
                     : "l"(mail(box == 0 ? 2 : box - 1, index)), "r"(unsigned(wanted)) : "memory");
        at = make_uint4(~found[0], ~found[1], ~found[2], ~found[3]);
        // Where one of two values is 0, and only there, subtracting 1 from each sets a sign that was not set.
        unsigned lacking = 0;
#pragma unroll
        for (unsigned pair : found) {
            lacking |= (pair - 0x00010001u) & ~pair;
        }
        return !wanted || (lacking & 0x80008000u) == 0;
    }

    __device__ __forceinline__ unsigned tag() const { return base + step + 1; }

    // Two letters to other blocks in this step.
    __device__ __forceinline__ void send(unsigned long long *letters, float first, float second) const {
        const unsigned long long tagged = (unsigned long long)(tag()) << 32;
        asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};"
                     :: "l"(letters), "l"(tagged | __float_as_uint(first)), "l"(tagged | __float_as_uint(second))
                     : "memory");
    }

    __device__ __forceinline__ bool receive(const unsigned long long *letters, float &first, float &second) const {
        unsigned long long found[2];
        asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                     : "=l"(found[0]), "=l"(found[1]) : "l"(letters) : "memory");
        first = __uint_as_float(unsigned(found[0]));
        second = __uint_as_float(unsigned(found[1]));
        return unsigned(found[0] >> 32) == tag() && unsigned(found[1] >> 32) == tag();
    }
};

// Has the L2 cache ready what a step reads and no step writes; `bytes` from `data` on, by a warp.
__device__ __forceinline__ void prefetch(const void *data, unsigned bytes) {
    for (unsigned at = threadIdx.x % WARP * 128; at < bytes; at += WARP * 128) {
        asm volatile("prefetch.global.L2 [%0];" :: "l"(static_cast<const char *>(data) + at));
    }
}
