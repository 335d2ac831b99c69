// softmax(scale · q·kᵀ + mask) · v in one pass over the keys, with a running maximum and no memory for the scores.
//
// The queries that share a KV head are the rows of one problem (a query's heads side by side), so that its keys and
// values are read once for all. Keys that the mask excludes for all rows at hand are not read, 16 or 32 at a time.

constexpr float FLOAT_MAX = 3.402823466e38f;

#kernel attention_split attention_once attention_tiled attention_plain
constexpr int queries = Q::size(2);
constexpr int keys = K::size(2);
constexpr int width = Q::size(3);
constexpr int value_width = V::size(3);
constexpr int kv_heads = K::size(1);
constexpr int sharing = Q::size(1) / kv_heads;  // heads that share a KV head
constexpr int rows = queries * sharing;

// One KV head of one batch and the queries that attend to it.
struct Problem {
    const Q::type *q;
    const K::type *k;
    const V::type *v;
    const Mask::type *mask;
    index_t batch;
    index_t kv_head;

    __device__ __forceinline__ Problem(
        const Q::type *q_start, const K::type *k_start, const V::type *v_start, const Mask::type *mask_start,
        index_t batch, index_t kv_head
    ) : q(q_start + batch * Q::stride(0) + kv_head * sharing * Q::stride(1)),
        k(k_start + batch * K::stride(0) + kv_head * K::stride(1)),
        v(v_start + batch * V::stride(0) + kv_head * V::stride(1)), mask(mask_start), batch(batch),
        kv_head(kv_head) {
        if constexpr (Mask::present) {
            mask += batch * Mask::stride(0) + kv_head * sharing * Mask::stride(1);
        }
    }

    __device__ __forceinline__ static int query_of(int row) { return row / sharing; }

    __device__ __forceinline__ const Q::type *q_row(int row) const {
        return q + row % sharing * Q::stride(1) + query_of(row) * Q::stride(2);
    }

    // What is added to a score; -inf for a key that the row does not attend to.
    __device__ __forceinline__ float bias(int row, int key) const {
        if (row >= rows || key >= keys || (param::causal && key > query_of(row))) {
            return -INFINITY_F;
        }
        if constexpr (Mask::present) {
            const index_t place = row % sharing * Mask::stride(1) + query_of(row) * Mask::stride(2)
                + key * Mask::stride(3);
            if constexpr (is_float<Mask::type>::value) {
                return to_float(mask[place]);
            } else {
                return to_int(mask[place]) != 0 ? 0.0f : -INFINITY_F;
            }
        } else {
            return 0.0f;
        }
    }
};

#kernel attention_once attention_tiled attention_plain
__device__ __forceinline__ index_t out_row(const Problem &problem, int row) {
    return problem.batch * Out::stride(0) + (problem.kv_head * sharing + row % sharing) * Out::stride(1)
        + Problem::query_of(row) * Out::stride(2);
}

#kernel attention_split attention_once attention_tiled
// Both forms multiply 16 rows at a time by tensor cores, one warp for itself; lane 4g + p holds parts of rows g and g + 8.
//
// A product does not mind in which order its terms come. So a lane's operands are 16 bytes side by side in memory: of
// queries and keys dimensions 8p to 8p + 7 of each 32 (`chunks`), of values dimensions 8g to 8g + 7 of each 64 (`spans`).

constexpr int block_rows = 16;
constexpr int block_keys = 16;
constexpr int chunks = (width + 31) / 32;
constexpr int spans = (value_width + 63) / 64;

using Half = K::type;

template <typename T>
struct IsBrain { static constexpr bool value = false; };
template <>
struct IsBrain<bf16> { static constexpr bool value = true; };

struct alignas(16) Words {
    unsigned at[4];
};

// 8 elements; zeros where they are outside.
__device__ __forceinline__ Words load_words(const Half *data, bool inside) {
    return inside ? *reinterpret_cast<const Words *>(data) : Words{};
}

__device__ __forceinline__ Half low_half(unsigned word) { return Half{(unsigned short)(word & 0xffffu)}; }
__device__ __forceinline__ Half high_half(unsigned word) { return Half{(unsigned short)(word >> 16)}; }

// sums[16 × 8] += a[16 × 16] · b[16 × 8], in the fragments of mma.m16n8k16.
__device__ __forceinline__ void multiply(
    float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1
) {
#if __CUDA_ARCH__ >= 800
    if constexpr (IsBrain<Half>::value) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
#else
    // GPUs before Ampere: the same sums from the same fragments, which the lanes hand to each other.
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int part = 0; part < 4; part++) {
        const int row_lane = (lane & ~3) | part;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const unsigned top = __shfl_sync(0xffffffffu, half ? a2 : a0, row_lane);
            const unsigned bottom = __shfl_sync(0xffffffffu, half ? a3 : a1, row_lane);
#pragma unroll
            for (int column = 0; column < 2; column++) {
                const int column_lane = (lane % 4 * 2 + column) * 4 + part;
                const unsigned right = __shfl_sync(0xffffffffu, half ? b1 : b0, column_lane);
                const float low = to_float(low_half(right));
                const float high = to_float(high_half(right));
                sums[column] = fmaf(to_float(low_half(top)), low, sums[column]);
                sums[column] = fmaf(to_float(high_half(top)), high, sums[column]);
                sums[2 + column] = fmaf(to_float(low_half(bottom)), low, sums[2 + column]);
                sums[2 + column] = fmaf(to_float(high_half(bottom)), high, sums[2 + column]);
            }
        }
    }
#endif
}

// Two weights as 16-bit values and what these lack, so that no precision is lost: both parts are multiplied. A weight
// that is not 0 has two parts that are not, or its product with an infinite value would be NaN.
struct WeightPair {
    unsigned coarse;
    unsigned fine;

    __device__ __forceinline__ WeightPair(float first, float second) {
        const float first_part = truncated(first);
        const float second_part = truncated(second);
        coarse = packed(first_part, second_part);
        fine = packed(rest(first, first_part), rest(second, second_part));
    }

    __device__ __forceinline__ static float truncated(float value) {
        return __uint_as_float(__float_as_uint(value) & (IsBrain<Half>::value ? 0xffff0000u : 0xffffe000u));
    }

    __device__ __forceinline__ static float rest(float value, float part) {
        return value > 0.0f ? fmaxf(value - part, IsBrain<Half>::value ? 1e-30f : 6e-8f) : 0.0f;
    }

    __device__ __forceinline__ static unsigned packed(float first, float second) {
        return unsigned(from<Half>(first).bits) | unsigned(from<Half>(second).bits) << 16;
    }
};

// What a warp knows of its 16 rows after some keys.
struct State {
    Words q[2][chunks];  // rows g and g + 8
    float largest[2];
    float total[2];  // of this lane's keys
    float sums[spans][8][4];

    __device__ __forceinline__ void start(const Problem &problem, int first_row) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + 8 * half + lane / 4;
#pragma unroll
            for (int chunk = 0; chunk < chunks; chunk++) {
                const int dim = 32 * chunk + lane % 4 * 8;
                const bool inside = row < rows && dim < width;
                q[half][chunk] = load_words(problem.q_row(inside ? row : 0) + (inside ? dim : 0), inside);
            }
            largest[half] = -FLOAT_MAX;
            total[half] = 0.0f;
        }
#pragma unroll
        for (int span = 0; span < spans; span++) {
#pragma unroll
            for (int tile = 0; tile < 8; tile++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[span][tile][i] = 0.0f;
                }
            }
        }
    }

    // Adds 16 keys, of which `available` are there, with what is to be added to their scores.
    __device__ __forceinline__ void add(
        const Half *k, index_t k_stride, const Half *v, index_t v_stride, int available, const float (&bias)[2][4]
    ) {
        const int lane = threadIdx.x % WARP;
        const int group = lane / 4;
        const int part = lane % 4;
        Words key_words[2][chunks];
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const int key = 8 * tile + group;
#pragma unroll
            for (int chunk = 0; chunk < chunks; chunk++) {
                const int dim = 32 * chunk + 8 * part;
                key_words[tile][chunk] = load_words(k + key * k_stride + dim, key < available && dim < width);
            }
        }
        Words value_words[4][spans];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int key = 2 * part + i % 2 + i / 2 * 8;
#pragma unroll
            for (int span = 0; span < spans; span++) {
                const int dim = 64 * span + 8 * group;
                value_words[i][span] = load_words(v + key * v_stride + dim, key < available && dim < value_width);
            }
        }

        float scores[2][4] = {};
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#pragma unroll
            for (int chunk = 0; chunk < chunks; chunk++) {
                const Words &top = q[0][chunk];
                const Words &bottom = q[1][chunk];
                const Words &key = key_words[tile][chunk];
                multiply(scores[tile], top.at[0], bottom.at[0], top.at[1], bottom.at[1], key.at[0], key.at[1]);
                multiply(scores[tile], top.at[2], bottom.at[2], top.at[3], bottom.at[3], key.at[2], key.at[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // -inf even where an excluded key made the score NaN.
                scores[tile][i] =
                    bias[tile][i] == -INFINITY_F ? -INFINITY_F : scores[tile][i] * param::scale + bias[tile][i];
            }
        }

        float shrink[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float greatest = fmaxf(
                fmaxf(scores[0][2 * half], scores[0][2 * half + 1]), fmaxf(scores[1][2 * half], scores[1][2 * half + 1])
            );
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, 1));
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, 2));
            greatest = fmaxf(greatest, largest[half]);
            shrink[half] = expf(largest[half] - greatest);
            largest[half] = greatest;
            total[half] *= shrink[half];
        }
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[tile][i] = expf(scores[tile][i] - largest[i / 2]);
                total[i / 2] += scores[tile][i];
            }
        }
        const WeightPair weights[4] = {
            {scores[0][0], scores[0][1]}, {scores[0][2], scores[0][3]},
            {scores[1][0], scores[1][1]}, {scores[1][2], scores[1][3]},
        };
#pragma unroll
        for (int span = 0; span < spans; span++) {
#pragma unroll
            for (int tile = 0; tile < 8; tile++) {
                float(&target)[4] = sums[span][tile];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    target[i] *= shrink[i / 2];
                }
                const unsigned halves = tile % 2 ? 0x7632 : 0x5410;
                const unsigned first = __byte_perm(
                    value_words[0][span].at[tile / 2], value_words[1][span].at[tile / 2], halves
                );
                const unsigned second = __byte_perm(
                    value_words[2][span].at[tile / 2], value_words[3][span].at[tile / 2], halves
                );
                multiply(
                    target, weights[0].coarse, weights[1].coarse, weights[2].coarse, weights[3].coarse, first, second
                );
                multiply(target, weights[0].fine, weights[1].fine, weights[2].fine, weights[3].fine, first, second);
            }
        }
    }

    // The totals of whole rows, in every lane that has a part of them.
    __device__ __forceinline__ void finish_totals() {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
            total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
        }
    }

    // Dimension 64 · span + 16 · p + i of this lane's row.
    __device__ __forceinline__ float sum_at(int half, int span, int i) const {
        return sums[span][i % 8][2 * half + i / 8];
    }
};

// What is added to the scores of 16 rows with 16 keys, as the fragments have them; whether any key is attended to.
__device__ __forceinline__ bool biases(const Problem &problem, int first_row, int first_key, float (&bias)[2][4]) {
    const int lane = threadIdx.x % WARP;
    bool attended = false;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = first_row + lane / 4 + i / 2 * 8;
            bias[tile][i] = problem.bias(row, first_key + 8 * tile + lane % 4 * 2 + i % 2);
            attended |= bias[tile][i] != -INFINITY_F;
        }
    }
    return attended;
}

#kernel attention_split attention_once
// For few queries: the keys are split over the warps of `splits` blocks, in turns of 16.
constexpr int warps = THREADS / WARP;
constexpr int row_blocks = (rows + block_rows - 1) / block_rows;
constexpr int held_rows = rows < block_rows ? rows : block_rows;
constexpr int held_width = spans * 64;

// Hands every element of the block's result to finish(problem, row, dim, maximum, total, sum).
template <typename Finish>
__device__ __forceinline__ void attend(const Problem &problem, int first_row, Finish finish) {
    __shared__ float largest_of[warps][block_rows];
    __shared__ float total_of[warps][block_rows];
    __shared__ float sums_of[warps][held_rows][held_width];
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    State state;
    state.start(problem, first_row);
    int key = (blockIdx.x * warps + warp) * block_keys;
    float bias[2][4];
    bool attended = biases(problem, first_row, key, bias);
    while (key < keys) {
        // The next keys' mask is on its way while these keys are.
        const int next = key + splits * warps * block_keys;
        float next_bias[2][4];
        const bool next_attended = biases(problem, first_row, next, next_bias);
        if (__any_sync(0xffffffffu, attended)) {
            state.add(
                problem.k + key * K::stride(2), K::stride(2), problem.v + key * V::stride(2), V::stride(2), keys - key,
                bias
            );
        }
        key = next;
        attended = next_attended;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            bias[i / 4][i % 4] = next_bias[i / 4][i % 4];
        }
    }
    state.finish_totals();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = lane / 4 + 8 * half;
        if (lane % 4 == 0) {
            largest_of[warp][row] = state.largest[half];
            total_of[warp][row] = state.total[half];
        }
        if (row < held_rows) {
#pragma unroll
            for (int i = 0; i < 16 * spans; i++) {
                sums_of[warp][row][i / 16 * 64 + lane % 4 * 16 + i % 16] = state.sum_at(half, i / 16, i % 16);
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < held_rows * value_width; i += THREADS) {
        const int row = i / value_width;
        const int dim = i % value_width;
        if (first_row + row >= rows) {
            continue;
        }
        float largest = -FLOAT_MAX;
#pragma unroll
        for (int other = 0; other < warps; other++) {
            largest = fmaxf(largest, largest_of[other][row]);
        }
        float total = 0.0f;
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < warps; other++) {
            const float weight = expf(largest_of[other][row] - largest);
            total += weight * total_of[other][row];
            sum += weight * sums_of[other][row][dim];
        }
        finish(problem, first_row + row, dim, largest, total, sum);
    }
}

#kernel attention_once
struct Finish {
    Out::type *out;

    __device__ __forceinline__ void operator()(
        const Problem &problem, int row, int dim, float, float total, float sum
    ) const {
        // A query that attends to no key at all gets zeros, as in PyTorch.
        const float value = total == 0.0f ? 0.0f : sum / total;
        out[out_row(problem, row) + dim * Out::stride(3)] = from<Out::type>(value);
    }
};

KERNEL(attention_once) {
    const Problem problem(q, k, v, mask, blockIdx.z, blockIdx.y / row_blocks);
    attend(problem, blockIdx.y % row_blocks * block_rows, Finish{out});
}

#kernel attention_split
// Leaves what the blocks found to `attention_combine`, which adds it up.
struct Finish {
    Sums::type *sums;
    Stats::type *stats;

    __device__ __forceinline__ void operator()(
        const Problem &problem, int row, int dim, float largest, float total, float sum
    ) const {
        const index_t part = ((problem.batch * kv_heads + problem.kv_head) * rows + row) * splits + blockIdx.x;
        if (total != 0.0f) {
            sums[part * value_width + dim] = sum;
        }
        if (dim == 0) {
            stats[2 * part] = largest;
            stats[2 * part + 1] = total;
        }
    }
};

KERNEL(attention_split) {
    const Problem problem(q, k, v, mask, blockIdx.z, blockIdx.y / row_blocks);
    attend(problem, blockIdx.y % row_blocks * block_rows, Finish{sums, stats});
}

#kernel attention_combine
// sums is [batch, KV head, row, split, dimension], stats has the maximum and the total of each; a block per row.
KERNEL(attention_combine) {
    constexpr int width = Sums::size(4);
    constexpr int rows = Sums::size(2);
    constexpr int kv_heads = Sums::size(1);
    constexpr int sharing = Out::size(1) / kv_heads;
    const int row = blockIdx.x % rows;
    const int kv_head = blockIdx.x / rows % kv_heads;
    const index_t batch = blockIdx.x / (rows * kv_heads);
    const index_t first = index_t(blockIdx.x) * splits;
    const index_t target = batch * Out::stride(0) + (kv_head * sharing + row % sharing) * Out::stride(1)
        + row / sharing * Out::stride(2);
    float largest = -FLOAT_MAX;
#pragma unroll 8
    for (int split = 0; split < splits; split++) {
        largest = fmaxf(largest, stats[2 * (first + split)]);
    }
    for (int dim = threadIdx.x; dim < width; dim += THREADS) {
        float total = 0.0f;
        float sum = 0.0f;
#pragma unroll 8
        for (int split = 0; split < splits; split++) {
            const float part = stats[2 * (first + split) + 1];
            if (part != 0.0f) {  // a split without keys leaves no sums
                const float weight = expf(stats[2 * (first + split)] - largest);
                total += weight * part;
                sum += weight * sums[(first + split) * width + dim];
            }
        }
        // A query that attends to no key at all gets zeros, as in PyTorch.
        out[target + dim * Out::stride(3)] = from<Out::type>(total == 0.0f ? 0.0f : sum / total);
    }
}

#kernel attention_tiled
// For many queries: every warp of a block has 16 rows of its own, and all multiply them by the same keys and values,
// which are copied to shared memory 32 at a time while those before are at work.
constexpr int warps = THREADS / WARP;
constexpr int tile_rows = warps * block_rows;
constexpr int tile_keys = 32;
constexpr int row_blocks = (rows + tile_rows - 1) / tile_rows;
// Lanes that read at the same time should meet different banks: rows of keys are an odd multiple of 64 bytes apart,
// rows of values 16 bytes more than a multiple of 128.
constexpr int key_stage = (chunks % 2 ? chunks : chunks + 1) * 32;
constexpr int value_stage = spans * 64 + 8;

struct alignas(16) Stage {
    Half k[tile_keys][key_stage];
    Half v[tile_keys][value_stage];
};

// 16 bytes to shared memory, without waiting; zeros where they are outside.
__device__ __forceinline__ void copy_words(Half *target, const Half *source, bool inside) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(unsigned(__cvta_generic_to_shared(target))), "l"(source), "r"(inside ? 16 : 0) : "memory");
#else
    *reinterpret_cast<Words *>(target) = load_words(source, inside);
#endif
}

__device__ __forceinline__ void end_of_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all copies but those since the last `end_of_copies`.
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}

template <int padded, int stage>
__device__ __forceinline__ void copy_tile(
    Half (&target)[tile_keys][stage], const Half *source, index_t stride, int first_key, int row_width
) {
    constexpr int pieces = padded / 8;
    for (int i = threadIdx.x; i < tile_keys * pieces; i += THREADS) {
        const int row = i / pieces;
        const int dim = i % pieces * 8;
        const bool inside = first_key + row < keys && dim < row_width;
        copy_words(&target[row][dim], inside ? source + (first_key + row) * stride + dim : source, inside);
    }
}

// Notes of every tile whether some row of the block attends to any of its keys.
__device__ __forceinline__ void find_attended(
    const Problem &problem, int first_row, int last_row, int tiles, bool *attended
) {
    constexpr int step = Mask::stride(1) == 0 ? sharing : 1;  // heads with the same mask need one look
    static_assert(tile_keys == WARP, "a lane looks at one key");
    const int lane = threadIdx.x % WARP;
    for (int tile = threadIdx.x / WARP; tile < tiles; tile += warps) {
        bool found = false;
#pragma unroll 8
        for (int row = first_row / step * step; row <= last_row; row += step) {
            found |= problem.bias(row, tile * tile_keys + lane) != -INFINITY_F;
        }
        found = __any_sync(0xffffffffu, found);
        if (lane == 0) {
            attended[tile] = found;
        }
    }
    __syncthreads();
}

// The first attended tile from `tile` on, or `tiles`.
__device__ __forceinline__ int attended_tile(const bool *attended, int tile, int tiles) {
    if constexpr (Mask::present) {
        while (tile < tiles && !attended[tile]) {
            tile++;
        }
    }
    return tile;
}

KERNEL(attention_tiled) {
    __shared__ Stage stages[2];
    __shared__ bool attended[(keys + tile_keys - 1) / tile_keys];
    const int lane = threadIdx.x % WARP;
    // The last rows have the most keys where attention is causal: they begin first.
    const int row_block = row_blocks - 1 - int(blockIdx.x % row_blocks);
    const index_t head = blockIdx.x / row_blocks;
    const Problem problem(q, k, v, mask, head / kv_heads, head % kv_heads);
    const int first_row = row_block * tile_rows + threadIdx.x / WARP * block_rows;
    const int last_row = smaller(row_block * tile_rows + tile_rows, rows) - 1;
    const int reach = param::causal ? smaller(keys, Problem::query_of(last_row) + 1) : keys;
    const int tiles = (reach + tile_keys - 1) / tile_keys;
    if constexpr (Mask::present) {
        find_attended(problem, row_block * tile_rows, last_row, tiles, attended);
    }
    State state;
    state.start(problem, first_row);
    int tile = attended_tile(attended, 0, tiles);
    int turn = 0;
    if (tile < tiles) {
        copy_tile<chunks * 32>(stages[0].k, problem.k, K::stride(2), tile * tile_keys, width);
        copy_tile<spans * 64>(stages[0].v, problem.v, V::stride(2), tile * tile_keys, value_width);
    }
    end_of_copies();
    while (tile < tiles) {
        const int next = attended_tile(attended, tile + 1, tiles);
        if (next < tiles) {
            Stage &stage = stages[1 - turn];
            copy_tile<chunks * 32>(stage.k, problem.k, K::stride(2), next * tile_keys, width);
            copy_tile<spans * 64>(stage.v, problem.v, V::stride(2), next * tile_keys, value_width);
        }
        end_of_copies();
        wait_for_copies();
        __syncthreads();
        const Stage &stage = stages[turn];
#pragma unroll 1
        for (int part = 0; part < tile_keys; part += block_keys) {
            float bias[2][4];
            const bool concerned = biases(problem, first_row, tile * tile_keys + part, bias);
            if (__any_sync(0xffffffffu, concerned)) {
                state.add(stage.k[part], key_stage, stage.v[part], value_stage, block_keys, bias);
            }
        }
        __syncthreads();
        tile = next;
        turn = 1 - turn;
    }
    state.finish_totals();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = first_row + lane / 4 + 8 * half;
        if (row >= rows) {
            continue;
        }
        // A query that attends to no key at all gets zeros, as in PyTorch.
        const float factor = state.total[half] == 0.0f ? 0.0f : 1.0f / state.total[half];
        Out::type *target = out + out_row(problem, row);
#pragma unroll
        for (int piece = 0; piece < 2 * spans; piece++) {
            const int dim = piece / 2 * 64 + lane % 4 * 16 + piece % 2 * 8;
            float values[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                values[i] = state.sum_at(half, piece / 2, piece % 2 * 8 + i) * factor;
            }
            if (dim < value_width) {
                if constexpr (Out::vector >= 8) {
                    store_floats(target + dim, values);
                } else {
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        target[(dim + i) * Out::stride(3)] = from<Out::type>(values[i]);
                    }
                }
            }
        }
    }
}

#kernel attention_plain
// Any dtypes, widths and strides, in float arithmetic: a block per query of a head and per slice of its result; each warp
// follows keys of its own.
constexpr int warps = THREADS / WARP;
constexpr int slices = (value_width + slice - 1) / slice;
constexpr int parts = (slice + WARP - 1) / WARP;

KERNEL(attention_plain) {
    __shared__ float largest_of[warps];
    __shared__ float total_of[warps];
    __shared__ float sums_of[warps][slice];
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const int first_dim = blockIdx.x % slices * slice;
    const int row = blockIdx.x / slices % rows;
    const index_t head = blockIdx.x / slices / rows;
    const Problem problem(q, k, v, mask, head / kv_heads, head % kv_heads);
    const Q::type *query = problem.q_row(row);
    float largest = -FLOAT_MAX;
    float total = 0.0f;
    float sums[parts] = {};
    const int reach = param::causal ? smaller(keys, Problem::query_of(row) + 1) : keys;
    for (int key = warp; key < reach; key += warps) {
        const float bias = problem.bias(row, key);
        if (bias == -INFINITY_F) {
            continue;
        }
        float product = 0.0f;
        for (int dim = lane; dim < width; dim += WARP) {
            const float right = to_float(problem.k[key * K::stride(2) + dim * K::stride(3)]);
            product = fmaf(to_float(query[dim * Q::stride(3)]), right, product);
        }
        const float score = warp_sum(product) * param::scale + bias;
        const float before = largest;
        largest = fmaxf(largest, score);
        const float shrink = expf(before - largest);
        const float weight = expf(score - largest);
        total = total * shrink + weight;
#pragma unroll
        for (int part = 0; part < parts; part++) {
            const int dim = first_dim + part * WARP + lane;
            if (dim < value_width) {
                const float value = to_float(problem.v[key * V::stride(2) + dim * V::stride(3)]);
                sums[part] = sums[part] * shrink + weight * value;
            }
        }
    }
#pragma unroll
    for (int part = 0; part < parts; part++) {
        if (part * WARP + lane < slice) {
            sums_of[warp][part * WARP + lane] = sums[part];
        }
    }
    if (lane == 0) {
        largest_of[warp] = largest;
        total_of[warp] = total;
    }
    __syncthreads();
    largest = -FLOAT_MAX;
    total = 0.0f;
#pragma unroll
    for (int other = 0; other < warps; other++) {
        largest = fmaxf(largest, largest_of[other]);
    }
#pragma unroll
    for (int other = 0; other < warps; other++) {
        total += total_of[other] * expf(largest_of[other] - largest);
    }
    for (int dim = threadIdx.x; dim < slice && first_dim + dim < value_width; dim += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < warps; other++) {
            sum += sums_of[other][dim] * expf(largest_of[other] - largest);
        }
        // A query that attends to no key at all gets zeros, as in PyTorch.
        const float value = total == 0.0f ? 0.0f : sum / total;
        out[out_row(problem, row) + (first_dim + dim) * Out::stride(3)] = from<Out::type>(value);
    }
}
