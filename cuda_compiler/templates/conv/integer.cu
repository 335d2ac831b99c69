// Integer kernels over images in bytes, and over anything element by element.

#kernel integer_conv2d_kernel
// A convolution of any strides, groups and zero points, a thread for each output element.
constexpr int pack = 1;
#include "conv/pixels.cuh"
#include "conv/finish_integer.cuh"

constexpr unsigned GROUP_CHANNELS = unsigned(Out::size(1)) / param::groups;

WAITING_KERNEL(integer_conv2d_kernel) {
    const Pixel pixel = own_pixel();
    if (!pixel.exists) {
        return;
    }
    begin_in_turn();
    const unsigned group = pixel.channel / GROUP_CHANNELS;
    const int top = int(pixel.row * param::stride(0)) - param::padding(0);
    const int left = int(pixel.column * param::stride(1)) - param::padding(2);
    const Weight::type *factors = weight + pixel.channel * Weight::stride(0);
    const X::type *image = x + pixel.image * X::stride(0) + group * unsigned(Weight::size(1)) * X::stride(1);
    int weight_zero = 0;
    if constexpr (Weight_zeros::present) {
        weight_zero = weight_zeros[pixel.channel];
    }
    int sum = 0;
    for (unsigned i = 0; i < Weight::size(2); i++) {
        const int row = top + int(i * param::dilation(0));
        for (unsigned j = 0; j < Weight::size(3); j++) {
            const int column = left + int(j * param::dilation(1));
            if (unsigned(row) >= X::size(2) || unsigned(column) >= X::size(3)) {
                continue;
            }
            const X::type *value = image + unsigned(row) * X::stride(2) + unsigned(column) * X::stride(3);
            const Weight::type *factor = factors + i * Weight::stride(2) + j * Weight::stride(3);
            for (unsigned c = 0; c < Weight::size(1); c++) {
                sum += (int(value[c * X::stride(1)]) - param::zero_point) *
                    (int(factor[c * Weight::stride(1)]) - weight_zero);
            }
        }
    }
    const float scale = __fmul_rn(scales[pixel.channel], param::x_scale);
    float y = scaled(float(sum), scale, Bias::present ? bias[pixel.channel] : NO_BIAS);
    if constexpr (Residual::present) {
        const Residual::type own = residual[place_in<Residual>(pixel, pixel.row, pixel.column)];
        y = __fadd_rn(y, residual_value(own, param::residual_scale));
    }
    out[place_in<Out>(pixel, pixel.row, pixel.column)] = finished(y, 1.0f / param::out_scale);
}

#kernel weight_sums
// The sum of each output channel's weights, a warp each.
WAITING_KERNEL(weight_sums) {
    const unsigned channel = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (channel >= X::size(0)) {
        return;
    }
    begin_in_turn();
    constexpr unsigned terms = unsigned(X::numel / X::size(0));
    int sum = 0;
    for (unsigned i = threadIdx.x % WARP; i < terms; i += WARP) {
        sum += int(x[X::offset(channel * terms + i)]);
    }
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    if (threadIdx.x % WARP == 0) {
        out[channel] = sum;
    }
}

#kernel integer_mean_kernel
// The mean of each map: eight lanes go along `pack` channels each, the others share the pixels.
#include "conv/codes.cuh"

constexpr unsigned MAP = unsigned(X::size(2) * X::size(3));
constexpr unsigned LANES = 8;
constexpr unsigned PACKS = unsigned(X::size(1)) / pack;
constexpr unsigned GROUPS = (PACKS + LANES - 1) / LANES;

WAITING_KERNEL(integer_mean_kernel) {
    const unsigned warp = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    const unsigned own = warp % GROUPS * LANES + threadIdx.x % LANES;
    const unsigned image = warp / GROUPS;
    if (image >= X::size(0)) {
        return;
    }
    begin_in_turn();
    const unsigned channel = min(own, PACKS - 1) * pack;
    const X::type *corner = x + image * X::stride(0) + channel * X::stride(1);
    int sums[pack] = {};
#pragma unroll 4
    for (unsigned i = threadIdx.x % WARP / LANES; i < MAP; i += WARP / LANES) {
        const Pack<X::type, pack> values =
            load_pack<pack>(corner + i / X::size(3) * X::stride(2) + i % X::size(3) * X::stride(3));
#pragma unroll
        for (int c = 0; c < pack; c++) {
            sums[c] += int(values.item[c]) - param::zero_point;
        }
    }
#pragma unroll
    for (int c = 0; c < pack; c++) {
#pragma unroll
        for (int step = LANES; step < WARP; step *= 2) {
            sums[c] += __shfl_xor_sync(0xffffffffu, sums[c], step);
        }
        if (threadIdx.x % WARP < LANES && own < PACKS) {
            out[image * Out::stride(0) + (channel + c) * Out::stride(1)] = stored(__fmul_rn(float(sums[c]), param::x_scale / float(MAP)), 1.0f / param::out_scale);
        }
    }
}

#kernel integer_add_kernel
// The sum of what two tensors of bytes stand for, `pack` elements a thread.
#include "conv/finish_integer.cuh"

WAITING_KERNEL(integer_add_kernel) {
    const index_t first = (blockIdx.x * index_t(THREADS) + threadIdx.x) * pack;
    if (first >= Out::numel) {
        return;
    }
    begin_in_turn();
    const Pack<X::type, pack> left = load_pack<pack>(x + X::offset(first));
    const Pack<Residual::type, pack> right = load_pack<pack>(residual + Residual::offset(first));
    Pack<Out::type, pack> result;
#pragma unroll
    for (int i = 0; i < pack; i++) {
        const float y = __fmul_rn(float(int(left.item[i]) - param::zero_point), param::x_scale);
        const float sum = __fadd_rn(y, residual_value(right.item[i], param::residual_scale));
        result.item[i] = finished(sum, 1.0f / param::out_scale);
    }
    store_pack<pack>(out + Out::offset(first), result);
}
