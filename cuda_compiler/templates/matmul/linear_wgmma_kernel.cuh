// The kernel of a product of some dozens of rows with a weight [N, K] by warpgroups, bound by reading that weight once: with the
// RMSNorm of x before it, and with a gate behind it. On GPUs of compute capability 9.0 only. `linear_wgmma.cu` and
// `linear_wgmma_codes.cu` say how the weight is stored.
//
// The `splits` blocks of a cluster share the terms. Clusters divide the columns of the result, `width` each, so that all
// multiprocessors read equally much; of a gated product, `width` gates and as many of what they multiply. A block goes through
// its terms in steps of `slabs` times 64. Two warps copy the weight and two copy x to a ring of `stages` steps in shared memory.
// The first warpgroups multiply all rows with all columns. In the end the blocks of a cluster add up what each found.
//
// With a norm, the warps that copy x multiply it with the gains in shared memory; a row's sum of squares scales the finished sums.
//
// Invariants
// W1. A place of the ring is filled when all threads that copy have arrived: after their copies, or, with a norm, after they have
//     multiplied what they copied. So products read nothing that is on its way.
// W2. A place is free when the products that read it are done, for all warps that multiply.
// W3. x is multiplied with the gains, and handed over, `behind` steps after its copy begins. That is less than `stages`, so a copy
//     never waits for a place with a step that its own threads have yet to hand over.
// W5. Before the kernel in front has ended, only constants are read: weights, where `ahead` says that they are some.
//
// Expects `WEIGHT`, the operands of the weight, `product_threads`, and two functions of them:
//
// void copy_weight(Memory &, operands..., int thread, int first_step, int steps);
// void multiply_and_store(float *target, Memory &, operands..., int first_step, int steps);  // where the ring was: sums by row

static_assert(THREADS == product_threads + 2 * copying_threads, "");

// What the blocks of the cluster found in four places from `own` on, added up.
__device__ __forceinline__ void add_four(float (&sum)[4], const float *own) {
    float parts[splits][4];
#pragma unroll
    for (unsigned other = 0; other < splits; other++) {
        if constexpr (splits > 1) {
            read_four_from(parts[other], other, own);
        } else {
            load_floats(parts[other], own);
        }
    }
#pragma unroll
    for (unsigned other = 0; other < splits; other++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum[i] += parts[other][i];
        }
    }
}

// A block's share of the cluster's results.
__device__ __forceinline__ void finish_results(
    const Memory &memory, const float *sums, const Bias::type *bias, const Residual::type *residual, Out::type *out
) {
    constexpr unsigned quads = width / 4;
    constexpr unsigned items = unsigned(param::m) * quads;
    const unsigned end = (blockIdx.z + 1) * items / splits;
    for (unsigned item = blockIdx.z * items / splits + threadIdx.x; item < end; item += THREADS) {
        const unsigned row = item / quads;
        const unsigned place = item % quads * 4;
        const index_t column = index_t(blockIdx.x) * width + place;
        if (param::n % width != 0 && column >= param::n) {
            continue;
        }
        float sum[4] = {};
        float up[4] = {};
        add_four(sum, sums + row * sums_stride + place);
        if constexpr (gated) {
            add_four(up, sums + row * sums_stride + width + place);
        }
        float scale = 1.0f;
        if constexpr (normed) {
            float square = 0.0f;
#pragma unroll
            for (unsigned other = 0; other < splits; other++) {
                square += splits > 1 ? read_from(other, &memory.squares[row]) : memory.squares[row];
            }
            scale = rsqrtf(square / float(param::k) + norm_eps);
        }
        Pack<Out::type, 4> results;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Addends addends(bias, residual, row, column + i);
            results.item[i] = addends.result(sum[i] * scale, up[i] * scale);
        }
        store_pack<4>(out + row * Out::stride(0) + column, results);
    }
}

WAITING_KERNEL(linear_wgmma) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    Memory &memory = *reinterpret_cast<Memory *>(shared_memory);
    float *const stored = reinterpret_cast<float *>(memory.ring);
    if (threadIdx.x < stages) {
        memory.filled[threadIdx.x].start(2 * copying_threads);
        memory.free[threadIdx.x].start(product_threads / WARP);
    }
    __syncthreads();
    const int first_step = int(blockIdx.z) * share;
    const int steps = larger(smaller(share, all_steps - first_step), 0);
    const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / warpgroup_threads, 0);
    if (warpgroup >= product_threads / warpgroup_threads) {
        const int thread = int(threadIdx.x) - product_threads;
        if (thread < copying_threads) {
            if (!ahead) {
                wait_for_inputs();  // W5
            }
            copy_weight(memory, WEIGHT, thread, first_step, steps);
        } else {
            begin_in_turn();
            copy_x(memory, x, gain, thread - copying_threads, first_step, steps);
        }
        end_of_copies();
        wait_for_copies<0>();
    } else {
        multiply_and_store(stored, memory, WEIGHT, first_step, steps);
    }
    wait_for_inputs();  // of which a residual may be one
    if constexpr (splits > 1) {
        cluster_barrier();
    } else {
        __syncthreads();
    }
    finish_results(memory, stored, bias, residual, out);
    if constexpr (splits > 1) {
        cluster_barrier();  // none may end, and take its sums along, while others read them
    }
}
