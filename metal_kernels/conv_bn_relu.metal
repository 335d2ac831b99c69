// Convolutions over NCHW with their epilogue. Batch normalization is folded into weight and bias by the compiler.

#include "common.metal"

constant uint x_type [[function_constant(0)]];
constant uint weight_type [[function_constant(1)]];
constant uint bias_type [[function_constant(2)]];
constant uint residual_type [[function_constant(3)]];
constant uint out_type [[function_constant(4)]];
constant bool has_bias [[function_constant(5)]];
constant bool has_residual [[function_constant(6)]];
constant uint activation [[function_constant(7)]];
constant bool direct [[function_constant(8)]];

struct Conv2dParams {
    uint stride[2];
    int padding[4];
    uint dilation[2];
    uint groups;
};

struct ConvTranspose2dParams {
    uint stride[2];
    int padding[2];
    uint output_padding[2];
    uint dilation[2];
    uint groups;
};

// As a matrix product, a group's convolution is weight[channels, K] · patches[K, pixels], K running over input channels
// and the kernel's window. A threadgroup makes BLOCK_CHANNELS × BLOCK_PIXELS outputs, BLOCK_K terms at a time.
#define BLOCK_CHANNELS 32
#define BLOCK_PIXELS 64
#define BLOCK_K 16
#define BLOCK_THREADS (4 * SIMD_WIDTH)
// Each of the four SIMD groups makes a quadrant of the block.
#define QUADRANT_CHANNELS (BLOCK_CHANNELS / 2)
#define QUADRANT_PIXELS (BLOCK_PIXELS / 2)
// Rows are staged four floats further apart than they are long, so that a column's elements lie in different banks.
#define WEIGHT_STRIDE (BLOCK_K + 4)
#define PATCH_STRIDE (BLOCK_PIXELS + 4)
#define PATCH_START (BLOCK_CHANNELS * WEIGHT_STRIDE)

// Outputs of one thread of the direct form.
#define DIRECT_PIXELS 4

inline uint element(constant Strided &view, uint image, uint channel, uint row, uint column) {
    return image * view.strides[0] + channel * view.strides[1] + row * view.strides[2] + column * view.strides[3];
}

// An output pixel, and where its window begins in the input (possibly in the padding).
struct Pixel {
    uint out_row;
    uint out_column;
    int row;
    int column;
};

inline Pixel pixel_at(uint index, constant Strided &out, constant Conv2dParams &params) {
    Pixel pixel;
    pixel.out_row = index / out.shape[3];
    pixel.out_column = index - pixel.out_row * out.shape[3];
    pixel.row = int(pixel.out_row * params.stride[0]) - params.padding[0];
    pixel.column = int(pixel.out_column * params.stride[1]) - params.padding[2];
    return pixel;
}

// act(value + bias + residual) in float, rounded once.
inline void finish(
    float value, device const void *bias, device const void *residual, device void *out, constant Strided *views,
    uint image, uint channel, Pixel pixel
) {
    if (has_bias) {
        value += load(bias, bias_type, channel);
    }
    if (has_residual) {
        const uint index = element(views[3], image, channel, pixel.out_row, pixel.out_column);
        value += load(residual, residual_type, index);
    }
    const uint index = element(views[4], image, channel, pixel.out_row, pixel.out_column);
    store(out, out_type, index, activate(value, activation));
}

// An element of an input plane, zero in the padding around it.
inline float input_at(device const void *x, constant Strided &view, uint plane, int row, int column) {
    // Negative places are large unsigned ones.
    if (uint(row) >= view.shape[2] || uint(column) >= view.shape[3]) {
        return 0.0f;
    }
    return load(x, x_type, plane + uint(row) * view.shape[3] + uint(column));
}

// One output channel at DIRECT_PIXELS pixels, a threadgroup's width apart: for groups so narrow that a matrix product
// would multiply zeros, depthwise ones above all.
inline void convolve_directly(
    device const void *x, device const void *weight, device const void *bias, device const void *residual,
    device void *out, constant Conv2dParams &params, constant Strided *views, uint3 block, uint thread_index,
    uint threads
) {
    constant Strided &input = views[0];
    constant Strided &filter = views[1];
    constant Strided &output = views[4];
    const uint channel = block.y;
    const uint channels = filter.shape[1];
    const uint group = channel / (output.shape[1] / params.groups);
    const uint pixels = output.shape[2] * output.shape[3];
    const uint plane_size = input.shape[2] * input.shape[3];
    const uint first = block.x * DIRECT_PIXELS * threads + thread_index;
    Pixel pixel[DIRECT_PIXELS];
    float sum[DIRECT_PIXELS];
#pragma unroll
    for (uint i = 0; i < DIRECT_PIXELS; i++) {
        pixel[i] = pixel_at(min(first + i * threads, pixels - 1), output, params);
        sum[i] = 0.0f;
    }
    uint weight_index = channel * filter.strides[0];
    uint plane = block.z * input.strides[0] + group * channels * plane_size;
    for (uint c = 0; c < channels; c++) {
        for (uint ky = 0; ky < filter.shape[2]; ky++) {
            for (uint kx = 0; kx < filter.shape[3]; kx++) {
                const float factor = load(weight, weight_type, weight_index);
                weight_index++;
#pragma unroll
                for (uint i = 0; i < DIRECT_PIXELS; i++) {
                    const int row = pixel[i].row + int(ky * params.dilation[0]);
                    const int column = pixel[i].column + int(kx * params.dilation[1]);
                    sum[i] = fma(factor, input_at(x, input, plane, row, column), sum[i]);
                }
            }
        }
        plane += plane_size;
    }
#pragma unroll
    for (uint i = 0; i < DIRECT_PIXELS; i++) {
        if (first + i * threads < pixels) {
            finish(sum[i], bias, residual, out, views, block.z, channel, pixel[i]);
        }
    }
}

// Where term k of the sums finds its input: the plane of its channel, from the group's first on, and row and column
// from the window's corner. Terms beyond `depth` lie in the padding of every window.
inline int3 tap_of(
    uint k, uint depth, constant Strided &input, constant Strided &filter, constant Conv2dParams &params
) {
    const uint window = filter.shape[2] * filter.shape[3];
    const uint channel = k / window;
    const uint place = k - channel * window;
    const uint row = place / filter.shape[3];
    const uint column = place - row * filter.shape[3];
    const uint plane = channel * input.shape[2] * input.shape[3];
    const int first_row = k < depth ? 0 : 1 << 30;
    return int3(int(plane), first_row + int(row * params.dilation[0]), int(column * params.dilation[1]));
}

// A BLOCK_CHANNELS × BLOCK_PIXELS block of one group and image, as a product of weight and patches.
inline void convolve_as_product(
    threadgroup float *shared, threadgroup int3 *taps, device const void *x, device const void *weight,
    device const void *bias, device const void *residual, device void *out, constant Conv2dParams &params,
    constant Strided *views, uint3 block, uint thread_index, uint simdgroup, uint lane
) {
    constant Strided &input = views[0];
    constant Strided &filter = views[1];
    constant Strided &output = views[4];
    const uint channels = output.shape[1] / params.groups;
    const uint channel_blocks = (channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
    const uint group = block.y / channel_blocks;
    const uint first_channel = (block.y - group * channel_blocks) * BLOCK_CHANNELS;
    const uint first_pixel = block.x * BLOCK_PIXELS;
    const uint last_pixel = output.shape[2] * output.shape[3] - 1;
    const uint depth = filter.shape[1] * filter.shape[2] * filter.shape[3];
    const uint plane = block.z * input.strides[0] + group * filter.shape[1] * input.shape[2] * input.shape[3];

    const uint staged_pixel = thread_index % BLOCK_PIXELS;
    const Pixel pixel = pixel_at(min(first_pixel + staged_pixel, last_pixel), output, params);
    const uint quadrant_channel = simdgroup / 2 * QUADRANT_CHANNELS;
    const uint quadrant_pixel = simdgroup % 2 * QUADRANT_PIXELS;
    ProductBlock<QUADRANT_CHANNELS / FRAGMENT, QUADRANT_PIXELS / FRAGMENT> sums;
    sums.clear();
    if (thread_index < BLOCK_K) {
        taps[thread_index] = tap_of(thread_index, depth, input, filter, params);
    }
    for (uint k = 0; k < depth; k += BLOCK_K) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = thread_index; i < BLOCK_CHANNELS * BLOCK_K; i += BLOCK_THREADS) {
            const uint channel = min(first_channel + i / BLOCK_K, channels - 1);
            const uint term = k + i % BLOCK_K;
            float value = 0.0f;
            if (term < depth) {
                value = load(weight, weight_type, (group * channels + channel) * depth + term);
            }
            shared[i / BLOCK_K * WEIGHT_STRIDE + i % BLOCK_K] = value;
        }
        for (uint i = thread_index / BLOCK_PIXELS; i < BLOCK_K; i += BLOCK_THREADS / BLOCK_PIXELS) {
            const int3 tap = taps[i];
            shared[PATCH_START + i * PATCH_STRIDE + staged_pixel] =
                input_at(x, input, plane + uint(tap.x), pixel.row + tap.y, pixel.column + tap.z);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sums.template accumulate<false>(
            shared + quadrant_channel * WEIGHT_STRIDE, WEIGHT_STRIDE, shared + PATCH_START + quadrant_pixel,
            PATCH_STRIDE, BLOCK_K
        );
        if (thread_index < BLOCK_K) {
            taps[thread_index] = tap_of(k + BLOCK_K + thread_index, depth, input, filter, params);
        }
    }
    // The sums take the place of what was staged.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float *quadrant = shared + simdgroup * QUADRANT_CHANNELS * QUADRANT_PIXELS;
    sums.store(quadrant);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const uint out_pixel = first_pixel + quadrant_pixel + lane;
    if (out_pixel <= last_pixel) {
        const Pixel place = pixel_at(out_pixel, output, params);
        for (uint i = 0; i < QUADRANT_CHANNELS; i++) {
            const uint channel = first_channel + quadrant_channel + i;
            if (channel < channels) {
                const float sum = quadrant[i * QUADRANT_PIXELS + lane];
                finish(sum, bias, residual, out, views, block.z, group * channels + channel, place);
            }
        }
    }
}

// out = act(conv(x, weight) + bias + residual); padding is top, bottom, left, right. x's last three dimensions and the
// weight are packed, out and residual have any strides.
kernel void conv2d_kernel(
    device const void *x [[buffer(0)]],
    device const void *weight [[buffer(1)]],
    device const void *bias [[buffer(2), function_constant(has_bias)]],
    device const void *residual [[buffer(3), function_constant(has_residual)]],
    device void *out [[buffer(4)]],
    constant Conv2dParams &params [[buffer(5)]],
    constant Strided *views [[buffer(6)]],
    uint3 block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared[BLOCK_CHANNELS * BLOCK_PIXELS];
    threadgroup int3 taps[BLOCK_K];
    if (direct) {
        convolve_directly(x, weight, bias, residual, out, params, views, block, thread_index, threads.x);
    } else {
        convolve_as_product(
            shared, taps, x, weight, bias, residual, out, params, views, block, thread_index, simdgroup, lane
        );
    }
}

// One output element: the sum over the input pixels whose window it lies in. weight is [I, O/groups, kh, kw].
kernel void conv_transpose2d_kernel(
    device const void *x [[buffer(0)]],
    device const void *weight [[buffer(1)]],
    device const void *bias [[buffer(2), function_constant(has_bias)]],
    device void *out [[buffer(3)]],
    constant ConvTranspose2dParams &params [[buffer(4)]],
    constant Strided *views [[buffer(5)]],
    uint index [[thread_position_in_grid]])
{
    constant Strided &input = views[0];
    constant Strided &filter = views[1];
    constant Strided &output = views[3];
    const uint out_columns = output.shape[3];
    const uint out_plane = output.shape[2] * out_columns;
    const uint group_outputs = filter.shape[1];
    const uint group_inputs = input.shape[1] / params.groups;
    const uint image = index / (output.shape[1] * out_plane);
    if (image >= output.shape[0]) {
        return;
    }
    const uint channel = index / out_plane - image * output.shape[1];
    const uint pixel = index % out_plane;
    const uint out_row = pixel / out_columns;
    const uint out_column = pixel - out_row * out_columns;
    const uint group = channel / group_outputs;
    const uint plane_size = input.shape[2] * input.shape[3];
    const uint plane = image * input.strides[0] + group * group_inputs * plane_size;
    const uint corner = group * group_inputs * filter.strides[0] +
        (channel - group * group_outputs) * filter.shape[2] * filter.shape[3];
    float sum = has_bias ? load(bias, bias_type, channel) : 0.0f;
    for (uint ky = 0; ky < filter.shape[2]; ky++) {
        // Before the first row it is a large number, as is a multiple of it.
        const uint scaled_row = out_row + uint(params.padding[0]) - ky * params.dilation[0];
        const uint row = scaled_row / params.stride[0];
        for (uint kx = 0; kx < filter.shape[3]; kx++) {
            const uint scaled_column = out_column + uint(params.padding[1]) - kx * params.dilation[1];
            const uint column = scaled_column / params.stride[1];
            const bool meets = row * params.stride[0] == scaled_row && column * params.stride[1] == scaled_column;
            if (meets && row < input.shape[2] && column < input.shape[3]) {
                uint x_index = plane + row * input.shape[3] + column;
                uint weight_index = corner + ky * filter.shape[3] + kx;
                for (uint c = 0; c < group_inputs; c++) {
                    sum = fma(load(x, x_type, x_index), load(weight, weight_type, weight_index), sum);
                    x_index += plane_size;
                    weight_index += filter.strides[0];
                }
            }
        }
    }
    store(out, out_type, element(output, image, channel, out_row, out_column), sum);
}
