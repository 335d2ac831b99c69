// Reads of what a kernel reads once.

// What is read once only should not displace in the L1 cache what is read again.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> stream_pack(const T *data) {
    if constexpr (sizeof(T) * N == 16) {
        struct alignas(16) Words { unsigned x, y, z, w; } words;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "l"(data));
        return *reinterpret_cast<const Pack<T, N> *>(&words);
    } else {
        return load_pack<N>(data);
    }
}
