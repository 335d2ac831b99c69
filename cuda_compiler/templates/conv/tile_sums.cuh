// The sums of a tile, copies of later steps going on beside the products. Expects `multiply_stage`, which adds the products
// of a staged step, and what it says of the copies ahead of it.

// A unit of x, or of what lies outside of the image.
__device__ __forceinline__ void copy_pixel(unsigned char *target, const X::type *source, bool inside) {
    const unsigned char *bytes = reinterpret_cast<const unsigned char *>(source);
    if constexpr (PADDING_WORD == 0) {
        copy_words<UNIT_BYTES>(target, bytes, inside);
    } else if (inside) {
        copy_words<UNIT_BYTES>(target, bytes, true);
    } else {
#pragma unroll
        for (int i = 0; i < UNIT_BYTES / 4; i++) {
            reinterpret_cast<unsigned *>(target)[i] = PADDING_WORD;
        }
    }
}

// Makes the sums of the tile's steps, of which there is one at least; the steps' copies lie in `memory`.
//
// Args:
//     begin: Called once, after the first copies of what other kernels have made, and before any waiting for them.
template <typename Begin>
__device__ __forceinline__ void sum_products(
    Sum (&sums)[M_FRAGMENTS][N_FRAGMENTS][4], unsigned char *memory, const X::type *x, const Weight::type *weight,
    const Tile &tile, const Begin &begin
) {
    const int row = threadIdx.x / ROW_UNITS;
    const int unit = threadIdx.x % ROW_UNITS;
    const auto stage = [&](unsigned step) { return memory + (step - tile.first_step) % stages * STAGE_BYTES; };
    const auto copy_factors = [&](unsigned step) {
        const unsigned term = step * ROW_UNITS + unit;
        unsigned char *target = stage(step) + tile_m * ROW_BYTES;
#pragma unroll
        for (int pass = 0; pass < tile_n / PASS; pass++) {
            const unsigned channel = tile.first_channel + row + pass * PASS;
            const bool inside = channel < tile.end_channel && term < DEPTH;
            const Weight::type *from = weight + (inside ? index_t(channel) * (DEPTH * UNIT) + term * UNIT : 0);
            copy_words<UNIT_BYTES>(
                target + staged(row + pass * PASS, unit * UNIT_BYTES), reinterpret_cast<const unsigned char *>(from),
                inside
            );
        }
    };
#pragma unroll
    for (int step = 0; step < AHEAD; step++) {
        if (tile.first_step + step < tile.end_step) {
            copy_factors(tile.first_step + step);
        }
    }

    int rows[tile_m / PASS];
    int columns[tile_m / PASS];
    Offset corners[tile_m / PASS];
#pragma unroll
    for (int pass = 0; pass < tile_m / PASS; pass++) {
        const unsigned number = tile.first_window + row + pass * PASS;
        const unsigned window = number % WINDOWS;
        rows[pass] = first_row<unsigned(window_columns)>(window);
        columns[pass] = first_column<unsigned(window_columns)>(window);
        corners[pass] = Offset(number / WINDOWS * X::stride(0)) + rows[pass] * Offset(X::stride(2)) +
            columns[pass] * Offset(X::stride(3)) + Offset(tile.first_input);
        if (number >= ROWS) {
            rows[pass] = -(1 << 30);  // far outside of the image
        }
    }
    const auto copy_patches = [&](unsigned step) {
        const unsigned term = step * ROW_UNITS + unit;
        const unsigned tap = term / CHANNEL_UNITS;
        const int down = int(tap / unsigned(Weight::size(3)) * param::dilation(0));
        const int right = int(tap % unsigned(Weight::size(3)) * param::dilation(1));
        const Offset ahead = down * Offset(X::stride(2)) + right * Offset(X::stride(3)) + term % CHANNEL_UNITS * UNIT;
        unsigned char *target = stage(step);
#pragma unroll
        for (int pass = 0; pass < tile_m / PASS; pass++) {
            const bool inside = unsigned(rows[pass] + down) < X::size(2) &&
                unsigned(columns[pass] + right) < X::size(3) && term < DEPTH;
            copy_pixel(
                target + staged(row + pass * PASS, unit * UNIT_BYTES), x + (inside ? corners[pass] + ahead : 0), inside
            );
        }
    };
    begin_in_turn();
#pragma unroll
    for (int step = 0; step < AHEAD; step++) {
        if (tile.first_step + step < tile.end_step) {
            copy_patches(tile.first_step + step);
        }
        end_of_copies();
    }
    begin();
    clear(sums);
    for (unsigned step = tile.first_step; step < tile.end_step; step++) {
        wait_for_copies<AHEAD - 1>();
        settle();
        __syncthreads();
        if constexpr (AHEAD < stages - 1) {
            multiply_stage(sums, stage(step), stage(step) + tile_m * ROW_BYTES, step != tile.first_step);
        }
        if (step + AHEAD < tile.end_step) {
            copy_factors(step + AHEAD);
            copy_patches(step + AHEAD);
        }
        end_of_copies();
        if constexpr (AHEAD == stages - 1) {
            multiply_stage(sums, stage(step), stage(step) + tile_m * ROW_BYTES, step != tile.first_step);
        }
    }
    finish_products(sums);
    wait_for_copies<0>();
    __syncthreads();
}
