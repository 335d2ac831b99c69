// The kernel of a product of a few rows with a weight [N, K], bound by reading that weight once: with the RMSNorm of x before it, and
// with a gate behind it. `streamed.cu` and `streamed_codes.cu` say how the weight is stored.
//
// The `splits` blocks of a cluster share the terms, and the warps of a block its part of them. A warp holds its part of x in
// registers: `pieces` of 32 terms of all rows. The weight streams by: a unit is eight of its rows with the block's terms, and a ring
// in shared memory has `stages` of them. Rows come in long stretches, since memory is slow to read short ones. Each warp multiplies
// its terms of a unit, the block adds up what the warps found while the next unit is multiplied, and in the end the blocks of a
// cluster add up what each found. Clusters divide the units; of a gated product a unit of gates and one of what they multiply
// follow each other. What the first copies bring is constant where `ahead` says so: they begin while the kernel before still runs.
//
// With a norm, x is multiplied with the gains as it is read; a row's sum of squares scales the finished sums.
//
// Of 32 terms, lane 4g + p takes terms 8p to 8p + 7 of row g, of x as of the weight: the order of terms in a fragment is free.
//
// Expects `unit_bytes`, the operands of the weight as `WEIGHT`, and their struct:
//
// struct Weights {
//     Weights(operands..., unsigned first_unit, int first_term, int terms);
//     void copy(unsigned turn, unsigned char *unit) const;  // begins to copy a unit
//     void prepare(Rows &own);                              // for `add`, from what a warp holds of x
//     void add(Sums &sums, const unsigned char *unit, const Rows &own) const;
// };

struct Memory {
    unsigned char units[stages][unit_bytes];
    float partial[2][warps][results];  // of the unit before, of the warps' terms
    float sums[splits > 1 ? most_units * (gated ? 2 : 1) : 1][results];  // of the block's terms
    float warp_squares[normed ? warps : 1][tile_m];
    float squares[tile_m];  // of the block's terms
};

WAITING_KERNEL(streamed) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Memory &memory = *reinterpret_cast<Memory *>(shared_memory);
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const int first_term = int(blockIdx.z) * share;
    const int terms = smaller(share, int(param::k) - first_term);
    const unsigned first_unit = blockIdx.x * all_units / clusters;
    const unsigned count = (blockIdx.x + 1) * all_units / clusters - first_unit;
    const unsigned end = gated ? 2 * count : count;
    Weights weights(WEIGHT, first_unit, first_term, terms);
    if constexpr (!ahead) {
        begin_in_turn();
    }
#pragma unroll
    for (unsigned i = 0; i < stages - 1; i++) {
        if (i < end) {
            weights.copy(i, memory.units[i]);
        }
        end_of_copies();
    }
    Words gains[normed ? pieces : 1];
    const int first_pack = warp * pieces * 4 + lane % 4;  // of this lane's terms
    const auto load_gains = [&] {
#pragma unroll
        for (int i = 0; i < pieces; i++) {
            const int term = (first_pack + 4 * i) * 8;
            const bool inside = term < terms;
            gains[i] = load_words(reinterpret_cast<const Half *>(gain) + first_term + (inside ? term : 0), inside);
        }
    };
    if constexpr (normed && ahead) {
        load_gains();
    }
    if constexpr (ahead) {
        begin_in_turn();
    }
    if constexpr (normed && !ahead) {
        load_gains();
    }

    Rows own;
#pragma unroll
    for (int m = 0; m < m_fragments; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = 16 * m + 8 * half + lane / 4;
#pragma unroll
            for (int i = 0; i < pieces; i++) {
                const int term = (first_pack + 4 * i) * 8;
                const bool inside = term < terms && row < int(param::m);
                own[m][half][i] = load_words(x + (inside ? row * X::stride(0) + first_term + term : 0), inside);
            }
        }
    }
    if constexpr (normed) {
#pragma unroll
        for (int m = 0; m < m_fragments; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float square = 0.0f;
#pragma unroll
                for (int i = 0; i < pieces; i++) {
                    square += sum_of_squares(own[m][half][i]);
                    multiply_all(own[m][half][i], gains[i]);
                }
                square += __shfl_xor_sync(0xffffffffu, square, 1);
                square += __shfl_xor_sync(0xffffffffu, square, 2);
                if (lane % 4 == 0) {
                    memory.warp_squares[warp][16 * m + 8 * half + lane / 4] = square;
                }
            }
        }
    }

    weights.prepare(own);

    float gates[turns] = {};
    // Adds up what the warps found of a unit. With one block a cluster, that is the result.
    const auto finish_unit = [&](unsigned turn) {
#pragma unroll
        for (int i = 0; i < turns; i++) {
            const int place = i * THREADS + threadIdx.x;
            if (results % THREADS != 0 && place >= results) {
                break;
            }
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < warps; other++) {
                sum += memory.partial[turn % 2][other][place];
            }
            if constexpr (splits > 1) {
                memory.sums[turn][place] = sum;
            } else {
                const int row = place / unit_rows;
                const index_t column = unit_column(first_unit, turn) + place % unit_rows;
                if (row < int(param::m) && column < param::n) {
                    if constexpr (normed) {
                        sum *= rsqrtf(memory.squares[row] / float(param::k) + norm_eps);
                    }
                    if (!gated || turn % 2) {
                        const Addends addends(bias, residual, row, column);
                        finish(gated ? gates[i] : sum, sum, addends, out, row, column);
                    }
                    gates[i] = sum;
                }
            }
        }
    };
    unsigned slot = 0;
#pragma unroll 1
    for (unsigned turn = 0; turn < end; turn++) {
        wait_for_copies<stages - 2>();
        __syncthreads();
        const unsigned filled = slot == 0 ? stages - 1 : slot - 1;
        if (turn + stages - 1 < end) {
            weights.copy(turn + stages - 1, memory.units[filled]);
        }
        end_of_copies();
        Sums sums = {};
        weights.add(sums, memory.units[slot], own);
        if (turn > 0) {
            finish_unit(turn - 1);
        } else if constexpr (normed) {
            for (int row = threadIdx.x; row < tile_m; row += THREADS) {
                float square = 0.0f;
#pragma unroll
                for (int other = 0; other < warps; other++) {
                    square += memory.warp_squares[other][row];
                }
                memory.squares[row] = square;
            }
        }
        float *found = memory.partial[turn % 2][warp] + lane / 4 * unit_rows + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < m_fragments; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Pack<float, 2> pair{{sums[m][2 * half], sums[m][2 * half + 1]}};
                store_pack<2>(found + (16 * m + 8 * half) * unit_rows, pair);
            }
        }
        slot = slot == stages - 1 ? 0 : slot + 1;
    }
    __syncthreads();
    if (end > 0) {
        finish_unit(end - 1);
    }
    if constexpr (splits > 1) {
        cluster_barrier();
        constexpr unsigned quads = results / 4;
        const unsigned items = count * quads;
        const unsigned own_end = (blockIdx.z + 1) * items / splits;
        for (unsigned item = blockIdx.z * items / splits + threadIdx.x; item < own_end; item += THREADS) {
            const unsigned unit = item / quads;
            const int place = item % quads * 4;
            const int row = place / unit_rows;
            const index_t column = index_t(first_unit + unit) * unit_rows + place % unit_rows;
            if (row >= int(param::m) || column >= param::n) {
                continue;
            }
            float sum[4] = {};
            float up[4] = {};
            float square = 0.0f;
#pragma unroll
            for (unsigned other = 0; other < splits; other++) {
                float part[4];
                read_four_from(part, other, &memory.sums[gated ? 2 * unit : unit][place]);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sum[j] += part[j];
                }
                if constexpr (gated) {
                    read_four_from(part, other, &memory.sums[2 * unit + 1][place]);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        up[j] += part[j];
                    }
                }
                if constexpr (normed) {
                    square += read_from(other, &memory.squares[row]);
                }
            }
            const float scale = normed ? rsqrtf(square / float(param::k) + norm_eps) : 1.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (column + j < param::n) {
                    const Addends addends(bias, residual, row, column + j);
                    finish(sum[j] * scale, up[j] * scale, addends, out, row, column + j);
                }
            }
        }
        cluster_barrier();  // none may end, and take its sums along, while others read them
    }
}
