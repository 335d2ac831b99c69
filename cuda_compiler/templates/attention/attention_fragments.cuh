#include "attention/attention_products.cuh"

// What a warp does with tiles of 16 keys for 16 rows of queries, and how a block's warps put their parts together. Expects
// `rows`, `width`, `value_width` and `Problem`, which has `q_row(row)`.
//
// A product does not mind in which order its terms come. So a lane's operands are 16 bytes side by side in memory: of
// queries and keys dimensions 8p to 8p + 7 of each 32 (`chunks`), of values dimensions 8g to 8g + 7 of each 64 (`spans`).
//
// Heads too wide for a warp's registers are divided among the warps of a team: each has `chunks` chunks and `spans` spans, and all
// add up their parts of the scores, so that they have the same weights. A wide block is as many teams as a narrow one is warps.
//
// Invariant
// T1. A warp leaves its parts of the scores of a team's tiles in two places, in turns, and its team's barrier is between that and
//     the others' reading. So a place is free again when the warp has passed the next tile's barrier. All warps of a team multiply
//     the same tiles in the same order.

constexpr int block_keys = 16;
constexpr int most_chunks = 4;  // that a warp has registers for
constexpr int most_spans = 2;

// The smallest power of two that is not below a number.
__device__ __forceinline__ constexpr int power_of_2_from(int number) {
    int power = 1;
    while (power < number) {
        power *= 2;
    }
    return power;
}

constexpr int all_chunks = (width + 31) / 32;
constexpr int all_spans = (value_width + 63) / 64;
constexpr int team = power_of_2_from(
    larger((all_chunks + most_chunks - 1) / most_chunks, (all_spans + most_spans - 1) / most_spans)
);  // warps
constexpr int chunks = (all_chunks + team - 1) / team;
constexpr int spans = (all_spans + team - 1) / team;
constexpr int held_rows = rows < block_rows ? rows : block_rows;
constexpr int halves = held_rows > 8 ? 2 : 1;  // of a fragment's rows that are in use

// The number of this thread's warp in its team, and where the warp's dimensions begin, in pieces of eight.
__device__ __forceinline__ int team_member() { return team == 1 ? 0 : int(threadIdx.x) / WARP % team; }
__device__ __forceinline__ int first_key_piece() { return team_member() * chunks * 4; }
__device__ __forceinline__ int first_value_piece() { return team_member() * spans * 8; }

// A warp's parts of the scores of a tile, as its lanes have them (T1).
template <int team>
struct TeamScores {
    alignas(16) float of[2][WARP][4 * halves];
};
template <>
struct TeamScores<1> {};

// What connects a warp with its team.
template <int team>
struct Team {
    TeamScores<team> *first;  // of the team's first warp
    unsigned step;  // bytes from one warp's to the next one's
    int turn = 0;

    template <typename Memory>
    __device__ __forceinline__ explicit Team(Memory *memory)
        : first(memory + threadIdx.x / WARP / team * team), step(sizeof(Memory)) {}

    // Adds the parts of all warps, in the same order in each.
    __device__ __forceinline__ void add_up(float (&scores)[2][4]) {
        const int lane = threadIdx.x % WARP;
        float(&own)[4 * halves] = part(team_member()).of[turn][lane];
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#pragma unroll
            for (int half = 0; half < halves; half++) {
                own[2 * halves * tile + 2 * half] = scores[tile][2 * half];
                own[2 * halves * tile + 2 * half + 1] = scores[tile][2 * half + 1];
            }
        }
        asm volatile("bar.sync %0, %1;" :: "r"(2 + int(threadIdx.x) / (WARP * team)), "n"(WARP * team) : "memory");
        float sums[4 * halves] = {};
#pragma unroll
        for (int member = 0; member < team; member++) {
#pragma unroll
            for (int i = 0; i < 4 * halves; i++) {
                sums[i] += part(member).of[turn][lane][i];
            }
        }
#pragma unroll
        for (int i = 0; i < 4 * halves; i++) {
            scores[i / (2 * halves)][i % (2 * halves)] = sums[i];
        }
        turn ^= 1;
    }

    __device__ __forceinline__ TeamScores<team> &part(int member) const {
        return *reinterpret_cast<TeamScores<team> *>(reinterpret_cast<char *>(first) + member * step);
    }
};
template <>
struct Team<1> {
    template <typename Memory>
    __device__ __forceinline__ explicit Team(Memory *) {}

    __device__ __forceinline__ void add_up(float (&)[2][4]) {}
};

// Two weights as 16-bit values and what these lack, so that no precision is lost: both parts are multiplied. A weight
// that is not 0 has two parts that are not, or its product with an infinite value would be NaN.
struct WeightPair {
    unsigned coarse;
    unsigned fine;

    WeightPair() = default;
    __device__ __forceinline__ WeightPair(float first, float second) {
        const float first_part = truncated(first);
        const float second_part = truncated(second);
        coarse = packed(first_part, second_part);
        fine = packed(rest(first, first_part), rest(second, second_part));
    }

    __device__ __forceinline__ static float truncated(float value) {
        return __uint_as_float(__float_as_uint(value) & (IsBrain<Half>::value ? 0xffff0000u : 0xffffe000u));
    }

    __device__ __forceinline__ static float rest(float value, float part) {
        return value > 0.0f ? fmaxf(value - part, IsBrain<Half>::value ? 1e-30f : 6e-8f) : 0.0f;
    }
};

// What a lane multiplies of 16 keys: dimensions 32 · chunk + 8p on of keys 8 · tile + g. `visit(words, key, piece)` is told
// which ones words are, or become: dimensions 8 · piece to 8 · piece + 7.
struct KeyWords {
    Words of[2][chunks];

    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#pragma unroll
            for (int chunk = 0; chunk < chunks; chunk++) {
                visit(of[tile][chunk], 8 * tile + lane / 4, first_key_piece() + 4 * chunk + lane % 4);
            }
        }
    }
};

// And of their values: dimensions 64 · span + 8g on of keys 2p, 2p + 1, 2p + 8 and 2p + 9.
struct ValueWords {
    Words of[spans][4];

    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int span = 0; span < spans; span++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                visit(of[span][i], lane % 4 * 2 + i % 2 + i / 2 * 8, first_value_piece() + 8 * span + lane / 4);
            }
        }
    }
};

// A warp's dimensions of 16 keys and of their values. Pieces of 16 bytes are shuffled so that lanes that read at a time meet
// different banks.
struct alignas(16) KeyTile {
    Half k[block_keys * chunks * 32];
    Half v[block_keys * spans * 64];

    __device__ __forceinline__ static int k_place(int key, int piece) {
        return (key * chunks * 4 + (chunks % 2 ? piece : piece ^ key % 2 * 4)) * 8;
    }

    __device__ __forceinline__ static int v_place(int key, int piece) {
        return (key * spans * 8 + (piece ^ key % 8)) * 8;
    }

    // Begins to copy the keys from `first`, which there is, on, by one warp; zeros stand for keys and dimensions that there are not. `pool`
    // says with `has(key)` which ones there are, and with `k_row(key)` and `v_row(key)` where.
    template <typename Pool>
    __device__ __forceinline__ void copy(const Pool &pool, int first) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < block_keys * chunks * 4; i += WARP) {
            const int key = (i + lane) / (chunks * 4);
            const int piece = (i + lane) % (chunks * 4);
            const int dim = (first_key_piece() + piece) * 8;
            const bool inside = pool.has(first + key) && dim < width;
            copy_words(k + k_place(key, piece), pool.k_row(inside ? first + key : first) + (inside ? dim : 0), inside);
        }
#pragma unroll
        for (int i = 0; i < block_keys * spans * 8; i += WARP) {
            const int key = (i + lane) / (spans * 8);
            const int piece = (i + lane) % (spans * 8);
            const int dim = (first_value_piece() + piece) * 8;
            const bool inside = pool.has(first + key) && dim < value_width;
            copy_words(v + v_place(key, piece), pool.v_row(inside ? first + key : first) + (inside ? dim : 0), inside);
        }
    }

    // Whether head dimensions fill their places, so that every piece of a key that exists does.
    static constexpr bool filled
        = width == team * chunks * 32 && value_width == team * spans * 64 && WARP % (chunks * 4) == 0;

    // `copy` where that is so and all 16 keys exist, `k_step` and `v_step` elements apart: nothing is to be checked.
    template <index_t k_step, index_t v_step>
    __device__ __forceinline__ void copy_all(const Half *k_start, const Half *v_start) {
        const int lane = threadIdx.x % WARP;
        constexpr int k_pieces = chunks * 4;
        k_start += lane / k_pieces * k_step + (first_key_piece() + lane % k_pieces) * 8;
#pragma unroll
        for (int i = 0; i < block_keys; i += WARP / k_pieces) {
            copy_words(k + k_place(i + lane / k_pieces, lane % k_pieces), k_start + i * k_step, true);
        }
        constexpr int v_pieces = spans * 8;
        v_start += lane / v_pieces * v_step + (first_value_piece() + lane % v_pieces) * 8;
#pragma unroll
        for (int i = 0; i < block_keys; i += WARP / v_pieces) {
            copy_words(v + v_place(i + lane / v_pieces, lane % v_pieces), v_start + i * v_step, true);
        }
    }

    __device__ __forceinline__ void read(KeyWords &to) const {
        to.each([&](Words &words, int key, int piece) {
            words = *reinterpret_cast<const Words *>(k + k_place(key, piece - first_key_piece()));
        });
    }

    __device__ __forceinline__ void read(ValueWords &to) const {
        to.each([&](Words &words, int key, int piece) {
            words = *reinterpret_cast<const Words *>(v + v_place(key, piece - first_value_piece()));
        });
    }
};

struct Weights {
    WeightPair of[2][halves];  // of keys 8 · tile + 2p and the one behind it
    float shrink[halves];  // of what was found before
};

// What a warp has found in the end: a row's maximum, total and the sums of the warp's dimensions. Pieces of 16 bytes are shuffled so that lanes that
// access them at a time meet different banks.
struct alignas(16) Found {
    float largest[block_rows];
    float total[block_rows];
    float sums[held_rows][spans * 64];

    // Dimensions 4 · piece to 4 · piece + 3.
    __device__ __forceinline__ float *place(int row, int piece) {
        return &sums[row][(piece ^ piece / 8 % 2 ^ row % 2 * 2) * 4];
    }
};

// What a warp knows of its 16 rows after some keys. `memory` is the warps' in shared memory.
struct State {
    Team<team> own_team;
    Words q[halves][chunks];  // rows g and g + 8
    float largest[halves];
    float total[halves];  // of this lane's keys
    float sums[spans][8][4];

    template <typename Memory>
    __device__ __forceinline__ State(const Problem &problem, int first_row, Memory *memory) : own_team(memory) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int half = 0; half < halves; half++) {
            const int row = first_row + 8 * half + lane / 4;
#pragma unroll
            for (int chunk = 0; chunk < chunks; chunk++) {
                const int dim = 32 * chunk + (first_key_piece() + lane % 4) * 8;
                const bool inside = row < rows && dim < width;
                q[half][chunk] = load_words(problem.q_row(inside ? row : 0) + (inside ? dim : 0), inside);
            }
            largest[half] = -FLOAT_MAX;
            total[half] = 0.0f;
        }
#pragma unroll
        for (int span = 0; span < spans; span++) {
#pragma unroll
            for (int tile = 0; tile < 8; tile++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[span][tile][i] = 0.0f;
                }
            }
        }
    }

    // The weights of 16 keys, given what is to be added to their scores; `add` comes next.
    __device__ __forceinline__ Weights weigh(const KeyWords &key_words, const float (&bias)[2][2 * halves]) {
        float scores[2][4];
        multiply_keys(key_words, scores);
        add_bias(scores, bias);
        return weigh_scores(scores);
    }

    __device__ __forceinline__ static void add_bias(float (&scores)[2][4], const float (&bias)[2][2 * halves]) {
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#pragma unroll
            for (int i = 0; i < 2 * halves; i++) {
                // -inf even where an excluded key made the score NaN.
                const float score = scores[tile][i] + bias[tile][i];
                scores[tile][i] = bias[tile][i] == -INFINITY_F ? -INFINITY_F : score;
            }
        }
    }

    // Scaled products of queries and keys, of all of a team's dimensions.
    __device__ __forceinline__ void multiply_keys(const KeyWords &key_words, float (&scores)[2][4]) {
        // Two sums for each score: a product waits for the one before it.
        float products[2][2][4] = {};
#pragma unroll
        for (int chunk = 0; chunk < chunks; chunk++) {
            const Words &top = q[0][chunk];
            const Words bottom = halves == 2 ? q[halves - 1][chunk] : Words{};
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const Words &key = key_words.of[tile][chunk];
                float(&sums)[4] = products[chunk % 2][tile];
                multiply(sums, top.at[0], bottom.at[0], top.at[1], bottom.at[1], key.at[0], key.at[1]);
                multiply(sums, top.at[2], bottom.at[2], top.at[3], bottom.at[3], key.at[2], key.at[3]);
            }
        }
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[tile][i] = (products[0][tile][i] + products[1][tile][i]) * param::scale;
            }
        }
        own_team.add_up(scores);
#where soft_cap
#pragma unroll
        for (int i = 0; i < 8; i++) {
            scores[i / 4][i % 4] = param::soft_cap * tanhf(scores[i / 4][i % 4] * (1.0f / param::soft_cap));
        }
#end
    }

    __device__ __forceinline__ Weights weigh_scores(float (&scores)[2][4]) {
        Weights weights;
#pragma unroll
        for (int half = 0; half < halves; half++) {
            float greatest = fmaxf(
                fmaxf(scores[0][2 * half], scores[0][2 * half + 1]), fmaxf(scores[1][2 * half], scores[1][2 * half + 1])
            );
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, 1));
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, 2));
            greatest = fmaxf(greatest, largest[half]);
            weights.shrink[half] = exponential(largest[half] - greatest);
            largest[half] = greatest;
            total[half] *= weights.shrink[half];
        }
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#pragma unroll
            for (int i = 0; i < 2 * halves; i++) {
                scores[tile][i] = exponential(scores[tile][i] - largest[i / 2]);
                total[i / 2] += scores[tile][i];
            }
#pragma unroll
            for (int half = 0; half < halves; half++) {
                weights.of[tile][half] = WeightPair(scores[tile][2 * half], scores[tile][2 * half + 1]);
            }
        }
        return weights;
    }

    // Of what is not above 0: with a relative error of about 1e-5 at the most, far below that of the 16-bit values it weighs.
    __device__ __forceinline__ static float exponential(float a) { return near_exp2(1.44269504f * a); }

    // Adds the values of 16 keys.
    __device__ __forceinline__ void add(const Weights &weights, const ValueWords &values) {
        const WeightPair(&near)[halves] = weights.of[0];
        const WeightPair(&far)[halves] = weights.of[1];
        // Mostly no row has found a larger score than before. NaN counts as one.
        if (__any_sync(0xffffffffu, !(weights.shrink[0] == 1.0f && weights.shrink[halves - 1] == 1.0f))) {
#pragma unroll
            for (int i = 0; i < spans * 8 * 4; i++) {
                sums[i / 32][i / 4 % 8][i % 4] *= weights.shrink[i % 4 / 2 % halves];
            }
        }
#pragma unroll
        for (int span = 0; span < spans; span++) {
            const Words(&of)[4] = values.of[span];
#pragma unroll
            for (int tile = 0; tile < 8; tile++) {
                float(&target)[4] = sums[span][tile];
                const unsigned order = tile % 2 ? 0x7632 : 0x5410;
                const unsigned first = __byte_perm(of[0].at[tile / 2], of[1].at[tile / 2], order);
                const unsigned second = __byte_perm(of[2].at[tile / 2], of[3].at[tile / 2], order);
                if constexpr (halves == 1) {
                    // The rows that are not in use take the fine parts.
                    multiply(target, near[0].coarse, near[0].fine, far[0].coarse, far[0].fine, first, second);
                } else {
                    multiply(target, near[0].coarse, near[1].coarse, far[0].coarse, far[1].coarse, first, second);
                    multiply(target, near[0].fine, near[1].fine, far[0].fine, far[1].fine, first, second);
                }
            }
        }
    }

    // The totals of whole rows, in every lane that has a part of them.
    __device__ __forceinline__ void finish_totals() {
#pragma unroll
        for (int half = 0; half < halves; half++) {
            total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
            total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
        }
    }

    // Dimension 64 · span + 16 · p + i of this lane's row, among the warp's.
    __device__ __forceinline__ float sum_at(int half, int span, int i) const {
        const float(&found)[4] = sums[span][i % 8];
        return halves == 1 ? found[i / 8] + found[2 + i / 8] : found[2 * half + i / 8];
    }

    __device__ __forceinline__ void leave(Found &found) {
        const int lane = threadIdx.x % WARP;
        finish_totals();
#pragma unroll
        for (int half = 0; half < halves; half++) {
            const int row = lane / 4 + 8 * half;
            if (row < held_rows) {
                if (lane % 4 == 0) {
                    found.largest[row] = largest[half];
                    found.total[row] = total[half];
                }
#pragma unroll
                for (int i = 0; i < 4 * spans; i++) {
                    float side[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        side[j] = sum_at(half, i / 4, i % 4 * 4 + j);
                    }
                    store_floats(found.place(row, i / 4 * 16 + lane % 4 * 4 + i % 4), side);
                }
            }
        }
    }
};

// Puts together what the first `used` teams of a block left, and hands it to finish(problem, row, dim, maximum, total, sums of
// dimensions dim to dim + 3), neighbours side by side.
template <int used, int warps, typename Memory, typename Finish>
__device__ __forceinline__ void combine_found(
    const Problem &problem, int first_row, Memory (&memory)[warps], Finish finish
) {
    constexpr int pieces = value_width / 4;
    constexpr int own_pieces = spans * 16;  // of a warp
    for (int i = threadIdx.x; i < held_rows * pieces; i += warps * WARP) {
        const int row = i / pieces;
        const int piece = i % pieces;
        if (first_row + row >= rows) {
            break;
        }
        float largest = -FLOAT_MAX;
#pragma unroll
        for (int other = 0; other < used; other++) {
            largest = fmaxf(largest, memory[other * team].found.largest[row]);
        }
        float total = 0.0f;
        float sums[4] = {};
#pragma unroll
        for (int other = 0; other < used; other++) {
            Found &found = memory[other * team + piece / own_pieces].found;
            const float weight = State::exponential(found.largest[row] - largest);
            float part[4];
            load_floats(part, found.place(row, piece % own_pieces));
            total = fmaf(weight, found.total[row], total);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sums[j] = fmaf(weight, part[j], sums[j]);
            }
        }
        finish(problem, first_row + row, 4 * piece, largest, total, sums);
    }
}

// The same for what the warps of a block have found, of whose teams none behind the first `used` has found anything.
// `memory[warp].found` is a warp's own.
template <int warps, typename Memory, typename Finish>
__device__ __forceinline__ void combine_warps(
    const Problem &problem, int first_row, State &state, Memory (&memory)[warps], Finish finish, int used = warps / team
) {
    static_assert(warps % team == 0, "");
    constexpr int teams = warps / team;
    state.leave(memory[threadIdx.x / WARP].found);
    sync_block();
    // Loops of known length have all that they read on its way at a time.
    if (used <= 1) {
        combine_found<1>(problem, first_row, memory, finish);
    } else if (used <= 2) {
        combine_found<smaller(2, teams)>(problem, first_row, memory, finish);
    } else if (used <= 4) {
        combine_found<smaller(4, teams)>(problem, first_row, memory, finish);
    } else {
        combine_found<teams>(problem, first_row, memory, finish);
    }
}

// What a warp has in shared memory while it is in `split_keys`, with `stages` tiles of keys.
template <int stages>
struct SplitMemory : TeamScores<team> {
    union {
        KeyTile tiles[stages];
        Found found;
    };
};
