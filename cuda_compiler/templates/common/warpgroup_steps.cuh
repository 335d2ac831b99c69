// Products by a warpgroup (four warps, 64 rows) whose right side lies in shared memory, and the barriers by which others
// fill that memory, for operands of any type. On GPUs of compute capability 9.0 only.
//
// Matrices lie in shared memory in slabs of 64 columns. A slab's rows are 128 bytes, and within each 8 of them, which are
// aligned to 1024 bytes, the 16-byte piece number p of row r lies at place p ^ r.

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this program was compiled for a GPU of compute capability 9.0; compile it with this device's target"
#endif

#include "common/warp_jobs.cuh"

constexpr int warpgroup_threads = 128;
constexpr int warpgroup_rows = 64;
constexpr int slab_width = 64;

// What tells a product where a matrix begins; `across` is from one slab to the next, in bytes.
__device__ __forceinline__ unsigned long long matrix_at(unsigned address, int across) {
    constexpr unsigned long long swizzled = 1ull << 62;
    constexpr unsigned long long eight_rows = 1024 >> 4;
    return swizzled | eight_rows << 32 | (unsigned long long)(across >> 4) << 16 | (address & 0x3ffffu) >> 4;
}

// The same matrix from some bytes on.
__device__ __forceinline__ unsigned long long further(unsigned long long matrix, int bytes) {
    return matrix + (bytes >> 4);
}

// Fragments from number i on as operands that are read and written, whose kind is "+f" or "+r".
#define FOUR(kind, x, i) kind(x[i][0]), kind(x[i][1]), kind(x[i][2]), kind(x[i][3])
#define EIGHT(kind, x, i) FOUR(kind, x, i), FOUR(kind, x, i + 1)
#define SIXTEEN(kind, x, i) EIGHT(kind, x, i), EIGHT(kind, x, i + 2)
#define SIXTY_FOUR(kind, x, i) \
    SIXTEEN(kind, x, i), SIXTEEN(kind, x, i + 4), SIXTEEN(kind, x, i + 8), SIXTEEN(kind, x, i + 12)

#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 NAMES_4 ", %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_20 NAMES_16 ", %16, %17, %18, %19"

#define NAMES_32 \
    NAMES_20 ", %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

#define NAMES_40 \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"

#define NAMES_48 \
    NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"

#define NAMES_64 \
    NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define NAMES_80 \
    NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"

#define NAMES_96 \
    NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define NAMES_128 \
    NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// sums[64 × width] (+)= left · right, both in shared memory, by one of two instructions, whose names say number and types of terms;
// some have signs as further operands.
#define MULTIPLY_SHARED(types, signs, width, names, a, b, adds_at, ...)                                             \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, " adds_at ", 0; wgmma.mma_async.sync.aligned.m64n" width types \
                 " {" names "}, " a ", " b ", adds" signs ";}"                                                      \
                 : __VA_ARGS__ : "l"(left), "l"(right), "r"(int(adds)))

#define SHARED_PRODUCT(sum, is_first, first_types, second_types, signs, groups, ...)                                \
    __device__ __forceinline__ void multiply_shared(                                                               \
        sum (&sums)[groups][4], unsigned long long left, unsigned long long right, bool adds                       \
    ) {                                                                                                            \
        if constexpr (is_first) {                                                                                  \
            MULTIPLY_SHARED(first_types, signs, __VA_ARGS__);                                                      \
        } else {                                                                                                   \
            MULTIPLY_SHARED(second_types, signs, __VA_ARGS__);                                                     \
        }                                                                                                          \
    }

// Products by their width. `product` is a macro that takes fragments, width, operands by number, and the sums as operands.
#define WIDE_8(product, kind) product(1, "8", NAMES_4, "%4", "%5", "%6", FOUR(kind, sums, 0))
#define WIDE_16(product, kind) product(2, "16", NAMES_8, "%8", "%9", "%10", EIGHT(kind, sums, 0))
#define WIDE_32(product, kind) product(4, "32", NAMES_16, "%16", "%17", "%18", SIXTEEN(kind, sums, 0))
#define WIDE_64(product, kind) \
    product(8, "64", NAMES_32, "%32", "%33", "%34", SIXTEEN(kind, sums, 0), SIXTEEN(kind, sums, 4))
#define WIDE_96(product, kind)                                                                                     \
    product(                                                                                                       \
        12, "96", NAMES_48, "%48", "%49", "%50", SIXTEEN(kind, sums, 0), SIXTEEN(kind, sums, 4), SIXTEEN(kind, sums, 8) \
    )
#define WIDE_128(product, kind) product(16, "128", NAMES_64, "%64", "%65", "%66", SIXTY_FOUR(kind, sums, 0))
#define WIDE_160(product, kind) \
    product(20, "160", NAMES_80, "%80", "%81", "%82", SIXTY_FOUR(kind, sums, 0), SIXTEEN(kind, sums, 16))
#define WIDE_192(product, kind)                                                                                    \
    product(                                                                                                       \
        24, "192", NAMES_96, "%96", "%97", "%98", SIXTY_FOUR(kind, sums, 0), SIXTEEN(kind, sums, 16),              \
        SIXTEEN(kind, sums, 20)                                                                                    \
    )
#define WIDE_256(product, kind) \
    product(32, "256", NAMES_128, "%128", "%129", "%130", SIXTY_FOUR(kind, sums, 0), SIXTY_FOUR(kind, sums, 16))

__device__ __forceinline__ void hold(float (&fragment)[4]) { asm volatile("" : FOUR("+f", (&fragment), 0) :: "memory"); }
__device__ __forceinline__ void hold(int (&fragment)[4]) { asm volatile("" : FOUR("+r", (&fragment), 0) :: "memory"); }
__device__ __forceinline__ void hold(unsigned (&fragment)[4]) { asm volatile("" : FOUR("+r", (&fragment), 0) :: "memory"); }

// Keeps the compiler from using registers earlier or later than here, which it does not know to be on their way.
template <typename Sum, int count>
__device__ __forceinline__ void pin(Sum (&sums)[count][4]) {
#pragma unroll
    for (int i = 0; i < count; i++) {
        hold(sums[i]);
    }
}

// Registers that were written before are ready for products from here on.
__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void end_of_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all products but those before the last `running` calls of `end_of_products`.
template <int running>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(running) : "memory");
}

// A barrier as `warp_jobs.cuh` has them, in shared memory.
struct Barrier {
    unsigned long long state;

    __device__ __forceinline__ void start(int arrivals) { start_barrier(shared_address(this), arrivals); }
    __device__ __forceinline__ void arrive() { arrive_at(shared_address(this)); }
    __device__ __forceinline__ void arrive_after_copies() { arrive_after_copies_at(shared_address(this)); }
    __device__ __forceinline__ void wait(int parity) { wait_at(shared_address(this), parity); }
};

// Where a ring of `stages` places is.
template <int stages>
struct RingTurn {
    int stage = 0;
    int parity = 0;

    __device__ __forceinline__ void advance() {
        stage = stage + 1 == stages ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

// Has so many threads of the block wait for each other, by one of its 16 barriers.
template <int barrier, int threads>
__device__ __forceinline__ void sync_some() {
    asm volatile("bar.sync %0, %1;" :: "n"(barrier), "n"(threads) : "memory");
}

// The same by the barrier with a number that is not known before.
template <int threads>
__device__ __forceinline__ void sync_some(int barrier) {
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "n"(threads) : "memory");
}

// What threads have written to shared memory, before this, can be read by products after it, and by the copy engine.
__device__ __forceinline__ void show_to_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stores two neighbouring fragments of 16 × 8 in 16 bits, a word of their first and of their last 8 rows each. Lanes give the
// addresses of rows: the first 16 of those of the first fragment, the others of the second one. The compiler may move other accesses
// across.
__device__ __forceinline__ void store_fragments(
    void *row, unsigned upper, unsigned lower, unsigned next_upper, unsigned next_lower
) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(shared_address(row)), "r"(upper), "r"(lower), "r"(next_upper), "r"(next_lower));
}
