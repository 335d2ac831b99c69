// The experts that a block's computing warps choose for the one row of a step, and whose weights its fetching warp then fetches:
// the number of the step that chose them plus 1, their numbers, and the factors of their results, in shared memory.
//
// Invariant
// I26. A step that chooses writes numbers and factors, then its own number plus 1. The fetching warp reads them before it fetches
//      what this step multiplies, and keeps them for the steps behind it that use the same choice. The next choice is written
//      when the computing warps have ended these steps, so after it has read.

#if CHOICES > 0
struct ChosenExperts {
    unsigned place;

    __device__ __forceinline__ explicit ChosenExperts(unsigned place) : place(place) {}

    __device__ __forceinline__ void initialize() const {
        asm volatile("st.shared.u32 [%0], %1;" :: "r"(place), "r"(0) : "memory");
    }

    // By a whole warp, whose lane c has choice number c.
    __device__ __forceinline__ void publish(int step, int expert, float factor) const {
        const unsigned own = place + 8 + 8 * (threadIdx.x % WARP);
        if (threadIdx.x % WARP < CHOICES) {
            asm volatile("st.shared.v2.b32 [%0], {%1, %2};" :: "r"(own), "r"(expert), "r"(__float_as_int(factor)) : "memory");
        }
        __syncwarp();
        if (threadIdx.x % WARP == 0) {
            asm volatile("st.release.cta.shared.u32 [%0], %1;" :: "r"(place), "r"(step + 1) : "memory");
        }
    }

    // Waits for the choice of a step; returns the expert of choice number `lane`, 0 for lanes that have none.
    __device__ __forceinline__ int wait(int step) const {
        int now;
        do {
            asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(now) : "r"(place) : "memory");
        } while (now < step + 1);
        int expert = 0;
        if (threadIdx.x % WARP < CHOICES) {
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(expert) : "r"(place + 8 + 8 * (threadIdx.x % WARP)) : "memory");
        }
        return expert;
    }

    // The expert of a choice, and the factor of its result: after `wait`, or after a barrier of the block behind `publish`.
    __device__ __forceinline__ int expert(int number) const {
        int value;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(place + 8 + 8 * number) : "memory");
        return value;
    }
    __device__ __forceinline__ float factor(int number) const {
        float value;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(place + 12 + 8 * number) : "memory");
        return value;
    }
};
#endif
