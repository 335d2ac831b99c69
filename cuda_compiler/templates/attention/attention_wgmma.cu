// Attention of many queries on GPUs whose warpgroups multiply matrices in shared memory. One warpgroup of a block copies
// keys and values to a ring of stages; each of the others has 64 rows, and weighs the scores of a tile while the tensor
// cores multiply the weights of the tile before by its values. A block does one item of work after the other (a problem's
// `tile_rows` rows), and copies the next one's queries and first keys meanwhile. Otherwise as `attention_tiled`.

#include "attention/attention_tiles.cuh"
#include "common/warpgroup.cuh"

constexpr int consumers = tile_rows / warpgroup_rows;
constexpr int held_width = (width + slab_width - 1) / slab_width * slab_width;  // of rows in shared memory, zeros included
constexpr int slabs = held_width / slab_width;
constexpr int pieces = held_width / 8;  // of 16 bytes, in a row
constexpr int copied_rows = warpgroup_threads / pieces;  // by one copy of each thread
constexpr int copies_at_once = consumers > 1 ? 2 : 8;  // more addresses at once than registers hold
static_assert(tile_keys % 32 == 0 && width == value_width && width <= held_width);
static_assert(held_width % slab_width == 0 && held_width <= 128);

struct alignas(1024) Memory {
    Half q[slabs][tile_rows][slab_width];
    Half k[stages][slabs][tile_keys][slab_width];
    Half v[stages][slabs][tile_keys][slab_width];
    Barrier k_filled[stages];
    Barrier k_free[stages];
    Barrier v_filled[stages];
    Barrier v_free[stages];
    Barrier q_free;  // the first keys' barrier tells that the queries are there
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
#pragma unroll copies_at_once
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
#pragma unroll copies_at_once
        for (int i = 0; i < tile_keys; i += copied_rows) {
            const bool inside = (keys % tile_keys == 0 || first_key + row + i < keys) && dim < width;
            copy_words(target + i * slab_width, inside ? own + i * stride : source, inside);
        }
    }
};

// A block's item number `round`; it is beyond `items` when there are no more. The order turns around, since the first items of
// a round may take longer than the last ones.
__device__ __forceinline__ int item_of(int round) {
    const int blocks = gridDim.x;
    return round * blocks + (round % 2 == 0 ? int(blockIdx.x) : blocks - 1 - int(blockIdx.x));
}

__device__ __forceinline__ void copy_all(
    Memory &memory, const Q::type *q, const K::type *k, const V::type *v, const Mask::type *mask,
    const Verdicts::type *verdicts
) {
    const Copier copier;
    Turn turn;
    int queries_parity = 1;
    for (int round = 0; item_of(round) < items; round++) {
        const int row_block = row_block_of(item_of(round));
        const Problem problem(q, k, v, mask, problem_of(item_of(round)) / kv_heads, problem_of(item_of(round)) % kv_heads);
        const Tiles tiles(verdicts, problem, row_block);
        bool is_first = true;
        for (int tile = tiles.next(0); tile < tiles.count; tile = tiles.next(tile + 1)) {
            if (is_first) {
                memory.q_free.wait(queries_parity);
                queries_parity ^= 1;
                copier.copy_queries(memory, problem, row_block * tile_rows);
                is_first = false;
            }
            memory.k_free[turn.stage].wait(turn.parity ^ 1);
            copier.copy_tile<K::stride(2)>(memory.k[turn.stage], problem.k, tile * tile_keys);
            memory.k_filled[turn.stage].arrive_after_copies();
            memory.v_free[turn.stage].wait(turn.parity ^ 1);
            copier.copy_tile<V::stride(2)>(memory.v[turn.stage], problem.v, tile * tile_keys);
            memory.v_filled[turn.stage].arrive_after_copies();
            turn.advance();
        }
    }
    end_of_copies();
    wait_for_copies<0>();
}

// A warpgroup's 64 rows.
struct Consumer {
    Memory &memory;
    int number;
    Turn turn;
    Rows rows_at;
    unsigned weights[tile_keys / 16][4];

    // Warpgroups start their products in turns, so that one weighs scores while another one's products run.
    __device__ __forceinline__ void wait_for_turn() const {
        if constexpr (takes_turns) {
            sync_some<2 * warpgroup_threads>(1 + number);
        }
    }

    __device__ __forceinline__ void end_turn() const {
        if constexpr (takes_turns) {
            asm volatile("bar.arrive %0, %1;"
                         :: "r"(1 + (number + 1) % consumers), "n"(2 * warpgroup_threads) : "memory");
        }
    }

    // Starts scores[64 × tile_keys] = q · kᵀ.
    __device__ __forceinline__ void start_scores(float (&scores)[key_groups][4]) {
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

    // What was read of a stage, and of the queries with the last of a problem's keys, may be overwritten.
    __device__ __forceinline__ void release_keys(bool are_last) {
        release(memory.k_free[turn.stage]);
        if (are_last) {
            release(memory.q_free);
        }
    }

    __device__ __forceinline__ void attend(const Problem &problem, const Tiles &tiles, int first_row) {
        rows_at = Rows{};
        int tile = tiles.next(0);
        if (tile == tiles.count) {
            return;
        }
        float scores[key_groups][4];
        wait_for_turn();
        start_scores(scores);
        end_turn();
        bool is_biased = tiles.is_biased(tile);
        int next = tiles.next(tile + 1);
        wait_for_products<0>();
        pin(scores);
        release_keys(next >= tiles.count);
        rows_at.weigh(scores, problem, first_row, tile * tile_keys, is_biased);
        hold_weights(scores);
        while (next < tiles.count) {
            const Turn before = turn;
            tile = next;
            turn.advance();
            wait_for_turn();
            start_scores(scores);
            start_sums(before);
            end_turn();
            is_biased = tiles.is_biased(tile);
            next = tiles.next(tile + 1);
            wait_for_products<1>();
            pin(scores);
            release_keys(next >= tiles.count);
            rows_at.weigh(scores, problem, first_row, tile * tile_keys, is_biased);
            wait_for_products<0>();
            pin(rows_at.sums);
            release(memory.v_free[before.stage]);
            rows_at.shrink_sums();
            hold_weights(scores);
        }
        start_sums(turn);
        wait_for_products<0>();
        pin(rows_at.sums);
        release(memory.v_free[turn.stage]);
        turn.advance();
    }

    // Lets a problem's keys and values pass by, of which this warpgroup has no rows.
    __device__ __forceinline__ void skip(const Tiles &tiles) {
        for (int tile = tiles.next(0); tile < tiles.count; ) {
            tile = tiles.next(tile + 1);
            wait_for_turn();
            end_turn();
            memory.k_filled[turn.stage].wait(turn.parity);
            release_keys(tile >= tiles.count);
            memory.v_filled[turn.stage].wait(turn.parity);
            release(memory.v_free[turn.stage]);
            turn.advance();
        }
    }
};

// Registers per thread of the warpgroup that copies, and of each of the others: as many as a multiprocessor has.
constexpr int copying_registers = consumers == 2 ? 40 : 32;
constexpr int computing_registers = consumers == 2 ? 232 : 160;

KERNEL(attention_wgmma) {
    Memory &memory = *reinterpret_cast<Memory *>(shared_memory);
    if (threadIdx.x == 0) {
        constexpr int warps = consumers * warpgroup_threads / WARP;
        for (int stage = 0; stage < stages; stage++) {
            memory.k_filled[stage].start(warpgroup_threads);
            memory.v_filled[stage].start(warpgroup_threads);
            memory.k_free[stage].start(warps);
            memory.v_free[stage].start(warps);
        }
        memory.q_free.start(warps);
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / warpgroup_threads, 0);
    if (warpgroup == consumers) {
        if constexpr (consumers > 1) {
            give_registers<copying_registers>();
        }
        copy_all(memory, q, k, v, mask, verdicts);
    } else {
        if constexpr (consumers > 1) {
            take_registers<computing_registers>();
        }
        Consumer consumer{memory, warpgroup};
        if (warpgroup == consumers - 1) {
            consumer.end_turn();  // the first turn is the first warpgroup's
        }
        for (int round = 0; item_of(round) < items; round++) {
            const int row_block = row_block_of(item_of(round));
            const int block_row = row_block * tile_rows + warpgroup * warpgroup_rows;
            const Problem problem(
                q, k, v, mask, problem_of(item_of(round)) / kv_heads, problem_of(item_of(round)) % kv_heads);
            const Tiles tiles(verdicts, problem, row_block);
            if (block_row >= rows) {
                consumer.skip(tiles);
                continue;
            }
            const int first_row = block_row + int(threadIdx.x) % warpgroup_threads / WARP * block_rows;
            consumer.attend(problem, tiles, first_row);
#where has_sinks
            consumer.rows_at.finish(problem, first_row, sinks, out);
#elsewhere
            consumer.rows_at.finish(problem, first_row, out);
#end
        }
    }
}
