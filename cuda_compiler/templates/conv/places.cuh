// Where the elements of an output pixel lie, and its window in the input. x, out and residual are [N, C, H, W] of any strides.

// Where an element of output pixel number `pixel` of an image lies.
template <typename View>
__device__ __forceinline__ index_t place(unsigned image, unsigned channel, unsigned pixel) {
    constexpr unsigned columns = unsigned(Out::size(3));
    return image * View::stride(0) + channel * View::stride(1) + pixel / columns * View::stride(2) +
        pixel % columns * View::stride(3);
}

constexpr unsigned PIXELS = unsigned(Out::size(2) * Out::size(3));

// Where a window begins in the input, possibly in the padding. Windows are numbered by rows of `columns`; as many as output pixels
// make one of these each.
template <unsigned columns = unsigned(Out::size(3))>
__device__ __forceinline__ int first_row(unsigned window) {
    return int(window / columns * param::stride(0)) - param::padding(0);
}

template <unsigned columns = unsigned(Out::size(3))>
__device__ __forceinline__ int first_column(unsigned window) {
    return int(window % columns * param::stride(1)) - param::padding(2);
}
