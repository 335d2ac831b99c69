"""The CUDA target's layout and joined calls on the CPU device's reference kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F

from cuda_compiler import CUDA_GPU, GPU
from cuda_compiler.pipeline import cuda_stages
from cuda_compiler.rules.epilogues import EPILOGUE, RESULT
from cuda_compiler.rules.planes import PLANE_PRODUCT
from cuda_compiler.specialization.activations import op_of
from npu_compiler.program.elementwise import ELEMENTWISE
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.target import CodegenTarget, OpLevelTarget, PlanStage
from npu_runtime import Operand
from npu_runtime.backend import Launch
from npu_runtime.cpu.backend import CPUBackend, bind
from npu_runtime.cpu.torch_kernels.elementwise import torch_function
from npu_runtime.torch_arrays import view_tensor


class LaidOut(OpLevelTarget):
    """The op-level program with the layout of the CUDA target and the calls that it joins."""

    config = CUDA_GPU

    def stages(self) -> list[PlanStage]:
        return list(takewhile(lambda stage: stage[0] != "lay_integers", cuda_stages(GPU())))


def activated(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return the activation of a tensor, by its name in a call of the CUDA target."""
    op, attrs = op_of(name)
    result: torch.Tensor = x if name == "none" else torch_function(op.torch)(x, **attrs)
    return result


class ReferenceBackend(CPUBackend):
    """The CPU device's torch kernels, with meanings for the calls that only the CUDA target makes."""

    config = CUDA_GPU
    runs_targets = (CUDA_GPU.name,)

    def __init__(self) -> None:
        super().__init__(native=False)

    @property
    def target(self) -> CodegenTarget:
        return LaidOut()

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        if EPILOGUE in call.params:
            return self._with_steps(call, inputs, outputs)
        if call.kernel == "squeeze_excite":
            return self._squeeze_excite(call, [view_tensor(bind(x)) for x in inputs], view_tensor(bind(outputs[0])))
        if "spread" in call.params:
            return self._spread_convolution(call, [view_tensor(bind(x)) for x in inputs], view_tensor(bind(outputs[0])))
        if call.kernel == "groupnorm_kernel" and "activation" in call.params:
            params = dict(call.params)
            name, normed = params.pop("activation"), view_tensor(bind(outputs[0]))
            normalize = super().prepare(replace(call, params=params), inputs, outputs)

            def then_activate() -> None:
                normalize()
                normed.copy_(activated(normed.float(), name))

            return then_activate
        if call.kernel == PLANE_PRODUCT:
            return self._plane_product(call, [view_tensor(bind(x)) for x in inputs], view_tensor(bind(outputs[0])))
        if "residual_last" in call.params or "(" in call.params.get("activation", ""):
            return self._finished_apart(call, inputs, outputs)
        if call.kernel != "to_channels_last":
            return super().prepare(call, inputs, outputs)
        (x,), (out,) = (map(view_tensor, map(bind, operands)) for operands in (inputs, outputs))

        fold, top, left = (call.params[name] for name in ("fold", "top", "left"))
        rows, columns = (fold * size for size in out.shape[2:])

        def launch() -> None:
            below, beyond = rows - top - x.shape[2], columns - left - x.shape[3]
            whole = F.pad(x.float(), (left, beyond, top, below))  # where that is less than nothing, pixels are left out
            squares = F.pixel_unshuffle(whole, fold)
            out.zero_()
            out[:, : squares.shape[1]].copy_(squares)

        return launch

    def _plane_product(self, call: KernelCall, operands: list[torch.Tensor], out: torch.Tensor) -> Launch:
        x, weight, *bias = operands

        def launch() -> None:
            sums = weight.float() @ x.float()
            out.copy_(activated(sums + bias[0].float()[:, None] if bias else sums, call.params["activation"]))

        return launch

    def _finished_apart(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        """A product or convolution whose activation, or the residual behind that, is not one of the CPU device's."""
        params, out = dict(call.params), view_tensor(bind(outputs[0]))
        name, last = params["activation"], bool(params.pop("residual_last", 0))
        params["activation"] = "none"
        residual = view_tensor(bind(inputs[-1])) if last else None
        if last:
            params["has_residual"] = 0
            call, inputs = replace(call, inputs=call.inputs[:-1]), inputs[:-1]
        compute = super().prepare(replace(call, params=params), inputs, outputs)

        def launch() -> None:
            addend = 0.0 if residual is None else residual.float().clone()
            compute()
            out.copy_(activated(out.float(), name) + addend)

        return launch

    def _with_steps(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        """A convolution or a squeeze-and-excitation with an epilogue, whose operands are the last inputs."""
        epilogue, out = call.params[EPILOGUE], view_tensor(bind(outputs[0]))
        count = len(inputs) - len(epilogue.operands)
        operands = [view_tensor(bind(x)) for x in inputs[count:]]
        params = {name: value for name, value in call.params.items() if name != EPILOGUE}
        compute = self.prepare(replace(call, inputs=call.inputs[:count], params=params), inputs[:count], outputs)

        def launch() -> None:
            values: dict[str | float, Any] = dict(zip(epilogue.operands, (x.float() for x in operands), strict=True))
            compute()
            values[RESULT] = out.float()
            for step in epilogue.steps:
                function = torch_function(ELEMENTWISE[step.op].torch)
                values[step.name] = function(*(values.get(x, x) for x in step.arguments), **dict(step.attrs))
            out.copy_(values[epilogue.result])

        return launch

    def _spread_convolution(self, call: KernelCall, operands: list[torch.Tensor], out: torch.Tensor) -> Launch:
        """A convolution whose windows make several pixels, which become a larger image that is cropped."""
        x, weight, *addends = operands
        params, (_, made, rows, columns) = call.params, out.shape
        (down, right), (top, left), parts = params["spread"], params["crop"], params["groups"]
        above, below, before, beyond = params["padding"]

        def launch() -> None:
            padded = F.pad(x.float(), (before, beyond, above, below))
            sums = F.conv2d(padded, weight.float(), None, 1, 0, params["dilation"], parts)
            assert list(sums.shape[2:]) == params["windows"]
            pixels = sums.unflatten(1, (parts, down, right, made // parts)).flip(2, 3).permute(0, 1, 4, 5, 2, 6, 3)
            image = pixels.flatten(5, 6).flatten(3, 4).flatten(1, 2)[:, :, top : top + rows, left : left + columns]
            for addend in addends:
                image = image + (addend.float()[:, None, None] if addend.ndim == 1 else addend.float())
            out.copy_(activated(image, params["activation"]))

        return launch

    def _squeeze_excite(self, call: KernelCall, operands: list[torch.Tensor], out: torch.Tensor) -> Launch:
        x, squeeze, *others = operands
        squeeze_bias = others.pop(0) if call.params["squeeze_bias"] else None
        excite, *excite_bias = others

        def product(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            padded = F.pad(values, (0, weight.shape[1] - values.shape[1]))
            return F.linear(padded, weight.flatten(1).float(), None if bias is None else bias.float())

        def launch() -> None:
            hidden = activated(product(x.float().mean((2, 3)), squeeze, squeeze_bias), call.params["activation"])
            factors = activated(product(hidden, excite, excite_bias[0] if excite_bias else None), call.params["gate"])
            out.copy_(x.float() * factors[:, :, None, None])

        return launch
