// The sum of all ranks' summands and a residual, with its RMSNorm if there is one behind it: what stands between a product that is
// divided by its input features and the next product. A GPU reads the others' summands in their memory and adds them in the order of
// the ranks, in float32 and rounded once, so all get the same bits.
//
// `peers` has the address of each rank's notices, this rank, the address of a word that the host sets when the others are gone, and the
// address of each rank's summands, 8 bytes each.
//
// Invariants
// R1. Ranks make the same calls in the same order, so a call has the same turn on all of them; `turns[0]` counts the turns, and
//     `turns[1]` the blocks of this turn that have ended.
// R2. Once a block of a rank runs, the kernel before has ended, so the rank's summands are complete. Its first block notifies the other
//     ranks (`complete`). Nobody reads a rank's summands earlier.
// R3. After this kernel others may write to the summands' memory. So its last block notifies the other ranks that this one has read
//     theirs (`read`), and ends only when all of them have read this one's.
// R4. A notice is the turn. Each has one writer, which may be one turn ahead of a reader: a later turn serves as well.

#include "common/reduction.cuh"

using Value = X::type;
constexpr int pack = 8;
constexpr int packs = width / pack;
constexpr int held = (packs + THREADS - 1) / THREADS;

enum Notice { complete, read };

struct Words {
    unsigned at[4];
};

struct Ranks {
    const unsigned long long *table;
    int own;

    __device__ __forceinline__ Ranks(const Peers::type *peers)
        : table(reinterpret_cast<const unsigned long long *>(peers)), own(int(table[ranks])) {}

    // Where a rank finds the notice of another one; 32 bytes, so that no two are in one access.
    __device__ __forceinline__ unsigned long long place(int reader, Notice notice, int writer) const {
        return table[reader] + 32ull * (int(notice) * ranks + writer);
    }

    // Notifies all other ranks of what this block, or a kernel before, has done. By the first threads of a block, one for a rank.
    __device__ __forceinline__ void notify(Notice notice, unsigned turn) const {
        const int other = threadIdx.x;
        if (other < ranks && other != own) {
            __threadfence_system();
            asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(place(other, notice, own)), "r"(turn) : "memory");
        }
    }

    // Has the block wait for a notice from all other ranks, or until they are gone.
    __device__ __forceinline__ void wait(Notice notice, unsigned turn) const {
        const int other = threadIdx.x;
        if (other < ranks && other != own) {
            const unsigned long long at = place(own, notice, other);
            unsigned found, gone = 0;
            int looked = 0;
            do {
                asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(at) : "memory");
                if (++looked % 4096 == 0) {
                    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(gone) : "l"(table[ranks + 1]) : "memory");
                }
            } while (int(found - turn) < 0 && !gone);  // R4
        }
        __syncthreads();
    }

    // Begins to read a pack of a rank's summands.
    __device__ __forceinline__ void request(Words &words, int rank, index_t element) const {
        const unsigned long long at = table[ranks + 2 + rank] + sizeof(Value) * element;
        asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.at[0]), "=r"(words.at[1]), "=r"(words.at[2]), "=r"(words.at[3]) : "l"(at) : "memory");
    }
};

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
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const index_t start = index_t(row) * width;
        Words summands[held][ranks];
        Pack<Value, pack> addends[held];
        each_pack([&](int turn, int column) {
#pragma unroll
            for (int rank = 0; rank < ranks; rank++) {
                all.request(summands[turn][rank], rank, start + column);
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
    __syncthreads();
    if (last) {
        all.notify(read, turn);  // R3
        all.wait(read, turn);
    }
}
