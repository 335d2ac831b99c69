// A resident kernel: one block on every multiprocessor goes through the steps of a program. `resident/source.py` fills in what
// has a dollar sign: the program's tables, the code of its phases, and the calls of these by number.
//
// Invariant
// I25. The kernel may start while the one before it still runs. Until that has ended, only the fetching warp accesses the GPU's
//      memory, since the weights are constants (I4): the other warps begin with `begin_in_turn`.

#define COMPUTING_THREADS ${threads}
${index_type}
#include "common/common.cuh"
#include "common/overlap.cuh"

${constants}

#include "resident/tables.cuh"

__constant__ Stream streams[] = {${streams}};
__constant__ Step steps[] = {
${steps}
};

#include "resident/ring.cuh"
#include "resident/prefetch.cuh"
#include "resident/grid.cuh"

${phases}

// In all no more than the block has at its start, 168 for each thread, or the computing warps wait for ever. To fetch scales
// and offsets, or what experts need, takes more.
constexpr int COMPUTING_REGISTERS = SIDES > 0 || CHOICES > 0 ? 224 : 232;
constexpr int OTHERS_REGISTERS = SIDES > 0 || CHOICES > 0 ? 56 : 40;
static_assert(
    THREADS * COMPUTING_REGISTERS + (ALL_THREADS - THREADS) * OTHERS_REGISTERS <= ALL_THREADS * 168, "registers of a block"
);

// The job of the computing warps.
__device__ __forceinline__ void compute(Ring &ring, PrefetchQueue &queue, const Operands &operands, char *shared) {
    begin_in_turn();  // I25
    Grid grid(operands.at[GRID_MEMORY], Progress(ring.progress_place()));
    for (; grid.step < STEPS; grid.step++) {
        queue.wait();
        const StepOperands &step = queue.step();
        switch (__shfl_sync(0xffffffffu, step.phase, 0)) {
${compute_cases}
        }
        queue.release();
        grid.end_step();
    }
    grid.end_run();
}

// The job of the prefetching warp.
__device__ __forceinline__ void prefetch(PrefetchQueue &queue, const Operands &operands) {
    for (int index = 0; index < STEPS; index++) {
        const Step &step = steps[index];
        queue.claim();
        queue.store_step(step, operands);
        switch (step.phase) {
${prefetch_cases}
        }
        queue.publish();
    }
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) ${name}(const __grid_constant__ Operands operands) {
    extern __shared__ __align__(128) char shared[];
#if __CUDA_ARCH__ >= 800
    Ring ring(shared);
    PrefetchQueue queue(shared);
    ring.initialize();
    queue.initialize();
    if (threadIdx.x == 0) {
        Progress(ring.progress_place()).initialize();
#if CHOICES > 0
        ChosenExperts(ring.choice_place()).initialize();
#endif
    }
    __syncthreads();
    if (threadIdx.x < THREADS) {
        take_registers<COMPUTING_REGISTERS>();
        compute(ring, queue, operands, shared);
        return;
    }
    give_registers<OTHERS_REGISTERS>();
    switch (threadIdx.x / WARP - warps) {
        case 0: ring.fill(operands); break;
        case 1: begin_in_turn(); run_barrier_warp(operands.at[GRID_MEMORY], Progress(ring.progress_place())); break;
        case 2: begin_in_turn(); prefetch(queue, operands); break;
    }
#else
    __trap();  // no GPU before sm_80 has the shared memory to be given this kernel
#endif
}
