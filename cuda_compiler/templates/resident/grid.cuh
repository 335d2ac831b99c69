// How the blocks of a resident kernel synchronize and exchange values: the grid barrier between steps, mailboxes by which a
// step passes its result to the next one ahead of that barrier, and tagged partial sums between the blocks of one step.
//
// A message is a 16-bit value in a zero-initialized mailbox, stored as its complement: zero means "not yet written". A tagged
// sum is 8 bytes: a float and the number of the step that wrote it. In both cases a reader polls the value's own place: no
// fence, no flag, no second round trip.
//
// Invariants
// I8.  All blocks run at the same time (a cooperative launch), so a block may poll for what another one writes.
// I9.  A round of the grid barrier adds 2^31 to its counter: block 0 adds 2^31 - (blocks - 1), the others 1 each. The sign
//      changes when the last of them arrives and not before, and the lower bits are 0 again. So the counter needs no reset.
// I10. A block arrives for step s + 1 only after it has seen the round of step s end, so the sign cannot change twice
//      unseen.
// I11. In step s > 0 every block passes the barrier of step s - 1 exactly once: at the start, or, where it reads a mailbox,
//      before it writes what step s - 1 reads or writes. From then on all blocks have ended step s - 1, and what was written
//      up to its end is visible. (`connect_mailboxes` connects no two steps for which this does not hold.)
// I12. At the end of a step the computing warps of a block wait for each other, so the next step may reuse the scratch memory.
// I13. Step s fills mailbox s mod 3 and empties mailbox s + 1 mod 3, both after the barrier of step s - 1, and reads mailbox
//      s - 1 mod 3, before or after it. The emptied one was filled in step s - 2 and read in step s - 1, which all blocks have
//      ended (I11). Its next readers are in step s + 2, and come there after the barrier of step s. So a reader finds zero or
//      the value of the step before.
// I14. No message is 0: only the complement of 0xffff is, a NaN with a sign, and no result is one.
// I15. Steps are counted on from run to run, in the tags and in the order of the mailboxes; between runs the kernel's end takes
//      the barrier's place. The last step stores the number of steps so far and the mailbox that it emptied, after a barrier
//      that a block reaches only when it has read both. So a kernel has at least two steps.
// I16. A value and its tag are stored at once. Tags count from 1 and repeat after 2^32 steps, so a reader knows whether a tagged
//      sum is this step's.
// I17. Tagged sums of step s are overwritten by step t > s only after all blocks have ended step s: for t > s + 1 by I11, and for
//      t = s + 1 because `connect_mailboxes` does not connect two steps that both write such sums.

// Only in programs whose ranks exchange sums, which define EXCHANGED, the most summands of a step:
// I23. Ranks run the same kernels in the same order, so a step has the same tag on all of them. Its summands are exchanged through
//      one of two halves of each rank's memory, in turns, counted on from run to run. A rank that sends those of exchange e + 2
//      has received all of exchange e + 1. The others sent these after the barrier of their step before, when all their blocks
//      had read exchange e (I11). So the half is free. A summand and its tag are one store of 8 bytes: no fence is needed.

static_assert(STEPS > 1, "the numbers for the next run are stored after a barrier (I15)");

// Named barriers of a block on which its computing threads and its barrier warp wait for each other.
constexpr int step_done = 2;
constexpr int grid_done = 3;

template <int barrier>
__device__ __forceinline__ void sync_with_barrier_warp() {
    asm volatile("bar.sync %0, %1;" :: "n"(barrier), "n"(THREADS + WARP) : "memory");
}

// The grid barrier between steps, run by one warp of each block, so that no other warp waits for its round trips: no block
// goes on before all have arrived, and what they wrote before that is visible afterwards.
__device__ __forceinline__ void run_barrier_warp(void *memory) {
    unsigned *const counter = static_cast<unsigned *>(memory);
    // Still the sign of the last run's end, since this block has not arrived yet (I10).
    unsigned sign = *static_cast<volatile unsigned *>(memory) & 0x80000000u;
    const unsigned amount = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;  // I9
    for (int step = 0; step + 1 < STEPS; step++) {
        sync_with_barrier_warp<step_done>();
        if (threadIdx.x % WARP == 0) {
            asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(amount) : "memory");
            unsigned now;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
            } while (((now ^ sign) & 0x80000000u) == 0);
        }
        sign ^= 0x80000000u;
        __syncwarp();
        sync_with_barrier_warp<grid_done>();
    }
}

// The grid as a step of a computing thread sees it. Its memory has the barrier's counter, the number of steps that earlier
// runs took, the mailbox that the next run fills first, and the three mailboxes.
struct Grid {
    unsigned *memory;
    unsigned base;
    int step = 0;
    int mailbox;  // that this step fills
#ifdef EXCHANGED
    int half = 0;  // of the ranks' memory that the next exchange uses (I23)
#endif

    __device__ __forceinline__ Grid(void *memory)
        : memory(static_cast<unsigned *>(memory)), base(static_cast<unsigned *>(memory)[1]),
          mailbox(static_cast<int *>(memory)[2]) {
#ifdef EXCHANGED
        half = static_cast<int *>(memory)[3];
#endif
    }

    // Waits until all blocks have ended the step before (I11).
    __device__ __forceinline__ void wait() const {
        if (step > 0) {
            sync_with_barrier_warp<grid_done>();
        }
    }

    // Empties the mailbox that the next step fills (I13), and arrives at the barrier (I12).
    __device__ __forceinline__ void end_step() {
        mailbox = mailbox == 2 ? 0 : mailbox + 1;
        const int at = (blockIdx.x * THREADS + threadIdx.x) * 8;
        for (int i = at; i < MAILBOX_SIZE; i += gridDim.x * THREADS * 8) {
            *reinterpret_cast<uint4 *>(message(mailbox, i)) = make_uint4(0, 0, 0, 0);
        }
        if (step + 1 < STEPS) {
            sync_with_barrier_warp<step_done>();
        }
    }

    // Leaves to the next run how far the counting has come (I15).
    __device__ __forceinline__ void end_run() {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            memory[1] = base + STEPS;
            memory[2] = mailbox;
#ifdef EXCHANGED
            memory[3] = half;
#endif
        }
    }

    __device__ __forceinline__ unsigned short *message(int mailbox, int index) const {
        return reinterpret_cast<unsigned short *>(memory + 4) + mailbox * MAILBOX_SIZE + index;
    }

    // A value as a message, never 0 (I14).
    template <typename T>
    __device__ __forceinline__ static unsigned short encoded(const T &value) {
        return ~reinterpret_cast<const unsigned short &>(value);
    }

    // Passes a value to the next step. After `wait` (I13).
    template <typename T>
    __device__ __forceinline__ void send(int index, const T &value) const {
        asm volatile("st.relaxed.gpu.global.u16 [%0], %1;"
                     :: "l"(message(mailbox, index)), "h"(encoded(value)) : "memory");
    }

    template <typename T>
    __device__ __forceinline__ void send(int index, const T (&values)[4]) const {
        asm volatile("st.relaxed.gpu.global.v4.u16 [%0], {%1, %2, %3, %4};"
                     :: "l"(message(mailbox, index)), "h"(encoded(values[0])), "h"(encoded(values[1])),
                        "h"(encoded(values[2])), "h"(encoded(values[3])) : "memory");
    }

    // Reads eight values of the step before, from `index` on, if they are `wanted`; returns whether all have been written, or
    // are not wanted (I13, I14).
    template <typename Values>
    __device__ __forceinline__ bool receive(Values &values, int index, bool wanted = true) const {
        static_assert(sizeof(Values) == 16, "eight values of two bytes");
        uint4 &at = reinterpret_cast<uint4 &>(values);
        unsigned found[4] = {~at.x, ~at.y, ~at.z, ~at.w};
        request(found, index, wanted);
        at = make_uint4(~found[0], ~found[1], ~found[2], ~found[3]);
        return !wanted || !is_missing(found);
    }

    // Begins to read the messages of eight values, as they are stored.
    __device__ __forceinline__ void request(unsigned (&found)[4], int index, bool wanted) const {
        asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n"
                     "@wanted ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                     : "+r"(found[0]), "+r"(found[1]), "+r"(found[2]), "+r"(found[3])
                     : "l"(message(mailbox == 0 ? 2 : mailbox - 1, index)), "r"(unsigned(wanted)) : "memory");
    }

    // Whether one of eight messages has not been written.
    __device__ __forceinline__ static bool is_missing(const unsigned (&found)[4]) {
        // Where one of two values is 0, and only there, subtracting 1 from each sets a sign that was not set.
        unsigned missing = 0;
#pragma unroll
        for (unsigned pair : found) {
            missing |= (pair - 0x00010001u) & ~pair;
        }
        return (missing & 0x80008000u) != 0;
    }

    __device__ __forceinline__ unsigned tag() const { return base + step + 1; }  // I16

#ifdef EXCHANGED
    // The sum of all ranks' summands, added in their order. After `wait` (I23). `peers` has each rank's memory, this rank, and the
    // host's word that the others are gone.
    template <int ranks>
    __device__ __forceinline__ float sum_of_ranks(const unsigned long long *peers, int index, float own) const {
        const int rank = int(peers[ranks]);
        const unsigned long long tagged = (unsigned long long)(tag()) << 32 | __float_as_uint(own);
#pragma unroll
        for (int other = 0; other < ranks; other++) {
            if (other != rank) {
                const unsigned long long place = peers[other] + 8ull * ((half * ranks + rank) * EXCHANGED + index);
                asm volatile("st.relaxed.sys.global.b64 [%0], %1;" :: "l"(place), "l"(tagged) : "memory");
            }
        }
        float total = 0.0f;
#pragma unroll
        for (int other = 0; other < ranks; other++) {
            unsigned long long found = tagged;
            if (other != rank) {
                const unsigned long long place = peers[rank] + 8ull * ((half * ranks + other) * EXCHANGED + index);
                unsigned looked = 0;
                unsigned gone = 0;
                do {
                    asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(found) : "l"(place) : "memory");
                    if (++looked % 4096 == 0) {
                        asm volatile("ld.relaxed.sys.global.u32 %0, [%1];"
                                     : "=r"(gone) : "l"(peers[ranks + 1]) : "memory");
                    }
                } while (unsigned(found >> 32) != tag() && !gone);
            }
            total += __uint_as_float(unsigned(found));
        }
        return total;
    }

    __device__ __forceinline__ void end_exchange() { half ^= 1; }
#endif

    // Two tagged sums for other blocks in this step (I17).
    __device__ __forceinline__ void send_tagged(unsigned long long *places, float first, float second) const {
        const unsigned long long tagged = (unsigned long long)(tag()) << 32;
        asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};"
                     :: "l"(places), "l"(tagged | __float_as_uint(first)), "l"(tagged | __float_as_uint(second))
                     : "memory");
    }

    // Reads two tagged sums; returns whether both are of this step (I16).
    __device__ __forceinline__ bool receive_tagged(const unsigned long long *places, float &first, float &second) const {
        unsigned long long found[2];
        asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                     : "=l"(found[0]), "=l"(found[1]) : "l"(places) : "memory");
        first = __uint_as_float(unsigned(found[0]));
        second = __uint_as_float(unsigned(found[1]));
        return unsigned(found[0] >> 32) == tag() && unsigned(found[1] >> 32) == tag();
    }
};
