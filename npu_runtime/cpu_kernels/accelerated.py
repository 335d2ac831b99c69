"""Which native kernel, if any, takes a call over from its torch reference."""

from __future__ import annotations

from collections.abc import Sequence

from npu_compiler.codegen import KernelCall
from npu_runtime.backend import Operand
from npu_runtime.native import NativeLaunch


def native_launch(call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> NativeLaunch | None:
    """The call prepared on a native kernel, or None where there is none for its shapes and dtypes."""
    return None
