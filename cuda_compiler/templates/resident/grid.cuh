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
// I10. A block's barrier warp arrives for step s + 1 only after it has seen the round of step s end, so the sign cannot change
//      twice unseen.
// I11. Step s begins with a wait for the barrier of step s - 1 or, where it reads a mailbox, of step s - 2. From then on all blocks
//      have ended that step, and what was written up to its end is visible. A step that reads a mailbox reads nothing else
//      that step s - 1 writes, and writes nothing that step s - 1 reads or writes (`connect_mailboxes`).
// I12. At the end of a step the computing warps of a block wait for each other, so the next step may reuse the scratch memory.
//      Then one of them tells the barrier warp, which has a counter of its own for its answer: neither waits for the other.
// I13. Step s fills mailbox s mod 5, reads mailbox s - 1 mod 5, and at its end empties mailbox s - 3 mod 5. The emptied one was
//      read in step s - 2, which all blocks have ended (I11). It is filled next in step s + 2, behind the barrier of step s, and
//      read next in step s + 3. So a reader finds zero or the value of the step before.
// I14. No message is 0: only the complement of 0xffff is, a NaN with a sign, and no result is one.
// I15. Steps are counted on from run to run, in the tags and in the order of the mailboxes; between runs the kernel's end takes
//      the barrier's place. The last step stores the number of steps so far and the mailbox that the next one fills, after the
//      barrier of step 0, which a block reaches only when it has read both. So a kernel has at least two steps.
// I16. A value and its tag are stored at once. Tags count from 1 and repeat after 2^32 steps, so a reader knows whether a tagged
//      sum is this step's.
// I17. Tagged sums of step s are overwritten by step t > s only after all blocks have ended step s: for t > s + 1 by I11, and for
//      t = s + 1 because `connect_mailboxes` does not connect two steps that both write such sums.

// Only in programs whose ranks exchange sums, which define EXCHANGED, the most summands of a step:
// I23. Ranks run the same kernels in the same order, so a step has the same tag on all of them. Its summands are exchanged through
//      one of two halves of each rank's memory, in turns, counted on from run to run. A rank that sends those of exchange e + 2
//      has received all of exchange e + 1. The others sent these after the barrier of their step before (`wait_for_all`), when
//      all their blocks had read exchange e. So the half is free. A summand and its tag are one store of 8 bytes: no fence is needed.

static_assert(STEPS > 1, "the numbers for the next run are stored after a barrier (I15)");

constexpr int MAILBOXES = 5;
constexpr int GRID_WORDS = 32;  // before the mailboxes

// How far a block has come: two numbers in its shared memory, written by one thread each (I12).
struct Progress {
    unsigned ended;  // the address of the number of steps that the block has ended
    unsigned passed;  // and of those that all blocks have

    __device__ __forceinline__ Progress(unsigned at) : ended(at), passed(at + 4) {}

    // By one thread, before anybody reads or writes them.
    __device__ __forceinline__ void initialize() const {
        asm volatile("st.shared.v2.u32 [%0], {%1, %1};" :: "r"(ended), "r"(0) : "memory");
    }

    __device__ __forceinline__ static void write(unsigned at, int steps) {
        asm volatile("st.release.cta.shared.u32 [%0], %1;" :: "r"(at), "r"(steps) : "memory");
    }

    // Waits until the number is at least `steps`.
    __device__ __forceinline__ static void wait(unsigned at, int steps) {
        int now;
        do {
            asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(now) : "r"(at) : "memory");
        } while (now < steps);
    }
};

// The grid barrier between steps, run by one thread of each block, so that no other one waits for its round trips: what all
// blocks wrote up to the end of a step is visible to whoever sees in `progress` that the step is over.
__device__ __forceinline__ void run_barrier_warp(void *memory, const Progress &progress) {
    unsigned *const counter = static_cast<unsigned *>(memory);
    // Still the sign of the last run's end, since this block has not arrived yet (I10).
    unsigned sign = *static_cast<volatile unsigned *>(memory) & 0x80000000u;
    const unsigned amount = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;  // I9
    for (int step = 0; step + 1 < STEPS && threadIdx.x % WARP == 0; step++) {
        Progress::wait(progress.ended, step + 1);
        asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(amount) : "memory");
        unsigned now;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
        } while (((now ^ sign) & 0x80000000u) == 0);
        sign ^= 0x80000000u;
        Progress::write(progress.passed, step + 1);
    }
}

// The grid as a step of a computing thread sees it. Its memory has the barrier's counter, the number of steps that earlier
// runs took, the mailbox that the next run fills first, and the mailboxes.
struct Grid {
    unsigned *memory;
    Progress progress;
    unsigned base;
    int step = 0;
    int mailbox;  // that this step fills
#ifdef EXCHANGED
    int half = 0;  // of the ranks' memory that the next exchange uses (I23)
#endif

    __device__ __forceinline__ Grid(void *memory, const Progress &progress)
        : memory(static_cast<unsigned *>(memory)), progress(progress), base(static_cast<unsigned *>(memory)[1]),
          mailbox(static_cast<int *>(memory)[2]) {
#ifdef EXCHANGED
        half = static_cast<int *>(memory)[3];
#endif
    }

    // Waits until all blocks have ended the step before or, in a step that reads a mailbox, the one before that (I11).
    template <bool from_mailbox>
    __device__ __forceinline__ void wait() const {
        Progress::wait(progress.passed, from_mailbox ? step - 1 : step);
    }

    __device__ __forceinline__ void wait_for_all() const { Progress::wait(progress.passed, step); }

    // Empties a mailbox (I13), and arrives at the barrier (I12).
    __device__ __forceinline__ void end_step() {
        const int read = before(mailbox, 3);
        const int at = (blockIdx.x * THREADS + threadIdx.x) * 8;
        for (int i = at; i < MAILBOX_SIZE; i += gridDim.x * THREADS * 8) {
            *reinterpret_cast<uint4 *>(message(read, i)) = make_uint4(0, 0, 0, 0);
        }
        mailbox = before(mailbox, MAILBOXES - 1);
        sync_block();
        if (threadIdx.x == 0) {
            Progress::write(progress.ended, step + 1);
        }
    }

    // The mailbox that was filled so many steps earlier than this one.
    __device__ __forceinline__ static int before(int mailbox, int steps) {
        return mailbox >= steps ? mailbox - steps : mailbox - steps + MAILBOXES;
    }

    // Leaves to the next run how far the counting has come (I15).
    __device__ __forceinline__ void end_run() {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            Progress::wait(progress.passed, 1);
            memory[1] = base + STEPS;
            memory[2] = mailbox;
#ifdef EXCHANGED
            memory[3] = half;
#endif
        }
    }

    __device__ __forceinline__ unsigned short *message(int mailbox, int index) const {
        return reinterpret_cast<unsigned short *>(memory + GRID_WORDS) + mailbox * MAILBOX_SIZE + index;
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

    // Reads one value of the step before; returns whether it has been written (I13, I14).
    template <typename T>
    __device__ __forceinline__ bool receive_one(T &value, int index) const {
        static_assert(sizeof(T) == 2, "a message has 16 bits");
        unsigned short found;
        asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(found) : "l"(message(before(mailbox, 1), index)) : "memory");
        reinterpret_cast<unsigned short &>(value) = ~found;
        return found != 0;
    }

    // Begins to read the messages of eight values, as they are stored.
    __device__ __forceinline__ void request(unsigned (&found)[4], int index, bool wanted) const {
        asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n"
                     "@wanted ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                     : "+r"(found[0]), "+r"(found[1]), "+r"(found[2]), "+r"(found[3])
                     : "l"(message(before(mailbox, 1), index)), "r"(unsigned(wanted)) : "memory");
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
