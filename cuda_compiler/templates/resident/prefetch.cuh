// What one warp of a block prefetches for coming steps: small operands into shared memory, and larger ones into the L2 cache.
//
// Invariants
// I6. The prefetching warp reads only what no earlier step of the kernel writes, apart from the rows of the cache that the
//     step itself replaces: `Phase.prefetched` names these operands, and `Run.takes` starts another kernel instead.
// I7. A place of the queue belongs to the prefetching warp from `claim` to `publish`, and to the computing warps from `wait`
//     to `release`. Every step passes through the queue, also one that needs nothing of it, so that the two sides are never
//     more than one round apart and one bit of parity says which round of a barrier is over.

// A step's phase and operands: constant memory, which they come from, is slow to read for the first time.
struct StepOperands {
    int phase;
    void *at[MAX_OPERANDS];
};

constexpr int STEP_OPERANDS_BYTES = (sizeof(StepOperands) + 15) / 16 * 16;
constexpr int PLACE_BYTES = STEP_OPERANDS_BYTES + PREFETCHED_BYTES;

struct PrefetchQueue : Pipeline {
    char *memory;

    __device__ __forceinline__ PrefetchQueue(char *memory)
        : Pipeline(shared_address(memory + PREFETCH_DEPTH * PLACE_BYTES), PREFETCH_DEPTH), memory(memory) {}

    __device__ __forceinline__ void initialize() const { Pipeline::initialize(1, warps); }

    // The current step's memory.
    __device__ __forceinline__ char *current_memory() const {
        return memory + current * PLACE_BYTES + STEP_OPERANDS_BYTES;
    }

    __device__ __forceinline__ StepOperands &step() const {
        return *reinterpret_cast<StepOperands *>(memory + current * PLACE_BYTES);
    }

    // Stores the phase and the operands of the current step, a lane each.
    __device__ __forceinline__ void store_step(const Step &of, const Operands &operands) const {
        const int lane = threadIdx.x % WARP;
        step().phase = of.phase;
        for (int i = lane; i < MAX_OPERANDS; i += WARP) {
            step().at[i] = operands.at[of.operand[i]];
        }
    }

    // By the prefetching warp: waits until the current place may be written, and hands it to the computing warps (I7).
    __device__ __forceinline__ void claim() const { wait_until_free(); }
    __device__ __forceinline__ void publish() { hand_over(full); }

    // By the computing warps: waits until the current place may be read, and gives it back (I7).
    __device__ __forceinline__ void wait() const { wait_until_full(); }
    __device__ __forceinline__ void release() {
        wait();
        hand_over(free());
    }
};

// Prefetches `bytes` from `data` on into the L2 cache, by a whole warp.
__device__ __forceinline__ void prefetch_l2(const void *data, unsigned bytes) {
    for (unsigned at = threadIdx.x % WARP * 128; at < bytes; at += WARP * 128) {
        asm volatile("prefetch.global.L2 [%0];" :: "l"(static_cast<const char *>(data) + at));
    }
}
