// The tables that make a resident kernel of a program: its steps, how their weights are divided among the blocks, and the
// operands' addresses.

#define BULK (__CUDA_ARCH__ >= 900)  // whether there is a copy engine

constexpr int warps = THREADS / WARP;  // that compute

// How a product's weight is divided: a block takes one unit of rows at a time (or of rows and their gates, one half each),
// in chunks of columns that fit a slot of the ring. Two units of a block take turns, chunk by chunk.
struct Stream {
    int units;
    int unit_rows;
    int own_rows;  // of a unit; the others are their partners
    int rows;  // of the weight, without partners
    unsigned row_bytes;
    unsigned chunk_bytes;  // also the distance between the rows of a slot
};

struct Step {
    int phase;
    int stream;  // -1 where a step streams no weight
    int weight;  // the operand that is streamed
    int operand[MAX_OPERANDS];
};

struct Operands {
    void *at[OPERANDS];
};
