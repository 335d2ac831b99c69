// Phases of a resident kernel that multiply a few rows (up to eight) with a weight [N, K], whose rows come through the
// ring: out = act(x · weightᵀ + bias) + residual, or with a gate act(gate) · up. With `normed`, x is RMS-normalized. With
// `mailed`, x comes as mail, and with `mails` the result goes as mail, too. A block writes the results of `batch` units together.
//
// A unit of up to eight weight rows is one operand of the tensor cores' products, x the other. The warps share out the
// columns, 64 at a time. A product does not mind in which order its terms come: a lane takes 16 bytes side by side.

#include "linear_result.cuh"

using Element = Weight::type;
using Half = Element;

#include "tensor_cores.cuh"

constexpr int rows = param::m;
constexpr int depth = param::k;
constexpr int pack = 16 / sizeof(Element);
constexpr int packs = depth / pack;
constexpr int last_packs = packs % chunk_packs;
constexpr int line = 8;  // packs of 128 bytes
constexpr int own_rows = gated ? unit_rows / 2 : unit_rows;  // results of a unit
constexpr int x_row = (packs + line - 1) / line * line * pack;

struct Scratch {
    alignas(16) Element x[rows][x_row];
    float sums[2][warps][batch][UNIT_ROWS][rows];  // of batches in turns
    float squares[rows][warps];
};
static_assert(sizeof(Scratch) <= SCRATCH_BYTES - AHEAD_BYTES, "the scratch memory is the largest phase's");

// Zeros behind rows of x that do not end in whole lines: the last line is read whole.
__device__ __forceinline__ void pad(Scratch &scratch) {
    constexpr int over = x_row / pack - packs;
    for (int i = threadIdx.x; i < rows * over; i += THREADS) {
        store_pack<pack>(&scratch.x[i % rows][depth + i / rows * pack], Pack<Element, pack>{});
    }
}

// x to shared memory, normalized if it is to be.
__device__ __forceinline__ void stage(Grid &grid, Scratch &scratch, const Element *x, const Gain::type *gain) {
    constexpr int held = (packs + THREADS - 1) / THREADS;
    Pack<Element, pack> values[rows][held] = {};
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
    if constexpr (patience > 0) {
        __nanosleep(patience);
    }
#pragma unroll
    for (int row = 0; row < rows; row++) {
        bool there[held] = {};
        bool complete;
        do {
            complete = true;
#pragma unroll
            for (int i = 0; i < held; i++) {
                const int at = i * THREADS + threadIdx.x;
                if constexpr (mailed) {
                    there[i] = grid.receive(values[row][i], row * depth + at * pack, !there[i] && at < packs);
                    complete &= there[i];
                } else if (at < packs) {
                    values[row][i] = load_pack<pack>(x + row * X::stride(0) + at * pack);
                }
            }
        } while (!complete);
    }
    if constexpr (!normed) {
#pragma unroll
        for (int i = 0; i < rows * held; i++) {
            const int at = i % held * THREADS + threadIdx.x;
            if (at < packs) {
                store_pack<pack>(&scratch.x[i / held][at * pack], values[i / held][i % held]);
            }
        }
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
                scratch.squares[row][threadIdx.x / WARP] = squares;
            }
        }
        sync_block();
#pragma unroll
        for (int row = 0; row < rows; row++) {
            float total = 0.0f;
#pragma unroll
            for (int warp = 0; warp < warps; warp++) {
                total += scratch.squares[row][warp];
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
                    store_floats(&scratch.x[row][at * pack], read);
                }
            }
        }
    }
    sync_block();
}

// Where the two pieces of a line that a lane reads begin, in packs.
__device__ __forceinline__ int piece(int turn, int which) {
    const int part = threadIdx.x % 4;
    return (turn * warps + threadIdx.x / WARP) * line + (which ? 4 + part : part);
}

// What a warp's products need of x, for the lines of one chunk.
template <int packs>
struct Columns {
    static constexpr int lines = (packs + line - 1) / line;
    static constexpr int turns = (lines + warps - 1) / warps;
    Words of[turns][2];

    __device__ __forceinline__ Columns(const Element (&x)[rows][x_row], int first_pack) {
        const int group = threadIdx.x % WARP / 4;
        const Element *x_at = x[group < rows ? group : rows - 1] + first_pack * pack;
#pragma unroll
        for (int turn = 0; turn < turns; turn++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                of[turn][i] = load_words(x_at + piece(turn, i) * pack, takes(turn));
            }
        }
    }

    __device__ __forceinline__ static bool takes(int turn) {
        return turn < lines / warps || turn * warps + int(threadIdx.x) / WARP < lines;
    }
};

// A warp's part of the sums of a unit, in fragments: rows of x by rows of the unit.
struct Sums {
    float of[4][4] = {};  // four, so that a product need not wait for the last one

    // Adds the products of a slot's rows with the part of x that they meet.
    template <int packs>
    __device__ __forceinline__ void add(const char *slot, const Columns<packs> &columns) {
        const int group = threadIdx.x % WARP / 4;
        // The pieces of odd rows are read in the other order, so that lanes that read at a time meet different banks.
        const bool odd = group % 2;
        slot += (group < unit_rows ? group : unit_rows - 1) * chunk_packs * 16;
        Words weights[Columns<packs>::turns][2];
#pragma unroll
        for (int turn = 0; turn < Columns<packs>::turns; turn++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = piece(turn, odd ? 1 - i : i);
                const bool inside = packs % line == 0 || at < packs;
                weights[turn][i] = load_words(
                    reinterpret_cast<const Half *>(slot + at * 16), inside && Columns<packs>::takes(turn)
                );
            }
        }
#pragma unroll
        for (int turn = 0; turn < Columns<packs>::turns; turn++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const Words &x = columns.of[turn][i];
                unsigned w[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    w[j] = odd ? weights[turn][1 - i].at[j] : weights[turn][i].at[j];
                }
                // Rows 0 to 7 of the first product and 8 to 15 of the second are the sums.
                multiply(of[2 * i], x.at[0], x.at[1], x.at[2], x.at[3], w[0], w[2]);
                multiply(of[2 * i + 1], x.at[0], x.at[1], x.at[2], x.at[3], w[1], w[3]);
            }
        }
    }

    __device__ __forceinline__ void leave(float (&target)[UNIT_ROWS][rows]) const {
        const int group = threadIdx.x % WARP / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (group < rows) {
                target[threadIdx.x % 4 * 2 + i][group] = (of[0][i] + of[1][2 + i]) + (of[2][i] + of[3][2 + i]);
            }
        }
    }
};

// Where a thread's result goes.
struct Place {
    int turn;
    int index;  // in its unit
    int row;
    int column;

    __device__ __forceinline__ Place(int number, int start)
        : turn(number / (own_rows * rows)), index(number % own_rows), row(number / own_rows % rows),
          column((start + turn * gridDim.x + blockIdx.x) * own_rows + index) {}
};

LOOK_AHEAD {
    if (blockIdx.x == 0) {
        if constexpr (Gain::present) {
            prefetch(gain, depth * sizeof(Gain::type));
        }
        if constexpr (Bias::present) {
            prefetch(bias, (gated ? 2 : 1) * param::n * sizeof(Bias::type));
        }
    }
}

PHASE(product) {
    Scratch &scratch = *reinterpret_cast<Scratch *>(shared);
    const int warp = threadIdx.x / WARP;
    if constexpr (!mailed) {
        grid.wait();
    }
    const Place own(threadIdx.x, 0);
    Addends addends;  // they can be read before the sums are there
    if (own.turn < batch && own.column < int(param::n)) {
        addends = Addends(bias, residual, own.row, own.column);
    }
    pad(scratch);
    stage(grid, scratch, x, gain);
    constexpr int chunks = packs / chunk_packs;
    // What fits in registers need not be read for every unit.
    constexpr bool keeps = chunks + (last_packs != 0) == 1;
    const Columns<keeps ? packs : line> kept(scratch.x, 0);
    int buffer = 0;
    for (int start = 0; start < units; start += batch * gridDim.x, buffer ^= 1) {
        float(&sums_of)[batch][UNIT_ROWS][rows] = scratch.sums[buffer][warp];
        int unit = start + blockIdx.x;
        int turn = 0;
        if (keeps) {
            // Two units at a time: what one waits for, the other one is busy with.
            for (; turn + 1 < batch && unit + int(gridDim.x) < units; turn += 2, unit += 2 * gridDim.x) {
                Sums first, second;
                const Ring behind = ring.behind();
                const char *const slot = ring.wait();
                const char *const other = behind.wait();
                first.add(slot, kept);
                second.add(other, kept);
                ring.release();
                ring.release();
                first.leave(sums_of[turn]);
                second.leave(sums_of[turn + 1]);
            }
        }
        for (; turn < batch && unit < units; turn++, unit += gridDim.x) {
            Sums sums;
            if (keeps) {
                sums.add(ring.wait(), kept);
                ring.release();
            } else {
#pragma unroll 1
                for (int chunk = 0; chunk + 1 < chunks; chunk += 2) {
                    const Ring behind = ring.behind();
                    const char *const slot = ring.wait();
                    const char *const other = behind.wait();
                    sums.add(slot, Columns<chunk_packs>(scratch.x, chunk * chunk_packs));
                    sums.add(other, Columns<chunk_packs>(scratch.x, (chunk + 1) * chunk_packs));
                    ring.release();
                    ring.release();
                }
                if (chunks % 2 != 0) {
                    sums.add(ring.wait(), Columns<chunk_packs>(scratch.x, (chunks - 1) * chunk_packs));
                    ring.release();
                }
                if (last_packs != 0) {
                    const Columns<last_packs == 0 ? line : last_packs> columns(scratch.x, packs - last_packs);
                    sums.add(ring.wait(), columns);
                    ring.release();
                }
            }
            sums.leave(sums_of[turn]);
        }
        // Behind this, nobody reads the sums of the batch before: the next ones may take their place.
        if (mailed && start == 0) {
            grid.wait();
        } else {
            sync_block();
        }
        static_assert(batch * own_rows * rows <= THREADS, "a thread has one result of a batch");
        const Place place(threadIdx.x, start);
        if (place.turn < batch && place.column < int(param::n)) {
            float sum = 0.0f;
            float up = 0.0f;
#pragma unroll
            for (int other = 0; other < warps; other++) {
                sum += scratch.sums[buffer][other][place.turn][place.index][place.row];
                if constexpr (gated) {
                    up += scratch.sums[buffer][other][place.turn][own_rows + place.index][place.row];
                }
            }
            if (start > 0) {
                addends = Addends(bias, residual, place.row, place.column);
            }
            const Out::type result = addends.result(sum, up);
            const index_t target = place.row * Out::stride(0) + place.column * Out::stride(1);
            if constexpr (mails) {
                grid.send(target, result);
            }
            out[target] = result;
        }
    }
}
