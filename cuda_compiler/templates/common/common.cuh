// What every generated source begins with: 16-bit types, loads and stores of one element or of a vector, warp sums.
// It includes nothing, so that NVRTC and nvcc take it alike, from sm_70 on.

#define INFINITY_F __int_as_float(0x7f800000)
#define FLOAT_MAX 3.402823466e38f
#define NAN_F __int_as_float(0x7fffffff)
#define WARP 32

// Neighbouring blocks along z that see each other's shared memory, on GPUs that have clusters.
#if __CUDA_ARCH__ >= 900
#define CLUSTER(blocks) __cluster_dims__(1, 1, blocks)
#else
#define CLUSTER(blocks)
#endif

// Has the threads of a block wait for each other: all of them, or in a kernel that says so the first few, which compute.
__device__ __forceinline__ void sync_block() {
#ifdef COMPUTING_THREADS
    asm volatile("bar.sync 1, %0;" :: "n"(COMPUTING_THREADS) : "memory");
#else
    __syncthreads();
#endif
}

__device__ __forceinline__ unsigned shared_address(const void *data) { return unsigned(__cvta_generic_to_shared(data)); }

// 16-bit floats are storage only: arithmetic is in float.
struct alignas(2) f16 {
    unsigned short bits;
};

struct alignas(2) bf16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(int value) { return float(value); }
__device__ __forceinline__ float to_float(bool value) { return float(value); }
__device__ __forceinline__ float to_float(bf16 value) { return __uint_as_float(unsigned(value.bits) << 16); }
__device__ __forceinline__ float to_float(f16 value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}

__device__ __forceinline__ int to_int(int value) { return value; }
__device__ __forceinline__ int to_int(bool value) { return int(value); }
__device__ __forceinline__ int to_int(signed char value) { return value; }
__device__ __forceinline__ int to_int(unsigned char value) { return value; }
template <typename T>
__device__ __forceinline__ int to_int(T value) { return int(to_float(value)); }

// A value as type T stores it: rounded to nearest even; true where it is not 0.
template <typename T>
__device__ __forceinline__ T from(float value) { return T(value); }
template <>
__device__ __forceinline__ bool from<bool>(float value) { return value != 0.0f; }
template <>
__device__ __forceinline__ f16 from<f16>(float value) {
    f16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}
template <>
__device__ __forceinline__ bf16 from<bf16>(float value) {
    bf16 result;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
    const unsigned bits = __float_as_uint(value);
    const unsigned rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    result.bits = (unsigned short)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
#endif
    return result;
}

template <typename T>
__device__ __forceinline__ T from(int value) { return from<T>(float(value)); }
template <>
__device__ __forceinline__ int from<int>(int value) { return value; }
template <>
__device__ __forceinline__ bool from<bool>(int value) { return value != 0; }

template <typename T>
struct is_float { static constexpr bool value = true; };
template <>
struct is_float<int> { static constexpr bool value = false; };
template <>
struct is_float<bool> { static constexpr bool value = false; };

// Between two element types; integers do not pass through floats.
template <typename To, typename From>
__device__ __forceinline__ To convert(From value) {
    if constexpr (is_float<From>::value) {
        return from<To>(to_float(value));
    } else {
        return from<To>(to_int(value));
    }
}

// What stands where an index was out of range, which a GPU cannot report: NaN, or 0 in integers.
template <typename T>
__device__ __forceinline__ T missing() {
    if constexpr (is_float<T>::value) {
        return from<T>(NAN_F);
    } else {
        return T(0);
    }
}

// N elements side by side, moved in accesses of up to 16 bytes; the address is a multiple of N elements.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
    T item[N];
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_pack(const T *data) {
    return *reinterpret_cast<const Pack<T, N> *>(data);
}

template <int N, typename T>
__device__ __forceinline__ void store_pack(T *data, const Pack<T, N> &pack) {
    *reinterpret_cast<Pack<T, N> *>(data) = pack;
}

template <int N, typename T>
__device__ __forceinline__ void to_floats(float (&values)[N], const Pack<T, N> &pack) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        values[i] = to_float(pack.item[i]);
    }
}

// Two at a time, with one instruction for each.
template <int N>
__device__ __forceinline__ void to_floats(float (&values)[N], const Pack<bf16, N> &pack) {
    if constexpr (N % 2 == 0) {
        const unsigned *words = reinterpret_cast<const unsigned *>(&pack);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            values[i] = __uint_as_float(words[i / 2] << 16);
            values[i + 1] = __uint_as_float(words[i / 2] & 0xffff0000u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            values[i] = to_float(pack.item[i]);
        }
    }
}

template <int N, typename T>
__device__ __forceinline__ void load_floats(float (&values)[N], const T *data) {
    to_floats(values, load_pack<N>(data));
}

template <typename T, int N>
__device__ __forceinline__ void from_floats(Pack<T, N> &pack, const float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        pack.item[i] = from<T>(values[i]);
    }
}

// Two at a time, with one instruction.
template <int N>
__device__ __forceinline__ void from_floats(Pack<bf16, N> &pack, const float (&values)[N]) {
#if __CUDA_ARCH__ >= 800
    if constexpr (N % 2 == 0) {
        unsigned *words = reinterpret_cast<unsigned *>(&pack);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i / 2]) : "f"(values[i + 1]), "f"(values[i]));
        }
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < N; i++) {
        pack.item[i] = from<bf16>(values[i]);
    }
}

template <int N, typename T>
__device__ __forceinline__ void store_floats(T *data, const float (&values)[N]) {
    Pack<T, N> pack;
    from_floats(pack, values);
    store_pack<N>(data, pack);
}

// The first type, or else the second.
template <bool first, typename A, typename B>
struct Either {
    using type = A;
};
template <typename A, typename B>
struct Either<false, A, B> {
    using type = B;
};

__device__ __forceinline__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// Where element `index`, counted row-major over the first `dims` dimensions of V, starts.
template <typename V, int dims>
__device__ __forceinline__ index_t leading_offset(index_t index) {
    index_t offset = 0;
#pragma unroll
    for (int dim = dims - 1; dim >= 0; dim--) {
        const index_t size = V::size(dim);
        offset += index % size * V::stride(dim);
        index /= size;
    }
    return offset;
}

// Over a whole warp; every lane gets the result.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, step);
    }
    return value;
}

// The larger one; NaN if either is, as in PyTorch.
__device__ __forceinline__ float max_nan(float a, float b) {
    return a > b || a != a ? a : b;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        value = max_nan(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
    return value;
}

// Activations whose errors are far below the rounding of a 16-bit result: relative ones of about 1e-5.

__device__ __forceinline__ float near_exp2(float a) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
    return result;
}

__device__ __forceinline__ float near_sigmoid(float a) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + near_exp2(-1.44269504f * a)));
    return result;
}

__device__ __forceinline__ float near_gelu_tanh(float a) {
    return a * near_sigmoid(1.59576912f * fmaf(0.044715f * a * a, a, a));
}

// The polynomial is the binary logarithm of how much of a normal distribution lies beyond |a|.
__device__ __forceinline__ float near_gelu(float a) {
    const float x = fminf(fabsf(a), 8.0f);
    float power = fmaf(-1.5631592e-6f, x, 5.617582e-5f);
    power = fmaf(power, x, -8.8813078e-4f);
    power = fmaf(power, x, 8.343539e-3f);
    power = fmaf(power, x, -5.3631693e-2f);
    power = fmaf(power, x, -0.45877936f);
    power = fmaf(power, x, -1.1511376f);
    const float beyond = near_exp2(fmaf(power, x, -1.0f));
    return a * (a < 0.0f ? beyond : 1.0f - beyond);
}
