// The input x of a resident kernel's product, as a block receives it: from memory or from the mailbox, RMS-normalized or not.

using Element = X::type;
using Half = Element;

#include "common/tensor_cores.cuh"

constexpr int rows = param::m;
constexpr int depth = param::k;
constexpr int pack = 16 / sizeof(Element);
constexpr int packs = depth / pack;
constexpr int held = (packs + THREADS - 1) / THREADS;  // packs of a row that a thread receives
constexpr int line = 8;  // packs, 128 bytes
constexpr int own_rows = gated ? unit_rows / 2 : unit_rows;  // results of a unit

// Polling (I8) slows down the blocks that are still writing x, so after a long step a block sleeps before it looks.
__device__ __forceinline__ void back_off() {
    if constexpr (backoff_ns > 0) {
        __nanosleep(backoff_ns);
    }
}

// Receives x, RMS-normalized with `normed`: a thread's value `i` of a row is pack `i * THREADS + threadIdx.x`, if there is one.
__device__ __forceinline__ void receive_x(
    Grid &grid, float (&row_squares)[rows][warps], const Element *x, const Gain::type *gain,
    Pack<Element, pack> (&values)[rows][held]
) {
    Pack<Gain::type, pack> gains[held];
    if constexpr (Gain::present) {
#pragma unroll
        for (int i = 0; i < held; i++) {
            const int at = i * THREADS + threadIdx.x;
            if (at < packs) {
                gains[i] = load_pack<pack>(gain + at * pack);
            }
        }
    }
    back_off();
    bool arrived[rows][held] = {};
    // Reads what is missing of a row; returns whether all of it is there.
    const auto receive_row = [&](int row) {
        bool complete = true;
#pragma unroll
        for (int i = 0; i < held; i++) {
            const int at = i * THREADS + threadIdx.x;
            if constexpr (from_mailbox) {
                bool &there = arrived[row][i];
                there = grid.receive(values[row][i], row * depth + at * pack, !there && at < packs);
                complete &= there;
            } else if (at < packs) {
                values[row][i] = load_pack<pack>(x + row * X::stride(0) + at * pack);
            }
        }
        return complete;
    };
    bool complete = true;
    const auto receive_rows = [&] {
        complete = true;
#pragma unroll
        for (int row = 0; row < rows; row++) {
            complete &= receive_row(row);
        }
    };
    receive_rows();
    while (!complete) {
        // The same columns of all rows are written at about the same time, so it is enough to poll for one row.
        if constexpr (rows > 1) {
            while (!receive_row(0)) {}
        }
        receive_rows();
    }
    if constexpr (normed) {
#pragma unroll
        for (int row = 0; row < rows; row++) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < held; i++) {
                if (i * THREADS + threadIdx.x < packs) {
                    float read[pack];
                    to_floats(read, values[row][i]);
#pragma unroll
                    for (int j = 0; j < pack; j++) {
                        squares = fmaf(read[j], read[j], squares);
                    }
                }
            }
            squares = warp_sum(squares);
            if (threadIdx.x % WARP == 0) {
                row_squares[row][threadIdx.x / WARP] = squares;
            }
        }
        sync_block();
#pragma unroll
        for (int row = 0; row < rows; row++) {
            float total = 0.0f;
#pragma unroll
            for (int warp = 0; warp < warps; warp++) {
                total += row_squares[row][warp];
            }
            const float scale = rsqrtf(total / float(depth) + norm_eps);
#pragma unroll
            for (int i = 0; i < held; i++) {
                const int at = i * THREADS + threadIdx.x;
                if (at < packs) {
                    float read[pack];
                    to_floats(read, values[row][i]);
                    float factors[pack];
                    to_floats(factors, gains[i]);
#pragma unroll
                    for (int j = 0; j < pack; j++) {
                        read[j] *= scale;
                        if constexpr (Gain::present) {
                            read[j] *= factors[j] + gain_offset;
                        }
                    }
                    store_floats(values[row][i].item, read);
                }
            }
        }
    }
}
