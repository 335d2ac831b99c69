// What warps of a block with different jobs need: barriers in shared memory, named by their addresses, and each other's
// registers. From sm_80 on.

// A barrier is passed, and ready for the next round, when so many have arrived. Rounds alternate between parities 0 and 1.
__device__ __forceinline__ void start_barrier(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive_at(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// As soon as this thread's copies so far are done.
__device__ __forceinline__ void arrive_after_copies_at(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(barrier) : "memory");
}

// Whether the last round that is over has this parity; the round before the first one has parity 1 and is over.
__device__ __forceinline__ bool is_over_at(unsigned barrier, unsigned parity) {
    unsigned passed;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
    return passed;
}

// The same, for which the hardware waits a while.
__device__ __forceinline__ bool is_soon_over_at(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
    unsigned passed;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
    return passed;
#else
    return is_over_at(barrier, parity);
#endif
}

// For the end of the round of this parity.
__device__ __forceinline__ void wait_at(unsigned barrier, unsigned parity) {
    while (!is_soon_over_at(barrier, parity)) {
    }
}

// Places that some warps fill and others use, in turns: barriers that say that a place is full, and behind them that it is
// free, and which place is somebody's next.
struct Pipeline {
    unsigned full;
    int depth;
    int current = 0;
    unsigned parity = 0;

    __device__ __forceinline__ Pipeline(unsigned full, int depth) : full(full), depth(depth) {}

    __device__ __forceinline__ unsigned free() const { return full + 8 * depth; }

    __device__ __forceinline__ void initialize(int fillers, int users) const {
        for (int place = threadIdx.x; place < depth; place += blockDim.x) {
            start_barrier(full + 8 * place, fillers);
            start_barrier(free() + 8 * place, users);
        }
    }

    __device__ __forceinline__ void wait_until_full() const { wait_at(full + 8 * current, parity); }
    __device__ __forceinline__ void wait_until_free() const { wait_at(free() + 8 * current, parity ^ 1); }
    __device__ __forceinline__ bool is_soon_free() const { return is_soon_over_at(free() + 8 * current, parity ^ 1); }

    __device__ __forceinline__ void advance() {
        if (++current == depth) {
            current = 0;
            parity ^= 1;
        }
    }

    // By a whole warp, which has done its part: the current place is full, or free.
    __device__ __forceinline__ void hand_over(unsigned barriers) {
        __syncwarp();
        if (threadIdx.x % WARP == 0) {
            arrive_at(barriers + 8 * current);
        }
        advance();
    }
};

// For whole groups of four warps, on GPUs where that is possible.
template <int registers>
__device__ __forceinline__ void give_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(registers));
#endif
}

template <int registers>
__device__ __forceinline__ void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(registers));
#endif
}
