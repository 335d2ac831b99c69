// Copies of boxes of a matrix to shared memory, and back, by the copy engine, which finds them by a map that the runtime makes
// (see `TensorMap` in cuda_program.py). A box's rows are 128 bytes there, with their pieces in the order that products of a
// warpgroup expect; what lies beyond the matrix is zeros. On GPUs of compute capability 9.0 and up.

// A kernel has its maps as parameters behind those of its operands.
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

// The round of a barrier, at which this thread arrives, ends after so many bytes have been copied, too.
__device__ __forceinline__ void expect_copies(Barrier &barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(shared_address(&barrier)), "r"(bytes) : "memory");
}

// The box that begins at this row and at this byte of it.
__device__ __forceinline__ void copy_box(void *target, const TensorMap &map, int row, int byte, Barrier &barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 :: "r"(shared_address(target)), "l"(&map), "r"(shared_address(&barrier)), "r"(byte), "r"(row) : "memory");
}

// The other way round: what threads have written there and `show_to_products` has shown. Behind the matrix nothing is stored.
__device__ __forceinline__ void store_box(const TensorMap &map, int row, int byte, const void *source) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                 :: "l"(&map), "r"(shared_address(source)), "r"(byte), "r"(row) : "memory");
}

__device__ __forceinline__ void end_of_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's stores have read what they store, or until it is stored.
template <bool only_read>
__device__ __forceinline__ void wait_for_stores() {
    if constexpr (only_read) {
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    } else {
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
