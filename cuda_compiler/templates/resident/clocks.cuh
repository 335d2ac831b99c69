// What a block notes of the time while it goes through the steps, if the program asks for it (`resident/clocks.py`): its first
// computing thread writes clock counts, and at the beginning and the end the global time too, by which the counts of all
// multiprocessors come to one time. Nobody reads them in the kernel.

struct Clocks {
    unsigned long long *own = nullptr;  // this block's, null for blocks that have no room

    __device__ __forceinline__ static unsigned long long now() { return clock64(); }

    __device__ __forceinline__ static unsigned long long global_time() {  // in nanoseconds
        unsigned long long time;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
        return time;
    }

    __device__ __forceinline__ void begin_run(void *memory) {
        if (threadIdx.x == 0 && blockIdx.x < CLOCKED_BLOCKS) {
            unsigned multiprocessor;
            asm("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
            own = static_cast<unsigned long long *>(memory) + blockIdx.x * (CLOCK_HEADER + CLOCK_MARKS * STEPS);
            own[0] = multiprocessor + 1;  // 0 is no block
            own[1] = global_time();
            own[2] = now();
        }
    }

    __device__ __forceinline__ void mark(int step, int which) const {
        if (threadIdx.x == 0 && own != nullptr) {
            own[CLOCK_HEADER + CLOCK_MARKS * step + which] = now();
        }
    }

    __device__ __forceinline__ void end_run() const {
        if (threadIdx.x == 0 && own != nullptr) {
            own[3] = global_time();
            own[4] = now();
        }
    }
};

