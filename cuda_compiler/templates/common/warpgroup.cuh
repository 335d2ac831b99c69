// Products by a warpgroup (four warps, 64 rows) whose right side lies in shared memory, and the barriers by which others
// fill that memory. On GPUs of compute capability 9.0 only; expects the operands' type as `Half`.
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

#define FOUR(x, i) "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])
#define SIXTEEN(x, i) FOUR(x, i), FOUR(x, i + 1), FOUR(x, i + 2), FOUR(x, i + 3)
#define NAMES_32                                                                                                       \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "    \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                                       \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "   \
    "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define MULTIPLY_SHARED_64(type)                                                                                       \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "."    \
                 type " {" NAMES_32 "}, %32, %33, adds, 1, 1, 0, 0;}"                                                  \
                 : SIXTEEN(sums, 0), SIXTEEN(sums, 4)                                                                  \
                 : "l"(left), "l"(right), "r"(int(adds)))
#define MULTIPLY_SHARED_128(type)                                                                                      \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "."   \
                 type " {" NAMES_64 "}, %64, %65, adds, 1, 1, 0, 0;}"                                                  \
                 : SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12)                             \
                 : "l"(left), "l"(right), "r"(int(adds)))

// sums[64 × 64 or 128] (+)= left[64 × 16] · right[64 or 128 × 16]ᵀ, in fragments as of 16 × 8 for each warp.
__device__ __forceinline__ void multiply_shared(
    float (&sums)[8][4], unsigned long long left, unsigned long long right, bool adds
) {
    if constexpr (IsBrain<Half>::value) {
        MULTIPLY_SHARED_64("bf16");
    } else {
        MULTIPLY_SHARED_64("f16");
    }
}

__device__ __forceinline__ void multiply_shared(
    float (&sums)[16][4], unsigned long long left, unsigned long long right, bool adds
) {
    if constexpr (IsBrain<Half>::value) {
        MULTIPLY_SHARED_128("bf16");
    } else {
        MULTIPLY_SHARED_128("f16");
    }
}

#define MULTIPLY_HELD_64(type)                                                                                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" NAMES_32 "}, "                       \
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"                                                              \
                 : SIXTEEN(sums, 0), SIXTEEN(sums, 4)                                                                  \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right))
#define MULTIPLY_HELD_128(type)                                                                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" NAMES_64 "}, "                      \
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                                              \
                 : SIXTEEN(sums, 0), SIXTEEN(sums, 4), SIXTEEN(sums, 8), SIXTEEN(sums, 12)                             \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right))

// sums[64 × 64 or 128] += left[64 × 16] · right[16 × 64 or 128], the left side in registers.
__device__ __forceinline__ void multiply_held(
    float (&sums)[8][4], const unsigned (&left)[4], unsigned long long right
) {
    if constexpr (IsBrain<Half>::value) {
        MULTIPLY_HELD_64("bf16");
    } else {
        MULTIPLY_HELD_64("f16");
    }
}

__device__ __forceinline__ void multiply_held(
    float (&sums)[16][4], const unsigned (&left)[4], unsigned long long right
) {
    if constexpr (IsBrain<Half>::value) {
        MULTIPLY_HELD_128("bf16");
    } else {
        MULTIPLY_HELD_128("f16");
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

// Keeps the compiler from using registers earlier or later than here, which it does not know to be on their way.
template <int count>
__device__ __forceinline__ void pin(float (&sums)[count][4]) {
#pragma unroll
    for (int i = 0; i < count; i++) {
        asm volatile("" : FOUR(sums, i) :: "memory");
    }
}

// A barrier as `warp_jobs.cuh` has them, in shared memory.
struct Barrier {
    unsigned long long state;

    __device__ __forceinline__ void start(int arrivals) { start_barrier(shared_address(this), arrivals); }
    __device__ __forceinline__ void arrive() { arrive_at(shared_address(this)); }
    __device__ __forceinline__ void arrive_after_copies() { arrive_after_copies_at(shared_address(this)); }
    __device__ __forceinline__ void wait(int parity) { wait_at(shared_address(this), parity); }
};

// What threads have written to shared memory, before this, can be read by products after it.
__device__ __forceinline__ void show_to_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
