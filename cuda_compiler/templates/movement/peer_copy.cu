// What comes before a copy of other ranks' operands: tells them that this one's is complete, and waits until theirs are
// (`common/ranks.cuh`). `turns[0]` counts the turns. The copy itself needs no kernel, and the sum that reads it
// waits for it.

#include "common/ranks.cuh"

KERNEL(peer_copy) {
    const Ranks all(peers);
    const unsigned turn = unsigned(turns[0]) + 1;
    all.notify(complete, turn);
    all.wait(complete, turn);
    if (threadIdx.x == 0) {
        turns[0] = int(turn);
    }
}
