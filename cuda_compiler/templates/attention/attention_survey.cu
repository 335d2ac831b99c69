// Reads the mask once for all heads that share it, a block per block of rows, and says which tiles of keys these need.

#include "attention/attention.cuh"
#include "attention/attention_verdicts.cuh"

constexpr int counts_bit = 1;  // some key is attended to
constexpr int lowest_bit = 2;  // some key would be, if its row had nothing better
constexpr int biased_bit = 4;  // some key has another bias than 0
constexpr int glance = 4;  // rows whose masks are on their way together
constexpr int segment = WARP * 8 / tile_keys;  // tiles that a warp looks at together

KERNEL(attention_survey) {
    __shared__ int attends[tile_rows];
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const int row_block = blockIdx.x % row_blocks;
    const index_t head = blockIdx.x / row_blocks;
    const Problem problem(q, k, v, mask, head / Verdicts::size(1), head % Verdicts::size(1));
    const int first_row = row_block * tile_rows / mask_sharing * mask_sharing;
    const int last_row = smaller((row_block + 1) * tile_rows, rows) - 1;
    verdicts += index_t(blockIdx.x) * key_tiles;
    for (int i = threadIdx.x; i < tile_rows; i += THREADS) {
        attends[i] = 0;
    }
    __syncthreads();
    for (int tile = warp * segment; tile < key_tiles; tile += THREADS / WARP * segment) {
        bool counts = false;
        bool lowest = false;
        bool adds = false;
        for (int row = first_row; row <= last_row; row += glance * mask_sharing) {
            float bias[glance][8];
#pragma unroll
            for (int i = 0; i < glance; i++) {
                // What is looked at twice does no harm.
                const int own = smaller(row + i * mask_sharing, last_row);
                problem.biases(own, tile * tile_keys + 8 * lane, bias[i]);
            }
#pragma unroll
            for (int i = 0; i < glance; i++) {
                bool attended = false;
#pragma unroll
                for (int key = 0; key < 8; key++) {
                    counts |= !(bias[i][key] <= lowest_bias);
                    lowest |= bias[i][key] > -INFINITY_F;
                    adds |= bias[i][key] != 0.0f;
                    attended |= bias[i][key] > lowest_bias / 2;
                }
                if constexpr (is_float<Mask::type>::value) {
                    if (__any_sync(0xffffffffu, attended) && lane == 0) {
                        const int own = smaller(row + i * mask_sharing, last_row);
                        atomicOr(&attends[(own - first_row) / mask_sharing], 1);
                    }
                }
            }
        }
        const unsigned counting = __ballot_sync(0xffffffffu, counts);
        const unsigned possible = __ballot_sync(0xffffffffu, lowest);
        const unsigned adding = __ballot_sync(0xffffffffu, adds);
        if (lane < segment && tile + lane < key_tiles) {
            const unsigned own = ((1u << tile_keys / 8) - 1u) << lane * (tile_keys / 8);
            verdicts[tile + lane] =
                (counting & own ? counts_bit : 0) | (possible & own ? lowest_bit : 0) | (adding & own ? biased_bit : 0);
        }
    }
    __syncthreads();
    bool all = true;
    for (int i = 0; i <= (last_row - first_row) / mask_sharing; i++) {
        all &= attends[i] != 0;
    }
    for (int tile = warp * segment + lane; tile < key_tiles && lane < segment; tile += THREADS / WARP * segment) {
        const int seen = verdicts[tile];
        const bool needed = seen & counts_bit || (seen & lowest_bit && !all);
        verdicts[tile] = !needed ? left_out : seen & biased_bit ? biased : whole;
    }
}
