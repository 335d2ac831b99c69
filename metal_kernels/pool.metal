// Pooling over [N, C, H, W].

#include "common.metal"

constant uint x_type [[function_constant(0)]];
constant uint out_type [[function_constant(1)]];
constant bool count_include_pad [[function_constant(2)]];

// A thread makes one element of a maximum or an average: x is its column, y its row, z its image and channel.
inline uint pixel_offset(constant Strided &view, uint3 position) {
    return offset_of(view, position.z, 2) + position.y * view.strides[2] + position.x * view.strides[3];
}

struct MaxPoolParams {
    uint window[2];
    uint stride[2];
    uint padding[2];
    uint dilation[2];
};

kernel void max_pool2d_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant MaxPoolParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint3 position [[thread_position_in_grid]])
{
    constant Strided &source = views[0];
    constant Strided &target = views[1];
    if (position.x >= target.shape[3] || position.y >= target.shape[2]) {
        return;
    }
    const uint plane = offset_of(source, position.z, 2);
    // Rows and columns in the padding before the image wrap around to large numbers.
    const uint top = position.y * params.stride[0] - params.padding[0];
    const uint left = position.x * params.stride[1] - params.padding[1];
    float highest = -INFINITY;
    for (uint i = 0; i < params.window[0]; i++) {
        const uint row = top + i * params.dilation[0];
        if (row >= source.shape[2]) {
            continue;
        }
        for (uint j = 0; j < params.window[1]; j++) {
            const uint column = left + j * params.dilation[1];
            if (column >= source.shape[3]) {
                continue;
            }
            const float value = load(x, x_type, plane + row * source.strides[2] + column * source.strides[3]);
            highest = value > highest || isnan(value) ? value : highest;
        }
    }
    store(out, out_type, pixel_offset(target, position), highest);
}

// Where each maximum is in its plane: the first of equal ones, the last of several NaNs.
kernel void max_pool2d_index_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant MaxPoolParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint3 position [[thread_position_in_grid]])
{
    constant Strided &source = views[0];
    constant Strided &target = views[1];
    if (position.x >= target.shape[3] || position.y >= target.shape[2]) {
        return;
    }
    const uint plane = offset_of(source, position.z, 2);
    // Rows and columns in the padding before the image wrap around to large numbers.
    const uint top = position.y * params.stride[0] - params.padding[0];
    const uint left = position.x * params.stride[1] - params.padding[1];
    float highest = -INFINITY;
    int index = -1;
    for (uint i = 0; i < params.window[0]; i++) {
        const uint row = top + i * params.dilation[0];
        if (row >= source.shape[2]) {
            continue;
        }
        for (uint j = 0; j < params.window[1]; j++) {
            const uint column = left + j * params.dilation[1];
            if (column >= source.shape[3]) {
                continue;
            }
            const float value = load(x, x_type, plane + row * source.strides[2] + column * source.strides[3]);
            if (value > highest || isnan(value) || index < 0) {
                highest = value;
                index = int(row * source.shape[3] + column);
            }
        }
    }
    store_int(out, out_type, pixel_offset(target, position), index);
}

struct AvgPoolParams {
    uint window[2];
    uint stride[2];
    uint padding[2];
    int divisor;
};

// What of a window lies in the image, and how wide the window is with the padding that it covers.
struct Window {
    int first;
    int end;
    int width;
};

inline Window window_at(uint position, uint window, uint stride, uint padding, uint size) {
    const int first = int(position * stride) - int(padding);
    const int end = min(first + int(window), int(size + padding));
    return {max(first, 0), min(end, int(size)), end - first};
}

kernel void avg_pool2d_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant AvgPoolParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint3 position [[thread_position_in_grid]])
{
    constant Strided &source = views[0];
    constant Strided &target = views[1];
    if (position.x >= target.shape[3] || position.y >= target.shape[2]) {
        return;
    }
    const Window rows = window_at(
        position.y, params.window[0], params.stride[0], params.padding[0], source.shape[2]
    );
    const Window columns = window_at(
        position.x, params.window[1], params.stride[1], params.padding[1], source.shape[3]
    );
    const uint plane = offset_of(source, position.z, 2);
    float sum = 0;
    for (int row = rows.first; row < rows.end; row++) {
        for (int column = columns.first; column < columns.end; column++) {
            sum += load(x, x_type, plane + uint(row) * source.strides[2] + uint(column) * source.strides[3]);
        }
    }
    int count = params.divisor;
    if (count == 0) {
        count = count_include_pad ? rows.width * columns.width
                                  : (rows.end - rows.first) * (columns.end - columns.first);
    }
    store(out, out_type, pixel_offset(target, position), sum / float(count));
}

// A SIMD group makes one element, since a window may be a whole image; it walks the window SIMD_WIDTH pixels at a time.
kernel void adaptive_avg_pool2d_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant Strided *views [[buffer(3)]],
    uint position [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]])
{
    constant Strided &source = views[0];
    constant Strided &target = views[1];
    const uint element = position / SIMD_WIDTH;
    if (element >= numel(target)) {
        return;
    }
    const uint line = element / target.shape[3];
    const uint out_column = element - line * target.shape[3];
    const uint plane = line / target.shape[2];
    const uint out_row = line - plane * target.shape[2];
    const uint top = out_row * source.shape[2] / target.shape[2];
    const uint left = out_column * source.shape[3] / target.shape[3];
    const uint height = ((out_row + 1) * source.shape[2] + target.shape[2] - 1) / target.shape[2] - top;
    const uint width = ((out_column + 1) * source.shape[3] + target.shape[3] - 1) / target.shape[3] - left;
    const uint first = offset_of(source, plane, 2) + top * source.strides[2] + left * source.strides[3];
    const uint row_step = SIMD_WIDTH / width;
    const uint column_step = SIMD_WIDTH % width;
    uint row = lane / width;
    uint column = lane % width;
    float sum = 0;
    while (row < height) {
        sum += load(x, x_type, first + row * source.strides[2] + column * source.strides[3]);
        row += row_step;
        column += column_step;
        if (column >= width) {
            column -= width;
            row++;
        }
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        store(out, out_type, offset_of(target, element), sum / float(width * height));
    }
}
