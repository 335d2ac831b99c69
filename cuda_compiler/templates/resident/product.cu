// Phases of a resident kernel that multiply a few rows (up to eight) with a weight [N, K], whose rows come through the
// ring: out = act(x · weightᵀ + bias) + residual, or with a gate act(gate) · up. With `normed`, x is RMS-normalized. With
// `mailed`, x comes as mail, and with `mails` the result goes as mail, too. A block writes the results of `batch` units together.
// While it goes through a weight that `is_long`, more slots may be on their way.
//
// A unit of up to eight weight rows, twice, is one operand of the tensor cores' products, x the other. The warps share out the
// columns, 64 at a time. A product does not mind in which order its terms come: a lane takes 16 bytes side by side.

#include "matmul/linear_result.cuh"

using Element = Weight::type;
using Half = Element;

#include "common/tensor_cores.cuh"

constexpr int rows = param::m;
constexpr int depth = param::k;
constexpr int pack = 16 / sizeof(Element);
constexpr int packs = depth / pack;
constexpr int last_packs = packs % chunk_packs;
constexpr int line = 8;  // packs of 128 bytes
constexpr int fours = (rows + 3) / 4;  // of rows of x
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

// What a warp's products need of x, for the lines of one chunk: lanes of groups 0 to 3 have the first piece of four rows of
// x, and the others the second one.
template <int packs>
struct Columns {
    static constexpr int lines = (packs + line - 1) / line;
    static constexpr int turns = (lines + warps - 1) / warps;
    Words of[turns][fours];

    __device__ __forceinline__ Columns(const Element (&x)[rows][x_row], int first_pack) {
        const int group = threadIdx.x % WARP / 4;
#pragma unroll
        for (int four = 0; four < fours; four++) {
            const int row = 4 * four + group % 4;
            const Element *x_at = x[row < rows ? row : rows - 1] + first_pack * pack;
#pragma unroll
            for (int turn = 0; turn < turns; turn++) {
                of[turn][four] = load_words(x_at + piece(turn, group / 4) * pack, takes(turn));
            }
        }
    }

    __device__ __forceinline__ static bool takes(int turn) {
        return turn < lines / warps || turn * warps + int(threadIdx.x) / WARP < lines;
    }
};

// What fits in registers need not be read for every unit.
constexpr int chunks = packs / chunk_packs;
constexpr bool keeps = chunks + (last_packs != 0) == 1;

// A warp's part of the sums of a unit. Rows 0 to 7 of a fragment are the unit's with one piece of their lines, rows 8 to 15
// the same rows with the other piece, and each has met four rows of x with either piece, of which one is right.
struct Sums {
    float of[fours][2][4] = {};  // two of each, so that a product need not wait for the last one

    // Adds the products of a slot's rows with the part of x that they meet.
    template <int packs>
    __device__ __forceinline__ void add(const char *slot, const Columns<packs> &columns) {
        const int group = threadIdx.x % WARP / 4;
        slot += (group < unit_rows ? group : unit_rows - 1) * chunk_packs * 16;
        Words weights[Columns<packs>::turns][2];
#pragma unroll
        for (int turn = 0; turn < Columns<packs>::turns; turn++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                // Odd rows begin with the second piece, so that lanes that read at a time meet different banks.
                const int at = piece(turn, i ^ group % 2);
                const bool inside = packs % line == 0 || at < packs;
                weights[turn][i] = load_words(
                    reinterpret_cast<const Half *>(slot + at * 16), inside && Columns<packs>::takes(turn)
                );
            }
        }
#pragma unroll
        for (int turn = 0; turn < Columns<packs>::turns; turn++) {
            const unsigned(&top)[4] = weights[turn][0].at;
            const unsigned(&bottom)[4] = weights[turn][1].at;
#pragma unroll
            for (int four = 0; four < fours; four++) {
                const unsigned(&x)[4] = columns.of[turn][four].at;
                multiply(of[four][0], top[0], bottom[0], top[1], bottom[1], x[0], x[1]);
                multiply(of[four][1], top[2], bottom[2], top[3], bottom[3], x[2], x[3]);
            }
        }
    }

    __device__ __forceinline__ void leave(float (&target)[UNIT_ROWS][rows]) const {
        const int group = threadIdx.x % WARP / 4;
        const int part = threadIdx.x % 4;  // of the columns, of which parts 2 and 3 met the second piece
        const bool bottom = (group % 2 != 0) != (part >= 2);
#pragma unroll
        for (int four = 0; four < fours; four++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float(&even)[4] = of[four][0];
                const float(&odd)[4] = of[four][1];
                float sum = bottom ? even[2 + i] + odd[2 + i] : even[i] + odd[i];
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                const int row = 4 * four + 2 * part + i;
                if (part < 2 && row < rows) {
                    target[group][row] = sum;
                }
            }
        }
    }
};

// Has `visit` the part of x for each chunk of a row.
template <typename Kept, typename Visit>
__device__ __forceinline__ void for_chunks(const Scratch &scratch, const Kept &kept, Visit visit) {
    if constexpr (keeps) {
        visit(kept);
    } else {
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            visit(Columns<chunk_packs>(scratch.x, chunk * chunk_packs));
        }
        if constexpr (last_packs != 0) {
            visit(Columns<last_packs == 0 ? line : last_packs>(scratch.x, packs - last_packs));
        }
    }
}

struct OneUnit {
    Ring &ring;
    Sums &sums;

    template <int packs>
    __device__ __forceinline__ void operator()(const Columns<packs> &columns) const {
        sums.add(ring.wait(), columns);
        ring.release();
    }
};

// Two at a time: what one waits for, the other one is busy with.
struct TwoUnits {
    Ring &ring;
    Sums &first;
    Sums &second;

    template <int packs>
    __device__ __forceinline__ void operator()(const Columns<packs> &columns) const {
        const Ring behind = ring.behind();
        const char *const slot = ring.wait();
        const char *const other = behind.wait();
        first.add(slot, columns);
        second.add(other, columns);
        ring.release();
        ring.release();
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
    const Columns<keeps ? packs : line> kept(scratch.x, 0);
    if (is_long && threadIdx.x == 0) {
        ring.hurry();
    }
    int buffer = 0;
    for (int start = 0; start < units; start += batch * gridDim.x, buffer ^= 1) {
        float(&sums_of)[batch][UNIT_ROWS][rows] = scratch.sums[buffer][warp];
        int unit = start + blockIdx.x;
        int turn = 0;
        for (; turn < batch && unit + int(gridDim.x) < units; turn += 2, unit += 2 * gridDim.x) {
            Sums first, second;
            for_chunks(scratch, kept, TwoUnits{ring, first, second});
            first.leave(sums_of[turn]);
            second.leave(sums_of[turn + 1]);
        }
        if (turn < batch && unit < units) {
            Sums sums;
            for_chunks(scratch, kept, OneUnit{ring, sums});
            sums.leave(sums_of[turn]);
        }
        if (is_long && threadIdx.x == 0 && start + batch * int(gridDim.x) >= units) {
            ring.calm_down();
        }
        // Behind this, nobody reads the sums of the batch before: the next ones may take their place.
        if (mailed && start == 0) {
            grid.wait();
        } else {
            sync_block();
        }
        static_assert(batch % 2 == 0, "units come in pairs");
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
