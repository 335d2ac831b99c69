// Pooling over [N, C, H, W].

#kernel max_pool2d_kernel avg_pool2d_kernel
// Where a thread's output element is: its image and channel as one number, row and column.
struct Pixel {
    index_t plane;
    index_t row;
    index_t column;
};

__device__ __forceinline__ Pixel pixel_of(index_t element) {
    const index_t line = element / Out::size(3);
    return {line / Out::size(2), line % Out::size(2), element % Out::size(3)};
}

#kernel max_pool2d_kernel
KERNEL(max_pool2d_kernel) {
    const index_t element = blockIdx.x * index_t(THREADS) + threadIdx.x;
    if (element >= Out::numel) {
        return;
    }
    const Pixel pixel = pixel_of(element);
    const X::type *plane = x + leading_offset<X, 2>(pixel.plane);
    // Rows and columns in the padding before the image wrap around to large numbers.
    const unsigned top = unsigned(pixel.row) * param::stride(0) - param::padding(0);
    const unsigned left = unsigned(pixel.column) * param::stride(1) - param::padding(1);
    float highest = -INFINITY_F;
    for (unsigned i = 0; i < param::window(0); i++) {
        const unsigned row = top + i * param::dilation(0);
        if (row >= X::size(2)) {
            continue;
        }
        for (unsigned j = 0; j < param::window(1); j++) {
            const unsigned column = left + j * param::dilation(1);
            if (column < X::size(3)) {
                const float value = to_float(plane[row * X::stride(2) + column * X::stride(3)]);
                highest = value > highest || isnan(value) ? value : highest;
            }
        }
    }
    out[Out::offset(element)] = from<Out::type>(highest);
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

KERNEL(avg_pool2d_kernel) {
    const index_t element = blockIdx.x * index_t(THREADS) + threadIdx.x;
    if (element >= Out::numel) {
        return;
    }
    const Pixel pixel = pixel_of(element);
    const Window rows = window_at(
        int(pixel.row), param::window(0), param::stride(0), param::padding(0), int(X::size(2))
    );
    const Window columns = window_at(
        int(pixel.column), param::window(1), param::stride(1), param::padding(1), int(X::size(3))
    );
    const X::type *plane = x + leading_offset<X, 2>(pixel.plane);
    float sum = 0.0f;
    for (int row = rows.first; row < rows.end; row++) {
        for (int column = columns.first; column < columns.end; column++) {
            sum += to_float(plane[index_t(row) * X::stride(2) + index_t(column) * X::stride(3)]);
        }
    }
    int count = param::divisor;
    if (count == 0) {
        count = param::count_include_pad ? rows.width * columns.width
                                         : (rows.end - rows.first) * (columns.end - columns.first);
    }
    out[Out::offset(element)] = from<Out::type>(sum / float(count));
}

#kernel adaptive_avg_pool2d_kernel
// A warp makes one element, since a window may be a whole image; it walks the window WARP pixels at a time.
KERNEL(adaptive_avg_pool2d_kernel) {
    const index_t element = blockIdx.x * index_t(THREADS / WARP) + threadIdx.x / WARP;
    if (element >= Out::numel) {
        return;
    }
    const unsigned lane = threadIdx.x % WARP;
    const index_t line = element / Out::size(3);
    const unsigned out_column = unsigned(element % Out::size(3));
    const unsigned out_row = unsigned(line % Out::size(2));
    const unsigned top = out_row * X::size(2) / Out::size(2);
    const unsigned left = out_column * X::size(3) / Out::size(3);
    const unsigned height = ((out_row + 1) * X::size(2) + Out::size(2) - 1) / Out::size(2) - top;
    const unsigned width = ((out_column + 1) * X::size(3) + Out::size(3) - 1) / Out::size(3) - left;
    const X::type *corner = x + leading_offset<X, 2>(line / Out::size(2)) + top * X::stride(2) + left * X::stride(3);
    float sum = 0.0f;
    for (unsigned i = lane; i < width * height; i += WARP) {
        sum += to_float(corner[i / width * X::stride(2) + i % width * X::stride(3)]);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        out[Out::offset(element)] = from<Out::type>(sum / float(width * height));
    }
}
