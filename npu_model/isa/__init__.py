"""The NPU's instruction set (docs/npu_isa.md): what a tile program is made of, its binary form and its text."""
