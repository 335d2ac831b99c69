// Attention of many queries: a block has `tile_rows` rows, 16 or 32 for each warp, and all multiply them by the same keys
// and values, which are copied to shared memory `tile_keys` at a time while those before are at work. The weights are
// rounded to 16 bits for their product with the values, as PyTorch's own kernels do.

#include "attention_products.cuh"

constexpr int row_blocks = (rows + tile_rows - 1) / tile_rows;
constexpr int key_tiles = (keys + tile_keys - 1) / tile_keys;

// What `attention_survey` says of a block's rows and a tile of keys: that no row attends to a key, that all rows attend to
// all keys with nothing added to their scores, or neither.
enum Verdict { left_out, whole, biased };

#kernel attention_survey
// Reads the mask once for all heads that share it: a block per block of rows.
constexpr int counts_bit = 1;  // some key is attended to
constexpr int lowest_bit = 2;  // some key would be, if its row had nothing better
constexpr int biased_bit = 4;  // some key has another bias than 0
constexpr int glance = 4;  // rows whose masks are on their way together
constexpr int segment = WARP * 8 / tile_keys;  // tiles that a warp looks at together

KERNEL(attention_survey) {
    __shared__ int attends[tile_rows];
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const int row_block = blockIdx.x % row_blocks;
    const index_t head = blockIdx.x / row_blocks;
    const Problem problem(q, k, v, mask, head / Verdicts::size(1), head % Verdicts::size(1));
    const int first_row = row_block * tile_rows / mask_sharing * mask_sharing;
    const int last_row = smaller((row_block + 1) * tile_rows, rows) - 1;
    verdicts += index_t(blockIdx.x) * key_tiles;
    for (int i = threadIdx.x; i < tile_rows; i += THREADS) {
        attends[i] = 0;
    }
    __syncthreads();
    for (int tile = warp * segment; tile < key_tiles; tile += THREADS / WARP * segment) {
        bool counts = false;
        bool lowest = false;
        bool adds = false;
        for (int row = first_row; row <= last_row; row += glance * mask_sharing) {
            float bias[glance][8];
#pragma unroll
            for (int i = 0; i < glance; i++) {
                // What is looked at twice does no harm.
                const int own = smaller(row + i * mask_sharing, last_row);
                problem.biases(own, tile * tile_keys + 8 * lane, bias[i]);
            }
#pragma unroll
            for (int i = 0; i < glance; i++) {
                bool attended = false;
#pragma unroll
                for (int key = 0; key < 8; key++) {
                    counts |= !(bias[i][key] <= lowest_bias);
                    lowest |= bias[i][key] > -INFINITY_F;
                    adds |= bias[i][key] != 0.0f;
                    attended |= bias[i][key] > lowest_bias / 2;
                }
                if constexpr (is_float<Mask::type>::value) {
                    if (__any_sync(0xffffffffu, attended) && lane == 0) {
                        const int own = smaller(row + i * mask_sharing, last_row);
                        atomicOr(&attends[(own - first_row) / mask_sharing], 1);
                    }
                }
            }
        }
        const unsigned counting = __ballot_sync(0xffffffffu, counts);
        const unsigned possible = __ballot_sync(0xffffffffu, lowest);
        const unsigned adding = __ballot_sync(0xffffffffu, adds);
        if (lane < segment && tile + lane < key_tiles) {
            const unsigned own = 0xffu << lane * (tile_keys / 8);
            verdicts[tile + lane] =
                (counting & own ? counts_bit : 0) | (possible & own ? lowest_bit : 0) | (adding & own ? biased_bit : 0);
        }
    }
    __syncthreads();
    bool all = true;
    for (int i = 0; i <= (last_row - first_row) / mask_sharing; i++) {
        all &= attends[i] != 0;
    }
    for (int tile = warp * segment + lane; tile < key_tiles && lane < segment; tile += THREADS / WARP * segment) {
        const int seen = verdicts[tile];
        const bool needed = seen & counts_bit || (seen & lowest_bit && !all);
        verdicts[tile] = !needed ? left_out : seen & biased_bit ? biased : whole;
    }
}

#kernel attention_tiled
constexpr int warps = THREADS / WARP;
constexpr int row_tiles = tile_rows / (warps * block_rows);  // of 16 rows, for each warp
constexpr int key_groups = tile_keys / 8;  // of a fragment of scores
constexpr int steps = (width + 15) / 16;
constexpr int value_tiles = (value_width + 15) / 16 * 2;  // of 8 dimensions
constexpr float log2_e = 1.44269504f;

// Rows are an odd multiple of 16 bytes apart, so that those of a matrix lie in different banks.
struct alignas(16) Stage {
    Half k[tile_keys][steps * 16 + 8];
    Half v[tile_keys][value_tiles * 8 + 8];
};

struct alignas(16) Memory {
    Stage stages[2];
    Half q[row_tiles > 1 ? tile_rows : 1][steps * 16 + 8];  // where registers do not suffice for them
};

extern __shared__ __align__(16) unsigned char shared_memory[];

template <int pieces, int stride>
__device__ __forceinline__ void copy_tile(
    Half (&target)[tile_keys][stride], const Half *source, index_t source_stride, int first_key, int row_width
) {
#pragma unroll
    for (int i = 0; i < tile_keys * pieces; i += THREADS) {
        const int key = (i + int(threadIdx.x)) / pieces;
        const int dim = (i + int(threadIdx.x)) % pieces * 8;
        if (tile_keys * pieces % THREADS != 0 && key >= tile_keys) {
            break;
        }
        const bool inside = first_key + key < keys && dim < row_width;
        copy_words(&target[key][dim], source + (inside ? (first_key + key) * source_stride + dim : 0), inside);
    }
}

__device__ __forceinline__ void copy_stage(Stage &stage, const Problem &problem, int tile) {
    copy_tile<steps * 2>(stage.k, problem.k, K::stride(2), tile * tile_keys, width);
    copy_tile<value_tiles>(stage.v, problem.v, V::stride(2), tile * tile_keys, value_width);
}

__device__ __forceinline__ unsigned shared_address(const Half *data) {
    return unsigned(__cvta_generic_to_shared(data));
}

// Four 8 × 8 matrices as fragments; lanes 8i to 8i + 7 say where the rows of matrix i begin in shared memory. Transposed,
// lane 4g + p holds rows 2p and 2p + 1 of column g.
template <bool transposed>
__device__ __forceinline__ void load_matrices(unsigned (&matrices)[4], unsigned address) {
#if __CUDA_ARCH__ >= 750
    if constexpr (transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3]) : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3]) : "r"(address)
                     : "memory");
    }
#else
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = 8 * i + (transposed ? lane % 4 * 2 : lane / 4);
        const unsigned first = __shfl_sync(0xffffffffu, address, row);
        const unsigned second = __shfl_sync(0xffffffffu, address, transposed ? row + 1 : row);
        const int column = transposed ? lane / 4 : lane % 4 * 2;
        const Half low = static_cast<const Half *>(__cvta_shared_to_generic(first))[column];
        const Half high = static_cast<const Half *>(__cvta_shared_to_generic(second))[column + (transposed ? 0 : 1)];
        matrices[i] = unsigned(low.bits) | unsigned(high.bits) << 16;
    }
#endif
}

__device__ __forceinline__ float power_of_2(float exponent) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
}

// The tiles of keys that a block has to multiply.
struct Tiles {
    const Verdicts::type *verdicts;  // of the block
    int first_query;
    int count;

    // The first one from `tile` on, or `count`.
    __device__ __forceinline__ int next(int tile) const {
        if constexpr (Mask::present) {
            const int lane = threadIdx.x % WARP;
            for (; tile < count; tile += WARP) {
                const bool needed = tile + lane < count && verdicts[tile + lane] != left_out;
                const unsigned found = __ballot_sync(0xffffffffu, needed);
                if (found != 0) {
                    return tile + __ffs(found) - 1;
                }
            }
            return count;
        }
        return tile;
    }

    __device__ __forceinline__ bool is_biased(int tile) const {
        if constexpr (Mask::present) {
            return verdicts[tile] == biased;
        }
        const int behind = (tile + 1) * tile_keys;
        return behind > keys || (param::causal && behind - 1 > first_query);
    }
};

// What a warp knows of 16 rows after some keys.
struct Rows {
    float largest[2] = {-FLOAT_MAX, -FLOAT_MAX};  // of rows g and g + 8
    float total[2] = {};  // of this lane's keys
    float sums[value_tiles][4] = {};

    // Scores to weights, relative to the largest scores so far, to which all that was summed is brought.
    __device__ __forceinline__ void weigh(
        float (&scores)[key_groups][4], const Problem &problem, int first_row, int first_key, bool is_biased
    ) {
        const int lane = threadIdx.x % WARP;
        const bool plain = !is_biased && param::scale > 0.0f;
        if (!plain) {
#pragma unroll
            for (int group = 0; group < key_groups; group++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = first_row + lane / 4 + i / 2 * 8;
                    const float bias = problem.bias(row, first_key + 8 * group + lane % 4 * 2 + i % 2);
                    // -inf even where an excluded key made the score NaN.
                    scores[group][i] = bias == -INFINITY_F ? -INFINITY_F : scores[group][i] * param::scale + bias;
                }
            }
        }
        float shrink[2];
        const float unit = plain ? param::scale : 1.0f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float greatest = scores[0][2 * half];
#pragma unroll
            for (int group = 0; group < key_groups; group++) {
                greatest = fmaxf(greatest, fmaxf(scores[group][2 * half], scores[group][2 * half + 1]));
            }
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, 1));
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, 2));
            greatest = fmaxf(greatest * unit, largest[half]);
            shrink[half] = power_of_2((largest[half] - greatest) * log2_e);
            largest[half] = greatest;
            total[half] *= shrink[half];
        }
        if (plain) {
            const float top[2] = {largest[0] * log2_e, largest[1] * log2_e};
#pragma unroll
            for (int group = 0; group < key_groups; group++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[group][i] = power_of_2(fmaf(scores[group][i], param::scale * log2_e, -top[i / 2]));
                }
            }
        } else {
            // A mask's lowest value times log2(e) would be infinite.
#pragma unroll
            for (int group = 0; group < key_groups; group++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[group][i] = power_of_2((scores[group][i] - largest[i / 2]) * log2_e);
                }
            }
        }
#pragma unroll
        for (int group = 0; group < key_groups; group++) {
            total[0] += scores[group][0] + scores[group][1];
            total[1] += scores[group][2] + scores[group][3];
        }
        if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
            for (int tile = 0; tile < value_tiles; tile++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[tile][i] *= shrink[i / 2];
                }
            }
        }
    }

    __device__ __forceinline__ void finish(const Problem &problem, int first_row, Out::type *out) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
            total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
            const int row = first_row + lane / 4 + 8 * half;
            if (row >= rows) {
                continue;
            }
            // A query that attends to no key at all gets zeros, as in PyTorch.
            const float factor = total[half] == 0.0f ? 0.0f : 1.0f / total[half];
            Out::type *target = out + problem.batch * Out::stride(0)
                + (problem.kv_head * sharing + row % sharing) * Out::stride(1)
                + Problem::query_of(row) * Out::stride(2);
#pragma unroll
            for (int tile = 0; tile < value_tiles; tile++) {
                const int dim = 8 * tile + lane % 4 * 2;
                const float values[2] = {sums[tile][2 * half] * factor, sums[tile][2 * half + 1] * factor};
                if (dim < value_width) {
                    if constexpr (Out::vector >= 2) {
                        store_floats(target + dim, values);
                    } else {
                        target[dim * Out::stride(3)] = from<Out::type>(values[0]);
                        target[(dim + 1) * Out::stride(3)] = from<Out::type>(values[1]);
                    }
                }
            }
        }
    }
};

// The queries of a warp as fragments: in registers, or in shared memory for the sake of registers.
struct Queries {
    unsigned held[row_tiles > 1 ? 1 : steps][4];
    unsigned address;

    __device__ __forceinline__ void start(const Problem &problem, int block_row, Memory &memory) {
        const int lane = threadIdx.x % WARP;
        const int warp_row = int(threadIdx.x) / WARP * row_tiles * block_rows;
        if constexpr (row_tiles > 1) {
            for (int i = threadIdx.x; i < tile_rows * steps * 2; i += THREADS) {
                const int row = i / (steps * 2);
                const int dim = i % (steps * 2) * 8;
                const bool inside = block_row + row < rows && dim < width;
                copy_words(&memory.q[row][dim], inside ? problem.q_row(block_row + row) + dim : problem.q, inside);
            }
            address = shared_address(&memory.q[warp_row + lane % 16][lane / 16 * 8]);
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = block_row + warp_row + 8 * half + lane / 4;
                const Half *data = problem.q_row(row < rows ? row : 0) + lane % 4 * 2;
#pragma unroll
                for (int step = 0; step < steps; step++) {
#pragma unroll
                    for (int side = 0; side < 2; side++) {
                        const int dim = 16 * step + 8 * side;
                        const bool inside = row < rows && dim < width;
                        held[step][2 * side + half] = inside ? *reinterpret_cast<const unsigned *>(data + dim) : 0;
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void load(unsigned (&left)[4], int tile, int step) const {
        if constexpr (row_tiles > 1) {
            load_matrices<false>(left, address + unsigned(sizeof(Memory::q[0]) * block_rows * tile + 32 * step));
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                left[i] = held[step][i];
            }
        }
    }
};

// scores[16 × tile_keys] = q · kᵀ for each 16 rows.
__device__ __forceinline__ void score(
    float (&scores)[row_tiles][key_groups][4], const Queries &queries_at, const Stage &stage
) {
    const int lane = threadIdx.x % WARP;
    const unsigned k = shared_address(&stage.k[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
#pragma unroll
    for (int step = 0; step < steps; step++) {
        unsigned left[row_tiles][4];
#pragma unroll
        for (int tile = 0; tile < row_tiles; tile++) {
            queries_at.load(left[tile], tile, step);
        }
#pragma unroll
        for (int pair = 0; pair < tile_keys / 16; pair++) {
            unsigned right[4];
            load_matrices<false>(right, k + unsigned(sizeof(stage.k[0]) * 16 * pair + 32 * step));
#pragma unroll
            for (int tile = 0; tile < row_tiles; tile++) {
                const unsigned(&q)[4] = left[tile];
                multiply(scores[tile][2 * pair], q[0], q[1], q[2], q[3], right[0], right[1]);
                multiply(scores[tile][2 * pair + 1], q[0], q[1], q[2], q[3], right[2], right[3]);
            }
        }
    }
}

// The sums of each 16 rows += weights · v
__device__ __forceinline__ void sum_up(
    Rows (&rows_at)[row_tiles], const float (&weights)[row_tiles][key_groups][4], const Stage &stage
) {
    const int lane = threadIdx.x % WARP;
    const unsigned v = shared_address(&stage.v[lane % 16][lane / 16 * 8]);
#pragma unroll
    for (int step = 0; step < tile_keys / 16; step++) {
        unsigned left[row_tiles][4];
#pragma unroll
        for (int tile = 0; tile < row_tiles; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&pair)[4] = weights[tile][2 * step + i / 2];
                left[tile][i] = packed(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int pair = 0; pair < value_tiles / 2; pair++) {
            unsigned right[4];
            load_matrices<true>(right, v + unsigned(sizeof(stage.v[0]) * 16 * step + 32 * pair));
#pragma unroll
            for (int tile = 0; tile < row_tiles; tile++) {
                const unsigned(&p)[4] = left[tile];
                multiply(rows_at[tile].sums[2 * pair], p[0], p[1], p[2], p[3], right[0], right[1]);
                multiply(rows_at[tile].sums[2 * pair + 1], p[0], p[1], p[2], p[3], right[2], right[3]);
            }
        }
    }
}

KERNEL(attention_tiled) {
    Memory &memory = *reinterpret_cast<Memory *>(shared_memory);
    // The last rows have the most keys where attention is causal: they begin first.
    constexpr int heads = int(K::size(0)) * kv_heads;
    const int row_block = row_blocks - 1 - int(blockIdx.x) / heads;
    const int head = int(blockIdx.x) % heads;
    const Problem problem(q, k, v, mask, head / kv_heads, head % kv_heads);
    const int block_row = row_block * tile_rows;
    const int first_row = block_row + int(threadIdx.x) / WARP * row_tiles * block_rows;
    const int last_row = smaller(block_row + tile_rows, rows) - 1;
    const int reach = param::causal ? smaller(keys, Problem::query_of(last_row) + 1) : keys;
    Tiles tiles{verdicts, Problem::query_of(block_row), (reach + tile_keys - 1) / tile_keys};
    if constexpr (Mask::present) {
        const index_t place = problem.batch % Verdicts::size(0) * Verdicts::size(1)
            + problem.kv_head % Verdicts::size(1);
        tiles.verdicts += (place * row_blocks + row_block) * key_tiles;
    }
    int tile = tiles.next(0);
    if (tile < tiles.count) {
        copy_stage(memory.stages[0], problem, tile);
    }
    Queries queries_at;
    queries_at.start(problem, block_row, memory);
    end_of_copies();
    Rows rows_at[row_tiles];
    int turn = 0;
    while (tile < tiles.count) {
        const int next = tiles.next(tile + 1);
        const bool is_biased = tiles.is_biased(tile);
        wait_for_copies<0>();
        __syncthreads();
        if (next < tiles.count) {
            copy_stage(memory.stages[1 - turn], problem, next);
        }
        end_of_copies();
        const Stage &stage = memory.stages[turn];
        float weights[row_tiles][key_groups][4] = {};
        score(weights, queries_at, stage);
#pragma unroll
        for (int part = 0; part < row_tiles; part++) {
            rows_at[part].weigh(
                weights[part], problem, first_row + part * block_rows, tile * tile_keys, is_biased
            );
        }
        sum_up(rows_at, weights, stage);
        tile = next;
        turn = 1 - turn;
    }
#pragma unroll
    for (int part = 0; part < row_tiles; part++) {
        rows_at[part].finish(problem, first_row + part * block_rows, out);
    }
}
