// Convolutions with their epilogue. Batch normalization is folded into weight and bias by the compiler. x, out and
// residual are [N, C, H, W] with any strides; what wants the channels side by side (channels-last) says so.

#kernel direct_conv2d_kernel conv2d_kernel
#include "conv/places.cuh"

#kernel to_channels_last
#define PACKED to_channels_last

__device__ __forceinline__ Out::type packed(X::type value) { return convert<Out::type>(value); }

#kernel quantize_to_channels_last
#define PACKED quantize_to_channels_last
#include "conv/codes.cuh"

__device__ __forceinline__ Out::type packed(X::type value) { return stored(to_float(value), 1.0f / param::out_scale); }

#kernel to_channels_last quantize_to_channels_last
// Squares of fold × fold pixels become the channels of one: channel (c * fold + a) * fold + b of pixel (i, j) is channel c of
// pixel (i * fold + a - top, j * fold + b - left), or `fill` where that is no channel or outside. x has any strides; out has
// its channels side by side, and a thread makes `pack` of them. Of these, `run` at a time lie side by side in x too.
constexpr bool by_packs = fold > 1 || X::stride(1) == 1;
constexpr unsigned CHANNELS = unsigned(X::size(1));
constexpr unsigned SQUARE = fold * fold;
constexpr index_t PIXELS = Out::size(2) * Out::size(3);
constexpr index_t PACKS = Out::size(1) / pack;

WAITING_KERNEL(PACKED) {
    const index_t thread = blockIdx.x * index_t(THREADS) + threadIdx.x;
    // Neighbouring threads have neighbours in out, or in x if its channels are planes.
    const index_t place = by_packs ? thread / PACKS : thread % PIXELS + thread / (PIXELS * PACKS) * PIXELS;
    const unsigned first_channel = unsigned(by_packs ? thread % PACKS : thread / PIXELS % PACKS) * pack;
    const index_t image = place / PIXELS;
    if (image >= Out::size(0)) {
        return;
    }
    begin_in_turn();
    const unsigned row = unsigned(place % PIXELS / Out::size(3));
    const unsigned column = unsigned(place % Out::size(3));
    Pack<Out::type, pack> pixel;
#pragma unroll
    for (int i = 0; i < pack; i += run) {
        const unsigned channel = (first_channel + i) / SQUARE, part = (first_channel + i) % SQUARE;
        const unsigned from_row = row * fold + part / fold - top;  // before the first one it is a large number
        const unsigned from_column = column * fold + part % fold - left;
        const bool exists = channel < CHANNELS && from_row < X::size(2) && from_column < X::size(3);
        const index_t source = image * X::stride(0) + channel * X::stride(1) + from_row * X::stride(2) +
            from_column * X::stride(3);
        Pack<X::type, run> values{};
        if (exists) {
            values = load_pack<run>(x + source);
        }
#pragma unroll
        for (int j = 0; j < run; j++) {
            pixel.item[i + j] = exists ? packed(values.item[j]) : from<Out::type>(float(fill));
        }
    }
    store_pack<pack>(
        out + image * Out::stride(0) + first_channel + row * Out::stride(2) + column * Out::stride(3), pixel
    );
}

#kernel direct_conv2d_kernel conv2d_kernel
// act(value + bias + residual) in float, rounded once; act(value + bias) + residual where that comes last.
__device__ __forceinline__ float finish(
    float value, const Bias::type *bias, const Residual::type *residual, index_t channel, index_t residual_place
#where epilogue
    , const Epilogue &epilogue, unsigned image, unsigned pixel
#end
) {
    if constexpr (Bias::present) {
        value += to_float(bias[channel * Bias::stride(0)]);
    }
#where epilogue
    float values[1] = {value};
    epilogue.apply(values, image, unsigned(channel), pixel);
    value = values[0];
#end
#where residual_last
    return activate(value) + to_float(residual[residual_place]);
#elsewhere
    if constexpr (Residual::present) {
        value += to_float(residual[residual_place]);
    }
    return activate(value);
#end
}
#where epilogue

// At the `pixel` of the kernel that calls it.
#define finish(...) finish(__VA_ARGS__, EPILOGUE, blockIdx.z, pixel)
#end

// An element of an input plane, zero in the padding around it; negative places are large unsigned ones.
__device__ __forceinline__ float input_at(const X::type *plane, int row, int column) {
    if (unsigned(row) >= X::size(2) || unsigned(column) >= X::size(3)) {
        return 0.0f;
    }
    return to_float(plane[unsigned(row) * X::stride(2) + unsigned(column) * X::stride(3)]);
}

constexpr unsigned GROUP_CHANNELS = unsigned(Out::size(1)) / param::groups;
constexpr unsigned WINDOW = unsigned(Weight::size(2) * Weight::size(3));
constexpr unsigned DEPTH = unsigned(Weight::size(1)) * WINDOW;

__device__ __forceinline__ float factor_at(const Weight::type *factors, unsigned channel, unsigned tap) {
    return to_float(factors[channel * Weight::stride(1) + tap / unsigned(Weight::size(3)) * Weight::stride(2) +
        tap % unsigned(Weight::size(3)) * Weight::stride(3)]);
}

#kernel direct_conv2d_kernel
// A thread per output element: for groups so narrow that a matrix product would multiply zeros, depthwise ones above
// all.
KERNEL(direct_conv2d_kernel) {
    const unsigned pixel = blockIdx.x * THREADS + threadIdx.x;
    if (pixel >= PIXELS) {
        return;
    }
    const unsigned channel = blockIdx.y;
    const int row = first_row(pixel);
    const int column = first_column(pixel);
    const Weight::type *factors = weight + channel * Weight::stride(0);
    const X::type *plane =
        x + blockIdx.z * X::stride(0) + channel / GROUP_CHANNELS * unsigned(Weight::size(1)) * X::stride(1);
    float sum = 0.0f;
    for (unsigned c = 0; c < Weight::size(1); c++) {
#pragma unroll
        for (int ky = 0; ky < int(Weight::size(2)); ky++) {
#pragma unroll
            for (int kx = 0; kx < int(Weight::size(3)); kx++) {
                const float value =
                    input_at(plane, row + ky * int(param::dilation(0)), column + kx * int(param::dilation(1)));
                sum = fmaf(factor_at(factors, c, ky * unsigned(Weight::size(3)) + kx), value, sum);
            }
        }
        plane += X::stride(1);
    }
    const index_t residual_place = place<Residual>(blockIdx.z, channel, pixel);
    out[place<Out>(blockIdx.z, channel, pixel)] =
        from<Out::type>(finish(sum, bias, residual, channel, residual_place));
}

#kernel conv2d_kernel
// A group's convolution as a matrix product, weight[channels, DEPTH] · patches[DEPTH, pixels]: a block of THREADS makes
// BLOCK × BLOCK outputs, BLOCK_K terms at a time; a thread makes 4 × 4 of them.
constexpr unsigned BLOCK = 64;
constexpr unsigned BLOCK_K = 16;
constexpr unsigned CHANNEL_BLOCKS = (GROUP_CHANNELS + BLOCK - 1) / BLOCK;

KERNEL(conv2d_kernel) {
    // A row is staged 4 floats longer than it is, so that a column's elements lie in different banks.
    __shared__ float factors[BLOCK_K][BLOCK + 4];
    __shared__ float patches[BLOCK_K][BLOCK + 4];
    const unsigned group = blockIdx.y / CHANNEL_BLOCKS;
    const unsigned first_channel = blockIdx.y % CHANNEL_BLOCKS * BLOCK;
    const unsigned first_pixel = blockIdx.x * BLOCK;
    const X::type *image = x + blockIdx.z * X::stride(0) + group * unsigned(Weight::size(1)) * X::stride(1);

    const unsigned staged_pixel = threadIdx.x % BLOCK;
    const unsigned source_pixel = min(first_pixel + staged_pixel, PIXELS - 1);
    const int row = first_row(source_pixel);
    const int column = first_column(source_pixel);
    const unsigned own_channel = threadIdx.x / 16 * 4;
    const unsigned own_pixel = threadIdx.x % 16 * 4;
    float sums[4][4] = {};
    for (unsigned k = 0; k < DEPTH; k += BLOCK_K) {
        for (unsigned i = threadIdx.x; i < BLOCK * BLOCK_K; i += THREADS) {
            const unsigned channel = first_channel + i / BLOCK_K;
            const unsigned term = k + i % BLOCK_K;
            float value = 0.0f;
            if (channel < GROUP_CHANNELS && term < DEPTH) {
                value = factor_at(
                    weight + (group * GROUP_CHANNELS + channel) * Weight::stride(0), term / WINDOW, term % WINDOW
                );
            }
            factors[i % BLOCK_K][i / BLOCK_K] = value;
        }
        for (unsigned i = threadIdx.x / BLOCK; i < BLOCK_K; i += THREADS / BLOCK) {
            const unsigned term = k + i;
            float value = 0.0f;
            if (term < DEPTH) {
                const unsigned tap = term % WINDOW;
                const int ky = int(tap / unsigned(Weight::size(3)) * param::dilation(0));
                const int kx = int(tap % unsigned(Weight::size(3)) * param::dilation(1));
                value = input_at(image + term / WINDOW * X::stride(1), row + ky, column + kx);
            }
            patches[i][staged_pixel] = value;
        }
        __syncthreads();
#pragma unroll
        for (unsigned i = 0; i < BLOCK_K; i++) {
            float left[4];
            float right[4];
#pragma unroll
            for (unsigned j = 0; j < 4; j++) {
                left[j] = factors[i][own_channel + j];
                right[j] = patches[i][own_pixel + j];
            }
#pragma unroll
            for (unsigned a = 0; a < 4; a++) {
#pragma unroll
                for (unsigned b = 0; b < 4; b++) {
                    sums[a][b] = fmaf(left[a], right[b], sums[a][b]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (unsigned a = 0; a < 4; a++) {
#pragma unroll
        for (unsigned b = 0; b < 4; b++) {
            const unsigned channel = first_channel + own_channel + a;
            const unsigned pixel = first_pixel + own_pixel + b;
            if (channel < GROUP_CHANNELS && pixel < PIXELS) {
                const unsigned whole_channel = group * GROUP_CHANNELS + channel;
                const index_t residual_place = place<Residual>(blockIdx.z, whole_channel, pixel);
                out[place<Out>(blockIdx.z, whole_channel, pixel)] =
                    from<Out::type>(finish(sums[a][b], bias, residual, whole_channel, residual_place));
            }
        }
    }
}

#kernel conv_transpose2d_kernel
#include "conv/pixels.cuh"

// One output pixel's `pack` channels, more than one in depthwise convolutions only: the sum over the input pixels whose window it
// lies in. weight is [I, O/groups, kh, kw].
KERNEL(conv_transpose2d_kernel) {
    const Pixel own = own_pixel();
    if (!own.exists) {
        return;
    }
    constexpr unsigned group_outputs = unsigned(Weight::size(1));
    constexpr unsigned group_inputs = unsigned(X::size(1)) / param::groups;
    static_assert(pack == 1 || group_inputs == 1 && group_outputs == 1, "");
    const unsigned group = own.channel / group_outputs;
    const X::type *image = x + own.image * X::stride(0) + group * group_inputs * X::stride(1);
    const Weight::type *corner =
        weight + group * group_inputs * Weight::stride(0) + own.channel % group_outputs * Weight::stride(1);
    float sums[pack] = {};
    if constexpr (Bias::present) {
#pragma unroll
        for (unsigned i = 0; i < pack; i++) {
            sums[i] = to_float(bias[(own.channel + i) * Bias::stride(0)]);
        }
    }
    for (unsigned ky = 0; ky < Weight::size(2); ky++) {
        // Before the first row it is a large number, as is its quotient.
        const unsigned scaled_row = own.row + unsigned(param::padding(0)) - ky * param::dilation(0);
        const unsigned row = scaled_row / param::stride(0);
        for (unsigned kx = 0; kx < Weight::size(3); kx++) {
            const unsigned scaled_column = own.column + unsigned(param::padding(1)) - kx * param::dilation(1);
            const unsigned column = scaled_column / param::stride(1);
            const bool meets = row * param::stride(0) == scaled_row && column * param::stride(1) == scaled_column;
            if (meets && row < X::size(2) && column < X::size(3)) {
                const X::type *value = image + row * X::stride(2) + column * X::stride(3);
                const Weight::type *factor = corner + ky * Weight::stride(2) + kx * Weight::stride(3);
                for (unsigned c = 0; c < group_inputs; c++) {
                    float values[pack];
                    load_floats(values, value + c * X::stride(1));
#pragma unroll
                    for (unsigned i = 0; i < pack; i++) {
                        sums[i] = fmaf(values[i], to_float(factor[(c + i) * Weight::stride(0)]), sums[i]);
                    }
                }
            }
        }
    }
    store_floats(out + place_in<Out>(own, own.row, own.column), sums);
}
