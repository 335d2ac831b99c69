// What all threads of a team know of a reduction, as each of them gets it. Where rows are few, the blocks of a cluster are one team:
// `splits` of them.

#include "common/cluster.cuh"
#include "common/reduction.cuh"
#include "reductions/states.cuh"

static_assert(splits == 1 || teams == 1, "");

// A state of each warp of the team, and then one of the block.
extern __shared__ __align__(16) unsigned char shared_memory[];

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

// What the teams of all blocks of a cluster know.
template <typename State>
__device__ __forceinline__ State merge_cluster(State own) {
    unsigned *found = reinterpret_cast<unsigned *>(shared_memory) + team_warps * words_of<State>;
    if (threadIdx.x == 0) {
        write_state(found, own);
    }
    cluster_barrier();
    State all;
#pragma unroll
    for (int block = 0; block < splits; block++) {
        unsigned words[words_of<State>];
#pragma unroll
        for (int i = 0; i < words_of<State>; i++) {
            words[i] = __float_as_uint(read_from(block, reinterpret_cast<const float *>(found) + i));
        }
        all.merge(read_state<State>(words));
    }
    cluster_barrier();  // until then others may read
    return all;
}

// The result, the same in every thread: lanes merge in different orders, so that they may differ in the last bit before. No
// thread of a team comes back before all of them have come.
template <typename State>
__device__ __forceinline__ float result_of_team(State own, Place place) {
    own = merge_warp(own);
    if constexpr (team_warps > 1) {
        auto &parts = *reinterpret_cast<unsigned (*)[team_warps][words_of<State>]>(shared_memory);
        __syncthreads();  // an earlier result may still be read
        if (place.lane == 0) {
            write_state(parts[place.warp], own);
        }
        __syncthreads();
        own = merge_warp(place.lane < team_warps ? read_state<State>(parts[place.lane]) : State());
    }
    if constexpr (splits > 1) {
        own = merge_cluster(own);
    }
    constexpr unsigned lanes = 0xffffffffu >> (WARP - team_lanes);
    const int first = threadIdx.x % WARP / team_lanes * team_lanes;
    return __shfl_sync(lanes << first, own.result(), first);
}
