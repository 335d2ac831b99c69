// Products of some dozens of rows with a weight [N, K] in 16 bits by warpgroups, bound by reading that weight once: with the
// RMSNorm of x before it, and with a gate behind it. On GPUs of compute capability 9.0 only.
//
// The `splits` blocks of a cluster share the terms. Clusters divide the columns of the result, `width` each, so that all
// multiprocessors read equally much; of a gated product, `width` gates and as many of what they multiply. A block goes through
// its terms in steps of `slabs` times 64. Two warps copy the weight and two copy x to a ring of `stages` steps in shared memory.
// The first warpgroup multiplies all rows with all columns. In the end the blocks of a cluster add up what each found.
//
// With a norm, the warps that copy x multiply it with the gains in shared memory; a row's sum of squares scales the finished sums.
//
// Invariants
// W1. A place of the ring is filled when all threads that copy have arrived: after their copies, or, with a norm, after they have
//     multiplied what they copied. So products read nothing that is on its way.
// W2. A place is free when the products that read it are done, for all four warps of the warpgroup.
// W3. x is multiplied with the gains, and handed over, `behind` steps after its copy begins. That is less than `stages`, so a copy
//     never waits for a place with a step that its own threads have yet to hand over.
// W4. Rows of the left side beyond those of x are whatever lies behind it, and copies may be changing it. Their sums are not stored.
// W5. Before the kernel in front has ended, only constants are read: weights, where `ahead` says that they are some.

using Half = X::type;

#include "common/tensor_cores.cuh"
#include "common/warpgroup.cuh"
#include "common/cluster.cuh"
#include "matmul/linear_result.cuh"

constexpr int copying_threads = 2 * WARP;                // of the weight, and as many of x
constexpr int held_rows = (int(param::m) + 7) / 8 * 8;   // of x
constexpr int columns = gated ? 2 * width : width;       // of a block's products: rows of the weight
constexpr int pieces = slab_width / 8;                   // of 16 bytes, in a row of a slab
constexpr int step_terms = slabs * slab_width;
constexpr int all_steps = (int(param::k) + step_terms - 1) / step_terms;
constexpr int share = (all_steps + splits - 1) / splits;  // steps of a block
constexpr int sums_stride = columns + 4;                  // so that rows begin in different banks
constexpr int behind = smaller(stages / 2, 2);            // steps from the copy of x to its product with the gains
constexpr int beyond = larger(warpgroup_rows - held_rows - columns, 0);  // rows that products read in vain

static_assert(sizeof(Half) == 2 && (!normed || IsBrain<Half>::value), "");
static_assert(THREADS == warpgroup_threads + 2 * copying_threads && copying_threads == 8 * pieces, "");
static_assert(columns % 8 == 0 && held_rows <= warpgroup_rows, "");
static_assert(behind >= 1 && behind < stages, "");  // W3
static_assert(width % 4 == 0 && param::n % 4 == 0 && param::k % 8 == 0, "");

struct alignas(1024) Stage {
    Half x[slabs][held_rows][slab_width];
    Half weight[slabs][columns][slab_width];
};

struct Memory {
    Stage ring[stages];
    Half spare[beyond + 1][slab_width];
    float squares[held_rows];  // of the block's terms
    Barrier filled[stages];
    Barrier free[stages];
};

static_assert(sizeof(float) * int(param::m) * sums_stride <= sizeof(Memory::ring), "");
static_assert(sizeof(Memory) <= (shared + 1023) / 1024 * 1024, "");  // with what aligns its end

using Turn = RingTurn<stages>;

// What one of two warps' threads copies of `rows` rows: always the same piece, of every eighth row of each slab.
template <int rows>
struct Copier {
    static constexpr int count = rows / 8;

    int row;  // the first one
    int piece;
    unsigned offsets[count];  // of the first step's pieces

    // `source(row)` is the offset of a row.
    template <typename Source>
    __device__ __forceinline__ Copier(int thread, const Source &source) : row(thread / pieces), piece(thread % pieces) {
#pragma unroll
        for (int i = 0; i < count; i++) {
            offsets[i] = unsigned(source(row + 8 * i)) + piece * 8;
        }
    }

    __device__ __forceinline__ bool has_terms(int step, int slab) const {
        return param::k % step_terms == 0 || step * step_terms + slab * slab_width + piece * 8 < int(param::k);
    }

    __device__ __forceinline__ Half *place(Half (&matrix)[rows][slab_width], int i) const {
        return &matrix[row + 8 * i][(piece ^ row) * 8];
    }

    __device__ __forceinline__ void copy(Half (&target)[slabs][rows][slab_width], const Half *source, int step) const {
        const Half *from = source + step * step_terms;
#pragma unroll
        for (int i = 0; i < count; i++) {
#pragma unroll
            for (int slab = 0; slab < slabs; slab++) {
                const bool inside = has_terms(step, slab);
                copy_words(place(target[slab], i), inside ? from + offsets[i] + slab * slab_width : source, inside);
            }
        }
    }

    // Hands over all steps, each as soon as what `copy(stage, step)` copies is there.
    template <typename Copy>
    __device__ __forceinline__ static void copy_all(Memory &memory, int steps, const Copy &copy) {
        Turn turn;
        for (int step = 0; step < steps; step++) {
            memory.free[turn.stage].wait(turn.parity ^ 1);
            copy(memory.ring[turn.stage], step);
            memory.filled[turn.stage].arrive_after_copies();  // W1
            turn.advance();
        }
    }

    // Hands over all steps of x times the gains. Finds the rows' sums of squares, too.
    __device__ __forceinline__ void copy_normed(
        Memory &memory, const Half *x, const Half *gain, int first_step, int steps
    ) const {
        float squares[count] = {};
        const auto load_gains = [&](Words (&gains)[slabs], int step) {
#pragma unroll
            for (int slab = 0; slab < slabs; slab++) {
                const bool inside = step < steps && has_terms(first_step + step, slab);
                const int term = (first_step + step) * step_terms + slab * slab_width + piece * 8;
                gains[slab] = load_words(gain + (inside ? term : 0), inside);
            }
        };
        Words gains[slabs];
        load_gains(gains, 0);
        Turn copied;
        Turn ready;
        for (int step = 0; step < steps + behind; step++) {
            if (step < steps) {
                memory.free[copied.stage].wait(copied.parity ^ 1);
                copy(memory.ring[copied.stage].x, x, first_step + step);
                copied.advance();
            }
            end_of_copies();
            if (step >= behind) {
                wait_for_copies<behind>();
                multiply_by_gains(memory.ring[ready.stage], gains, squares);
                load_gains(gains, step - behind + 1);
                show_to_products();
                memory.filled[ready.stage].arrive();  // W1
                ready.advance();
            }
        }
#pragma unroll
        for (int i = 0; i < count; i++) {
#pragma unroll
            for (int lanes = 1; lanes < pieces; lanes *= 2) {
                squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], lanes);
            }
            if (piece == 0) {
                memory.squares[row + 8 * i] = squares[i];
            }
        }
    }

    __device__ __forceinline__ void multiply_by_gains(
        Stage &stage, const Words (&gains)[slabs], float (&squares)[count]
    ) const {
#pragma unroll
        for (int i = 0; i < count; i++) {
#pragma unroll
            for (int slab = 0; slab < slabs; slab++) {
                Words &own = *reinterpret_cast<Words *>(place(stage.x[slab], i));
                Words values = own;
                squares[i] += sum_of_squares(values);
                multiply_all(values, gains[slab]);
                own = values;
            }
        }
    }
};

// Copies all of the block's steps: of the weight or of x.
__device__ __forceinline__ void copy_weight(
    Memory &memory, const Weight::type *weight, int thread, int first_step, int steps
) {
    const Copier<columns> copier(thread, [&](int row) {
        const bool second = gated && row >= width;
        const index_t column = index_t(blockIdx.x) * width + (second ? row - width : row);
        const index_t last = param::n - 1;  // which the last block may have several times
        return ((column < last ? column : last) + (second ? param::n : 0)) * Weight::stride(0);
    });
    copier.copy_all(memory, steps, [&](Stage &stage, int step) {
        copier.copy(stage.weight, weight, first_step + step);
    });
}

__device__ __forceinline__ void copy_x(
    Memory &memory, const X::type *x, const Gain::type *gain, int thread, int first_step, int steps
) {
    const Copier<held_rows> copier(thread, [&](int row) {
        return smaller(row, int(param::m) - 1) * X::stride(0);
    });
    if constexpr (normed) {
        copier.copy_normed(memory, x, reinterpret_cast<const Half *>(gain), first_step, steps);
    } else {
        copier.copy_all(memory, steps, [&](Stage &stage, int step) {
            copier.copy(stage.x, x, first_step + step);
        });
    }
}

// sums[64 × 8 · count] += x · weightᵀ, from the fragment number `first` on, in as few products as there are sizes for.
template <int first = 0, int count>
__device__ __forceinline__ void multiply_columns(
    float (&sums)[count][4], unsigned long long left, unsigned long long right
) {
    constexpr int rest = count - first;
    if constexpr (rest > 0) {
        constexpr int most = rest >= 12 ? rest / 4 * 4 : rest >= 8 ? 8 : rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
        constexpr int taken = smaller(most, 20);
        multiply_shared(*reinterpret_cast<float (*)[taken][4]>(&sums[first]), left, further(right, first * 1024), true);
        multiply_columns<first + taken>(sums, left, right);
    }
}

// The sums of the block's terms, by the warpgroup.
__device__ __forceinline__ void sum_up(float (&sums)[columns / 8][4], Memory &memory, int steps) {
    Turn turn;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const Stage &stage = memory.ring[turn.stage];
        memory.filled[turn.stage].wait(turn.parity);
        show_to_products();
        pin(sums);
        begin_products();
#pragma unroll
        for (int slab = 0; slab < slabs; slab++) {
            const unsigned long long left = matrix_at(shared_address(stage.x[slab]), 0);
            const unsigned long long right = matrix_at(shared_address(stage.weight[slab]), 0);
#pragma unroll
            for (int part = 0; part < slab_width / 16; part++) {
                multiply_columns(sums, further(left, 32 * part), further(right, 32 * part));
            }
        }
        end_of_products();
        wait_for_products<0>();
        pin(sums);
        if (threadIdx.x % WARP == 0) {
            memory.free[turn.stage].arrive();  // W2
        }
        turn.advance();
    }
}

// Puts the sums where the ring was, which nobody needs any more, but for those of rows that there are not (W4).
__device__ __forceinline__ void store_sums(float *target, const float (&sums)[columns / 8][4]) {
    const int lane = int(threadIdx.x) % WARP;
    const int first = int(threadIdx.x) / WARP * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (first + 8 * half < int(param::m)) {
            float *found = target + (first + 8 * half) * sums_stride + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < columns / 8; i++) {
                store_pack<2>(found + 8 * i, Pack<float, 2>{{sums[i][2 * half], sums[i][2 * half + 1]}});
            }
        }
    }
}

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

#kernel linear_wgmma
WAITING_KERNEL(linear_wgmma) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    Memory &memory = *reinterpret_cast<Memory *>(shared_memory);
    float *const stored = reinterpret_cast<float *>(memory.ring);
    if (threadIdx.x < stages) {
        memory.filled[threadIdx.x].start(2 * copying_threads);
        memory.free[threadIdx.x].start(warpgroup_threads / WARP);
    }
    __syncthreads();
    const int first_step = int(blockIdx.z) * share;
    const int steps = larger(smaller(share, all_steps - first_step), 0);
    const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / warpgroup_threads, 0);
    if (warpgroup > 0) {
        const int thread = int(threadIdx.x) - warpgroup_threads;
        if (thread < copying_threads) {
            if (!ahead) {
                wait_for_inputs();  // W5
            }
            copy_weight(memory, weight, thread, first_step, steps);
        } else {
            begin_in_turn();
            copy_x(memory, x, gain, thread - copying_threads, first_step, steps);
        }
        end_of_copies();
        wait_for_copies<0>();
    } else {
        float sums[columns / 8][4] = {};
        sum_up(sums, memory, steps);
        sync_some<1, warpgroup_threads>();
        store_sums(stored, sums);
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
