// What all threads of a team know of a reduction, as each of them gets it.

#include "common/reduction.cuh"
#include "reductions/states.cuh"

template <typename State>
__device__ __forceinline__ State merge_warp(State own) {
    constexpr unsigned lanes = 0xffffffffu >> (WARP - team_lanes);
    const unsigned together = lanes << (threadIdx.x % WARP / team_lanes * team_lanes);
#pragma unroll
    for (int distance = team_lanes / 2; distance > 0; distance /= 2) {
        own.merge(of_lane(own, distance, together));
    }
    return own;
}

// The result, the same in every thread: lanes merge in different orders, so that they may differ in the last bit before. No
// thread of a team comes back before all of them have come.
template <typename State>
__device__ __forceinline__ float result_of_team(State own, Place place) {
    own = merge_warp(own);
    if constexpr (team_warps > 1) {
        __shared__ unsigned parts[team_warps][words_of<State>];
        __syncthreads();  // an earlier result may still be read
        if (place.lane == 0) {
            write_state(parts[place.warp], own);
        }
        __syncthreads();
        own = merge_warp(place.lane < team_warps ? read_state<State>(parts[place.lane]) : State());
    }
    constexpr unsigned lanes = 0xffffffffu >> (WARP - team_lanes);
    const int first = threadIdx.x % WARP / team_lanes * team_lanes;
    return __shfl_sync(lanes << first, own.result(), first);
}
