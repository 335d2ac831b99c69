"""An op that the op table lacks, added in two short functions: `torch.cumprod`.

    python examples/custom_op.py

The row says how a node of the op becomes kernel calls; the kernel's declaration names its operands; the CPU kernel says
what it means, in NumPy, and is the reference for any other device's kernel. Nothing else has to know: the constraint
checker, the partitioner and the CPU device read the same row. Prints the graph before and after, and that the result
equals PyTorch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import npu_compiler
from npu_compiler import is_op_supported
from npu_compiler.graph.model import OpNode
from npu_compiler.ops import register_op
from npu_compiler.ops.lowering import Lowering
from npu_compiler.program.kernels import Family, Grid, declare_kernel
from npu_runtime import Device, Executor
from npu_runtime.cpu.kernels.registry import cpu_kernel, to_float
from npu_sim.extract import extract_ir


def add_cumprod() -> None:
    declare_kernel("cumprod_kernel", Family.REDUCTION, "x -> out", source="cumsum.metal", grid=Grid.ROW_ELEMENTS)

    @register_op("aten.cumprod", tensors=("self",))
    def lower_cumprod(ctx: Lowering, node: OpNode) -> None:
        """The kernel runs along the last dimension; a transposed view, which costs nothing, is what any other needs."""
        view, out = ctx.view(node.inputs[0]), ctx.output()
        dim, last = node.attrs["dim"], view.rank - 1
        ctx.emit("cumprod_kernel", [view.transpose(dim, last)], [out.transpose(dim, last)])

    @cpu_kernel("cumprod_kernel")
    def cumprod(inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], params: Mapping[str, Any]) -> None:
        """Running product along the last dimension."""
        outputs[0][...] = to_float(inputs[0]).cumprod(-1, np.float64)


class Survival(nn.Module):
    """Hazards [batch, time] → the share that is left after each step."""

    def forward(self, hazards: Tensor) -> Tensor:
        return torch.cumprod(1 - hazards, dim=1)


def main() -> None:
    hazards = torch.rand(2, 5, generator=torch.Generator().manual_seed(0))
    print("aten.cumprod supported:", is_op_supported("aten.cumprod.default"))
    add_cumprod()
    print("aten.cumprod supported:", is_op_supported("aten.cumprod.default"))

    ir = extract_ir(Survival(), (hazards,))  # without the row, it would be taken apart into ops that have one
    program = npu_compiler.compile(ir, options=npu_compiler.CompileOptions(compute_dtype="float32"))
    print(program.describe())
    executor = Executor(program, Device("cpu"))
    (result,) = executor.run({program.input_specs[0].name: hazards.numpy()}).values()
    print("largest difference from PyTorch:", np.abs(result.to_numpy() - Survival()(hazards).numpy()).max())


if __name__ == "__main__":
    main()
