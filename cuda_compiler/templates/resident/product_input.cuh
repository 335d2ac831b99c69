// The input x of a resident kernel's product, as a block receives it: from memory or from the mailbox, RMS-normalized or not.
// With `base`, x stands for base + RMSNorm(x), which one block stores as `whole`: that is the residual of layers with a norm behind
// each of their parts.

using Element = X::type;
using Half = Element;

#include "common/tensor_cores.cuh"

constexpr int rows = param::m;
constexpr int depth = param::k;
constexpr int pack = 16 / sizeof(Element);
constexpr int packs = depth / pack;
constexpr int row_warps = warps / (rows > 4 ? 8 : rows > 2 ? 4 : rows);  // warps that receive a row
constexpr int row_threads = row_warps * WARP;
constexpr int held = (packs + row_threads - 1) / row_threads;  // packs of its row that a thread receives
constexpr int line = 8;  // packs, 128 bytes
constexpr int own_rows = gated ? unit_rows / 2 : unit_rows;  // results of a unit
constexpr bool side_by_side = row_experts > 1;  // the rows of chosen experts, one chunk each

// Which row is that of a result, of a gated product the gate's, and which one is what the gate multiplies; `results` rows are those of
// results, and as many the others.
__device__ __forceinline__ constexpr int row_of_result(int index) { return interleaved ? 2 * index : index; }
__device__ __forceinline__ constexpr int gated_row_of_result(int index, int results) {
    return interleaved ? 2 * index + 1 : results + index;
}

// The number of the thread, asked for anew every time: else the compiler would compute the addresses of all steps ahead of the
// first one, more than there are registers for.
__device__ __forceinline__ int this_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Polling (I8) slows down the blocks that are still writing x, so after a long step a block sleeps before it looks.
__device__ __forceinline__ void back_off() {
    if constexpr (backoff_ns > 0) {
        __nanosleep(backoff_ns);
    }
}

// What a thread receives of x: some packs of a row, if there is such a row.
struct Receiver {
    int row;
    int first;

    __device__ __forceinline__ Receiver() {
        const int thread = this_thread();
        row = rows == 1 ? 0 : thread / row_threads;
        first = rows == 1 ? thread : thread % row_threads;
    }

    __device__ __forceinline__ int pack(int i) const { return i * row_threads + first; }
    __device__ __forceinline__ bool takes(int i) const { return row < rows && pack(i) < packs; }
};

// The sum of what each warp found, in few dependent steps.
template <typename Part>
__device__ __forceinline__ float sum_of_warps(Part part) {
    static_assert(warps == 8, "three steps");
    return ((part(0) + part(1)) + (part(2) + part(3))) + ((part(4) + part(5)) + (part(6) + part(7)));
}

// The scale of the norm, where only the squares of the warps' parts of x are known: after a barrier of the block.
__device__ __forceinline__ float scale_of_norm(const float (&squares)[warps]) {
    return rsqrtf(sum_of_warps([&](int warp) { return squares[warp]; }) * (1.0f / float(depth)) + norm_eps);
}

// The operands of which the input is made.
struct Input {
    const Element *x;
    const Gain::type *gain;
    const Base::type *base;
    const Base_gain::type *base_gain;
    Whole::type *whole;
};

// What the warps that share a row tell each other of its squares, in turn.
struct Squares {
    float received[Base::present ? warps : 1];
    float of[warps];
};

// The sum of squares of packs of a row, of this warp's.
template <int held>
__device__ __forceinline__ float squares_of(const Pack<Element, pack> (&values)[held]) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < held; i++) {
        float read[pack];
        to_floats(read, values[i]);  // 0 behind the end
#pragma unroll
        for (int j = 0; j < pack; j++) {
            total = fmaf(read[j], read[j], total);
        }
    }
    return warp_sum(total);
}

// The sum over the warps that share a row; all warps of the block come here.
__device__ __forceinline__ float sum_of_row(float own, float *parts) {
    if constexpr (row_warps == 1) {
        return own;
    }
    const int warp = this_thread() / WARP;
    if (this_thread() % WARP == 0) {
        parts[warp] = own;
    }
    sync_block();
    float total = 0.0f;
#pragma unroll
    for (int other = 0; other < row_warps; other++) {
        total += parts[warp / row_warps * row_warps + other];
    }
    return total;
}

// The packs of `base` and of its gains that belong to what a thread receives of x.
template <int held>
struct BasePacks {
    Pack<Base::type, pack> base[held] = {};
    Pack<Base_gain::type, pack> gains[held] = {};

    template <typename Receiver>
    __device__ __forceinline__ BasePacks(const Receiver &own, const Input &input) {
        if constexpr (Base::present) {
#pragma unroll
            for (int i = 0; i < held; i++) {
                if (own.takes(i)) {
                    base[i] = load_pack<pack>(input.base + own.row * Base::stride(0) + own.pack(i) * pack);
                    if constexpr (Base_gain::present) {
                        gains[i] = load_pack<pack>(input.base_gain + own.pack(i) * pack);
                    }
                }
            }
        }
    }

    // base + RMSNorm(x) in place of x. The block that has the fewest units stores it.
    template <typename Receiver>
    __device__ __forceinline__ void add_to(
        Pack<Element, pack> (&values)[held], const Receiver &own, Squares &squares, const Input &input
    ) const {
        const float total = sum_of_row(squares_of(values), squares.received);
        const float scale = rsqrtf(total / float(depth) + base_eps);
#pragma unroll
        for (int i = 0; i < held; i++) {
            float read[pack], factors[pack], added[pack];
            to_floats(read, values[i]);
            to_floats(factors, gains[i]);
            to_floats(added, base[i]);
#pragma unroll
            for (int j = 0; j < pack; j++) {
                const float factor = Base_gain::present ? scale * (factors[j] + base_gain_offset) : scale;
                read[j] = added[j] + to_float(from<Element>(read[j] * factor));
            }
            store_floats(values[i].item, read);
            if (blockIdx.x == gridDim.x - 1 && own.takes(i)) {
                store_pack(input.whole + own.row * Whole::stride(0) + own.pack(i) * pack, values[i]);
            }
        }
    }
};

// Receives x, RMS-normalized with `normed`. With `scales_later`, only the sums of its squares are left in `squares`, and x is not
// scaled by them.
template <bool scales_later, int held, typename Receiver>
__device__ __forceinline__ void receive_x(
    Grid &grid, const Receiver &own, Squares &squares, const Input &input, Pack<Element, pack> (&values)[held]
) {
    Pack<Gain::type, pack> gains[held] = {};  // not left open, or they would keep their registers from step to step
    if constexpr (Gain::present) {
#pragma unroll
        for (int i = 0; i < held; i++) {
            if (own.takes(i)) {
                gains[i] = load_pack<pack>(input.gain + own.pack(i) * pack);
            }
        }
    }
    const BasePacks<Base::present ? held : 1> base(own, input);
    back_off();
    if constexpr (from_mailbox) {
        bool arrived[held] = {};
        const auto receive = [&](int i) {
            arrived[i] = grid.receive(values[i], own.row * depth + own.pack(i) * pack, !arrived[i] && own.takes(i));
            return arrived[i];
        };
        for (;;) {
            bool complete = true;
#pragma unroll
            for (int i = 0; i < held; i++) {
                complete &= receive(i);
            }
            if (complete) {
                break;
            }
            while (!receive(held - 1)) {}  // what is written last, and so enough to poll for
        }
    } else {
#pragma unroll
        for (int i = 0; i < held; i++) {
            if (own.takes(i)) {
                values[i] = load_pack<pack>(input.x + own.row * X::stride(0) + own.pack(i) * pack);
            }
        }
    }
    if constexpr (Base::present) {
        base.add_to(values, own, squares, input);
    }
    if constexpr (normed) {
        const float total = squares_of(values);
        float scale = 1.0f;
        if constexpr (scales_later) {
            if (this_thread() % WARP == 0) {
                squares.of[this_thread() / WARP] = total;
            }
        } else {
            scale = rsqrtf(sum_of_row(total, squares.of) / float(depth) + norm_eps);
        }
#pragma unroll
        for (int i = 0; i < held; i++) {
            float read[pack];
            to_floats(read, values[i]);
            float factors[pack];
            to_floats(factors, gains[i]);
#pragma unroll
            for (int j = 0; j < pack; j++) {
                read[j] *= scale;
                if constexpr (Gain::present) {
                    read[j] *= factors[j] + gain_offset;
                }
            }
            store_floats(values[i].item, read);
        }
    }
}
