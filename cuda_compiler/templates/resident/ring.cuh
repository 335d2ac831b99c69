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
//     partner alone, and so all units of weights in few bits. It holds up to two slots at a time, so the ring has at least two
//     (`least_shared`).
// I4. Fetching waits for no step: weights are constants, so no step writes them. Of experts' weights it has to know which are
//     chosen, so it waits for the choice (I26).
// I5. The limit's barrier has completed an odd number of rounds exactly while the limit is raised.

#include "common/warp_jobs.cuh"
#include "resident/chosen.cuh"

// The copies in flight: those to the last slots before the current one.
struct InFlight {
    int slots = 0;

    // Waits until there are fewer than `limit`, and adds one (I2).
    __device__ __forceinline__ void add(const Pipeline &ring, int limit) {
        for (; slots >= limit; slots--) {
            const int first = ring.current - slots;
            const bool wraps = first < 0;
            wait_at(ring.full + 8 * (wraps ? first + ring.depth : first), ring.parity ^ wraps);
        }
        slots++;
    }
};

// The rows of a unit that one lane copies, `copied` at a time: the lane's first row in the first unit, and the row from which on a
// unit has none for this lane.
struct LaneRows {
    int copied;
    int begins;
    int end;

    __device__ __forceinline__ LaneRows(const Stream &stream, int copied) : copied(copied) {
        const int first = threadIdx.x % WARP * copied;
        const bool partner = first >= stream.own_rows;
        const int own = first - (partner ? stream.own_rows : 0);
        begins = own + (partner ? stream.rows : 0);
        end = first < stream.unit_rows ? stream.rows - own : 0;
    }

    // Where the lane's rows of the unit that begins at `row` are, of what has `row_bytes` for each row and begins with row `first`.
    __device__ __forceinline__ unsigned long long address(
        unsigned long long rows, unsigned first, int row, unsigned row_bytes
    ) const {
        return rows + (unsigned long long)(first + unsigned(begins + row)) * row_bytes;
    }

    // How many rows of the unit that begins at `row`.
    __device__ __forceinline__ int count(int row) const { return row < end ? smaller(copied, end - row) : 0; }
};

#if CHOICES > 0
// A unit's number among those of its expert, and that expert's number among the chosen ones, found without divisions.
struct ExpertUnit {
    int expert = 0;
    int unit;
    int each;  // units that an expert has

    __device__ __forceinline__ ExpertUnit(int unit, int each) : unit(unit), each(each) { advance(0); }

    __device__ __forceinline__ void advance(int units) {
        for (unit += units; unit >= each; unit -= each) {
            expert++;
        }
    }
};
#endif

// The slots, and the position in them of one warp: the one that fetches, or one that computes.
struct Ring : Pipeline {
    char *slots;

    __device__ __forceinline__ Ring(char *memory) : Ring(memory + SCRATCH_BYTES, slot_count()) {}
    __device__ __forceinline__ Ring(char *slots, int depth)
        : Pipeline(shared_address(slots + depth * SLOT_BYTES), depth), slots(slots) {}

    __device__ __forceinline__ static int slot_count() {
        unsigned bytes;
        asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
        return int(bytes - SCRATCH_BYTES - AFTER_RING_BYTES) / (SLOT_BYTES + 16);
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

    // Where the block's progress is kept (`grid.cuh`): behind the limit's barrier. Behind that is the choice of experts.
    __device__ __forceinline__ unsigned progress_place() const { return limit_barrier() + 8; }
    __device__ __forceinline__ unsigned choice_place() const { return progress_place() + 8; }

    // Waits until the current slot may be filled (I1), and calls `meanwhile` until then.
    template <typename Meanwhile>
    __device__ __forceinline__ void begin_fetch(const Stream &stream, InFlight &in_flight, Meanwhile meanwhile) const {
        in_flight.add(*this, smaller(limit_is_raised() ? stream.most_in_flight : stream.in_flight, depth));
        while (!is_soon_free()) {
            meanwhile();
        }
    }

#if BULK
    // Prefetches what each lane has into the L2 cache.
    __device__ __forceinline__ static void prefetch(unsigned long long source, unsigned bytes) {
        if (bytes > 0) {
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(source), "r"(bytes) : "memory");
        }
    }
#endif

    // Starts to copy what each lane has to the current slot; addresses and sizes are multiples of 16 bytes.
    __device__ __forceinline__ unsigned copy(unsigned long long source, unsigned place, unsigned bytes) const {
        const unsigned target = full - (depth - current) * SLOT_BYTES + place;  // without registers for the address of `slots`
#if BULK
        if (bytes > 0) {
            // Weights are read once per run; they leave the L2 cache first, so that what is read again stays there.
            unsigned long long policy;
            asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                         "[%0], [%1], %2, [%3], %4;"
                         :: "r"(target), "l"(source), "r"(bytes), "r"(full + 8 * current), "l"(policy) : "memory");
        }
#else
        for (int lane = 0; lane < WARP; lane++) {
            const unsigned end = __shfl_sync(0xffffffffu, bytes, lane);
            const unsigned to = __shfl_sync(0xffffffffu, target, lane);
            const unsigned long long from = __shfl_sync(0xffffffffu, source, lane);
            for (unsigned at = threadIdx.x % WARP * 16; at < end; at += WARP * 16) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + at), "l"(from + at) : "memory");
            }
        }
#endif
        return bytes;
    }

    // The same of a side: what belongs to a chunk of `count` rows from `rows` on.
    __device__ __forceinline__ unsigned copy(const Side &side, unsigned long long rows, unsigned chunk, int count) const {
        const unsigned begin = chunk * side.chunk_bytes;
        const unsigned long long start = rows + begin;
        const unsigned before = unsigned(start) % 16;
        const unsigned last = before + (count - 1) * side.row_bytes + min(side.part_bytes, side.row_bytes - begin);
        const unsigned bytes = count > 0 && side.row_bytes > 0 ? (last + 15) / 16 * 16 : 0;
        return copy(start - before, side.place + threadIdx.x % WARP * side.stride, bytes);
    }

    // Has the slot be full when what the lanes copied, so many bytes each, is there. That may already be so for some of it: the
    // barrier's count of bytes is below zero until then.
    __device__ __forceinline__ void end_fetch(unsigned bytes) {
#if BULK
        bytes = __reduce_add_sync(0xffffffffu, bytes);
        if (threadIdx.x % WARP == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                         :: "r"(full + 8 * current), "r"(bytes) : "memory");
        }
#else
        arrive_after_copies_at(full + 8 * current);
#endif
        advance();
    }

    // Fetches everything that the block's steps stream (I3, I4); the fetching warp's whole job.
    __device__ __forceinline__ void fill(const Operands &operands) {
        const int lane = threadIdx.x % WARP;
        InFlight in_flight;
#if CHOICES > 0
        int chosen = 0;  // the expert of choice number `lane`
#endif
        for (int step = 0; step < STEPS; step++) {
            if (steps[step].stream < 0) {
                continue;
            }
            const Stream &stream = streams[steps[step].stream];
            const unsigned long long whole = (unsigned long long)(operands.at[steps[step].weight]);
#if CHOICES > 0
            if (stream.expert_units > 0) {
                chosen = ChosenExperts(choice_place()).wait(step);
            }
            // Of a weight without experts, or whose units are not divided among them, all units are those of number 0.
            ExpertUnit first_own(blockIdx.x, stream.expert_units > 0 ? stream.expert_units : 0x7fffffff);
            ExpertUnit own = first_own;
            const auto begin_chunk = [&] { own = first_own; };
            const auto end_unit = [&] { own.advance(gridDim.x); };
            const auto end_units = [&] { first_own.advance(stream.units_together * gridDim.x); };
            // The first row of the matrix that the current unit and a chunk belong to.
            const auto first_row = [&](int chunk) {
                const int number = stream.expert_units > 0 ? own.expert : stream.expert_rows > 0 ? chunk : 0;
                return unsigned(__shfl_sync(0xffffffffu, chosen, number)) * stream.expert_rows;
            };
            const auto row_of = [&](int) { return own.unit * stream.own_rows; };
            const auto row_end = [&] { return stream.row_bytes * stream.row_experts; };
            const auto place_in_row = [&](unsigned begin) { return stream.row_experts > 1 ? 0 : begin; };
            const auto is_whole = [&] { return stream.expert_rows == 0; };
#else
            const auto begin_chunk = [] {};
            const auto end_unit = [] {};
            const auto end_units = [] {};
            const auto first_row = [](int) { return 0u; };
            const auto row_of = [&](int unit) { return unit * stream.own_rows; };
            const auto row_end = [&] { return stream.row_bytes; };
            const auto place_in_row = [](unsigned begin) { return begin; };
            const auto is_whole = [] { return true; };
#endif
            const LaneRows codes(stream, stream.copied_rows);
            const LaneRows sides(stream, stream.side_rows);
            const int together = stream.units_together * gridDim.x;
            int unit = blockIdx.x;
            int ahead = 0;  // the first unit that has not been prefetched
            // While the ring is full, the memory has time for what comes after it. Only of weights in 16 bits, whose units are
            // taken in pairs, and not of experts: with others it was not measured.
            const auto prefetch_ahead = [&] {
#if BULK
                ahead = larger(ahead, unit + int(gridDim.x));
                const int end = smaller(stream.units, unit + (UNITS_AHEAD + 1) * int(gridDim.x));
                if (stream.units_together == 2 && is_whole() && ahead < end) {
                    const int row = ahead * stream.own_rows;
                    prefetch(codes.address(whole, 0, row, stream.row_bytes), codes.count(row) * stream.row_bytes);
                    ahead += gridDim.x;
                    __nanosleep(AHEAD_NS);
                }
#endif
            };
            for (int first = blockIdx.x; first < stream.units; first += together) {
                for (unsigned begin = 0, chunk = 0; begin < row_end(); begin += stream.chunk_bytes, chunk++) {
                    begin_chunk();
                    for (unit = first; unit < stream.units && unit < first + together; unit += gridDim.x) {
                        const int row = row_of(unit);
                        const unsigned first_own_row = first_row(chunk);
                        begin_fetch(stream, in_flight, prefetch_ahead);
                        unsigned bytes = copy(
                            codes.address(whole, first_own_row, row, stream.row_bytes) + place_in_row(begin),
                            lane * stream.copied_rows * stream.chunk_bytes,
                            codes.count(row) * min(row_end() - begin, stream.chunk_bytes)
                        );
#pragma unroll
                        for (int i = 0; i < SIDES; i++) {
                            const Side &side = stream.sides[i];
                            const unsigned long long rows = (unsigned long long)(operands.at[steps[step].sides[i]]);
                            const unsigned long long source = sides.address(rows, first_own_row, row, side.row_bytes);
                            bytes += copy(side, source, chunk, sides.count(row));
                        }
                        end_fetch(bytes);
                        end_unit();
                    }
                }
                end_units();
            }
        }
    }
};
