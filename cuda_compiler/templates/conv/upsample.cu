// Resampling of [N, C, H, W] of any strides.

#include "conv/pixels.cuh"

#kernel upsample_nearest_kernel
#include "common/move_vector.cuh"

__device__ __forceinline__ unsigned nearest(unsigned position, float scale, unsigned size) {
    return min(unsigned((float(position) + (param::exact ? 0.5f : 0.0f)) * scale), size - 1);
}

KERNEL(upsample_nearest_kernel) {
    const Pixel pixel = own_pixel();
    if (!pixel.exists) {
        return;
    }
    const unsigned row = nearest(pixel.row, param::scale(0), unsigned(X::size(2)));
    const unsigned column = nearest(pixel.column, param::scale(1), unsigned(X::size(3)));
    move_vector<pack>(out + place_in<Out>(pixel, pixel.row, pixel.column), x + place_in<X>(pixel, row, column));
}

#kernel upsample_bilinear_kernel
// The two pixels that an output pixel lies between, and how far it is from the first to the second.
struct Between {
    unsigned low;
    unsigned high;
    float weight;
};

__device__ __forceinline__ Between between(unsigned position, float scale, unsigned size, unsigned out_size) {
    float at;
    if (param::align_corners) {
        at = out_size > 1 ? float(position) * (float(size - 1) / float(out_size - 1)) : 0.0f;
    } else {
        at = fmaxf((float(position) + 0.5f) * scale - 0.5f, 0.0f);
    }
    const unsigned low = min(unsigned(at), size - 1);
    return {low, min(low + 1, size - 1), fminf(fmaxf(at - float(low), 0.0f), 1.0f)};
}

KERNEL(upsample_bilinear_kernel) {
    const Pixel pixel = own_pixel();
    if (!pixel.exists) {
        return;
    }
    const Between rows = between(pixel.row, param::scale(0), unsigned(X::size(2)), unsigned(Out::size(2)));
    const Between columns = between(pixel.column, param::scale(1), unsigned(X::size(3)), unsigned(Out::size(3)));
    float corners[2][2][pack];
#pragma unroll
    for (int lower = 0; lower < 2; lower++) {
        const unsigned row = lower ? rows.high : rows.low;
        load_floats(corners[lower][0], x + place_in<X>(pixel, row, columns.low));
        load_floats(corners[lower][1], x + place_in<X>(pixel, row, columns.high));
    }
    float values[pack];
#pragma unroll
    for (int i = 0; i < pack; i++) {
        const float upper = corners[0][0][i] * (1.0f - columns.weight) + corners[0][1][i] * columns.weight;
        const float lower = corners[1][0][i] * (1.0f - columns.weight) + corners[1][1][i] * columns.weight;
        values[i] = upper * (1.0f - rows.weight) + lower * rows.weight;
    }
    store_floats(out + place_in<Out>(pixel, pixel.row, pixel.column), values);
}
