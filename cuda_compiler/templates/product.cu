// Phases of a resident kernel that multiply a few rows (up to eight) with a weight [N, K], whose rows come through the
// ring: out = act(x · weightᵀ + bias) + residual, or with a gate act(gate) · up. With `normed`, x is RMS-normalized; without
// an x, it is what the splits of attention found, put together.

#include "linear_result.cuh"

constexpr int rows = param::m;
constexpr int depth = param::k;
constexpr int pieces = gated ? 2 : 1;
constexpr int pack = 16 / sizeof(Weight::type);
constexpr int teams = warps / splits;
constexpr int part_packs = depth / pack / splits;
constexpr int last_packs = part_packs % chunk_packs;
constexpr int capacity = 32;  // of the sums that a warp keeps until they are written

using Element = Weight::type;

struct Scratch {
    alignas(16) Element x[rows][depth];
    float sums[warps][capacity][pieces][rows];
    float squares[rows][warps];
    float2 part_stats[part_count];
    float part_weights[part_count];
};
static_assert(sizeof(Scratch) <= SCRATCH_BYTES, "the scratch memory is the largest phase's");

// x to shared memory, normalized if it is to be.
__device__ __forceinline__ void stage(Scratch &scratch, const Element *x, const Gain::type *gain) {
    constexpr int packs = depth / pack;
    constexpr int held = (packs + THREADS - 1) / THREADS;
    Pack<Element, pack> values[rows][held];
    Pack<Gain::type, pack> gains[held];
#pragma unroll
    for (int i = 0; i < held; i++) {
        const int at = i * THREADS + threadIdx.x;
        if (at < packs) {
            if constexpr (Gain::present) {
                gains[i] = load_pack<pack>(gain + at * pack);
            }
#pragma unroll
            for (int row = 0; row < rows; row++) {
                values[row][i] = load_pack<pack>(x + row * X::stride(0) + at * pack);
                if constexpr (!normed) {
                    store_pack<pack>(&scratch.x[row][at * pack], values[row][i]);
                }
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
        __syncthreads();
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
    __syncthreads();
}

// The splits' parts of attention, [batch, KV head, row, split, dimension], as `LeaveParts` leaves them, to shared memory.
template <typename Parts>
__device__ __forceinline__ void stage_parts(Scratch &scratch, const float *parts, const float *stats) {
    constexpr int width = Parts::size(4);
    constexpr int count = Parts::size(3);
    constexpr int problem_rows = Parts::size(2);
    constexpr int kv_heads = Parts::size(1);
    constexpr int queries = rows / int(Parts::size(0));
    constexpr int sharing = problem_rows / queries;
    constexpr int side = 4;
    for (int i = threadIdx.x; i < part_count; i += THREADS) {
        scratch.part_stats[i] = reinterpret_cast<const float2 *>(stats)[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < part_count; i += THREADS) {
        const float2 *of_row = scratch.part_stats + i / count * count;
        float largest = -3.402823466e38f;
#pragma unroll
        for (int split = 0; split < count; split++) {
            largest = fmaxf(largest, of_row[split].x);
        }
        // A split without keys left no sums.
        const float2 own = scratch.part_stats[i];
        scratch.part_weights[i] = own.y == 0.0f ? -1.0f : expf(own.x - largest);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < part_count / count * width / side; i += THREADS) {
        const int row = i / (width / side);
        const int dim = i % (width / side) * side;
        float sum[side] = {};
        float total = 0.0f;
#pragma unroll
        for (int split = 0; split < count; split++) {
            const float weight = scratch.part_weights[row * count + split];
            if (weight >= 0.0f) {
                total = fmaf(weight, scratch.part_stats[row * count + split].y, total);
                float part[side];
                load_floats(part, parts + (row * count + split) * width + dim);
#pragma unroll
                for (int j = 0; j < side; j++) {
                    sum[j] = fmaf(weight, part[j], sum[j]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < side; j++) {
            sum[j] = total == 0.0f ? 0.0f : sum[j] / total;
        }
        const int kv_head = row / problem_rows % kv_heads;
        const int query = row % problem_rows / sharing;
        const int head = kv_head * sharing + row % sharing;
        store_floats(&scratch.x[row / (problem_rows * kv_heads) * queries + query][head * width + dim], sum);
    }
    __syncthreads();
}

// A warp's sums of a weight row and its gate, two for each so that an addition need not wait for the last one.
struct Sums {
    float of[pieces][rows][2];

    // The products of `packs` packs of weights in a slot with the part of x that they meet.
    template <int packs>
    __device__ __forceinline__ void add(const char *slot, const Element (&x)[rows][depth], int first_pack) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int turn = 0; turn < (packs + WARP - 1) / WARP; turn++) {
            const int at = turn * WARP + lane;
            if (turn < packs / WARP || at < packs) {
                float weights[pieces][pack];
#pragma unroll
                for (int piece = 0; piece < pieces; piece++) {
                    const Weight::type *data = reinterpret_cast<const Weight::type *>(slot);
                    load_floats(weights[piece], data + (piece * chunk_packs + at) * pack);
                }
#pragma unroll
                for (int row = 0; row < rows; row++) {
                    float values[pack];
                    load_floats(values, &x[row][(first_pack + at) * pack]);
#pragma unroll
                    for (int piece = 0; piece < pieces; piece++) {
#pragma unroll
                        for (int j = 0; j < pack; j++) {
                            of[piece][row][j % 2] = fmaf(values[j], weights[piece][j], of[piece][row][j % 2]);
                        }
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void reduce(float (&result)[pieces][rows]) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int piece = 0; piece < pieces; piece++) {
#pragma unroll
            for (int row = 0; row < rows; row++) {
                const float sum = warp_sum(of[piece][row][0] + of[piece][row][1]);
                if (lane == 0) {
                    result[piece][row] = sum;
                }
            }
        }
    }
};

// Where a thread's first result goes, and what is added to it, which can be read before the sums are there.
struct Place {
    int row;
    int team;
    int turn;
    int column;

    __device__ __forceinline__ Place(int number, int start)
        : row(number % rows), team(number / rows % teams), turn(number / (rows * teams)),
          column(start + (turn * teams + team) * gridDim.x + blockIdx.x) {}
};

PHASE(look_ahead) {
    if (blockIdx.x == 0) {
        if constexpr (Gain::present) {
            prefetch(gain, depth * sizeof(Gain::type));
        }
        if constexpr (Bias::present) {
            prefetch(bias, pieces * param::n * sizeof(Bias::type));
        }
    }
}

PHASE(product) {
    Scratch &scratch = *reinterpret_cast<Scratch *>(shared);
    const int warp = threadIdx.x / WARP;
    const int first_pack = warp % splits * part_packs;
    const int stride = teams * gridDim.x;
    const Place first(threadIdx.x, 0);
    Addends addends;
    if (first.column < int(param::n)) {
        addends = Addends(bias, residual, first.row, first.column);
    }
    if constexpr (X::present) {
        stage(scratch, reinterpret_cast<const Element *>(x), gain);
    } else {
        stage_parts<Parts>(scratch, parts, stats);
    }
    for (int start = 0; start < int(param::n); start += capacity * stride) {
        int column = start + warp / splits * gridDim.x + blockIdx.x;
        Sums before;
        int turn = 0;
        for (; turn < capacity && column < int(param::n); turn++) {
            Sums sums{};
#pragma unroll 1
            for (int chunk = 0; chunk < part_packs / chunk_packs; chunk++) {
                sums.add<chunk_packs>(ring.wait(), scratch.x, first_pack + chunk * chunk_packs);
                ring.release();
            }
            if constexpr (last_packs != 0) {
                sums.add<last_packs>(ring.wait(), scratch.x, first_pack + part_packs - last_packs);
                ring.release();
            }
            // The warp's lanes exchange a row's sums while they read the next one.
            if (turn > 0) {
                before.reduce(scratch.sums[warp][turn - 1]);
            }
            before = sums;
            column += stride;
        }
        if (turn > 0) {
            before.reduce(scratch.sums[warp][turn - 1]);
        }
        __syncthreads();
        for (int number = threadIdx.x; number < capacity * teams * rows; number += THREADS) {
            const Place place(number, start);
            if (place.column >= int(param::n)) {
                break;
            }
            float sum = 0.0f;
            float up = 0.0f;
#pragma unroll
            for (int part = 0; part < splits; part++) {
                sum += scratch.sums[place.team * splits + part][place.turn][0][place.row];
                if constexpr (gated) {
                    up += scratch.sums[place.team * splits + part][place.turn][1][place.row];
                }
            }
            if (start > 0 || number >= THREADS) {
                addends = Addends(bias, residual, place.row, place.column);
            }
            finish(sum, up, addends, out, place.row, place.column);
        }
        if (start + capacity * stride < int(param::n)) {
            __syncthreads();
        }
    }
}
