// Metal's scalar and vector types.
#pragma once

#include "integer_types.h"
#include "launch.h"

#define METAL_INLINE inline __attribute__((always_inline))

namespace metal_runtime {

template <class T> struct is_number { static constexpr bool value = false; };
#define METAL_NUMBER(T) \
    template <> struct is_number<T> { static constexpr bool value = true; };
METAL_NUMBER(bool) METAL_NUMBER(char) METAL_NUMBER(signed char) METAL_NUMBER(unsigned char) METAL_NUMBER(short)
METAL_NUMBER(unsigned short) METAL_NUMBER(int) METAL_NUMBER(unsigned int) METAL_NUMBER(long) METAL_NUMBER(unsigned long)
METAL_NUMBER(long long) METAL_NUMBER(unsigned long long) METAL_NUMBER(float)
#undef METAL_NUMBER

template <bool, class T = int> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <class T> using if_number = typename enable_if<is_number<T>::value>::type;
template <class T> struct identity { typedef T type; };
template <class T> using identity_t = typename identity<T>::type;
template <class T> struct remove_const { typedef T type; };
template <class T> struct remove_const<const T> { typedef T type; };
template <class T> using remove_const_t = typename remove_const<T>::type;

template <class To, class From> METAL_INLINE To bit_cast(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}

METAL_INLINE u16 half_bits_in_software(float value) {
    const u32 bits = bit_cast<u32>(value);
    const u32 sign = bits >> 16 & 0x8000;
    const u32 magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<u16>(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return static_cast<u16>(sign | 0x7c00);
    if (magnitude < 0x38800000) {
        // Adding 0.5 shifts a subnormal half's bits to the bottom of the mantissa and rounds them as additions do.
        return static_cast<u16>(sign | (bit_cast<u32>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000));
    }
    return static_cast<u16>(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13));
}

METAL_INLINE float half_value_in_software(u16 bits) {
    const u32 sign = static_cast<u32>(bits & 0x8000) << 16;
    const u32 magnitude = bits & 0x7fff;
    if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    if (magnitude < 0x400) return bit_cast<float>(sign | bit_cast<u32>(static_cast<float>(magnitude) * 0x1p-24f));
    return bit_cast<float>(sign | ((magnitude << 13) + 0x38000000));
}

#if defined(__F16C__) && !defined(METAL_SOFTWARE_HALF)
typedef float float_lanes __attribute__((vector_size(16)));
typedef short short_lanes __attribute__((vector_size(16)));
METAL_INLINE u16 half_bits(float value) {
    return static_cast<u16>(__builtin_ia32_vcvtps2ph(float_lanes{value, 0, 0, 0}, 0)[0]);
}
METAL_INLINE float half_value(u16 bits) {
    return __builtin_ia32_vcvtph2ps(short_lanes{static_cast<short>(bits), 0, 0, 0, 0, 0, 0, 0})[0];
}
#elif defined(__aarch64__) && !defined(METAL_SOFTWARE_HALF)
METAL_INLINE u16 half_bits(float value) { return bit_cast<u16>(static_cast<__fp16>(value)); }
METAL_INLINE float half_value(u16 bits) { return static_cast<float>(bit_cast<__fp16>(bits)); }
#else
METAL_INLINE u16 half_bits(float value) { return half_bits_in_software(value); }
METAL_INLINE float half_value(u16 bits) { return half_value_in_software(bits); }
#endif

METAL_INLINE u16 bfloat_bits(float value) {
    const u32 bits = bit_cast<u32>(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<u16>(bits >> 16 | 0x40);
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
METAL_INLINE float bfloat_value(u16 bits) { return bit_cast<float>(static_cast<u32>(bits) << 16); }

}  // namespace metal_runtime

// A 16-bit float becomes a float by itself; the other way must be written.
#define METAL_SIXTEEN_BIT_FLOAT(NAME)                                                                               \
    struct NAME {                                                                                                   \
        metal_runtime::u16 bits;                                                                                    \
        NAME() = default;                                                                                           \
        template <class U, metal_runtime::if_number<U> = 0>                                                         \
        METAL_INLINE explicit NAME(U value) : bits(metal_runtime::NAME##_bits(static_cast<float>(value))) {}        \
        METAL_INLINE operator float() const { return metal_runtime::NAME##_value(bits); }                           \
    };                                                                                                              \
    METAL_INLINE NAME operator-(NAME a) { return NAME(-float(a)); }                                                 \
    METAL_INLINE NAME operator+(NAME a) { return a; }                                                               \
    METAL_SIXTEEN_BIT_OPERATOR(NAME, +)                                                                             \
    METAL_SIXTEEN_BIT_OPERATOR(NAME, -)                                                                             \
    METAL_SIXTEEN_BIT_OPERATOR(NAME, *)                                                                             \
    METAL_SIXTEEN_BIT_OPERATOR(NAME, /)
#define METAL_SIXTEEN_BIT_OPERATOR(NAME, OP)                                                                        \
    METAL_INLINE NAME operator OP(NAME a, NAME b) { return NAME(float(a) OP float(b)); }                            \
    METAL_INLINE NAME &operator OP##=(NAME &a, NAME b) { return a = a OP b; }

METAL_SIXTEEN_BIT_FLOAT(half)
METAL_SIXTEEN_BIT_FLOAT(bfloat)

namespace metal {

template <class To, class From> METAL_INLINE To as_type(const From &from) { return metal_runtime::bit_cast<To>(from); }

template <class T, int N> struct vec;

#define METAL_VEC_COMMON(N)                                                                                         \
    vec() = default;                                                                                                \
    METAL_INLINE vec(T s) { for (int i = 0; i < N; ++i) data[i] = s; }                                              \
    template <class U, metal_runtime::if_number<U> = 0>                                                             \
    METAL_INLINE explicit vec(U s) { for (int i = 0; i < N; ++i) data[i] = T(s); }                                  \
    template <class U> METAL_INLINE explicit vec(const vec<U, N> &other) {                                          \
        for (int i = 0; i < N; ++i) data[i] = T(other.data[i]);                                                     \
    }                                                                                                               \
    template <int... I> METAL_INLINE vec<T, sizeof...(I)> swizzle() const { return {data[I]...}; }                  \
    template <class I> METAL_INLINE T &operator[](I i) { return data[i]; }                                          \
    template <class I> METAL_INLINE const T &operator[](I i) const { return data[i]; }

template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
    union {
        struct { T x, y; };
        struct { T r, g; };
        T data[2];
    };
    METAL_VEC_COMMON(2)
    METAL_INLINE vec(T a, T b) : data{a, b} {}
};

template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
    union {
        struct { T x, y, z; };
        struct { T r, g, b; };
        T data[3];
    };
    METAL_VEC_COMMON(3)
    METAL_INLINE vec(T a, T b, T c) : data{a, b, c} {}
    METAL_INLINE vec(vec<T, 2> a, T b) : data{a.x, a.y, b} {}
    METAL_INLINE vec(T a, vec<T, 2> b) : data{a, b.x, b.y} {}
};

template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
    union {
        struct { T x, y, z, w; };
        struct { T r, g, b, a; };
        T data[4];
    };
    METAL_VEC_COMMON(4)
    METAL_INLINE vec(T a, T b, T c, T d) : data{a, b, c, d} {}
    METAL_INLINE vec(vec<T, 2> a, vec<T, 2> b) : data{a.x, a.y, b.x, b.y} {}
    METAL_INLINE vec(vec<T, 2> a, T b, T c) : data{a.x, a.y, b, c} {}
    METAL_INLINE vec(T a, vec<T, 2> b, T c) : data{a, b.x, b.y, c} {}
    METAL_INLINE vec(T a, T b, vec<T, 2> c) : data{a, b, c.x, c.y} {}
    METAL_INLINE vec(vec<T, 3> a, T b) : data{a.x, a.y, a.z, b} {}
    METAL_INLINE vec(T a, vec<T, 3> b) : data{a, b.x, b.y, b.z} {}
};
#undef METAL_VEC_COMMON

#define METAL_VEC_OPERATOR(OP)                                                                                      \
    template <class T, int N> METAL_INLINE vec<T, N> operator OP(const vec<T, N> &a, const vec<T, N> &b) {          \
        vec<T, N> result;                                                                                           \
        for (int i = 0; i < N; ++i) result.data[i] = T(a.data[i] OP b.data[i]);                                     \
        return result;                                                                                              \
    }                                                                                                               \
    template <class T, int N>                                                                                       \
    METAL_INLINE vec<T, N> operator OP(const vec<T, N> &a, metal_runtime::identity_t<T> b) {                        \
        return a OP vec<T, N>(b);                                                                                   \
    }                                                                                                               \
    template <class T, int N>                                                                                       \
    METAL_INLINE vec<T, N> operator OP(metal_runtime::identity_t<T> a, const vec<T, N> &b) {                        \
        return vec<T, N>(a) OP b;                                                                                   \
    }                                                                                                               \
    template <class T, int N> METAL_INLINE vec<T, N> &operator OP##=(vec<T, N> &a, const vec<T, N> &b) {            \
        return a = a OP b;                                                                                          \
    }                                                                                                               \
    template <class T, int N>                                                                                       \
    METAL_INLINE vec<T, N> &operator OP##=(vec<T, N> &a, metal_runtime::identity_t<T> b) {                          \
        return a = a OP b;                                                                                          \
    }
METAL_VEC_OPERATOR(+)
METAL_VEC_OPERATOR(-)
METAL_VEC_OPERATOR(*)
METAL_VEC_OPERATOR(/)
METAL_VEC_OPERATOR(%)
METAL_VEC_OPERATOR(&)
METAL_VEC_OPERATOR(|)
METAL_VEC_OPERATOR(^)
METAL_VEC_OPERATOR(<<)
METAL_VEC_OPERATOR(>>)
#undef METAL_VEC_OPERATOR

#define METAL_VEC_COMPARISON(OP)                                                                                    \
    template <class T, int N> METAL_INLINE vec<bool, N> operator OP(const vec<T, N> &a, const vec<T, N> &b) {       \
        vec<bool, N> result;                                                                                        \
        for (int i = 0; i < N; ++i) result.data[i] = a.data[i] OP b.data[i];                                        \
        return result;                                                                                              \
    }                                                                                                               \
    template <class T, int N>                                                                                       \
    METAL_INLINE vec<bool, N> operator OP(const vec<T, N> &a, metal_runtime::identity_t<T> b) {                     \
        return a OP vec<T, N>(b);                                                                                   \
    }                                                                                                               \
    template <class T, int N>                                                                                       \
    METAL_INLINE vec<bool, N> operator OP(metal_runtime::identity_t<T> a, const vec<T, N> &b) {                     \
        return vec<T, N>(a) OP b;                                                                                   \
    }
METAL_VEC_COMPARISON(<)
METAL_VEC_COMPARISON(<=)
METAL_VEC_COMPARISON(>)
METAL_VEC_COMPARISON(>=)
METAL_VEC_COMPARISON(==)
METAL_VEC_COMPARISON(!=)
METAL_VEC_COMPARISON(&&)
METAL_VEC_COMPARISON(||)
#undef METAL_VEC_COMPARISON

template <class T, int N> METAL_INLINE vec<T, N> operator-(const vec<T, N> &a) {
    vec<T, N> result;
    for (int i = 0; i < N; ++i) result.data[i] = -a.data[i];
    return result;
}

template <int N> METAL_INLINE vec<bool, N> operator!(const vec<bool, N> &a) {
    vec<bool, N> result;
    for (int i = 0; i < N; ++i) result.data[i] = !a.data[i];
    return result;
}

#define METAL_VEC_NAMES(T) \
    typedef vec<T, 2> T##2; \
    typedef vec<T, 3> T##3; \
    typedef vec<T, 4> T##4;
METAL_VEC_NAMES(bool) METAL_VEC_NAMES(char) METAL_VEC_NAMES(uchar) METAL_VEC_NAMES(short) METAL_VEC_NAMES(ushort)
METAL_VEC_NAMES(int) METAL_VEC_NAMES(uint) METAL_VEC_NAMES(long) METAL_VEC_NAMES(ulong) METAL_VEC_NAMES(half)
METAL_VEC_NAMES(bfloat) METAL_VEC_NAMES(float)
#undef METAL_VEC_NAMES

using ::bfloat;
using ::half;
using ::uchar;
using ::uint;
using ::ulong;
using ::ushort;

}  // namespace metal

namespace metal_runtime {

template <class T> struct scalar_of { typedef T type; };
template <class T, int N> struct scalar_of<metal::vec<T, N>> { typedef T type; };
template <class T, size_t N> struct scalar_of<T[N]> { typedef typename scalar_of<T>::type type; };

// What an expression of type T reads as: structs by reference, the rest by value.
template <class T> struct is_value { static constexpr bool value = is_number<T>::value; };
template <> struct is_value<half> { static constexpr bool value = true; };
template <> struct is_value<bfloat> { static constexpr bool value = true; };
template <class T, int N> struct is_value<metal::vec<T, N>> { static constexpr bool value = true; };

}  // namespace metal_runtime
