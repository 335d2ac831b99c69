// A thread's output elements of [N, C, H, W] of any strides: `pack` channels of a pixel, which lie side by side where
// they are more than one.

constexpr index_t PACKS = Out::size(1) / pack;

struct Pixel {
    unsigned image;
    unsigned channel;
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
    return {
        unsigned(image), unsigned(channel), unsigned(pixel / Out::size(3)), unsigned(pixel % Out::size(3)),
        image < Out::size(0)
    };
}

// Where the pixel's channels are in V at a row and a column.
template <typename V>
__device__ __forceinline__ index_t place_in(const Pixel &pixel, unsigned row, unsigned column) {
    return pixel.image * V::stride(0) + pixel.channel * V::stride(1) + row * V::stride(2) + column * V::stride(3);
}
