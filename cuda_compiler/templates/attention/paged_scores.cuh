// Which keys count for the rows of a tile of `paged.cuh`, in the fragments of `attention_fragments.cuh`.

// What is added to the scores of 16 rows with 16 keys, as the fragments have them.
__device__ __forceinline__ void paged_biases(
    const Problem &problem, int first_row, int first_key, float (&bias)[2][2 * halves]
) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 2 * halves; i++) {
        const int reach = problem.reach(first_row + lane / 4 + i / 2 * 8);
#where window
        const int first_seen = problem.first_seen(first_row + lane / 4 + i / 2 * 8);
#end
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#where window
            const int key = first_key + 8 * tile + lane % 4 * 2 + i % 2;
            bias[tile][i] = key >= first_seen && key < reach ? 0.0f : -INFINITY_F;
#elsewhere
            bias[tile][i] = first_key + 8 * tile + lane % 4 * 2 + i % 2 < reach ? 0.0f : -INFINITY_F;
#end
        }
    }
}

// The weights of 16 keys, of which a row attends to those before its reach.
__device__ __forceinline__ Weights weigh_keys(
    State &state, const Problem &problem, int first_row, int first_key, const KeyWords &words
) {
    float scores[2][4];
    state.multiply_keys(words, scores);
#where window
    const bool all_begin_before = first_key >= problem.first_seen(problem.count * sharing - 1);
    if (first_key + block_keys > problem.reach(0) || !all_begin_before) {  // else all rows attend to all of them
#elsewhere
    if (first_key + block_keys > problem.reach(0)) {  // else all rows attend to all of them
#end
        float bias[2][2 * halves];
        paged_biases(problem, first_row, first_key, bias);
        State::add_bias(scores, bias);
    }
    return state.weigh_scores(scores);
}
