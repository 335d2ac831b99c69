// The mathematical functions that Metal has, and no others. Those of half are computed in float and rounded.
#pragma once

#include "types.h"

namespace metal {

#define METAL_VEC_UNARY(NAME)                                                                                       \
    template <class T, int N> METAL_INLINE vec<T, N> NAME(const vec<T, N> &x) {                                     \
        vec<T, N> result;                                                                                           \
        for (int i = 0; i < N; ++i) result.data[i] = NAME(x.data[i]);                                               \
        return result;                                                                                              \
    }
#define METAL_VEC_BINARY(NAME)                                                                                      \
    template <class T, int N> METAL_INLINE vec<T, N> NAME(const vec<T, N> &x, const vec<T, N> &y) {                 \
        vec<T, N> result;                                                                                           \
        for (int i = 0; i < N; ++i) result.data[i] = NAME(x.data[i], y.data[i]);                                    \
        return result;                                                                                              \
    }                                                                                                               \
    template <class T, int N> METAL_INLINE vec<T, N> NAME(const vec<T, N> &x, metal_runtime::identity_t<T> y) {     \
        return NAME(x, vec<T, N>(y));                                                                               \
    }
#define METAL_VEC_TERNARY(NAME)                                                                                     \
    template <class T, int N>                                                                                       \
    METAL_INLINE vec<T, N> NAME(const vec<T, N> &x, const vec<T, N> &y, const vec<T, N> &z) {                       \
        vec<T, N> result;                                                                                           \
        for (int i = 0; i < N; ++i) result.data[i] = NAME(x.data[i], y.data[i], z.data[i]);                         \
        return result;                                                                                              \
    }                                                                                                               \
    template <class T, int N>                                                                                       \
    METAL_INLINE vec<T, N> NAME(const vec<T, N> &x, metal_runtime::identity_t<T> y, metal_runtime::identity_t<T> z) { \
        return NAME(x, vec<T, N>(y), vec<T, N>(z));                                                                 \
    }

#define METAL_UNARY(NAME, VALUE)                                                                                    \
    METAL_INLINE float NAME(float x) { return VALUE; }                                                              \
    METAL_INLINE half NAME(half x) { return half(NAME(float(x))); }                                                 \
    METAL_VEC_UNARY(NAME)
#define METAL_BINARY(NAME, VALUE)                                                                                   \
    METAL_INLINE float NAME(float x, float y) { return VALUE; }                                                     \
    METAL_INLINE half NAME(half x, half y) { return half(NAME(float(x), float(y))); }                               \
    METAL_VEC_BINARY(NAME)

METAL_UNARY(acos, __builtin_acosf(x))
METAL_UNARY(acosh, __builtin_acoshf(x))
METAL_UNARY(asin, __builtin_asinf(x))
METAL_UNARY(asinh, __builtin_asinhf(x))
METAL_UNARY(atan, __builtin_atanf(x))
METAL_UNARY(atanh, __builtin_atanhf(x))
METAL_UNARY(ceil, __builtin_ceilf(x))
METAL_UNARY(cos, __builtin_cosf(x))
METAL_UNARY(cosh, __builtin_coshf(x))
METAL_UNARY(exp, __builtin_expf(x))
METAL_UNARY(exp2, __builtin_exp2f(x))
METAL_UNARY(exp10, __builtin_powf(10.0f, x))
METAL_UNARY(fabs, __builtin_fabsf(x))
METAL_UNARY(floor, __builtin_floorf(x))
METAL_UNARY(fract, x - __builtin_floorf(x))
METAL_UNARY(log, __builtin_logf(x))
METAL_UNARY(log2, __builtin_log2f(x))
METAL_UNARY(log10, __builtin_log10f(x))
METAL_UNARY(rint, __builtin_rintf(x))
METAL_UNARY(round, __builtin_roundf(x))
METAL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))
METAL_UNARY(saturate, x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f)
METAL_UNARY(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f)
METAL_UNARY(sin, __builtin_sinf(x))
METAL_UNARY(sinh, __builtin_sinhf(x))
METAL_UNARY(sqrt, __builtin_sqrtf(x))
METAL_UNARY(tan, __builtin_tanf(x))
METAL_UNARY(tanh, __builtin_tanhf(x))
METAL_UNARY(trunc, __builtin_truncf(x))
METAL_BINARY(atan2, __builtin_atan2f(x, y))
METAL_BINARY(copysign, __builtin_copysignf(x, y))
METAL_BINARY(fdim, x > y ? x - y : x <= y ? 0.0f : x + y)
METAL_BINARY(fmax, x < y || x != x ? y : x)
METAL_BINARY(fmin, y < x || x != x ? y : x)
METAL_BINARY(fmod, __builtin_fmodf(x, y))
METAL_BINARY(pow, __builtin_powf(x, y))
METAL_BINARY(powr, x < 0.0f ? __builtin_nanf("") : __builtin_powf(x, y))
METAL_BINARY(step, y < x ? 0.0f : 1.0f)
METAL_INLINE float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
METAL_INLINE float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
METAL_INLINE half fma(half x, half y, half z) { return half(__builtin_fmaf(x, y, z)); }
METAL_VEC_TERNARY(fma)
METAL_INLINE float mix(float x, float y, float a) { return x + (y - x) * a; }
METAL_VEC_TERNARY(mix)
METAL_INLINE float smoothstep(float low, float high, float x) {
    const float t = saturate((x - low) / (high - low));
    return t * t * (3.0f - 2.0f * t);
}
METAL_VEC_TERNARY(smoothstep)

METAL_INLINE bool isnan(float x) { return x != x; }
METAL_INLINE bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
METAL_INLINE bool isfinite(float x) { return __builtin_fabsf(x) < __builtin_inff(); }
METAL_INLINE bool signbit(float x) { return metal_runtime::bit_cast<uint>(x) >> 31; }
template <int N> METAL_INLINE vec<bool, N> isnan(const vec<float, N> &x) { return x != x; }

#define METAL_INTEGER_FUNCTIONS(T)                                                                                  \
    METAL_INLINE T max(T x, T y) { return x < y ? y : x; }                                                          \
    METAL_INLINE T min(T x, T y) { return y < x ? y : x; }                                                          \
    METAL_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }
METAL_INTEGER_FUNCTIONS(char) METAL_INTEGER_FUNCTIONS(uchar) METAL_INTEGER_FUNCTIONS(short)
METAL_INTEGER_FUNCTIONS(ushort) METAL_INTEGER_FUNCTIONS(int) METAL_INTEGER_FUNCTIONS(uint)
METAL_INTEGER_FUNCTIONS(long) METAL_INTEGER_FUNCTIONS(ulong)
#undef METAL_INTEGER_FUNCTIONS
METAL_INLINE float max(float x, float y) { return fmax(x, y); }
METAL_INLINE float min(float x, float y) { return fmin(x, y); }
METAL_INLINE float clamp(float x, float low, float high) { return fmin(fmax(x, low), high); }
METAL_INLINE half max(half x, half y) { return fmax(x, y); }
METAL_INLINE half min(half x, half y) { return fmin(x, y); }
METAL_INLINE half clamp(half x, half low, half high) { return fmin(fmax(x, low), high); }
METAL_INLINE int abs(int x) { return x < 0 ? -x : x; }
METAL_INLINE long abs(long x) { return x < 0 ? -x : x; }
METAL_INLINE float abs(float x) { return fabs(x); }
METAL_INLINE half abs(half x) { return fabs(x); }
METAL_VEC_BINARY(max)
METAL_VEC_BINARY(min)
METAL_VEC_TERNARY(clamp)
METAL_VEC_UNARY(abs)

METAL_INLINE uint popcount(uint x) { return static_cast<uint>(__builtin_popcount(x)); }
METAL_INLINE uint clz(uint x) { return x ? static_cast<uint>(__builtin_clz(x)) : 32; }
METAL_INLINE uint ctz(uint x) { return x ? static_cast<uint>(__builtin_ctz(x)) : 32; }
METAL_INLINE uint mulhi(uint x, uint y) { return static_cast<uint>(static_cast<ulong>(x) * y >> 32); }
METAL_INLINE uint mul24(uint x, uint y) { return x * y; }

template <class T> METAL_INLINE T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N>
METAL_INLINE vec<T, N> select(const vec<T, N> &a, const vec<T, N> &b, const vec<bool, N> &c) {
    vec<T, N> result;
    for (int i = 0; i < N; ++i) result.data[i] = c.data[i] ? b.data[i] : a.data[i];
    return result;
}
template <int N> METAL_INLINE bool all(const vec<bool, N> &x) {
    bool result = true;
    for (int i = 0; i < N; ++i) result = result && x.data[i];
    return result;
}
template <int N> METAL_INLINE bool any(const vec<bool, N> &x) { return !all(!x); }
template <class T, int N> METAL_INLINE T dot(const vec<T, N> &x, const vec<T, N> &y) {
    T result = x.data[0] * y.data[0];
    for (int i = 1; i < N; ++i) result = result + x.data[i] * y.data[i];
    return result;
}
template <class T, int N> METAL_INLINE T length(const vec<T, N> &x) { return sqrt(dot(x, x)); }

#undef METAL_UNARY
#undef METAL_BINARY
#undef METAL_VEC_UNARY
#undef METAL_VEC_BINARY
#undef METAL_VEC_TERNARY

namespace precise {
using namespace metal;
}
namespace fast {
using namespace metal;
}

}  // namespace metal
