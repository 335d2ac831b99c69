// The input x of a resident kernel's product, as a block receives it: from memory or from the mailbox, RMS-normalized or not.

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

// Receives x, RMS-normalized with `normed`. In `squares` the warps that share a row tell each other what they have found; with
// `scales_later`, only that is left there, and x is not scaled by it.
template <bool scales_later, int held, typename Receiver>
__device__ __forceinline__ void receive_x(
    Grid &grid, const Receiver &own, float (&squares)[warps], const Element *x, const Gain::type *gain,
    Pack<Element, pack> (&values)[held]
) {
    Pack<Gain::type, pack> gains[held] = {};  // not left open, or they would keep their registers from step to step
    if constexpr (Gain::present) {
#pragma unroll
        for (int i = 0; i < held; i++) {
            if (own.takes(i)) {
                gains[i] = load_pack<pack>(gain + own.pack(i) * pack);
            }
        }
    }
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
                values[i] = load_pack<pack>(x + own.row * X::stride(0) + own.pack(i) * pack);
            }
        }
    }
    if constexpr (normed) {
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
        total = warp_sum(total);
        float scale = 1.0f;
        if constexpr (scales_later) {
            if (this_thread() % WARP == 0) {
                squares[this_thread() / WARP] = total;
            }
        } else if constexpr (row_warps > 1) {
            const int warp = this_thread() / WARP;
            if (this_thread() % WARP == 0) {
                squares[warp] = total;
            }
            sync_block();
            total = 0.0f;
#pragma unroll
            for (int other = 0; other < row_warps; other++) {
                total += squares[warp / row_warps * row_warps + other];
            }
        }
        if constexpr (!scales_later) {
            scale = rsqrtf(total / float(depth) + norm_eps);
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
