// The tables that make a resident kernel of a program: its steps, how their weights are divided among the blocks, and the
// operands' addresses.

#define BULK (__CUDA_ARCH__ >= 900)  // whether there is a copy engine

constexpr int warps = THREADS / WARP;  // that compute

// What belongs to the rows of a weight in few bits: their scales, and their offsets. A copy of it begins and ends at multiples
// of 16 bytes, so it may have up to 15 bytes more at both ends.
struct Side {
    unsigned row_bytes;  // 0 where there is none
    unsigned chunk_bytes;  // from a row's part for one chunk to its part for the next; 0 where every slot has whole rows
    unsigned part_bytes;  // of a row's part
    unsigned place;  // in a slot
    unsigned stride;  // from one copy to the next
};

// How a product's weight is divided: a block takes one unit of rows at a time (or of rows and their gates, one half each),
// in chunks of columns that fit a slot of the ring.
struct Stream {
    int units;
    int unit_rows;
    int own_rows;  // of a unit; the others are their partners
    int rows;  // of the weight, without partners
    unsigned row_bytes;
    unsigned chunk_bytes;  // also the distance between the rows of a slot
    int copied_rows;  // that one copy takes
    int side_rows;  // that one copy of a side takes
    int units_together;  // 2 where two units of a block take turns, chunk by chunk
    int in_flight;  // slots that may be on their way at a time
    int most_in_flight;  // while the limit is raised
    Side sides[2];
    unsigned expert_rows;  // from an expert's first row to the next one's; 0 where the weight has no experts
    int expert_units;  // that each chosen expert has; 0 where units are not divided among experts
    int row_experts;  // chosen experts whose rows, one chunk each, make a row; else 1
};

struct Step {
    int phase;
    int stream;  // -1 where a step streams no weight
    int weight;  // the operand that is streamed
    int sides[2];  // the operands with its scales and offsets
    int operand[MAX_OPERANDS];
};

struct Operands {
    void *at[OPERANDS];
};
