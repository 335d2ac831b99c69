// How a product by warpgroups is divided, for the kernels that include `linear_wgmma_kernel.cuh`: that says what it does.

#include "common/tensor_cores.cuh"
#include "common/warpgroup.cuh"
#include "common/cluster.cuh"
#include "matmul/linear_result.cuh"

constexpr int copying_threads = 2 * WARP;                // of the weight, and as many of x
constexpr int held_rows = (int(param::m) + 7) / 8 * 8;   // of x
constexpr int columns = gated ? 2 * width : width;       // of a block's products: rows of the weight
constexpr int pieces = slab_width / 8;                   // of 16 bytes, in a row of a slab
constexpr int step_terms = slabs * slab_width;
constexpr int all_steps = (int(param::k) + step_terms - 1) / step_terms;
constexpr int share = (all_steps + splits - 1) / splits;  // steps of a block
constexpr int sums_stride = columns + 4;                  // so that rows begin in different banks
constexpr int behind = smaller(stages / 2, 2);            // steps from the copy of x to its product with the gains

static_assert(sizeof(Half) == 2 && (!normed || IsBrain<Half>::value), "");
static_assert(copying_threads == 8 * pieces, "");
static_assert(behind >= 1 && behind < stages, "");  // W3
static_assert(width % 4 == 0 && param::n % 4 == 0 && param::k % 8 == 0, "");

// The row of the weight that is a block's row number `row`: of a gated product, first gates, then what they multiply.
__device__ __forceinline__ index_t weight_row(int row) {
    const bool second = gated && row >= width;
    const index_t column = index_t(blockIdx.x) * width + (second ? row - width : row);
    const index_t last = param::n - 1;  // which the last block may have several times
    return (column < last ? column : last) + (second ? param::n : 0);
}
