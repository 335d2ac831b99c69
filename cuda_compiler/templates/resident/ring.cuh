// The ring of slots in shared memory through which a block's weights arrive. The weights depend on no step, so one warp does
// nothing but fetch the block's parts of them, in the order of their use and far ahead: the memory stays busy while the
// blocks wait for each other. From sm_90 on the copy engine copies, on sm_80 the warp's lanes do, asynchronously.
//
// Invariants
// I1. A slot belongs to the fetching warp from the time when all computing warps have released it until its bytes have
//     arrived, and to the computing warps from then until all of them have released it.
// I2. Whoever waits for a slot is at most one round of the ring away from the other side, so one bit of parity says which
//     round of a barrier is over. For the copies in flight this holds because there are at most as many as slots.
// I3. A product takes the slots in the order in which `fill` fills them: pairs of units, chunk by chunk; a unit without a
//     partner alone. It holds two slots at a time, so the ring has at least two (`IN_FLIGHT`).
// I4. Fetching waits for no step: weights are constants, so no step writes them.
// I5. The limit's barrier has completed an odd number of rounds exactly while the limit is raised.

#include "common/warp_jobs.cuh"

// The slots whose copies are in flight, in order.
struct InFlight {
    Pipeline first;
    int slots = 0;

    __device__ __forceinline__ InFlight(const Pipeline &first) : first(first) {}

    // Waits until there are fewer than `limit`, and adds one (I2).
    __device__ __forceinline__ void add(int limit) {
        while (slots >= limit) {
            first.wait_until_full();
            first.advance();
            slots--;
        }
        slots++;
    }
};

// The slots, and the position in them of one warp: the one that fetches, or one that computes.
struct Ring : Pipeline {
    char *slots;

    __device__ __forceinline__ Ring(char *memory) : Ring(memory + SCRATCH_BYTES, slot_count()) {}
    __device__ __forceinline__ Ring(char *slots, int depth)
        : Pipeline(shared_address(slots + depth * SLOT_BYTES), depth), slots(slots) {}

    __device__ __forceinline__ static int slot_count() {
        unsigned bytes;
        asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
        return int(bytes - SCRATCH_BYTES - LIMIT_BARRIER_BYTES) / (SLOT_BYTES + 16);
    }

    __device__ __forceinline__ void initialize() const {
        Pipeline::initialize(BULK ? 1 : WARP, warps);
        if (threadIdx.x == 0) {
            start_barrier(limit_barrier(), 1);
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

    // The position after the current slot, which is not released for it.
    __device__ __forceinline__ Ring after_current() const {
        Ring next = *this;
        next.advance();
        return next;
    }

    // Gives the current slot back to the fetching warp (I1).
    __device__ __forceinline__ void release() { hand_over(free()); }

    // The in-flight limit is low, because the few reads that a step waits for queue behind the copies. While a block goes
    // through a long weight it waits for little else, and the limit is higher. Called by one computing thread, in turns (I5).
    __device__ __forceinline__ void raise_limit() const { arrive_at(limit_barrier()); }
    __device__ __forceinline__ void lower_limit() const { arrive_at(limit_barrier()); }
    __device__ __forceinline__ bool limit_is_raised() const { return is_over_at(limit_barrier(), 0); }
    __device__ __forceinline__ unsigned limit_barrier() const { return full + 16 * depth; }

    // Starts to fill the current slot, once it is free (I1), with `bytes` of each row: a lane has a row, which begins at
    // `source`, or none.
    __device__ __forceinline__ void fetch(
        InFlight &in_flight, const char *source, bool has_row, unsigned stride, unsigned bytes
    ) {
        const int lane = threadIdx.x % WARP;
        const unsigned signal = full + 8 * current;
        const unsigned target = full - (depth - current) * SLOT_BYTES;  // in `slots`, without registers for that address
        const unsigned rows = __popc(__ballot_sync(0xffffffffu, has_row));
        in_flight.add(limit_is_raised() ? smaller(MAX_IN_FLIGHT, depth) : IN_FLIGHT);
        wait_until_free();
#if BULK
        if (lane == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                         :: "r"(signal), "r"(rows * bytes) : "memory");
        }
        __syncwarp();
        if (has_row) {
            // Weights are read once per run; they leave the L2 cache first, so that what is read again stays there.
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

    // Fetches everything that the block's steps stream (I3, I4); the fetching warp's whole job.
    __device__ __forceinline__ void fill(const Operands &operands) {
        const int lane = threadIdx.x % WARP;
        InFlight in_flight(*this);
        for (int step = 0; step < STEPS; step++) {
            if (steps[step].stream < 0) {
                continue;
            }
            const Stream stream = streams[steps[step].stream];
            const char *weight = static_cast<const char *>(operands.at[steps[step].weight]);
            // The lane's row in the first unit, and the row from which on a unit has none for this lane.
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
                        fetch(in_flight, source, row < end, stream.chunk_bytes, bytes);
                    }
                }
            }
        }
    }
};
