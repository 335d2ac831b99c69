// Depthwise convolutions over channels-last images: each output channel from the input channel of its number; the weight [C, 1, kh, kw] has its channels side
// by side as well. A thread makes `across` pixels of a row, PACK channels of each.
#include "conv/places.cuh"
#include "conv/finish.cuh"

constexpr unsigned CHANNEL_PACKS = unsigned(Out::size(1)) / PACK;
constexpr unsigned SPANS = (unsigned(Out::size(3)) + across - 1) / across;
constexpr int TAPS = int(Weight::size(3));
constexpr int WIDTH = (across - 1) * int(param::stride(1)) + (TAPS - 1) * int(param::dilation(1)) + 1;

WAITING_KERNEL(conv_depthwise) {
    const index_t thread = blockIdx.x * index_t(THREADS) + threadIdx.x;
    const unsigned channel = unsigned(thread % CHANNEL_PACKS) * PACK;
    const unsigned span = unsigned(thread / CHANNEL_PACKS % SPANS);
    const index_t line = thread / CHANNEL_PACKS / SPANS;
    const unsigned image = unsigned(line / Out::size(2));
    if (image >= Out::size(0)) {
        return;
    }
    const unsigned first_pixel = unsigned(line % Out::size(2) * Out::size(3)) + span * across;
    const int top = first_row(first_pixel);
    const int left = first_column(first_pixel);
    const X::type *plane = x + image * X::stride(0) + channel;
    begin_in_turn();
    float sums[across][PACK] = {};
#pragma unroll
    for (int ky = 0; ky < int(Weight::size(2)); ky++) {
        const unsigned row = unsigned(top + ky * int(param::dilation(0)));
        if (row >= X::size(2)) {
            continue;
        }
        float factors[TAPS][PACK];
#pragma unroll
        for (int kx = 0; kx < TAPS; kx++) {
            load_floats(factors[kx], weight + channel + ky * Weight::stride(2) + kx * Weight::stride(3));
        }
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            const unsigned column = unsigned(left + j);
            if (column >= X::size(3)) {
                continue;
            }
            float values[PACK];
            load_floats(values, plane + row * X::stride(2) + column * X::stride(3));
#pragma unroll
            for (int pixel = 0; pixel < across; pixel++) {
                const int ahead = j - pixel * int(param::stride(1));
                if (ahead >= 0 && ahead % int(param::dilation(1)) == 0 && ahead / int(param::dilation(1)) < TAPS) {
#pragma unroll
                    for (int i = 0; i < PACK; i++) {
                        sums[pixel][i] = fmaf(factors[ahead / int(param::dilation(1))][i], values[i], sums[pixel][i]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int pixel = 0; pixel < across; pixel++) {
        if (span * across + pixel < Out::size(3)) {
            finish(sums[pixel], bias, residual, out, image, channel, first_pixel + pixel);
        }
    }
}
