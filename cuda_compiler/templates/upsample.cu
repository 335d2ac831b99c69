// Resampling of [N, C, H, W]; a thread makes one pixel.

// Where a thread's output pixel is, and where its plane begins in the input.
struct Pixel {
    index_t plane;
    unsigned row;
    unsigned column;
};

__device__ __forceinline__ Pixel pixel_of(index_t element) {
    const index_t line = element / Out::size(3);
    return {
        leading_offset<X, 2>(line / Out::size(2)), unsigned(line % Out::size(2)), unsigned(element % Out::size(3))
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
    const index_t element = blockIdx.x * index_t(THREADS) + threadIdx.x;
    if (element >= Out::numel) {
        return;
    }
    const Pixel pixel = pixel_of(element);
    const unsigned row = nearest(pixel.row, param::scale(0), unsigned(X::size(2)));
    const unsigned column = nearest(pixel.column, param::scale(1), unsigned(X::size(3)));
    out[Out::offset(element)] = convert<Out::type>(x[place(pixel, row, column)]);
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
    const index_t element = blockIdx.x * index_t(THREADS) + threadIdx.x;
    if (element >= Out::numel) {
        return;
    }
    const Pixel pixel = pixel_of(element);
    const Between rows = between(pixel.row, param::scale(0), unsigned(X::size(2)), unsigned(Out::size(2)));
    const Between columns = between(pixel.column, param::scale(1), unsigned(X::size(3)), unsigned(Out::size(3)));
    const float upper = to_float(x[place(pixel, rows.low, columns.low)]) * (1.0f - columns.weight) +
        to_float(x[place(pixel, rows.low, columns.high)]) * columns.weight;
    const float lower = to_float(x[place(pixel, rows.high, columns.low)]) * (1.0f - columns.weight) +
        to_float(x[place(pixel, rows.high, columns.high)]) * columns.weight;
    out[Out::offset(element)] = from<Out::type>(upper * (1.0f - rows.weight) + lower * rows.weight);
}
