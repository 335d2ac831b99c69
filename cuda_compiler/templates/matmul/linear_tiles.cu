// Products of many rows and a weight by warpgroups, bound by the tensor cores: `linear_codes` of bytes with a scale for each row,
// `linear_halves` of 16-bit floats. With what follows them: act(sum · scales + bias) + residual, or the same with the residual
// inside, or `made` of the product's first and its second half of columns. On GPUs of compute capability 9.0 only.
//
// Blocks go through tiles of 128 rows of x and `weight_rows` rows of the weight. One thread copies, in steps of 128 bytes of a row,
// to a ring of `stages` steps in shared memory, across tiles. Two warpgroups multiply 64 rows each, and put their results where
// their part of the residual has been copied to while they multiplied. From there the copy engine stores them during the next tile.
//
// Invariants
// C1. A place of the ring is filled when all of its bytes have arrived.
// C2. A place is copied to when all warps that multiply have done so with what was there.
// C3. Rows beyond those of x, and columns beyond those of the weight, are zeros, or what belongs to the other half; the copy
//     engine does not store their results.
// C4. A warpgroup's results are written when the store of those before has read them, which the thread that started it knows;
//     it then has the residual copied there, or meets the others at a barrier.

#kernel linear_codes
constexpr bool SIGNED = true;

#include "common/warpgroup_bytes.cuh"

using Sum = Either<to_int8, int, float>::type;

#kernel linear_halves
using Half = X::type;
using Sum = float;

#include "common/tensor_cores.cuh"
#include "common/warpgroup.cuh"

WIDE_192(HALF_PRODUCT, "+f")
WIDE_256(HALF_PRODUCT, "+f")

#kernel linear_codes linear_halves
#include "common/tensor_maps.cuh"

constexpr int step_bytes = 128;  // of a row
constexpr int row_bytes = int(X::size(1) * sizeof(X::type));
constexpr int m = int(X::size(0));
constexpr int n = int(Weight::size(0)) / (is_made ? 2 : 1);
constexpr int consumers = 2;
constexpr int tile_rows = consumers * warpgroup_rows;
constexpr int half = weight_rows / 2;
constexpr int width = is_made ? half : weight_rows;  // columns of the result
constexpr int row_tiles = (m + tile_rows - 1) / tile_rows;
constexpr int column_tiles = (n + width - 1) / width;
constexpr int steps = (row_bytes + step_bytes - 1) / step_bytes;
constexpr int fragments = weight_rows / 8;  // of a warp's sums, 8 columns each
constexpr bool is_whole = n % width == 0;   // all columns of all tiles exist

static_assert(THREADS == (consumers + 1) * warpgroup_threads && sizeof(Out::type) == 2, "");
static_assert(width % slab_width == 0 && n % 2 == 0, "");

struct alignas(1024) Stage {
    unsigned char x[tile_rows][step_bytes];
    unsigned char weight[2][half][step_bytes];
};

using Slab = Out::type[warpgroup_rows][slab_width];

struct Memory {
    Stage ring[stages];
    Slab results[consumers][width / slab_width];
    Barrier filled[stages];
    Barrier free[stages];
    Barrier residual[consumers];
};

static_assert(sizeof(Memory) <= (shared + 1023) / 1024 * 1024, "");  // with what aligns its end

using Turn = RingTurn<stages>;

// A block's share of the tiles: their rows and columns of the result.
struct Tile {
    int number = int(blockIdx.x);

    __device__ __forceinline__ bool exists() const { return number < row_tiles * column_tiles; }
    __device__ __forceinline__ int row() const { return number % row_tiles * tile_rows; }
    __device__ __forceinline__ int column() const { return number / row_tiles * width; }
    __device__ __forceinline__ void advance() { number += int(gridDim.x); }
};

__device__ __forceinline__ void copy_tiles(Memory &memory, const TensorMap &x, const TensorMap &weight) {
    constexpr int apart = is_made ? n : half;  // the weight's rows of both halves
    Turn turn;
    for (Tile tile; tile.exists(); tile.advance()) {
        for (int step = 0; step < steps; step++) {
            Stage &stage = memory.ring[turn.stage];
            Barrier &filled = memory.filled[turn.stage];
            memory.free[turn.stage].wait(turn.parity ^ 1);  // C2
            expect_copies(filled, sizeof(Stage));           // C1
            copy_box(stage.x, x, tile.row(), step * step_bytes, filled);
            copy_box(stage.weight[0], weight, tile.column(), step * step_bytes, filled);
            copy_box(stage.weight[1], weight, tile.column() + apart, step * step_bytes, filled);
            turn.advance();
        }
    }
}

#kernel linear_codes
// Those of the rows and columns of which a thread has sums.
struct Scales {
    float rows[2];
    float columns[fragments][2];

    __device__ __forceinline__ float of(int fragment, int second, int j) const { return columns[fragment][j] * rows[second]; }
};

#kernel linear_halves
struct Scales {
    __device__ __forceinline__ float of(int, int, int) const { return 1.0f; }
};

#kernel linear_codes linear_halves

// One of the warpgroups that multiply.
struct Consumer {
    Memory &memory;
    int number;
    int thread;
    Turn turn;

    __device__ __forceinline__ Slab &slab(int i) const { return memory.results[number][i]; }

    __device__ __forceinline__ void sync() const { sync_some<warpgroup_threads>(1 + number); }

    // Where its part of a tile is, and in it the slabs of its results.
    __device__ __forceinline__ int first_row(const Tile &tile) const { return tile.row() + number * warpgroup_rows; }
    __device__ __forceinline__ static int first_byte(const Tile &tile, int i) {
        return (tile.column() + i * slab_width) * int(sizeof(Out::type));
    }

    // The row of this thread's first sums in each fragment, or 8 further on.
    __device__ __forceinline__ int own_row(int second) const {
        return thread / WARP * 16 + thread % WARP / 4 + 8 * second;
    }

    __device__ __forceinline__ void release(int stage) const {
        if (thread % WARP == 0) {
            memory.free[stage].arrive();  // C2
        }
    }

    __device__ __forceinline__ void multiply(Sum (&sums)[fragments][4]) {
        int before = 0;
        pin(sums);
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const Stage &stage = memory.ring[turn.stage];
            memory.filled[turn.stage].wait(turn.parity);  // C1
            const unsigned long long left = matrix_at(shared_address(stage.x[number * warpgroup_rows]), 0);
            const unsigned long long right = matrix_at(shared_address(stage.weight), 0);
            begin_products();
#pragma unroll
            for (int part = 0; part < step_bytes / 32; part++) {
                multiply_shared(sums, further(left, 32 * part), further(right, 32 * part), step + part > 0);
            }
            end_of_products();
            wait_for_products<1>();
            if (step > 0) {
                release(before);
            }
            before = turn.stage;
            turn.advance();
        }
        wait_for_products<0>();
        pin(sums);
        release(before);
    }

    // Makes room for the results, with the residual in it.
    template <typename Map>
    __device__ __forceinline__ void begin_results(const Tile &tile, const Map &residuals) const {
        if (thread == 0) {
            wait_for_stores<true>();  // C4
            if constexpr (Residual::present) {
                expect_copies(memory.residual[number], sizeof(memory.results[number]));
                for (int i = 0; i < width / slab_width; i++) {
                    copy_box(slab(i), residuals, first_row(tile), first_byte(tile, i), memory.residual[number]);
                }
            }
        }
    }

    __device__ __forceinline__ void store_results(const Tile &tile, const TensorMap &results) const {
        show_to_products();
        sync();
        if (thread == 0) {
            for (int i = 0; i < width / slab_width; i++) {
                store_box(results, first_row(tile), first_byte(tile, i), slab(i));
            }
            end_of_stores();
        }
    }

    // What lies where a word of a fragment's results will: two columns of the thread's first row, or of the one 8 further on.
    __device__ __forceinline__ unsigned load_word(int fragment, int second) const {
        const int row = own_row(second);
        const int piece = (fragment ^ row) % 8;
        unsigned word;  // before the store behind it, which is volatile too
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(word) : "r"(shared_address(&slab(fragment / 8)[row][piece * 8]) + thread % 4 * 4));
        return word;
    }

    // The row of two neighbouring fragments whose address this thread gives for a store of them.
    __device__ __forceinline__ void *row_of_two(int fragment) const {
        const int lane = thread % WARP;
        const int row = thread / WARP * 16 + lane % 16;
        const int piece = (fragment + lane / 16 ^ row) % 8;
        return &slab(fragment / 8)[row][piece * 8];
    }

    // Two neighbouring columns of this thread, or the last two that there are.
    template <typename T>
    __device__ __forceinline__ void load(float (&values)[2], const T *data, int column) const {
        const int first = column + thread % 4 * 2;
        load_floats(values, data + (is_whole ? first : smaller(first, n - 2)));
    }

#kernel linear_codes
    __device__ __forceinline__ Scales load_scales(const Tile &tile, const float *rows, const float *columns) const {
        Scales scales;
#pragma unroll
        for (int second = 0; second < 2; second++) {
            scales.rows[second] = rows[smaller(first_row(tile) + own_row(second), m - 1)];
        }
#pragma unroll
        for (int i = 0; i < fragments; i++) {
            const bool second = is_made && i >= half / 8;
            const int column = tile.column() + 8 * (second ? i - half / 8 : i);
            load(scales.columns[i], columns + (second ? n : 0), column);
        }
        return scales;
    }

#kernel linear_codes linear_halves
    __device__ __forceinline__ void make_results(
        const Sum (&sums)[fragments][4], const Scales &scales, const Tile &tile, const Bias::type *bias
    ) const {
#pragma unroll
        for (int first = 0; first < width / 8; first += 2) {
            unsigned words[2][2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int fragment = first + i;
                float biases[2] = {};
                if constexpr (Bias::present) {
                    load(biases, bias, tile.column() + 8 * fragment);
                }
#pragma unroll
                for (int second = 0; second < 2; second++) {
                    float values[2];
                    float addends[2] = {};
                    if constexpr (Residual::present) {
                        const unsigned added = load_word(fragment, second);
                        to_floats(addends, *reinterpret_cast<const Pack<Out::type, 2> *>(&added));
                    }
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const float value = float(sums[fragment][2 * second + j]) * scales.of(fragment, second, j);
                        if constexpr (is_made) {
                            const Sum other = sums[half / 8 + fragment][2 * second + j];
                            values[j] = made(value, float(other) * scales.of(half / 8 + fragment, second, j));
                        } else if constexpr (residual_last) {
                            values[j] = activate(value + biases[j]) + addends[j];
                        } else {
                            values[j] = activate(value + biases[j] + addends[j]);
                        }
                    }
                    Pack<Out::type, 2> pair;
                    from_floats(pair, values);
                    words[i][second] = *reinterpret_cast<const unsigned *>(&pair);
                }
            }
            store_fragments(row_of_two(first), words[0][0], words[0][1], words[1][0], words[1][1]);
        }
    }
};

// The block's memory, whose barriers are ready.
__device__ __forceinline__ Memory &begin() {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    Memory &memory = *reinterpret_cast<Memory *>(shared_memory);
    if (threadIdx.x < stages) {
        memory.filled[threadIdx.x].start(1);
        memory.free[threadIdx.x].start(consumers * warpgroup_threads / WARP);
    }
    if (threadIdx.x < consumers) {
        memory.residual[threadIdx.x].start(1);
    }
    show_to_products();
    __syncthreads();
    return memory;
}

// Makes all of a block's tiles. `scales(consumer, tile)` loads the scales of one.
template <typename Load, typename ResidualMap>
__device__ __forceinline__ void multiply_tiles(
    Memory &memory, const TensorMap &x, const TensorMap &weight, const TensorMap &out, const ResidualMap &residuals,
    const Bias::type *bias, const Load &scales
) {
    const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / warpgroup_threads, 0);
    if (warpgroup == consumers) {
        give_registers<40>();
        if (threadIdx.x % warpgroup_threads == 0) {
            copy_tiles(memory, x, weight);
        }
        return;
    }
    take_registers<232>();
    Consumer consumer{memory, warpgroup, int(threadIdx.x) % warpgroup_threads};
    int parity = 0;
    for (Tile tile; tile.exists(); tile.advance()) {
        consumer.begin_results(tile, residuals);
        const Scales of_tile = scales(consumer, tile);  // which are there when they are needed
        Sum sums[fragments][4];
        consumer.multiply(sums);
        if constexpr (Residual::present) {
            memory.residual[warpgroup].wait(parity);
        } else {
            consumer.sync();
        }
        parity ^= 1;
        consumer.make_results(sums, of_tile, tile, bias);
        consumer.store_results(tile, out);
    }
    if (consumer.thread == 0) {
        wait_for_stores<false>();
    }
}

#kernel linear_codes
WAITING_KERNEL(linear_codes) {
    Memory &memory = begin();
    begin_in_turn();
    multiply_tiles(memory, x_map, weight_map, out_map, RESIDUAL_MAP, bias, [&](const Consumer &consumer, const Tile &tile) {
        return consumer.load_scales(tile, rows, columns);
    });
}

#kernel linear_halves
WAITING_KERNEL(linear_halves) {
    Memory &memory = begin();
    begin_in_turn();
    multiply_tiles(
        memory, x_map, weight_map, out_map, RESIDUAL_MAP, bias, [](const Consumer &, const Tile &) { return Scales(); }
    );
}
