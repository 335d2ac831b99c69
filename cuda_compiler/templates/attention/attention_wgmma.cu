// Attention of many queries on GPUs whose warpgroups multiply matrices in shared memory. One warpgroup of a block copies
// keys and values to a ring of stages; each of the others has 64 rows, and weighs the scores of a tile while the tensor
// cores multiply the weights of the tile before by its values. Otherwise as `attention_tiled`.

#include "attention/attention_tiles.cuh"
#include "common/warpgroup.cuh"

constexpr int consumers = tile_rows / warpgroup_rows;
constexpr int held_width = (width + slab_width - 1) / slab_width * slab_width;  // of rows in shared memory, zeros included
constexpr int slabs = held_width / slab_width;
constexpr int pieces = held_width / 8;  // of 16 bytes, in a row
constexpr int copied_rows = warpgroup_threads / pieces;  // by one copy of each thread
static_assert(tile_keys == 128 && width == value_width && width <= held_width);
static_assert(held_width % slab_width == 0 && held_width <= 128);

struct alignas(1024) Memory {
    Half q[slabs][tile_rows][slab_width];
    Half k[stages][slabs][tile_keys][slab_width];
    Half v[stages][slabs][tile_keys][slab_width];
    Barrier k_filled[stages];
    Barrier k_free[stages];
    Barrier v_filled[stages];
    Barrier v_free[stages];
};

extern __shared__ __align__(1024) unsigned char shared_memory[];

using Turn = RingTurn<stages>;

// The copies of one thread of the warpgroup that makes them: always the same piece of a row.
struct Copier {
    int row;
    int dim;

    __device__ __forceinline__ Copier() {
        row = int(threadIdx.x) % warpgroup_threads / pieces;
        dim = int(threadIdx.x) % pieces * 8;
    }

    // Rows that are a multiple of 8 further on have their pieces in the same order.
    template <int count>
    __device__ __forceinline__ Half *place(Half (&matrix)[slabs][count][slab_width]) const {
        return &matrix[dim / slab_width][row][(dim % slab_width / 8 ^ row % 8) * 8];
    }

    __device__ __forceinline__ void copy_queries(Memory &memory, const Problem &problem, int block_row) const {
        Half *target = place(memory.q);
#pragma unroll
        for (int i = 0; i < tile_rows; i += copied_rows) {
            const bool inside = block_row + row + i < rows && dim < width;
            copy_words(target + i * slab_width, inside ? problem.q_row(block_row + row + i) + dim : problem.q, inside);
        }
    }

    template <index_t stride>
    __device__ __forceinline__ void copy_tile(
        Half (&matrix)[slabs][tile_keys][slab_width], const Half *source, int first_key
    ) const {
        Half *target = place(matrix);
        const Half *own = source + (first_key + row) * stride + dim;
#pragma unroll
        for (int i = 0; i < tile_keys; i += copied_rows) {
            const bool inside = (keys % tile_keys == 0 || first_key + row + i < keys) && dim < width;
            copy_words(target + i * slab_width, inside ? own + i * stride : source, inside);
        }
    }
};

__device__ __forceinline__ void copy_all(Memory &memory, const Problem &problem, const Tiles &tiles, int block_row) {
    const Copier copier;
    copier.copy_queries(memory, problem, block_row);
    Turn turn;
    for (int tile = tiles.next(0); tile < tiles.count; tile = tiles.next(tile + 1)) {
        memory.k_free[turn.stage].wait(turn.parity ^ 1);
        copier.copy_tile<K::stride(2)>(memory.k[turn.stage], problem.k, tile * tile_keys);
        memory.k_filled[turn.stage].arrive_after_copies();
        memory.v_free[turn.stage].wait(turn.parity ^ 1);
        copier.copy_tile<V::stride(2)>(memory.v[turn.stage], problem.v, tile * tile_keys);
        memory.v_filled[turn.stage].arrive_after_copies();
        turn.advance();
    }
    end_of_copies();
    wait_for_copies<0>();
}

// A warpgroup's 64 rows.
struct Consumer {
    Memory &memory;
    int number;
    Rows rows_at;
    unsigned weights[tile_keys / 16][4];

    // Starts scores[64 × 128] = q · kᵀ.
    __device__ __forceinline__ void start_scores(float (&scores)[key_groups][4], Turn turn) {
        memory.k_filled[turn.stage].wait(turn.parity);
        show_to_products();
        const unsigned long long q = matrix_at(shared_address(&memory.q[0][number * warpgroup_rows]), 0);
        const unsigned long long k = matrix_at(shared_address(&memory.k[turn.stage]), 0);
        pin(scores);
        begin_products();
#pragma unroll
        for (int step = 0; step < (width + 15) / 16; step++) {
            constexpr int in_slab = slab_width / 16;
            const int column = step % in_slab * 32;
            multiply_shared(
                scores, further(q, step / in_slab * int(sizeof(memory.q[0])) + column),
                further(k, step / in_slab * int(sizeof(memory.k[0][0])) + column), step > 0
            );
        }
        end_of_products();
    }

    // Starts sums += weights · v.
    __device__ __forceinline__ void start_sums(Turn turn) {
        memory.v_filled[turn.stage].wait(turn.parity);
        show_to_products();
        const unsigned long long v = matrix_at(shared_address(&memory.v[turn.stage]), sizeof(memory.v[0][0]));
        pin(rows_at.sums);
        begin_products();
#pragma unroll
        for (int step = 0; step < tile_keys / 16; step++) {
            multiply_held(rows_at.sums, weights[step], further(v, step * 16 * slab_width * int(sizeof(Half))));
        }
        end_of_products();
    }

    __device__ __forceinline__ void hold_weights(const float (&scores)[key_groups][4]) {
#pragma unroll
        for (int step = 0; step < tile_keys / 16; step++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&pair)[4] = scores[2 * step + i / 2];
                weights[step][i] = packed(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
            }
        }
    }

    __device__ __forceinline__ static void release(Barrier &barrier) {
        if (threadIdx.x % WARP == 0) {
            barrier.arrive();
        }
    }

    __device__ __forceinline__ void attend(const Problem &problem, const Tiles &tiles, int first_row) {
        int tile = tiles.next(0);
        if (tile == tiles.count) {
            return;
        }
        Turn turn;
        float scores[key_groups][4];
        start_scores(scores, turn);
        bool is_biased = tiles.is_biased(tile);
        wait_for_products<0>();
        pin(scores);
        release(memory.k_free[0]);
        rows_at.weigh(scores, problem, first_row, tile * tile_keys, is_biased);
        hold_weights(scores);
        for (tile = tiles.next(tile + 1); tile < tiles.count; ) {
            const Turn before = turn;
            turn.advance();
            start_scores(scores, turn);
            start_sums(before);
            is_biased = tiles.is_biased(tile);
            const int next = tiles.next(tile + 1);
            wait_for_products<1>();
            pin(scores);
            release(memory.k_free[turn.stage]);
            rows_at.weigh(scores, problem, first_row, tile * tile_keys, is_biased);
            wait_for_products<0>();
            pin(rows_at.sums);
            release(memory.v_free[before.stage]);
            rows_at.shrink_sums();
            hold_weights(scores);
            tile = next;
        }
        start_sums(turn);
        wait_for_products<0>();
        pin(rows_at.sums);
    }
};

KERNEL(attention_wgmma) {
    Memory &memory = *reinterpret_cast<Memory *>(shared_memory);
    const int row_block = own_row_block();
    const Problem problem(q, k, v, mask, own_problem() / kv_heads, own_problem() % kv_heads);
    const int block_row = row_block * tile_rows;
    const Tiles tiles(verdicts, problem, row_block);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < stages; stage++) {
            memory.k_filled[stage].start(warpgroup_threads);
            memory.v_filled[stage].start(warpgroup_threads);
            memory.k_free[stage].start(consumers * warpgroup_threads / WARP);
            memory.v_free[stage].start(consumers * warpgroup_threads / WARP);
        }
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / warpgroup_threads, 0);
    if (warpgroup == consumers) {
        if constexpr (consumers > 1) {
            give_registers<24>();
        }
        copy_all(memory, problem, tiles, block_row);
    } else {
        if constexpr (consumers > 1) {
            take_registers<240>();
        }
        Consumer consumer{memory, warpgroup};
        const int warp = int(threadIdx.x) % warpgroup_threads / WARP;
        const int first_row = block_row + warpgroup * warpgroup_rows + warp * block_rows;
        consumer.attend(problem, tiles, first_row);
        consumer.rows_at.finish(problem, first_row, out);
    }
}
