// One KV head of one batch with the queries that attend to it, and what their mask says.
//
// The queries that share a KV head are the rows of one problem (a query's heads side by side), so that its keys and
// values are read once for all. Expects the operands Q, K, V and Mask, `param::scale` and `param::causal`.

constexpr int queries = Q::size(2);
constexpr int keys = K::size(2);
constexpr int width = Q::size(3);
constexpr int value_width = V::size(3);
constexpr int kv_heads = K::size(1);
constexpr int sharing = Q::size(1) / kv_heads;  // heads that share a KV head
constexpr int rows = queries * sharing;

// Float masks spell "not attended" as -inf or as their dtype's lowest value; float32 ones often as bfloat16's. Added to
// a score, that leaves a key no weight, unless its row has nothing better.
template <typename T>
struct Lowest { static constexpr float value = -3.3895314e38f; };
template <>
struct Lowest<f16> { static constexpr float value = -65504.0f; };

constexpr float lowest_bias = Lowest<Mask::type>::value;

struct Problem {
    const Q::type *q;
    const K::type *k;
    const V::type *v;
    const Mask::type *mask;
    index_t batch;
    index_t kv_head;

    __device__ __forceinline__ Problem(
        const Q::type *q_start, const K::type *k_start, const V::type *v_start, const Mask::type *mask_start,
        index_t batch, index_t kv_head
    ) : q(q_start + batch * Q::stride(0) + kv_head * sharing * Q::stride(1)),
        k(k_start + batch * K::stride(0) + kv_head * K::stride(1)),
        v(v_start + batch * V::stride(0) + kv_head * V::stride(1)), mask(mask_start), batch(batch),
        kv_head(kv_head) {
        if constexpr (Mask::present) {
            mask += batch * Mask::stride(0) + kv_head * sharing * Mask::stride(1);
        }
    }

    __device__ __forceinline__ static int query_of(int row) { return row / sharing; }

    __device__ __forceinline__ const Q::type *q_row(int row) const {
        return q + row % sharing * Q::stride(1) + query_of(row) * Q::stride(2);
    }

    __device__ __forceinline__ static bool has(int key) { return key < keys; }

    __device__ __forceinline__ const K::type *k_row(int key) const { return k + key * K::stride(2); }

    __device__ __forceinline__ const V::type *v_row(int key) const { return v + key * V::stride(2); }

    __device__ __forceinline__ const Mask::type *mask_row(int row) const {
        return mask + row % sharing * Mask::stride(1) + query_of(row) * Mask::stride(2);
    }

    __device__ __forceinline__ static float bias_of(Mask::type value) {
        if constexpr (is_float<Mask::type>::value) {
            return to_float(value);
        } else {
            return to_int(value) != 0 ? 0.0f : -INFINITY_F;
        }
    }

    // Whether there is such a row and such a key, and the one comes before the other where that counts.
    __device__ __forceinline__ static bool reaches(int row, int key) {
        return row < rows && key < keys && !(param::causal && key > query_of(row));
    }

    // What is added to a score; -inf for a key that the row does not attend to. It loads in any case, so that several of
    // these loads can be on their way at a time.
    __device__ __forceinline__ float bias(int row, int key) const {
        if constexpr (Mask::present) {
            const float value = bias_of(mask_row(row < rows ? row : 0)[(key < keys ? key : 0) * Mask::stride(3)]);
            return reaches(row, key) ? value : -INFINITY_F;
        } else {
            return reaches(row, key) ? 0.0f : -INFINITY_F;
        }
    }

    // The same for some keys side by side, the first a multiple of their count.
    template <int count>
    __device__ __forceinline__ void biases(int row, int key, float (&bias_at)[count]) const {
        if constexpr (Mask::present && Mask::vector >= count && keys % count == 0) {
            const auto pack = load_pack<count>(mask_row(row < rows ? row : 0) + (key < keys ? key : 0));
#pragma unroll
            for (int i = 0; i < count; i++) {
                bias_at[i] = reaches(row, key + i) ? bias_of(pack.item[i]) : -INFINITY_F;
            }
        } else {
#pragma unroll
            for (int i = 0; i < count; i++) {
                bias_at[i] = bias(row, key + i);
            }
        }
    }
};

// Rows one after the other that have the same mask: only one of them needs a look.
constexpr int mask_sharing = Mask::stride(1) != 0 ? 1 : Mask::stride(2) != 0 || param::causal ? sharing : rows;

// Whether each of some rows attends to a key anywhere, so that keys at the mask's lowest value count for nothing. For
// whole warps. A key at half the lowest value is too close to it to be sure: float16's is in the reach of scores.
__device__ __forceinline__ bool all_attend(const Problem &problem, int first_row, int last_row) {
    const int lane = threadIdx.x % WARP;
    for (int row = first_row / mask_sharing * mask_sharing; row <= last_row; row += mask_sharing) {
        bool found = false;
        for (int key = 0; key < keys && !found; key += 8 * WARP) {
            float bias[8];
            problem.biases(row, key + 8 * lane, bias);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                found |= bias[i] > lowest_bias / 2;
            }
            found = __any_sync(0xffffffffu, found);
        }
        if (!found) {
            return false;
        }
    }
    return true;
}
