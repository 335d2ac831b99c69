// Where the results of a window lie. One window of a transposed convolution makes spread_down × spread_right pixels: its channels
// are those of a group for each of these pixels, from the last pixel to the first, group by group. Windows at the edges make some
// pixels outside of the image, crop_top rows and crop_left columns of them before it.

struct Target {
    unsigned channel;
    unsigned pixel;
    bool exists;
};

__device__ __forceinline__ Target target_of(unsigned window, unsigned channel) {
    constexpr unsigned spread = unsigned(spread_down * spread_right);
    if constexpr (spread == 1) {
        return {channel, window, true};
    } else {
        constexpr unsigned made = GROUP_CHANNELS / spread;  // channels of a group of one pixel
        const unsigned part = spread - 1 - channel / made % spread;
        // Before the first row it is a large number.
        const unsigned row = window / window_columns * spread_down + part / spread_right - crop_top;
        const unsigned column = window % window_columns * spread_right + part % spread_right - crop_left;
        return {
            channel / GROUP_CHANNELS * made + channel % made, row * unsigned(Out::size(3)) + column,
            row < Out::size(2) && column < Out::size(3)
        };
    }
}
