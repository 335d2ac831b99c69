// Recurrent layers; `layer.cuh` says how.

#kernel recurrent_begin
// R2
using Bits = Either<sizeof(Out::type) == 2, unsigned short, unsigned>::type;

KERNEL(recurrent_begin) {
    const index_t first = (blockIdx.x * index_t(THREADS) + threadIdx.x) * pack;
    if (first < Out::numel) {
        Pack<Bits, pack> missing;
#pragma unroll
        for (int i = 0; i < pack; i++) {
            missing.item[i] = Bits(~Bits(0));
        }
        *reinterpret_cast<Pack<Bits, pack> *>(out + Out::offset(first)) = missing;
    }
}

#kernel recurrent_steps recurrent_steps_plain
#include "recurrent/layer.cuh"

#kernel recurrent_steps
// Products by tensor cores: the weight's lines are the rows of a fragment, and rows of the batch its columns. Warps divide lines and
// terms. The order of terms in a fragment is free, so a lane takes eight neighbours of a row, for two fragments at once.

using Half = Hidden_weight::type;
#include "common/tensor_cores.cuh"

enum Held { NOWHERE, IN_REGISTERS, IN_SHARED_MEMORY };  // where a block keeps its weights

constexpr int tiles = (lines + 15) / 16 / LINE_WARPS;  // of 16 lines, per warp
constexpr int rounds = (hidden + 32 * PIECES - 1) / (32 * PIECES);  // of 32 terms, per warp
constexpr int columns = padded_rows / 8;  // fragments' columns are 8 rows of the batch
constexpr int together = smaller(columns, 4);
constexpr int depth = smaller(rounds, 8 / together);  // rounds whose values are requested at once
constexpr int unrolled = HELD == IN_REGISTERS ? rounds : 1;
constexpr bool is_whole = hidden % 8 == 0;

static_assert((lines + 15) / 16 % LINE_WARPS == 0 && THREADS == PIECES * LINE_WARPS * WARP, "warps divide lines and terms");

// Eight terms of a row, from term `k` on; zeros beyond the end.
template <bool aligned, typename T>
__device__ __forceinline__ Words eight(const T *row, index_t step, int k) {
    if constexpr (aligned && is_whole) {
        return load_words(row + k, k < hidden);
    } else {
        Pack<Half, 8> values;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            values.item[i] = k + i < hidden ? convert<Half>(row[(k + i) * step]) : from<Half>(0.0f);
        }
        return reinterpret_cast<const Words &>(values);
    }
}

// Whether one of eight messages is missing: where one of two values is 0, subtracting 1 from each sets a sign that was not set.
__device__ __forceinline__ bool is_missing(const Words &words) {
    unsigned missing = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned inverse = ~words.at[i];
        missing |= (inverse - 0x00010001u) & ~inverse;
    }
    return (missing & 0x80008000u) != 0;
}

// Eight messages, from term `k` on; those that are missing stay so.
__device__ __forceinline__ Words receive_eight(const Out::type *place, int k) {
    Words words;
    if constexpr (sizeof(Out::type) == 2 && Out::vector % 8 == 0 && is_whole) {
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.at[0]), "=r"(words.at[1]), "=r"(words.at[2]), "=r"(words.at[3])
                     : "l"(place) : "memory");
    } else {
        Pack<Half, 8> &values = reinterpret_cast<Pack<Half, 8> &>(words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            values.item[i] = k + i < hidden ? convert<Half>(receive(place + i * Out::stride(2))) : from<Half>(0.0f);
        }
    }
    return words;
}

KERNEL(recurrent_steps) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Part part;
    const Shared shared(memory);
    Words *const kept = reinterpret_cast<Words *>(shared.rest);
    const int warp = threadIdx.x / WARP;
    const int piece = warp % PIECES;
    const int first_tile = warp / PIECES * tiles;
    const int line = threadIdx.x % WARP / 4;  // in a fragment, and the row of the batch among 8
    const int term = threadIdx.x % 4 * 8;
    const Half *const weight = part.backward ? reinterpret_cast<const Half *>(back_hidden_weight) : hidden_weight;
    const index_t stride = part.backward ? Back_hidden_weight::stride(0) : Hidden_weight::stride(0);
    constexpr bool aligned = Hidden_weight::vector % 8 == 0 && Back_hidden_weight::vector % 8 == 0;

    const auto term_of = [&](int round) { return (round * PIECES + piece) * 32 + term; };
    const auto weight_at = [&](int round, int tile, int half) {
        const int row = part.weight_row((first_tile + tile) * 16 + half * 8 + line);
        const Half *const start = weight + index_t(larger(row, 0)) * stride;
        return eight<aligned>(start, 1, row < 0 ? hidden : term_of(round));
    };
    const auto place_of = [&](int round, int tile, int half) {
        return (((round * tiles + tile) * 2 + half) * THREADS) + threadIdx.x;
    };

    Words held[HELD == IN_REGISTERS ? rounds * tiles * 2 : 1];
    if constexpr (HELD != NOWHERE) {
#pragma unroll unrolled
        for (int round = 0; round < rounds; round++) {
#pragma unroll
            for (int tile = 0; tile < tiles; tile++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const Words words = weight_at(round, tile, half);
                    if constexpr (HELD == IN_REGISTERS) {
                        held[(round * tiles + tile) * 2 + half] = words;
                    } else {
                        kept[place_of(round, tile, half)] = words;
                    }
                }
            }
        }
    }
    Elements elements;
    BEGIN_STEPS(part, shared, elements);

    for (int step = 0; step < steps; step++) {
        elements.request(given, part, step);
        float *const partial = shared.sums[step % 2] + piece * padded_rows * padded_lines;
#pragma unroll 1
        for (int column = 0; column < columns; column += together) {
            float sums[tiles][together][4] = {};
#pragma unroll unrolled
            for (int start = 0; start < rounds; start += depth) {
                Words values[depth][together];
                unsigned missing = 0;
#pragma unroll
                for (int i = 0; i < depth * together; i++) {
                    const int round = start + i / together;
                    const int row = (column + i % together) * 8 + line;
                    const bool wanted = round < rounds && term_of(round) < hidden && part.has_row(row);
                    values[i / together][i % together] = Words{};
                    missing |= unsigned(wanted) << i;
                }
                if (step == 0) {
#pragma unroll
                    for (int i = 0; i < depth * together; i++) {
                        if (missing >> i & 1) {
                            const int row = (column + i % together) * 8 + line;
                            values[i / together][i % together] = eight<false>(
                                h0 + part.state<H0>(row, 0), H0::stride(2), term_of(start + i / together));
                        }
                    }
                    missing = 0;
                }
                while (missing) {
#pragma unroll
                    for (int i = 0; i < depth * together; i++) {
                        if (missing >> i & 1) {
                            const int row = (column + i % together) * 8 + line;
                            const int k = term_of(start + i / together);
                            values[i / together][i % together] = receive_eight(out + part.result(step - 1, row, k), k);
                        }
                    }
#pragma unroll
                    for (int i = 0; i < depth * together; i++) {
                        if (!is_missing(values[i / together][i % together])) {
                            missing &= ~(1u << i);
                        }
                    }
                }
                __syncwarp();
#pragma unroll
                for (int i = 0; i < depth; i++) {
                    if (start + i < rounds) {
#pragma unroll
                        for (int tile = 0; tile < tiles; tile++) {
                            Words top;
                            Words bottom;
                            if constexpr (HELD == IN_REGISTERS) {
                                top = held[((start + i) * tiles + tile) * 2];
                                bottom = held[((start + i) * tiles + tile) * 2 + 1];
                            } else if constexpr (HELD == IN_SHARED_MEMORY) {
                                top = kept[place_of(start + i, tile, 0)];
                                bottom = kept[place_of(start + i, tile, 1)];
                            } else {
                                top = weight_at(start + i, tile, 0);
                                bottom = weight_at(start + i, tile, 1);
                            }
#pragma unroll
                            for (int j = 0; j < together; j++) {
                                const Words &right = values[i][j];
                                multiply(sums[tile][j], top.at[0], bottom.at[0], top.at[1], bottom.at[1], right.at[0],
                                         right.at[1]);
                                multiply(sums[tile][j], top.at[2], bottom.at[2], top.at[3], bottom.at[3], right.at[2],
                                         right.at[3]);
                            }
                        }
                    }
                }
            }
#pragma unroll
            for (int tile = 0; tile < tiles; tile++) {
#pragma unroll
                for (int j = 0; j < together; j++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int row = (column + j) * 8 + threadIdx.x % 4 * 2 + i % 2;
                        const int at = (first_tile + tile) * 16 + i / 2 * 8 + line;
                        if (columns % together == 0 || row < padded_rows) {
                            partial[row * padded_lines + at] = sums[tile][j][i];
                        }
                    }
                }
            }
        }
        __syncthreads();  // R3
        elements.finish(part, shared, step, out, hn, cn);
    }
}

#kernel recurrent_steps_plain
// Products of float32 values, a pair of a row and a unit per thread; threads divide the terms, too.

KERNEL(recurrent_steps_plain) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Part part;
    const Shared shared(memory);
    float *const before = reinterpret_cast<float *>(shared.rest);  // the hidden states of the step before, by rows
    const Hidden_weight::type *const weight =
        part.backward ? reinterpret_cast<const Hidden_weight::type *>(back_hidden_weight) : hidden_weight;
    const index_t stride = part.backward ? Back_hidden_weight::stride(0) : Hidden_weight::stride(0);
    Elements elements;
    BEGIN_STEPS(part, shared, elements);

    for (int step = 0; step < steps; step++) {
        elements.request(given, part, step);
        for (int i = threadIdx.x; i < ROWS * hidden; i += THREADS) {
            const int row = i / hidden;
            const int unit = i % hidden;
            float value = 0.0f;
            if (part.has_row(row)) {
                value = step == 0 ? to_float(convert<Out::type>(h0[part.state<H0>(row, unit)]))
                                  : to_float(receive(out + part.result(step - 1, row, unit)));
            }
            before[i] = value;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < PIECES * ROWS * UNITS; i += THREADS) {
            const int unit = i % UNITS;
            const int row = i / UNITS % ROWS;
            const int piece = i / UNITS / ROWS;
            if (part.has_unit(unit)) {
#pragma unroll
                for (int gate = 0; gate < GATES; gate++) {
                    const Hidden_weight::type *const terms = weight + part.weight_row(gate * UNITS + unit) * stride;
                    float sum = 0.0f;
                    for (int k = piece; k < hidden; k += PIECES) {
                        sum = fmaf(to_float(terms[k]), before[row * hidden + k], sum);
                    }
                    shared.sums[step % 2][(piece * padded_rows + row) * padded_lines + gate * UNITS + unit] = sum;
                }
            }
        }
        __syncthreads();  // R3, and the states before may be overwritten
        elements.finish(part, shared, step, out, hn, cn);
    }
}
