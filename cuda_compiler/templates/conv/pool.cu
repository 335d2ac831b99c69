// Pooling over [N, C, H, W] of any strides.

#kernel max_pool2d_kernel avg_pool2d_kernel
#include "conv/pixels.cuh"

__device__ __forceinline__ void store(Out::type *out, const Pixel &pixel, const float (&values)[pack]) {
    store_floats(out + place_in<Out>(pixel, pixel.row, pixel.column), values);
}

#kernel max_pool2d_kernel
WAITING_KERNEL(max_pool2d_kernel) {
    const Pixel pixel = own_pixel();
    if (!pixel.exists) {
        return;
    }
    begin_in_turn();
    // Rows and columns in the padding before the image wrap around to large numbers.
    const unsigned top = pixel.row * param::stride(0) - param::padding(0);
    const unsigned left = pixel.column * param::stride(1) - param::padding(1);
    float highest[pack];
#pragma unroll
    for (int k = 0; k < pack; k++) {
        highest[k] = -INFINITY_F;
    }
#pragma unroll 4
    for (unsigned i = 0; i < param::window(0); i++) {
        const unsigned row = top + i * param::dilation(0);
        if (row >= X::size(2)) {
            continue;
        }
#pragma unroll 4
        for (unsigned j = 0; j < param::window(1); j++) {
            const unsigned column = left + j * param::dilation(1);
            if (column < X::size(3)) {
                float values[pack];
                load_floats(values, x + place_in<X>(pixel, row, column));
#pragma unroll
                for (int k = 0; k < pack; k++) {
                    highest[k] = values[k] > highest[k] || isnan(values[k]) ? values[k] : highest[k];
                }
            }
        }
    }
    store(out, pixel, highest);
}

#kernel max_pool2d_index_kernel
#include "conv/pixels.cuh"

// Where each maximum is in its plane: the first of equal ones, the last of several NaNs. A thread makes one element.
KERNEL(max_pool2d_index_kernel) {
    const Pixel pixel = own_pixel();
    if (!pixel.exists) {
        return;
    }
    // Rows and columns in the padding before the image wrap around to large numbers.
    const unsigned top = pixel.row * param::stride(0) - param::padding(0);
    const unsigned left = pixel.column * param::stride(1) - param::padding(1);
    float highest = -INFINITY_F;
    int index = -1;
    for (unsigned i = 0; i < param::window(0); i++) {
        const unsigned row = top + i * param::dilation(0);
        if (row >= X::size(2)) {
            continue;
        }
        for (unsigned j = 0; j < param::window(1); j++) {
            const unsigned column = left + j * param::dilation(1);
            if (column >= X::size(3)) {
                continue;
            }
            const float value = to_float(x[place_in<X>(pixel, row, column)]);
            if (value > highest || isnan(value) || index < 0) {
                highest = value;
                index = int(row * unsigned(X::size(3)) + column);
            }
        }
    }
    out[place_in<Out>(pixel, pixel.row, pixel.column)] = Out::type(index);
}

#kernel avg_pool2d_kernel
// What of a window lies in the image, and how wide the window is with the padding that it covers.
struct Window {
    int first;
    int end;
    int width;
};

__device__ __forceinline__ Window window_at(int position, int window, int stride, int padding, int size) {
    const int first = position * stride - padding;
    const int end = min(first + window, size + padding);
    return {max(first, 0), min(end, size), end - first};
}

WAITING_KERNEL(avg_pool2d_kernel) {
    const Pixel pixel = own_pixel();
    if (!pixel.exists) {
        return;
    }
    const Window rows = window_at(
        int(pixel.row), param::window(0), param::stride(0), param::padding(0), int(X::size(2))
    );
    const Window columns = window_at(
        int(pixel.column), param::window(1), param::stride(1), param::padding(1), int(X::size(3))
    );
    begin_in_turn();
    float sums[pack] = {};
    for (int row = rows.first; row < rows.end; row++) {
        for (int column = columns.first; column < columns.end; column++) {
            float values[pack];
            load_floats(values, x + place_in<X>(pixel, row, column));
#pragma unroll
            for (int k = 0; k < pack; k++) {
                sums[k] += values[k];
            }
        }
    }
    int count = param::divisor;
    if (count == 0) {
        count = param::count_include_pad ? rows.width * columns.width
                                         : (rows.end - rows.first) * (columns.end - columns.first);
    }
#pragma unroll
    for (int k = 0; k < pack; k++) {
        sums[k] /= float(count);
    }
    store(out, pixel, sums);
}

#kernel adaptive_avg_pool2d_kernel
// A team, which is a warp or the whole block, makes `lanes` packs of `pack` channels of one pixel; its threads share the
// window, which may be a whole image.
constexpr unsigned PACKS = unsigned(Out::size(1)) / pack;
constexpr unsigned GROUPS = (PACKS + lanes - 1) / lanes;
constexpr unsigned WALKERS = team / lanes;
static_assert(team == WARP || team == THREADS, "");

// Adds the sums of a block's warps. Threads of the same place in their warps have the same channels.
__device__ __forceinline__ void add_warps(float (&sums)[pack]) {
    constexpr unsigned WARPS = THREADS / WARP;
    __shared__ float shared[WARPS][lanes * pack];
    const unsigned lane = threadIdx.x % WARP;
    if (lane < lanes) {
#pragma unroll
        for (int k = 0; k < pack; k++) {
            shared[threadIdx.x / WARP][lane * pack + k] = sums[k];
        }
    }
    __syncthreads();
    if (threadIdx.x < lanes) {
#pragma unroll
        for (int k = 0; k < pack; k++) {
            float sum = 0.0f;
#pragma unroll 8
            for (unsigned warp = 0; warp < WARPS; warp++) {
                sum += shared[warp][threadIdx.x * pack + k];
            }
            sums[k] = sum;
        }
    }
}

WAITING_KERNEL(adaptive_avg_pool2d_kernel) {
    const index_t number = blockIdx.x * index_t(THREADS / team) + threadIdx.x / team;
    const unsigned own = unsigned(number % GROUPS) * lanes + threadIdx.x % lanes;
    const unsigned walker = threadIdx.x % team / lanes;
    const index_t pixel = number / GROUPS;
    const unsigned out_column = unsigned(pixel % Out::size(3));
    const unsigned out_row = unsigned(pixel / Out::size(3) % Out::size(2));
    const index_t image = pixel / Out::size(3) / Out::size(2);
    if (image >= Out::size(0)) {
        return;
    }
    const unsigned channel = min(own, PACKS - 1) * pack;
    const unsigned top = out_row * X::size(2) / Out::size(2);
    const unsigned left = out_column * X::size(3) / Out::size(3);
    const unsigned height = ((out_row + 1) * X::size(2) + Out::size(2) - 1) / Out::size(2) - top;
    const unsigned width = ((out_column + 1) * X::size(3) + Out::size(3) - 1) / Out::size(3) - left;
    const X::type *corner =
        x + image * X::stride(0) + channel * X::stride(1) + top * X::stride(2) + left * X::stride(3);
    begin_in_turn();
    float sums[pack] = {};
#pragma unroll 8
    for (unsigned i = walker; i < width * height; i += WALKERS) {
        float values[pack];
        load_floats(values, corner + i / width * X::stride(2) + i % width * X::stride(3));
#pragma unroll
        for (int k = 0; k < pack; k++) {
            sums[k] += values[k];
        }
    }
#pragma unroll
    for (int k = 0; k < pack; k++) {
#pragma unroll
        for (int step = lanes; step < WARP; step *= 2) {
            sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], step);
        }
    }
    if constexpr (team > WARP) {
        add_warps(sums);
    }
    if (walker == 0 && own < PACKS) {
#pragma unroll
        for (int k = 0; k < pack; k++) {
            sums[k] /= float(width * height);
        }
        store_floats(
            out + image * Out::stride(0) + channel * Out::stride(1) + out_row * Out::stride(2) +
                out_column * Out::stride(3),
            sums
        );
    }
}
