// What the phases of a resident kernel share: one block for every multiprocessor goes through the program's steps, and
// a barrier of the whole grid separates them.
//
// The weights depend on no step. So each warp has a ring of slots in shared memory which it fills with its parts of the
// weights in the order of their use, far ahead: the memory stays busy while the blocks wait for each other. From sm_90 on
// the copy engine fills them; before, each lane copies what it will read itself, from sm_80 on asynchronously.

#kernel tables
#define BULK (__CUDA_ARCH__ >= 900)  // whether there is a copy engine

constexpr int warps = THREADS / WARP;

// How a product's weight is shared out: a team of `splits` warps takes a row (or a row and its gate) at a time, each
// warp of it a part of the row, in chunks that fit a slot.
struct Stream {
    int rows;  // or pairs of rows
    int splits;
    int pieces;  // rows that are used together: 2 where there are gates
    unsigned row_bytes;
    unsigned part_bytes;
    unsigned chunk_bytes;
    unsigned long long piece_bytes;  // from a row to its partner
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
__device__ __forceinline__ unsigned shared_address(const void *data) { return unsigned(__cvta_generic_to_shared(data)); }

// What a warp fetches next.
struct Cursor {
    int step;
    int row;
    int rows;
    int stride;  // from one row of the warp to the next
    int pieces;
    unsigned begin;  // within the warp's part of the row
    unsigned part_bytes;
    unsigned chunk_bytes;
    unsigned long long piece_bytes;
    unsigned long long stride_bytes;
    const char *row_start;  // of the warp's part
};

// The beginning of the first step from `step` on that has a row for this warp.
__device__ __noinline__ Cursor seek(const Operands &operands, int step) {
    Cursor cursor = {};
    for (; step < STEPS; step++) {
        if (steps[step].stream < 0) {
            continue;
        }
        const Stream &stream = streams[steps[step].stream];
        const int warp = threadIdx.x / WARP;
        cursor.row = warp / stream.splits * gridDim.x + blockIdx.x;
        if (cursor.row < stream.rows) {
            cursor.rows = stream.rows;
            cursor.stride = warps / stream.splits * gridDim.x;
            cursor.pieces = stream.pieces;
            cursor.part_bytes = stream.part_bytes;
            cursor.chunk_bytes = stream.chunk_bytes;
            cursor.piece_bytes = stream.piece_bytes;
            cursor.stride_bytes = (unsigned long long)(cursor.stride) * stream.row_bytes;
            cursor.row_start = static_cast<const char *>(operands.at[steps[step].weight])
                + (unsigned long long)(cursor.row) * stream.row_bytes + warp % stream.splits * stream.part_bytes;
            break;
        }
    }
    cursor.step = step;
    return cursor;
}

struct Ring {
    const Operands &operands;
    char *slots;
    unsigned full;  // address of this warp's mbarriers, one for each slot
    int depth;
    int filled = 0;   // the slot to fill next
    int current = 0;  // the slot to use next
    unsigned parity = 0;
    Cursor next;

    __device__ __forceinline__ Ring(const Operands &operands, char *memory) : operands(operands) {
        unsigned bytes;
        asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
        depth = int(bytes - SCRATCH_BYTES) / (warps * (SLOT_BYTES + 8));
        const int warp = threadIdx.x / WARP;
        slots = memory + SCRATCH_BYTES + warp * depth * SLOT_BYTES;
        full = shared_address(memory + SCRATCH_BYTES + warps * depth * SLOT_BYTES) + warp * depth * 8;
#if __CUDA_ARCH__ >= 800
        if (threadIdx.x % WARP == 0) {
#pragma unroll 1
            for (int slot = 0; slot < depth; slot++) {
                const int arrivals = BULK ? 1 : WARP;
                asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(full + 8 * slot), "r"(arrivals) : "memory");
            }
#if BULK
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
        }
        __syncwarp();
#endif
        next = seek(operands, 0);
#pragma unroll 1
        for (int slot = 0; slot < depth; slot++) {
            fetch();
        }
    }

    // Starts to fill the slot that is free next.
    __device__ __forceinline__ void fetch() {
        const int lane = threadIdx.x % WARP;
        if (next.step == STEPS || (BULK && lane != 0)) {
            return;
        }
        const unsigned left = next.part_bytes - next.begin;
        const unsigned bytes = left < next.chunk_bytes ? left : next.chunk_bytes;
        const char *source = next.row_start + next.begin;
        char *target = slots + filled * SLOT_BYTES;
#if BULK
        const unsigned signal = full + 8 * filled;
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                     :: "r"(signal), "r"(next.pieces * bytes) : "memory");
#endif
#pragma unroll 1
        for (int piece = 0; piece < next.pieces; piece++) {
#if BULK
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                :: "r"(shared_address(target)), "l"(source), "r"(bytes), "r"(signal) : "memory");
#else
#pragma unroll 4
            for (unsigned at = lane * 16; at < bytes; at += WARP * 16) {
#if __CUDA_ARCH__ >= 800
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                             :: "r"(shared_address(target + at)), "l"(source + at) : "memory");
#else
                *reinterpret_cast<uint4 *>(target + at) = *reinterpret_cast<const uint4 *>(source + at);
#endif
            }
#endif
            source += next.piece_bytes;
            target += next.chunk_bytes;
        }
#if __CUDA_ARCH__ >= 800 && !BULK
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(full + 8 * filled) : "memory");
#endif
        filled = filled + 1 == depth ? 0 : filled + 1;
        next.begin += bytes;
        if (next.begin == next.part_bytes) {
            next.begin = 0;
            next.row += next.stride;
            next.row_start += next.stride_bytes;
            if (next.row >= next.rows) {
                next = seek(operands, next.step + 1);
            }
        }
    }

    // The slot to use next, once it is full.
    __device__ __forceinline__ const char *wait() const {
#if __CUDA_ARCH__ >= 800
        unsigned done = 0;
        while (!done) {
            asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done) : "r"(full + 8 * current), "r"(parity) : "memory");
        }
#endif
        return slots + current * SLOT_BYTES;
    }

    // Gives the current slot back, to be filled with what comes next.
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (++current == depth) {
            current = 0;
            parity ^= 1;
        }
        fetch();
    }
};

// No block goes on before all have come here, and what they wrote before is seen behind it. All blocks but the first add
// 1 to the counter, the first what makes its sign change once all have; so it needs no reset.
struct GridBarrier {
    unsigned *counter;
    unsigned sign;

    __device__ __forceinline__ GridBarrier(void *counter) : counter(static_cast<unsigned *>(counter)) {
        // Nobody can have changed the sign yet, since this block has not arrived.
        sign = *static_cast<volatile unsigned *>(counter) & 0x80000000u;
    }

    __device__ __forceinline__ void arrive() {
        __syncthreads();
        if (threadIdx.x == 0) {
            const unsigned amount = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
            asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(amount) : "memory");
        }
    }

    __device__ __forceinline__ void wait() {
        if (threadIdx.x == 0) {
            unsigned now;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
            } while (((now ^ sign) & 0x80000000u) == 0);
        }
        sign ^= 0x80000000u;
        __syncthreads();
    }
};

// Has the L2 cache ready what the next step reads and no step writes; `bytes` from `data` on, by the threads of one block.
__device__ __forceinline__ void prefetch(const void *data, unsigned bytes) {
    for (unsigned at = threadIdx.x * 128; at < bytes; at += THREADS * 128) {
        asm volatile("prefetch.global.L2 [%0];" :: "l"(static_cast<const char *>(data) + at));
    }
}
