// The weight of the sink of a head, where the weight of a key is exp(score - largest).
__device__ __forceinline__ float sink_weight(const Sinks::type *sinks, int head, float largest) {
    return expf(to_float(sinks[head * Sinks::stride(0)]) - largest);
}
