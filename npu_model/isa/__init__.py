"""The NPU's instruction set (docs/npu_isa.md): data types of tile programs, their binary form and their text."""
