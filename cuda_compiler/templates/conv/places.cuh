// Where the elements of an output pixel lie, and its window in the input. x, out and residual are [N, C, H, W] of any strides.

// Where an element of output pixel number `pixel` of an image lies.
template <typename View>
__device__ __forceinline__ index_t place(unsigned image, unsigned channel, unsigned pixel) {
    constexpr unsigned columns = unsigned(Out::size(3));
    return image * View::stride(0) + channel * View::stride(1) + pixel / columns * View::stride(2) +
        pixel % columns * View::stride(3);
}

constexpr unsigned PIXELS = unsigned(Out::size(2) * Out::size(3));

// Where an output pixel's window begins in the input, possibly in the padding.
__device__ __forceinline__ int first_row(unsigned pixel) {
    return int(pixel / unsigned(Out::size(3)) * param::stride(0)) - param::padding(0);
}

__device__ __forceinline__ int first_column(unsigned pixel) {
    return int(pixel % unsigned(Out::size(3)) * param::stride(1)) - param::padding(2);
}
