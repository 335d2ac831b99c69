// SIMD-group functions and barriers. Every lane leaves its value and waits; the last to arrive works for all.
#pragma once

#include "memory.h"

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_device_and_threadgroup = 3 };
METAL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) {
    return static_cast<mem_flags>(static_cast<uint>(a) | static_cast<uint>(b));
}

METAL_INLINE void threadgroup_barrier(mem_flags flags, uint site = __builtin_LINE()) {
    metal_scheduler->threadgroup_barrier(&metal_runtime::current(), static_cast<uint>(flags), site);
}

METAL_INLINE void simdgroup_barrier(mem_flags flags, uint site = __builtin_LINE()) {
    metal_runtime::Thread &self = metal_runtime::current();
    if (metal_scheduler->simd_arrive(&self, site)) {
        if (flags != mem_flags::mem_none) ++self.simdgroup->epoch;
        metal_scheduler->simd_release(&self);
    }
}

}  // namespace metal

namespace metal_runtime {

// Gives every lane the result that `combine(values, results, count)` makes of all lanes' values.
template <class R, class T, class Combine> inline R collective(T value, u32 site, Combine combine) {
    constexpr size_t most = sizeof(Thread::exchange);
    static_assert(sizeof(T) <= most && sizeof(R) <= most, "too large for a lane to hand over");
    Thread &self = current();
    __builtin_memcpy(self.exchange, &value, sizeof(T));
    if (metal_scheduler->simd_arrive(&self, site)) {
        const Simdgroup &simdgroup = *self.simdgroup;
        T values[SIMD_WIDTH];
        R results[SIMD_WIDTH];
        for (u32 lane = 0; lane < simdgroup.count; ++lane) {
            __builtin_memcpy(values + lane, simdgroup.lanes[lane].exchange, sizeof(T));
        }
        combine(values, results, simdgroup.count);
        for (u32 lane = 0; lane < simdgroup.count; ++lane) {
            __builtin_memcpy(simdgroup.lanes[lane].exchange, results + lane, sizeof(R));
        }
        metal_scheduler->simd_release(&self);
    }
    R result;
    __builtin_memcpy(&result, self.exchange, sizeof(R));
    return result;
}

// Neighbours first, as a tree of exchanges does, so that rounding resembles the GPU's.
template <class T, class Operation> inline T reduce(T value, u32 site, Operation operation) {
    return collective<T>(value, site, [operation](T *values, T *results, u32 count) {
        for (u32 width = 1; width < count; width *= 2) {
            for (u32 lane = 0; lane + width < count; lane += 2 * width) {
                values[lane] = operation(values[lane], values[lane + width]);
            }
        }
        for (u32 lane = 0; lane < count; ++lane) results[lane] = values[0];
    });
}

template <class T, class Operation>
inline T scan(T value, u32 site, T identity, bool inclusive, Operation operation) {
    return collective<T>(value, site, [=](T *values, T *results, u32 count) {
        T total = identity;
        for (u32 lane = 0; lane < count; ++lane) {
            const T next = operation(total, values[lane]);
            results[lane] = inclusive ? next : total;
            total = next;
        }
    });
}

template <class P> struct pointee;
template <class T> struct pointee<T *> { typedef T type; };

template <class T> struct lane_value {
    T value;
    u32 lane;
};

// `missing` lanes keep their value where Metal says so, and are a fault where Metal leaves the result undefined.
template <class T> inline T shuffle(T value, u32 lane, bool keep_missing, u32 site) {
    return collective<T>(lane_value<T>{value, lane}, site, [=](lane_value<T> *values, T *results, u32 count) {
        for (u32 own = 0; own < count; ++own) {
            const u32 source = values[own].lane;
            if (source >= count && !keep_missing) {
                metal_scheduler->fault(&current(), "SIMD shuffle at line %u reads lane %u of %u", site, source, count);
            }
            results[own] = values[source < count ? source : own].value;
        }
    });
}

}  // namespace metal_runtime

namespace metal {

#define METAL_SIMD_FUNCTIONS(T)                                                                                     \
    METAL_INLINE T simd_sum(T x, uint site = __builtin_LINE()) {                                                    \
        return metal_runtime::reduce(x, site, [](T a, T b) { return T(a + b); });                                   \
    }                                                                                                               \
    METAL_INLINE T simd_product(T x, uint site = __builtin_LINE()) {                                                \
        return metal_runtime::reduce(x, site, [](T a, T b) { return T(a * b); });                                   \
    }                                                                                                               \
    METAL_INLINE T simd_max(T x, uint site = __builtin_LINE()) {                                                    \
        return metal_runtime::reduce(x, site, [](T a, T b) { return a < b || a != a ? b : a; });                    \
    }                                                                                                               \
    METAL_INLINE T simd_min(T x, uint site = __builtin_LINE()) {                                                    \
        return metal_runtime::reduce(x, site, [](T a, T b) { return b < a || a != a ? b : a; });                    \
    }                                                                                                               \
    METAL_INLINE T simd_prefix_inclusive_sum(T x, uint site = __builtin_LINE()) {                                   \
        return metal_runtime::scan(x, site, T(0), true, [](T a, T b) { return T(a + b); });                         \
    }                                                                                                               \
    METAL_INLINE T simd_prefix_exclusive_sum(T x, uint site = __builtin_LINE()) {                                   \
        return metal_runtime::scan(x, site, T(0), false, [](T a, T b) { return T(a + b); });                        \
    }                                                                                                               \
    METAL_INLINE T simd_prefix_inclusive_product(T x, uint site = __builtin_LINE()) {                               \
        return metal_runtime::scan(x, site, T(1), true, [](T a, T b) { return T(a * b); });                         \
    }
METAL_SIMD_FUNCTIONS(float)
METAL_SIMD_FUNCTIONS(half)
METAL_SIMD_FUNCTIONS(int)
METAL_SIMD_FUNCTIONS(uint)
#undef METAL_SIMD_FUNCTIONS

#define METAL_SIMD_BITS(T)                                                                                          \
    METAL_INLINE T simd_and(T x, uint site = __builtin_LINE()) {                                                    \
        return metal_runtime::reduce(x, site, [](T a, T b) { return a & b; });                                      \
    }                                                                                                               \
    METAL_INLINE T simd_or(T x, uint site = __builtin_LINE()) {                                                     \
        return metal_runtime::reduce(x, site, [](T a, T b) { return a | b; });                                      \
    }                                                                                                               \
    METAL_INLINE T simd_xor(T x, uint site = __builtin_LINE()) {                                                    \
        return metal_runtime::reduce(x, site, [](T a, T b) { return a ^ b; });                                      \
    }
METAL_SIMD_BITS(int)
METAL_SIMD_BITS(uint)
#undef METAL_SIMD_BITS

METAL_INLINE bool simd_all(bool x, uint site = __builtin_LINE()) {
    return metal_runtime::reduce(x, site, [](bool a, bool b) { return a && b; });
}
METAL_INLINE bool simd_any(bool x, uint site = __builtin_LINE()) {
    return metal_runtime::reduce(x, site, [](bool a, bool b) { return a || b; });
}

template <int N> METAL_INLINE vec<float, N> simd_sum(const vec<float, N> &x, uint site = __builtin_LINE()) {
    return metal_runtime::reduce(x, site, [](vec<float, N> a, vec<float, N> b) { return a + b; });
}

template <class T> METAL_INLINE T simd_shuffle(T x, ushort lane, uint site = __builtin_LINE()) {
    return metal_runtime::shuffle(x, lane, false, site);
}
template <class T> METAL_INLINE T simd_shuffle_xor(T x, ushort mask, uint site = __builtin_LINE()) {
    return metal_runtime::shuffle(x, metal_runtime::current().lane ^ mask, false, site);
}
template <class T> METAL_INLINE T simd_shuffle_up(T x, ushort delta, uint site = __builtin_LINE()) {
    return metal_runtime::shuffle(x, metal_runtime::current().lane - delta, true, site);
}
template <class T> METAL_INLINE T simd_shuffle_down(T x, ushort delta, uint site = __builtin_LINE()) {
    return metal_runtime::shuffle(x, metal_runtime::current().lane + delta, true, site);
}
template <class T> METAL_INLINE T simd_broadcast(T x, ushort lane, uint site = __builtin_LINE()) {
    return metal_runtime::shuffle(x, lane, false, site);
}
template <class T> METAL_INLINE T simd_broadcast_first(T x, uint site = __builtin_LINE()) {
    return metal_runtime::shuffle(x, 0u, false, site);
}
METAL_INLINE bool simd_is_first() { return metal_runtime::current().lane == 0; }

// Atomics are no races; they are checked for bounds alone.
template <class T> struct atomic {
    T value;
};
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
typedef atomic<float> atomic_float;
enum memory_order { memory_order_relaxed };

template <class T> METAL_INLINE T *atomic_address(atomic<T> *pointer) { return &pointer->value; }
#if defined(METAL_CHECKS)
template <class Space, class T>
METAL_INLINE T *atomic_address(metal_runtime::checked_pointer<Space, atomic<T>> pointer) {
    metal_runtime::Region unrecorded = *pointer.region;
    unrecorded.device_cells = nullptr;
    return reinterpret_cast<T *>(
        metal_runtime::checked<metal_runtime::device_space, T>(&unrecorded, pointer.address, metal_runtime::UPDATE));
}
#endif

template <class T> METAL_INLINE T atomic_exchange_bits(T *address, T (*change)(T, T), T operand) {
    T before = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(address, &before, change(before, operand), false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
    return before;
}
#define METAL_ATOMIC(NAME, VALUE)                                                                                   \
    template <class P, class T> METAL_INLINE T atomic_fetch_##NAME##_explicit(P pointer, T operand, memory_order) { \
        auto *address = atomic_address(pointer);                                                                    \
        typedef metal_runtime::remove_const_t<typename metal_runtime::pointee<decltype(address)>::type> V;          \
        return atomic_exchange_bits<V>(address, [](V a, V b) -> V { return VALUE; }, static_cast<V>(operand));      \
    }
METAL_ATOMIC(add, a + b)
METAL_ATOMIC(sub, a - b)
METAL_ATOMIC(max, a < b ? b : a)
METAL_ATOMIC(min, b < a ? b : a)
METAL_ATOMIC(or, a | b)
METAL_ATOMIC(and, a & b)
#undef METAL_ATOMIC
template <class P> METAL_INLINE auto atomic_load_explicit(P pointer, memory_order) {
    return __atomic_load_n(atomic_address(pointer), __ATOMIC_RELAXED);
}
template <class P, class T> METAL_INLINE void atomic_store_explicit(P pointer, T value, memory_order) {
    auto *address = atomic_address(pointer);
    __atomic_store_n(address, static_cast<typename metal_runtime::pointee<decltype(address)>::type>(value),
                     __ATOMIC_RELAXED);
}

}  // namespace metal
