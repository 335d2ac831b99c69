// Reductions over a team: `team_warps` warps of a block that work on one row, or `team_lanes` lanes of a warp. A block has
// `teams` of them; more than one only where a team is a warp or less, so that a team may leave before the others.

static_assert(team_lanes == WARP || team_warps == 1, "");

struct Place {
    int lane;
    int warp;  // within the team
    index_t row;

    __device__ __forceinline__ Place()
        : lane(threadIdx.x % team_lanes), warp(threadIdx.x / team_lanes % team_warps),
          row(index_t(blockIdx.x) * teams + threadIdx.x / team_lanes / team_warps) {}

    __device__ __forceinline__ int thread() const { return warp * WARP + lane; }
    __device__ __forceinline__ static constexpr int threads() { return team_warps * team_lanes; }
};

struct Sum {
    template <typename T>
    __device__ __forceinline__ static T of(T a, T b) { return a + b; }
};

struct Product {
    template <typename T>
    __device__ __forceinline__ static T of(T a, T b) { return a * b; }
};

// Floats among them are never NaN: those that may be are compared as ordered integers.
struct Max {
    template <typename T>
    __device__ __forceinline__ static T of(T a, T b) { return a > b ? a : b; }
};

struct Min {
    template <typename T>
    __device__ __forceinline__ static T of(T a, T b) { return a < b ? a : b; }
};

// Over a warp, or a team that is less.
template <typename Op, typename T>
__device__ __forceinline__ T reduce_warp(T value) {
    constexpr unsigned lanes = 0xffffffffu >> (WARP - team_lanes);
    const unsigned together = lanes << (threadIdx.x % WARP / team_lanes * team_lanes);
#pragma unroll
    for (int step = team_lanes / 2; step > 0; step /= 2) {
        value = Op::of(value, __shfl_xor_sync(together, value, step));
    }
    return value;
}

// The reduction of every thread's value, in every thread of the team.
template <typename Op, typename T>
__device__ __forceinline__ T reduce_team(T value, T identity, Place place) {
    value = reduce_warp<Op>(value);
    if constexpr (team_warps > 1) {
        __shared__ T partial[team_warps];
        __syncthreads();  // an earlier reduction may still be read
        if (place.lane == 0) {
            partial[place.warp] = value;
        }
        __syncthreads();
        value = reduce_warp<Op>(place.lane < team_warps ? partial[place.lane] : identity);
    }
    return value;
}

__device__ __forceinline__ float reduce_sum(float value, Place place) {
    return reduce_team<Sum>(value, 0.0f, place);
}
