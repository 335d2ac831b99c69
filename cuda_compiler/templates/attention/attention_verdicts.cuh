// What is known of the tiles of keys before any of them is multiplied. Expects `tile_rows` and `tile_keys`.

constexpr int row_blocks = (rows + tile_rows - 1) / tile_rows;
constexpr int key_tiles = (keys + tile_keys - 1) / tile_keys;

// What `attention_survey` says of a block's rows and a tile of keys: that no row attends to a key, that all rows attend to
// all keys with nothing added to their scores, or neither.
enum Verdict { left_out, whole, biased };
