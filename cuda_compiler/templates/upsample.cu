// Resampling of [N, C, H, W] of any strides. A thread makes `pack` channels of a pixel, which lie side by side where they
// are more than one.

constexpr index_t PACKS = Out::size(1) / pack;

// Where a thread's output elements are, and where its plane begins in the input.
struct Pixel {
    index_t plane;
    index_t target;
    unsigned row;
    unsigned column;
    bool exists;
};

// Consecutive threads go along the dimension that lies side by side in memory.
__device__ __forceinline__ Pixel own_pixel() {
    const index_t thread = blockIdx.x * index_t(THREADS) + threadIdx.x;
    constexpr index_t pixels = Out::size(2) * Out::size(3);
    constexpr bool channels_last = Out::stride(1) == 1 && Out::stride(3) != 1;
    const index_t pixel = channels_last ? thread / PACKS % pixels : thread % pixels;
    const index_t channel = (channels_last ? thread % PACKS : thread / pixels % PACKS) * pack;
    const index_t image = thread / pixels / PACKS;
    const index_t row = pixel / Out::size(3);
    const index_t column = pixel % Out::size(3);
    return {
        image * X::stride(0) + channel * X::stride(1),
        image * Out::stride(0) + channel * Out::stride(1) + row * Out::stride(2) + column * Out::stride(3),
        unsigned(row), unsigned(column), image < Out::size(0)
    };
}

__device__ __forceinline__ index_t place(const Pixel &pixel, unsigned row, unsigned column) {
    return pixel.plane + row * X::stride(2) + column * X::stride(3);
}

#kernel upsample_nearest_kernel
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
    const Pack<X::type, pack> source = load_pack<pack>(x + place(pixel, row, column));
    Pack<Out::type, pack> target;
#pragma unroll
    for (int i = 0; i < pack; i++) {
        target.item[i] = convert<Out::type>(source.item[i]);
    }
    store_pack<pack>(out + pixel.target, target);
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
        load_floats(corners[lower][0], x + place(pixel, row, columns.low));
        load_floats(corners[lower][1], x + place(pixel, row, columns.high));
    }
    float values[pack];
#pragma unroll
    for (int i = 0; i < pack; i++) {
        const float upper = corners[0][0][i] * (1.0f - columns.weight) + corners[0][1][i] * columns.weight;
        const float lower = corners[1][0][i] * (1.0f - columns.weight) + corners[1][1][i] * columns.weight;
        values[i] = upper * (1.0f - rows.weight) + lower * rows.weight;
    }
    store_floats(out + pixel.target, values);
}
