// The sum of all ranks' summands and a residual, with its RMSNorm if there is one behind it: what stands between a product that is
// divided by its input features and the next product. A GPU reads the others' summands in their memory and adds them in the order of
// the ranks, in float32 and rounded once, so all get the same bits. `common/ranks.cuh` has its invariants, R1 to R4: `turns[0]` counts
// the turns, `turns[1]` the blocks of this turn that have ended.
//
// Where there is a `copied`, it holds the first half of the other rank's rows (`movement/peer_copy.cu`). Pairs of blocks then take a row
// of each half, and change halves from row to row, so that the links are busy all the time.

#include "common/reduction.cuh"
#include "common/ranks.cuh"

using Value = X::type;
constexpr int pack = 8;
constexpr int packs = width / pack;
constexpr int held = (packs + THREADS - 1) / THREADS;

struct Words {
    unsigned at[4];
};

// Begins to read a pack of a rank's summands.
__device__ __forceinline__ void request(Words &words, unsigned long long at) {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.at[0]), "=r"(words.at[1]), "=r"(words.at[2]), "=r"(words.at[3]) : "l"(at) : "memory");
}

// A thread's values of a row: pack `turn * THREADS + threadIdx.x` for each turn.
template <typename Visit>
__device__ __forceinline__ void each_pack(Visit visit) {
#pragma unroll
    for (int turn = 0; turn < held; turn++) {
        const int at = turn * THREADS + threadIdx.x;
        if (held * THREADS == packs || at < packs) {
            visit(turn, at * pack);
        }
    }
}

KERNEL(rank_sum) {
    const Ranks all(peers);
    const unsigned turn = unsigned(turns[0]) + 1;
    if (blockIdx.x == 0) {
        all.notify(complete, turn);  // R2
    }
    all.wait(complete, turn);
    const Place place;
    Value *const normal = (Value *)normalized;  // null where there is no norm
    for (int taken = blockIdx.x, round = 0; taken < rows; taken += gridDim.x, round++) {
        const bool is_copied = Copied::present && (taken + round) % 2 == 0;
        const int row = !Copied::present ? taken : taken / 2 + (is_copied ? 0 : rows / 2);
        const index_t start = index_t(row) * width;
        unsigned long long places[ranks];
#pragma unroll
        for (int rank = 0; rank < ranks; rank++) {
            places[rank] = (is_copied && rank != all.own ? (unsigned long long)(copied) : all.operand(rank)) + sizeof(Value) * start;
        }
        Words summands[held][ranks];
        Pack<Value, pack> addends[held];
        each_pack([&](int turn, int column) {
#pragma unroll
            for (int rank = 0; rank < ranks; rank++) {
                request(summands[turn][rank], places[rank] + sizeof(Value) * column);
            }
            addends[turn] = load_pack<pack>(residual + start + column);
        });
        float sums[held][pack];
        float squares = 0.0f;
        each_pack([&](int turn, int column) {
            to_floats(sums[turn], addends[turn]);
            float total[pack] = {};
#pragma unroll
            for (int rank = 0; rank < ranks; rank++) {
                float part[pack];
                to_floats(part, reinterpret_cast<const Pack<Value, pack> &>(summands[turn][rank]));
#pragma unroll
                for (int i = 0; i < pack; i++) {
                    total[i] += part[i];
                }
            }
            Pack<Value, pack> stored;
#pragma unroll
            for (int i = 0; i < pack; i++) {
                stored.item[i] = from<Value>(sums[turn][i] + total[i]);
                sums[turn][i] = to_float(stored.item[i]);
                squares = fmaf(sums[turn][i], sums[turn][i], squares);
            }
            store_pack(out + start + column, stored);
        });
        if constexpr (Normalized::present) {
            const float scale = rsqrtf(reduce_sum(squares, place) / float(width) + eps);
            each_pack([&](int turn, int column) {
                Pack<Value, pack> result;
#pragma unroll
                for (int i = 0; i < pack; i++) {
                    const float weight = Gain::present ? to_float(gain[column + i]) + gain_offset : 1.0f;
                    result.item[i] = from<Value>(sums[turn][i] * scale * weight);
                }
                store_pack(normal + start + column, result);
            });
        }
    }
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&turns[1], 1) == int(gridDim.x) - 1;
        if (last) {
            turns[0] = int(turn);
            turns[1] = 0;
        }
    }
    if constexpr (is_last) {
        __syncthreads();
        if (last) {
            all.notify(read, turn);  // R3
            all.wait(read, turn);
        }
    }
}
