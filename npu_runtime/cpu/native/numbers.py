"""Numbers that stand for names in argument blocks: the values of the kernels' C++ enums, in order."""

from __future__ import annotations

import numpy as np

from npu_compiler.graph.quantization import OFFSETS, ROW_FORMATS
from npu_compiler.program import elementwise
from npu_compiler.target_config import KERNEL_CODES
from npu_runtime.cpu.arrays import BFLOAT16

# `Dtype` in kernel.h, those with bytes, `Stored` in integer_args.h, and those that element-wise kernels compute in or
# tell, of which `Number` in elementwise.cpp has some.
DTYPES = {np.dtype(np.float32): 0, BFLOAT16: 1, np.dtype(np.float16): 2}
STORED_DTYPES = {**DTYPES, np.dtype(np.int8): 3, np.dtype(np.uint8): 4}
NUMBER_DTYPES = {**STORED_DTYPES, np.dtype(np.int32): 5, np.dtype(np.bool_): 6}


def _numbered(*names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


ACTIVATIONS = _numbered("none", *elementwise.ACTIVATIONS)  # `Activation` in activation.h
CODES = _numbered(*KERNEL_CODES)  # `Codes` in quantized.h
OFFSET_KINDS = _numbered(*OFFSETS)  # `Offsets` in quantized.h
# `Op` in elementwise.cpp
ELEMENTWISE = _numbered(*"copy add sub mul abs neg eq ne lt le gt ge where cos sin true_divide".split())
ROUNDING = _numbered("none", *ROW_FORMATS)  # `RowFormat` in row_rounding.h
