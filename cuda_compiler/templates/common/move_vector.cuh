// N elements side by side from one place to another.
template <int N, typename To, typename From>
__device__ __forceinline__ void move_vector(To *to, const From *from_place) {
    const Pack<From, N> source = load_pack<N>(from_place);
    Pack<To, N> target;
#pragma unroll
    for (int i = 0; i < N; i++) {
        target.item[i] = convert<To>(source.item[i]);
    }
    store_pack<N>(to, target);
}
