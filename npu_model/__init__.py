"""The simulated NPU: chips, an instruction set, the lowering of op-level programs to it, and a machine that runs it."""
