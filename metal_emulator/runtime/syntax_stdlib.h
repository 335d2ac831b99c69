// Declarations of what Metal's standard library has, for a syntax check by clang++ with distinct address spaces. half
// and bfloat are builtin types of the AArch64 target, vectors are ext_vector_type, and nothing is defined.
#pragma once

#include "integer_types.h"

#define METAL_DEVICE __attribute__((address_space(1)))
#define METAL_CONSTANT const __attribute__((address_space(2)))
#define METAL_THREADGROUP __attribute__((address_space(3)))
#define METAL_EACH_SPACE(DECLARE) DECLARE(METAL_DEVICE) DECLARE(METAL_THREADGROUP)

typedef _Float16 half;
typedef __fp16 bfloat;

// `float4(a, b)` becomes this: clang makes no vector by a functional cast.
template <class V, class... Parts> V metal_construct(Parts...);

namespace metal {

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

#define METAL_VEC_NAMES(T)  \
    typedef vec<T, 2> T##2; \
    typedef vec<T, 3> T##3; \
    typedef vec<T, 4> T##4;
METAL_VEC_NAMES(char) METAL_VEC_NAMES(uchar) METAL_VEC_NAMES(short) METAL_VEC_NAMES(ushort) METAL_VEC_NAMES(int)
METAL_VEC_NAMES(uint) METAL_VEC_NAMES(long) METAL_VEC_NAMES(ulong) METAL_VEC_NAMES(half) METAL_VEC_NAMES(bfloat)
METAL_VEC_NAMES(float)
#undef METAL_VEC_NAMES

template <class To, class From> To as_type(From);

#define METAL_UNARY(NAME)  \
    float NAME(float);     \
    half NAME(half);       \
    template <class T, int N> vec<T, N> NAME(vec<T, N>);
#define METAL_BINARY(NAME)     \
    float NAME(float, float);  \
    half NAME(half, half);     \
    template <class T, int N> vec<T, N> NAME(vec<T, N>, vec<T, N>);
#define METAL_TERNARY(NAME)           \
    float NAME(float, float, float);  \
    half NAME(half, half, half);      \
    template <class T, int N> vec<T, N> NAME(vec<T, N>, vec<T, N>, vec<T, N>);
#define METAL_FLOAT_FUNCTIONS                                                                                         \
    METAL_UNARY(acos) METAL_UNARY(acosh) METAL_UNARY(asin) METAL_UNARY(asinh) METAL_UNARY(atan) METAL_UNARY(atanh)    \
    METAL_UNARY(ceil) METAL_UNARY(cos) METAL_UNARY(cosh) METAL_UNARY(exp) METAL_UNARY(exp2) METAL_UNARY(exp10)        \
    METAL_UNARY(fabs) METAL_UNARY(floor) METAL_UNARY(fract) METAL_UNARY(log) METAL_UNARY(log2) METAL_UNARY(log10)     \
    METAL_UNARY(rint) METAL_UNARY(round) METAL_UNARY(rsqrt) METAL_UNARY(saturate) METAL_UNARY(sign) METAL_UNARY(sin)  \
    METAL_UNARY(sinh) METAL_UNARY(sqrt) METAL_UNARY(tan) METAL_UNARY(tanh) METAL_UNARY(trunc) METAL_BINARY(atan2)     \
    METAL_BINARY(copysign) METAL_BINARY(fdim) METAL_BINARY(fmax) METAL_BINARY(fmin) METAL_BINARY(fmod)                \
    METAL_BINARY(pow) METAL_BINARY(powr) METAL_BINARY(step) METAL_TERNARY(fma) METAL_TERNARY(mix)                     \
    METAL_TERNARY(smoothstep) METAL_BINARY(max) METAL_BINARY(min) METAL_TERNARY(clamp) METAL_UNARY(abs)
METAL_FLOAT_FUNCTIONS
float ldexp(float, int);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
bool signbit(float);

#define METAL_INTEGER_FUNCTIONS(T) \
    T max(T, T);                   \
    T min(T, T);                   \
    T clamp(T, T, T);
METAL_INTEGER_FUNCTIONS(char) METAL_INTEGER_FUNCTIONS(uchar) METAL_INTEGER_FUNCTIONS(short)
METAL_INTEGER_FUNCTIONS(ushort) METAL_INTEGER_FUNCTIONS(int) METAL_INTEGER_FUNCTIONS(uint)
METAL_INTEGER_FUNCTIONS(long) METAL_INTEGER_FUNCTIONS(ulong)
#undef METAL_INTEGER_FUNCTIONS
int abs(int);
long abs(long);
uint popcount(uint);
uint clz(uint);
uint ctz(uint);
uint mulhi(uint, uint);
uint mul24(uint, uint);

template <class T, class C> T select(T, T, C);
template <int N> bool all(vec<int, N>);
template <int N> bool any(vec<int, N>);
template <class T, int N> T dot(vec<T, N>, vec<T, N>);
template <class T, int N> T length(vec<T, N>);

namespace precise {
METAL_FLOAT_FUNCTIONS
}
namespace fast {
METAL_FLOAT_FUNCTIONS
}
#undef METAL_FLOAT_FUNCTIONS
#undef METAL_UNARY
#undef METAL_BINARY
#undef METAL_TERNARY

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
    return static_cast<mem_flags>(static_cast<uint>(a) | static_cast<uint>(b));
}
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define METAL_SIMD_FUNCTIONS(T)      \
    T simd_sum(T);                   \
    T simd_product(T);               \
    T simd_max(T);                   \
    T simd_min(T);                   \
    T simd_prefix_inclusive_sum(T);  \
    T simd_prefix_exclusive_sum(T);  \
    T simd_prefix_inclusive_product(T);
METAL_SIMD_FUNCTIONS(float)
METAL_SIMD_FUNCTIONS(half)
METAL_SIMD_FUNCTIONS(int)
METAL_SIMD_FUNCTIONS(uint)
#undef METAL_SIMD_FUNCTIONS
#define METAL_SIMD_BITS(T) \
    T simd_and(T);         \
    T simd_or(T);          \
    T simd_xor(T);
METAL_SIMD_BITS(int)
METAL_SIMD_BITS(uint)
#undef METAL_SIMD_BITS
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();
template <int N> vec<float, N> simd_sum(vec<float, N>);
template <class T> T simd_shuffle(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort);
template <class T> T simd_shuffle_up(T, ushort);
template <class T> T simd_shuffle_down(T, ushort);
template <class T> T simd_broadcast(T, ushort);
template <class T> T simd_broadcast_first(T);

template <class T, int Columns, int Rows> struct simdgroup_matrix {
    simdgroup_matrix() = default;
    explicit simdgroup_matrix(T);
    vec<T, 2> &thread_elements();
    const vec<T, 2> &thread_elements() const;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int C, int R> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
#define METAL_MATRIX_MEMORY(SPACE)                                                                                    \
    template <class T>                                                                                                \
    void simdgroup_load(simdgroup_matrix<T, 8, 8> &, const SPACE T *, ulong = 8, ulong2 = ulong2{0, 0}, bool = false); \
    template <class T>                                                                                                \
    void simdgroup_store(simdgroup_matrix<T, 8, 8>, SPACE T *, ulong = 8, ulong2 = ulong2{0, 0}, bool = false);
METAL_EACH_SPACE(METAL_MATRIX_MEMORY)
#undef METAL_MATRIX_MEMORY
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>,
                                   simdgroup_matrix<C, 8, 8>);

template <class T> struct atomic {
    T value;
};
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
typedef atomic<float> atomic_float;
enum memory_order { memory_order_relaxed };
#define METAL_ATOMIC_FUNCTIONS(SPACE)                                                       \
    template <class T> T atomic_load_explicit(const SPACE atomic<T> *, memory_order);       \
    template <class T> void atomic_store_explicit(SPACE atomic<T> *, T, memory_order);      \
    template <class T, class U> T atomic_fetch_add_explicit(SPACE atomic<T> *, U, memory_order); \
    template <class T, class U> T atomic_fetch_sub_explicit(SPACE atomic<T> *, U, memory_order); \
    template <class T, class U> T atomic_fetch_max_explicit(SPACE atomic<T> *, U, memory_order); \
    template <class T, class U> T atomic_fetch_min_explicit(SPACE atomic<T> *, U, memory_order); \
    template <class T, class U> T atomic_fetch_or_explicit(SPACE atomic<T> *, U, memory_order);  \
    template <class T, class U> T atomic_fetch_and_explicit(SPACE atomic<T> *, U, memory_order);
METAL_EACH_SPACE(METAL_ATOMIC_FUNCTIONS)
#undef METAL_ATOMIC_FUNCTIONS

}  // namespace metal

#include "limits.h"

#define device METAL_DEVICE
#define constant METAL_CONSTANT
#define threadgroup METAL_THREADGROUP
#define thread
#define kernel
#define double METAL_HAS_NO_DOUBLE
