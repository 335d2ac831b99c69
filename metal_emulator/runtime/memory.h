// Pointers into the address spaces. With METAL_CHECKS they are classes that check each access; without, plain pointers.
//
// The translator rewrites every assignment through a pointer to `write` or `update`, so that `[]` and unary `*` of a
// checked pointer only read: an assignment that it does not recognize fails to compile.
#pragma once

#include "types.h"

extern const metal_runtime::Scheduler *metal_scheduler;

namespace metal_runtime {

struct device_space { static constexpr const char *name = "device"; };
struct constant_space { static constexpr const char *name = "constant"; };
struct threadgroup_space { static constexpr const char *name = "threadgroup"; };

template <class A, class I> METAL_INLINE auto write(A &&base, I index) -> decltype((base[index])) {
    return base[index];
}
template <class A, class I> METAL_INLINE auto update(A &&base, I index) -> decltype((base[index])) {
    return base[index];
}
template <class T> METAL_INLINE T &write(T *pointer) { return *pointer; }
template <class T> METAL_INLINE T &update(T *pointer) { return *pointer; }
template <class To, class From> METAL_INLINE To pointer_cast(From from) { return (To)from; }

#if defined(METAL_CHECKS)

// The compiler checks a thread's own arrays where they are read, but lets one past the end pass as an address.
template <size_t N, class I> METAL_INLINE void check_index(I index, const char *file, u32 line) {
    if (__builtin_expect(static_cast<u64>(static_cast<i64>(index)) >= N, 0)) {
        metal_scheduler->fault(&current(), "index %lld is outside of the array at %s:%u", static_cast<long long>(index),
                               file, line);
    }
}
template <class T, size_t N, class I>
METAL_INLINE T &write(T (&array)[N], I index, const char *file = __builtin_FILE(), u32 line = __builtin_LINE()) {
    check_index<N>(index, file, line);
    return array[index];
}
template <class T, size_t N, class I>
METAL_INLINE T &update(T (&array)[N], I index, const char *file = __builtin_FILE(), u32 line = __builtin_LINE()) {
    check_index<N>(index, file, line);
    return array[index];
}

constexpr u32 device_key(u32 group, u32 thread, u32 epoch) {
    return group << 18 | (thread & 0x3ff) << 8 | (epoch < 31 ? epoch : 31) << 3;
}
constexpr u32 SEVERAL_READERS = 4;

// Whether accesses with these keys may happen in any order: other threads, and no barrier of one threadgroup between.
METAL_INLINE bool device_unordered(u32 mine, u32 other) {
    const u32 difference = mine ^ other;
    if ((mine & other & 3) == 0) return false;
    if (difference >> 18) return true;
    return (difference >> 8 & 0x3ff) != 0 && (difference >> 3 & 31) == 0 && (mine >> 3 & 31) != 31;
}

inline __attribute__((noinline)) void device_race(const Region *region, u32 kind, i64 offset, u32 size, u32 other_kind,
                                                  u32 other) {
    metal_scheduler->race(&current(), region, device_space::name, kind, offset, size, other_kind, other >> 18,
                          other >> 8 & 0x3ff);
}

inline __attribute__((noinline)) void record_device(const Region *region, u32 kind, i64 offset, u32 size) {
    const Thread &self = current();
    const u32 key = device_key(self.group->linear, self.index, self.group->device_epoch);
    const u8 *address = region->base + offset;
    const u64 start = static_cast<u64>(address - region->cells_start);
    for (u64 at = start; at < start + size;) {
        DeviceCell &cell = region->device_cells[at / 2];
        const u32 bytes = at & 1 ? 2 : start + size - at == 1 ? 1 : 3;
        const u32 mine = key | bytes;
        at = (at | 1) + 1;
        const u32 written = __atomic_load_n(&cell.write, __ATOMIC_RELAXED);
        if (written != 0 && device_unordered(mine, written)) device_race(region, kind, offset, size, WRITE, written);
        const u32 read = __atomic_load_n(&cell.read, __ATOMIC_RELAXED);
        if (kind & WRITE) {
            if (read != 0) {
                const bool several = (read & SEVERAL_READERS) != 0 && (read >> 3 & 31) == (mine >> 3 & 31);
                if (several || device_unordered(mine, read)) device_race(region, WRITE, offset, size, READ, read);
            }
            __atomic_store_n(&cell.write, mine, __ATOMIC_RELAXED);
        } else if (read == 0 || !device_unordered(mine, read)) {
            __atomic_store_n(&cell.read, mine | (read & 3), __ATOMIC_RELAXED);
        } else {
            __atomic_store_n(&cell.read, read | bytes | SEVERAL_READERS, __ATOMIC_RELAXED);
        }
    }
}

METAL_INLINE bool threadgroup_unordered(const Thread &self, const Access &other) {
    const u32 thread = other.thread & THREAD_MASK;
    if (other.epoch != self.group->epoch || thread == self.index) return false;
    return thread / SIMD_WIDTH != self.index / SIMD_WIDTH || other.simd_epoch == self.simdgroup->epoch;
}

inline __attribute__((noinline)) void threadgroup_race(const Region *region, u32 kind, i64 offset, u32 size,
                                                       u32 other_kind, const Access &other) {
    Thread &self = current();
    metal_scheduler->race(&self, region, threadgroup_space::name, kind, offset, size, other_kind,
                          self.group->linear & 0x3fff, other.thread & THREAD_MASK);
}

inline __attribute__((noinline)) void record_threadgroup(const Region *region, u32 kind, i64 offset, u32 size) {
    Thread &self = current();
    const Group &group = *self.group;
    const Access mine{group.epoch, self.simdgroup->epoch, static_cast<u16>(self.index)};
    const u32 granule = region->granule;
    for (u64 at = static_cast<u64>(offset) / granule; at * granule < static_cast<u64>(offset) + size; ++at) {
        ThreadgroupCell &cell = region->threadgroup_cells[at];
        const bool written = cell.write.epoch >= group.first_epoch;
        if (!written && (kind & READ)) {
            metal_scheduler->access_fault(&self, region, threadgroup_space::name, READ, offset, size, 0);
        }
        if (written && threadgroup_unordered(self, cell.write)) {
            threadgroup_race(region, kind, offset, size, WRITE, cell.write);
        }
        Access &read = cell.read;
        const bool same_simdgroup = (read.thread & THREAD_MASK) / SIMD_WIDTH == self.index / SIMD_WIDTH;
        if (kind & WRITE) {
            const bool lanes_conflict = !same_simdgroup || read.simd_epoch == mine.simd_epoch;
            if (read.epoch == group.epoch && ((read.thread & SEVERAL_SIMDGROUPS) != 0 ||
                                              ((read.thread & SEVERAL_LANES) != 0 && lanes_conflict) ||
                                              threadgroup_unordered(self, read))) {
                threadgroup_race(region, WRITE, offset, size, READ, read);
            }
            cell.write = mine;
        } else if (read.epoch != group.epoch) {
            read = mine;
        } else if (!same_simdgroup) {
            read.thread |= SEVERAL_SIMDGROUPS;
        } else if ((read.thread & SEVERAL_SIMDGROUPS) == 0 && read.simd_epoch != mine.simd_epoch) {
            read = mine;
        } else if ((read.thread & THREAD_MASK) != self.index) {
            read.thread |= SEVERAL_LANES;
        }
    }
}

template <class Space> METAL_INLINE void record(const Region *region, u32 kind, i64 offset, u32 size);
template <> METAL_INLINE void record<device_space>(const Region *region, u32 kind, i64 offset, u32 size) {
    if (region->device_cells != nullptr) record_device(region, kind, offset, size);
}
template <> METAL_INLINE void record<constant_space>(const Region *, u32, i64, u32) {}
template <> METAL_INLINE void record<threadgroup_space>(const Region *region, u32 kind, i64 offset, u32 size) {
    record_threadgroup(region, kind, offset, size);
}

// The element at `address`, after all checks.
template <class Space, class T> METAL_INLINE T *checked(const Region *region, uptr address, u32 kind) {
    if (region == nullptr) return reinterpret_cast<T *>(address);
    const u64 offset = address - reinterpret_cast<uptr>(region->base);
    const bool is_inside = offset < region->length && region->length - offset >= sizeof(T);
    if (__builtin_expect(!is_inside || region->base == nullptr, 0)) {
        metal_scheduler->access_fault(&current(), region, Space::name, kind, static_cast<i64>(offset), sizeof(T), 0);
    }
    if (alignof(T) > 1 && __builtin_expect(address % alignof(T) != 0, 0)) {
        metal_scheduler->access_fault(&current(), region, Space::name, kind, static_cast<i64>(offset), sizeof(T),
                                      alignof(T));
    }
    record<Space>(region, kind, static_cast<i64>(offset), sizeof(T));
    return reinterpret_cast<T *>(address);
}

template <class T, bool is_value> struct read_type { typedef const T &type; };
template <class T> struct read_type<T, true> { typedef remove_const_t<T> type; };
template <> struct read_type<void, false> { typedef void type; };
template <> struct read_type<const void, false> { typedef void type; };
template <class T> using read_t = typename read_type<T, is_value<remove_const_t<T>>::value>::type;

template <class From, class To> struct converts {
    static char test(To *);
    static long test(...);
    static constexpr bool value = sizeof(test(static_cast<From *>(nullptr))) == sizeof(char);
};
template <class From, class To> struct keeps_const { static constexpr bool value = true; };
template <class From, class To> struct keeps_const<const From, To> { static constexpr bool value = false; };
template <class From, class To> struct keeps_const<const From, const To> { static constexpr bool value = true; };

template <class Space, class T> struct checked_pointer {
    uptr address;
    const Region *region;

    checked_pointer() = default;
    METAL_INLINE checked_pointer(uptr address, const Region *region) : address(address), region(region) {}
    METAL_INLINE checked_pointer(decltype(nullptr)) : address(0), region(nullptr) {}
    // A table at program scope is not a bound buffer.
    METAL_INLINE checked_pointer(T *table) : address(reinterpret_cast<uptr>(table)), region(nullptr) {}
    template <class U, typename enable_if<converts<U, T>::value>::type = 0>
    METAL_INLINE checked_pointer(checked_pointer<Space, U> other) : address(other.address), region(other.region) {}
    template <class U, typename enable_if<!converts<U, T>::value && keeps_const<U, T>::value>::type = 0>
    METAL_INLINE explicit checked_pointer(checked_pointer<Space, U> other)
        : address(other.address), region(other.region) {}

    template <class I> METAL_INLINE uptr at(I index) const {
        return address + static_cast<uptr>(static_cast<i64>(index)) * sizeof(T);
    }
    template <class I> METAL_INLINE read_t<T> operator[](I index) const {
        return *checked<Space, const T>(region, at(index), READ);
    }
    template <class U = T> METAL_INLINE read_t<U> operator*() const {
        return *checked<Space, const U>(region, address, READ);
    }
    METAL_INLINE const T *operator->() const { return checked<Space, const T>(region, address, READ); }
    template <class I> METAL_INLINE checked_pointer operator+(I index) const { return {at(index), region}; }
    template <class I> METAL_INLINE checked_pointer operator-(I index) const {
        return {address - static_cast<uptr>(static_cast<i64>(index)) * sizeof(T), region};
    }
    METAL_INLINE ptrdiff_t operator-(checked_pointer other) const {
        return static_cast<ptrdiff_t>(address - other.address) / static_cast<ptrdiff_t>(sizeof(T));
    }
    template <class I> METAL_INLINE checked_pointer &operator+=(I index) { return *this = *this + index; }
    template <class I> METAL_INLINE checked_pointer &operator-=(I index) { return *this = *this - index; }
    METAL_INLINE checked_pointer &operator++() { return *this += 1; }
    METAL_INLINE checked_pointer &operator--() { return *this -= 1; }
    METAL_INLINE checked_pointer operator++(int) {
        const checked_pointer before = *this;
        *this += 1;
        return before;
    }
    METAL_INLINE checked_pointer operator--(int) {
        const checked_pointer before = *this;
        *this -= 1;
        return before;
    }
    METAL_INLINE bool operator==(checked_pointer other) const { return address == other.address; }
    METAL_INLINE bool operator!=(checked_pointer other) const { return address != other.address; }
    METAL_INLINE bool operator<(checked_pointer other) const { return address < other.address; }
    METAL_INLINE explicit operator bool() const { return address != 0; }
};

template <class Space, class T, class I> METAL_INLINE T &write(checked_pointer<Space, T> pointer, I index) {
    return *checked<Space, T>(pointer.region, pointer.at(index), WRITE);
}
template <class Space, class T, class I> METAL_INLINE T &update(checked_pointer<Space, T> pointer, I index) {
    return *checked<Space, T>(pointer.region, pointer.at(index), UPDATE);
}
template <class Space, class T> METAL_INLINE T &write(checked_pointer<Space, T> pointer) { return write(pointer, 0); }
template <class Space, class T> METAL_INLINE T &update(checked_pointer<Space, T> pointer) { return update(pointer, 0); }

// A threadgroup array, or a row of one.
template <class A> struct threadgroup_view;
template <class T, size_t N> struct threadgroup_view<T[N]> {
    uptr address;
    const Region *region;

    template <class I> METAL_INLINE uptr at(I index) const {
        const u64 place = static_cast<u64>(static_cast<i64>(index));
        if (__builtin_expect(place >= N, 0)) {
            metal_scheduler->fault(&current(), "index %lld of threadgroup array '%s' is not below %llu",
                                   static_cast<long long>(place), region->name, static_cast<unsigned long long>(N));
        }
        return address + place * sizeof(T);
    }
    METAL_INLINE operator checked_pointer<threadgroup_space, T>() const { return {address, region}; }
    METAL_INLINE operator checked_pointer<threadgroup_space, const T>() const { return {address, region}; }
    template <class I> METAL_INLINE checked_pointer<threadgroup_space, T> operator+(I index) const {
        return checked_pointer<threadgroup_space, T>{address, region} + index;
    }
    METAL_INLINE read_t<T> operator*() const { return (*this)[0]; }
    template <class I> METAL_INLINE auto operator[](I index) const { return element(at(index), (T *)nullptr); }
    template <class U> METAL_INLINE U element(uptr place, U *) const {
        static_assert(is_value<U>::value, "a threadgroup array of structs: use one array per member");
        return *checked<threadgroup_space, const U>(region, place, READ);
    }
    template <class U, size_t M> METAL_INLINE threadgroup_view<U[M]> element(uptr place, U (*)[M]) const {
        return {place, region};
    }
};

template <class T, size_t N, class I> METAL_INLINE T &write(threadgroup_view<T[N]> view, I index) {
    return *checked<threadgroup_space, T>(view.region, view.at(index), WRITE);
}
template <class T, size_t N, class I> METAL_INLINE T &update(threadgroup_view<T[N]> view, I index) {
    return *checked<threadgroup_space, T>(view.region, view.at(index), UPDATE);
}

template <class T> using device_pointer = checked_pointer<device_space, T>;
template <class T> using constant_pointer = checked_pointer<constant_space, const T>;
template <class T> using threadgroup_pointer = checked_pointer<threadgroup_space, T>;

#else

template <class T> using device_pointer = T *;
template <class T> using constant_pointer = const T *;
template <class T> using threadgroup_pointer = T *;
template <class A> using threadgroup_view = A &;

#endif

template <class A> METAL_INLINE threadgroup_view<A> threadgroup_array(u32 array, const char *name) {
    Thread &self = current();
    Region &region = self.group->arrays[array];
    if (region.base == nullptr) {
        metal_scheduler->declare_array(&self, array, name, sizeof(A), sizeof(typename scalar_of<A>::type));
    }
#if defined(METAL_CHECKS)
    return {reinterpret_cast<uptr>(region.base), &region};
#else
    return *reinterpret_cast<A *>(region.base);
#endif
}

// How a kernel's argument is made from what is bound.
template <class P> struct bound_buffer;
template <class T> struct bound_buffer<T *> {
    static METAL_INLINE T *make(const Region &region) { return reinterpret_cast<T *>(region.base); }
};
template <class T> struct bound_buffer<const T &> {
    static METAL_INLINE const T &make(const Region &region) {
#if defined(METAL_CHECKS)
        return *checked<constant_space, const T>(&region, reinterpret_cast<uptr>(region.base), READ);
#else
        return *reinterpret_cast<const T *>(region.base);
#endif
    }
};
template <class T> struct bound_buffer<T &> {
    static METAL_INLINE T &make(const Region &region) {
#if defined(METAL_CHECKS)
        return *checked<device_space, T>(&region, reinterpret_cast<uptr>(region.base), UPDATE);
#else
        return *reinterpret_cast<T *>(region.base);
#endif
    }
};
#if defined(METAL_CHECKS)
template <class Space, class T> struct bound_buffer<checked_pointer<Space, T>> {
    static METAL_INLINE checked_pointer<Space, T> make(const Region &region) {
        return {reinterpret_cast<uptr>(region.base), &region};
    }
};
#endif

METAL_INLINE Position grid_position(const Launch &launch, const Thread &thread) {
    const Position group = thread.group->position;
    return {group.x * launch.threads.x + thread.position.x, group.y * launch.threads.y + thread.position.y,
            group.z * launch.threads.z + thread.position.z};
}

template <class T> struct builtin_argument {
    static METAL_INLINE T make(Position position) { return static_cast<T>(position.x); }
};
template <class T> struct builtin_argument<metal::vec<T, 2>> {
    static METAL_INLINE metal::vec<T, 2> make(Position p) { return {static_cast<T>(p.x), static_cast<T>(p.y)}; }
};
template <class T> struct builtin_argument<metal::vec<T, 3>> {
    static METAL_INLINE metal::vec<T, 3> make(Position p) {
        return {static_cast<T>(p.x), static_cast<T>(p.y), static_cast<T>(p.z)};
    }
};

}  // namespace metal_runtime
