// Products of up to 128 rows with a weight [N, K] in few bits by warpgroups: the codes of 64 columns each, as the left side in
// registers, with all rows of x in shared memory. Codes become 16-bit floats exactly, then, where a row has several scales or
// minimums, the elements themselves, rounded as a weight in 16 bits is. With one scale for a row, it multiplies the finished sum.
//
// A thread has terms 2p and 2p + 1 of each eight, of two rows of the weight, p being its place among four lanes: of 4-bit codes those
// are a byte.

using Half = X::type;

#include "matmul/linear_wgmma_layout.cuh"
#include "common/code_factors.cuh"

template <class A, class B>
struct SameTypes { static constexpr bool value = false; };
template <class A>
struct SameTypes<A, A> { static constexpr bool value = true; };

constexpr int product_rows = (columns + warpgroup_rows - 1) / warpgroup_rows * warpgroup_rows;  // some may be in vain
constexpr int product_threads = product_rows * 2;
constexpr int beyond = 0;
constexpr bool one_scale = param::groups == 1 && !has_minimum;  // for a row
constexpr bool in_two = !one_scale && !SameTypes<Scales::type, Half>::value;  // a scale is the sum of two 16-bit floats
constexpr int row_bytes = in_nibbles ? step_terms / 2 : step_terms;  // of a step
constexpr int row_packs = row_bytes / 16;

static_assert(columns % 16 == 0 && param::k % step_terms == 0 && group % 32 == 0, "");
static_assert(param::groups == 1 || group >= step_terms ? group % step_terms == 0 : step_terms % group == 0, "");
static_assert(one_scale || !has_minimum || sizeof(Scales::type) == 2, "");
static_assert(behind + 2 <= stages, "");  // a place is freed after the next one is filled

// Scales or offsets of the rows' groups in a step, as they are copied: in words of 4 to 16 bytes, each with all of a row's, of which
// there may be fewer than it has room for.
template <class Operand, bool staged>
struct Side {
    using type = typename Operand::type;
    static constexpr int count = param::groups != 1 && group < step_terms ? step_terms / int(group) : 1;  // of a row
    static constexpr int bytes = larger(count * int(sizeof(type)), 4);
    static constexpr unsigned room = bytes / sizeof(type);

    alignas(16) unsigned char words[staged ? product_rows : 1][bytes];

    // The number of the first one that a step has, of a row of the weight.
    __device__ __forceinline__ static unsigned first(index_t row, int step) {
        return unsigned(row * param::groups) + (param::groups == 1 ? 0 : step * step_terms / unsigned(group));
    }

    __device__ __forceinline__ void copy(int row, const type *source, int step) {
        if constexpr (staged) {
            const type *from = source + first(weight_row(row), step) / room * room;
            copy_words<bytes>(words[row], reinterpret_cast<const unsigned char *>(from), true);
        }
    }

    // `shift` is where the first one of the row lies in its word.
    __device__ __forceinline__ const type &at(int row, unsigned shift, int part) const {
        return reinterpret_cast<const type *>(words[row])[count == 1 ? shift : part * 32 / int(group)];
    }
};

struct alignas(1024) Stage {
    Half x[slabs][held_rows][slab_width];
    unsigned char codes[product_rows * row_bytes];
    Side<Scales, !one_scale> scales;
    Side<Offset, Offset::present> offsets;
};

#include "matmul/linear_wgmma_ring.cuh"

// Where 16 bytes of codes of a row lie, so that the lanes of a warp read from different banks.
__device__ __forceinline__ int place_of(int row, int pack) {
    return row * row_bytes + (pack ^ (in_nibbles ? row / 2 % 4 : row % 8)) * 16;
}

// Copies all of the block's steps.
__device__ __forceinline__ void copy_weight(
    Memory &memory, const unsigned char *data, const Scales::type *scales, const Offset::type *offset, int thread,
    int first_step, int steps
) {
    constexpr int rows_at_once = copying_threads / row_packs;
    constexpr int count = columns / rows_at_once;
    const int first_row = thread / row_packs;
    const int pack = thread % row_packs;
    unsigned offsets[count];
#pragma unroll
    for (int i = 0; i < count; i++) {
        offsets[i] = unsigned(weight_row(first_row + rows_at_once * i) * Data::stride(0)) + pack * 16;
    }
    Turn turn;
    for (int step = 0; step < steps; step++) {
        memory.free[turn.stage].wait(turn.parity ^ 1);
        Stage &stage = memory.ring[turn.stage];
        const unsigned char *from = data + (first_step + step) * row_bytes;
#pragma unroll
        for (int i = 0; i < count; i++) {
            copy_words(stage.codes + place_of(first_row + rows_at_once * i, pack), from + offsets[i], true);
        }
#pragma unroll
        for (int row = 0; row < columns; row += copying_threads) {
            if (columns % copying_threads == 0 || row + thread < columns) {
                stage.scales.copy(row + thread, scales, first_step + step);
                stage.offsets.copy(row + thread, offset, first_step + step);
            }
        }
        memory.filled[turn.stage].arrive_after_copies();  // W1
        turn.advance();
    }
}

// Two 16-bit floats from the low half of a word: codes of int8 or float8.
__device__ __forceinline__ unsigned pair_of(unsigned word, int half) {
    return is_int8 || has_table ? Factors::of_int8(word, half) : Factors::of_float8(word, half);
}

// A thread's codes of 32 terms of a row, as 16-bit floats: of each eight terms a pair.
__device__ __forceinline__ void pairs_of(unsigned (&pairs)[4], const unsigned char *codes, int row, int part) {
    const unsigned lane = threadIdx.x % 4;
    if constexpr (in_nibbles) {
        const Words words = *reinterpret_cast<const Words *>(codes + place_of(row, part));
        if constexpr (is_int4) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // Of the lane's byte, its low bits to the first byte, its high bits to the third one.
                const unsigned apart = __byte_perm(words.at[i], words.at[i] >> 4, 0x4400 + lane * 0x1111);
                pairs[i] = (apart & 0x000f000fu) | integral;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const unsigned bytes = table_bytes(__byte_perm(words.at[i], words.at[i + 1], 0x40 + lane * 0x11));
                pairs[i] = pair_of(bytes, 0);
                pairs[i + 1] = pair_of(bytes, 1);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned char *bytes = codes + place_of(row, 2 * part + i / 2) + i % 2 * 8 + lane * 2;
            pairs[i] = pair_of(*reinterpret_cast<const unsigned short *>(bytes), 0);
        }
    }
}

// Zero points are bytes and never get here, but their code is compiled, too.
__device__ __forceinline__ float float_of(unsigned char) { return 0.0f; }
template <class Minimum> __device__ __forceinline__ float float_of(Minimum minimum) { return to_float(minimum); }

__device__ __forceinline__ unsigned twice(Half value) { return value.bits * 0x00010001u; }

// What a thread multiplies: elements of two rows of the weight.
struct Elements {
    int row[2];  // of the block's
    unsigned first[2];  // number of the row's first scale

    __device__ __forceinline__ Elements() {
#pragma unroll
        for (int side = 0; side < 2; side++) {
            row[side] = int(threadIdx.x) / WARP * 16 + int(threadIdx.x) % WARP / 4 + 8 * side;
            first[side] = unsigned(weight_row(row[side]) * param::groups);
        }
    }

    // The left side of four products: a slab of the rows.
    __device__ __forceinline__ void load(unsigned (&left)[4][4], const Stage &stage, int step, int slab) const {
        const unsigned number = param::groups == 1 ? 0 : unsigned(step * step_terms) / unsigned(group);
#pragma unroll
        for (int side = 0; side < 2; side++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int part = 2 * slab + half;
                unsigned pairs[4];
                pairs_of(pairs, stage.codes, row[side], part);
                const unsigned place = first[side] + number;
                const Offset::type &offset = stage.offsets.at(row[side], place % stage.offsets.room, part);
                const Scales::type &own_scale = stage.scales.at(row[side], place % stage.scales.room, part);
                const unsigned zero = less_zero_of(&offset, 0);
                const float exact = one_scale ? 1.0f : to_float(own_scale);
                const Half rounded = from<Half>(exact);
                const unsigned scale = twice(rounded);
                const unsigned rest = twice(from<Half>(exact - to_float(rounded)));
                const unsigned minimum = has_minimum ? twice(from<Half>(float_of(offset))) : 0x80008000u;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    unsigned value = pairs[i];
                    if constexpr (is_int4 || has_zero_point) {
                        value = multiply_add_pairs(value, one, zero);
                    }
                    if constexpr (!one_scale) {
                        const unsigned added = in_two ? multiply_add_pairs(value, rest, minimum) : minimum;
                        value = multiply_add_pairs(value, scale, added);
                    }
                    left[2 * half + i / 2][i % 2 * 2 + side] = value;
                }
            }
        }
    }
};

// sums[64 × 8 · count] += left · xᵀ, from the fragment number `first` on, in as few products as there are sizes for.
template <int first = 0, int count>
__device__ __forceinline__ void multiply_rows(float (&sums)[count][4], const unsigned (&left)[4], unsigned long long right) {
    constexpr int rest = count - first;
    if constexpr (rest > 0) {
        constexpr int taken = rest >= 16 ? 16 : rest >= 12 ? 12 : rest >= 8 ? 8 : rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
        multiply_rows_held(*reinterpret_cast<float (*)[taken][4]>(&sums[first]), left, further(right, first * 1024));
        multiply_rows<first + taken>(sums, left, right);
    }
}

// The products of a slab, on their way.
__device__ __forceinline__ void begin_slab(
    float (&sums)[held_rows / 8][4], unsigned (&left)[4][4], const Half (&x)[held_rows][slab_width]
) {
    const unsigned long long right = matrix_at(shared_address(x), 0);
    pin(left);
    pin(sums);
    begin_products();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        multiply_rows(sums, left[i], further(right, 32 * i));
    }
    end_of_products();
}

// Ends them. What they read is not overwritten before.
__device__ __forceinline__ void end_slab(float (&sums)[held_rows / 8][4], unsigned (&left)[4][4]) {
    wait_for_products<0>();
    pin(sums);
    pin(left);
}

// Multiplies a slab while the elements of the next one are made.
__device__ __forceinline__ void multiply_and_store(
    float *target, Memory &memory, const unsigned char *, const Scales::type *scales, const Offset::type *,
    int first_step, int steps
) {
    static_assert(slabs == 2, "");
    const Elements elements;
    float sums[held_rows / 8][4] = {};
    unsigned left[2][4][4];
    Turn turn;
    if (steps > 0) {
        memory.filled[0].wait(0);
        elements.load(left[0], memory.ring[0], first_step, 0);
    }
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const Stage &stage = memory.ring[turn.stage];
        const int own = turn.stage;
        show_to_products();
        begin_slab(sums, left[0], stage.x[0]);
        elements.load(left[1], stage, first_step + step, 1);
        end_slab(sums, left[0]);
        begin_slab(sums, left[1], stage.x[1]);
        turn.advance();
        if (step + 1 < steps) {
            memory.filled[turn.stage].wait(turn.parity);
            elements.load(left[0], memory.ring[turn.stage], first_step + step + 1, 0);
        }
        end_slab(sums, left[1]);
        if (threadIdx.x % WARP == 0) {
            memory.free[own].arrive();  // W2
        }
    }
    sync_some<1, product_threads>();
    float scale[2] = {1.0f, 1.0f};
    if constexpr (one_scale) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
            scale[side] = to_float(scales[weight_row(elements.row[side]) * Scales::stride(0)]);
        }
    }
#pragma unroll
    for (int i = 0; i < held_rows / 8; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = 8 * i + int(threadIdx.x) % 4 * 2 + j % 2;
            if (row < int(param::m) && elements.row[j / 2] < columns) {
                target[row * sums_stride + elements.row[j / 2]] = sums[i][j] * scale[j / 2];
            }
        }
    }
}

#define WEIGHT data, scales, offset

#kernel linear_wgmma
#include "matmul/linear_wgmma_kernel.cuh"
