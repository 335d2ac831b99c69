// What kernels of several GPUs tell each other. `ranks` of them take part.
//
// `peers` has 8 bytes each for the address of every rank's notices, this rank, the address of a word that the host sets when the others
// are gone, and the address of an operand on each rank.
//
// Invariants
// R1. Ranks make the same calls in the same order, so a call has the same turn on all of them. It counts its turns.
// R2. Once a block of a rank runs, the kernel before has ended. So when one tells the other ranks that an operand is `complete`, it is.
//     Nobody reads it earlier.
// R3. A rank writes to the memory of an operand that others read only when all have read it. A rank makes its exchanges in turn, so
//     it has read the operands of one when it says that those of the next are complete: that memory is free when the next sum has
//     waited for that. The last sum of a program waits until all have said that they have `read`.
// R4. A notice is the turn. Each has one writer, which may be one turn ahead of a reader: a later turn serves as well.

enum Notice { complete, read };

struct Ranks {
    const unsigned long long *table;
    int own;

    __device__ __forceinline__ Ranks(const Peers::type *peers)
        : table(reinterpret_cast<const unsigned long long *>(peers)), own(int(table[ranks])) {}

    // Where a rank finds the notice of another one; 32 bytes, so that no two are in one access.
    __device__ __forceinline__ unsigned long long place(int reader, Notice notice, int writer) const {
        return table[reader] + 32ull * (int(notice) * ranks + writer);
    }

    // Notifies all other ranks of what this block, or a kernel before, has done. By the first threads of a block, one for a rank.
    __device__ __forceinline__ void notify(Notice notice, unsigned turn) const {
        const int other = threadIdx.x;
        if (other < ranks && other != own) {
            __threadfence_system();
            asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(place(other, notice, own)), "r"(turn) : "memory");
        }
    }

    // Where this GPU finds a rank's operand.
    __device__ __forceinline__ unsigned long long operand(int rank) const { return table[ranks + 2 + rank]; }

    // Has the block wait for a notice from all other ranks, or until they are gone.
    __device__ __forceinline__ void wait(Notice notice, unsigned turn) const {
        const int other = threadIdx.x;
        if (other < ranks && other != own) {
            const unsigned long long at = place(own, notice, other);
            unsigned found, gone = 0;
            int looked = 0;
            do {
                asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(at) : "memory");
                if (++looked % 4096 == 0) {
                    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(gone) : "l"(table[ranks + 1]) : "memory");
                }
            } while (int(found - turn) < 0 && !gone);  // R4
        }
        __syncthreads();
    }
};
