"""Transfers between a caller's CUDA tensors and a program's buffers, on the caller's stream and without waiting.

A call launches the program's CUDA graph once. The graph begins with a kernel that copies (and casts, and checks) all
inputs, and ends with one that copies the outputs into new tensors; the addresses of these tensors are set before each
launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cuda_runtime import CUDABackend
from cuda_runtime.launches import MovingLaunch
from cuda_runtime.tensor_copies import MOST, Copy, can_copy
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import INT32_MAX, INT32_MIN, is_int
from npu_compiler.graph.model import TensorSpec
from npu_runtime.program_run import BoundProgram

_MOST_BINDINGS = 16  # of inputs that a program changes in place; each captures the graph again


class GPUPorts:
    """Copies all inputs and outputs of a program that is bound to buffers, between CUDA tensors and these buffers.

    Args:
        program: The program.
        bound: The program bound to its buffers.
        backend: The GPU.
        device: The torch device of the caller's tensors.
        results: Outputs that the caller keeps, so that they need memory of their own.
        in_place: Inputs whose memory the caller allows the program to overwrite with an output.
    """

    @staticmethod
    def fit(program: CompiledProgram) -> bool:
        """Whether the program's inputs and outputs have no padding and have dtypes that can be copied."""
        return all(
            (spec.alloc_shape or spec.shape) == spec.shape and can_copy(spec.dtype, spec.storage)
            for spec in (*program.input_specs, *program.output_specs)
        )

    def __init__(
        self,
        program: CompiledProgram,
        bound: BoundProgram,
        backend: CUDABackend,
        device: torch.device,
        results: set[str],
        in_place: set[str],
    ) -> None:
        self._program, self._bound, self._backend, self._device = program, bound, backend, device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._results, self._in_place, self._bindings = results, sorted(in_place), 0
        self._flag, seen = backend.allocate_visible((1,), "int32")
        self._out_of_bounds = seen()
        self._at: dict[str, int] = {}
        self._dense: list[torch.Tensor] = []
        self._outputs: dict[str, torch.Tensor] = {}
        self.follow()

    def go_home(self) -> None:
        """Do nothing; `TensorPorts` binds the program to its own buffers here, which copies do not need."""

    def follow(self) -> None:
        """Prepare the copies again for the program's current buffers."""
        program, bound = self._program, self._bound
        self._copied = [index for index, spec in enumerate(program.input_specs) if spec.name not in self._at]
        inwards = [
            Copy(_address(bound.inputs[spec.name]), spec.numel, spec.dtype, spec.storage, _bounds(spec))
            for spec in (program.input_specs[index] for index in self._copied)
        ]
        self._fill = self._backend.tensor_copies(inwards, True, self._flag)
        donors = program.plan.donations
        self._taken = [
            spec
            for spec in program.output_specs
            if donors.get(spec.name) not in self._at and (spec.name in self._results or spec.storage != spec.dtype)
        ]
        outwards = [
            Copy(_address(bound.outputs[spec.name]), spec.numel, spec.dtype, spec.storage) for spec in self._taken
        ]
        self._take = self._backend.tensor_copies(outwards, False, self._flag)
        bound.surround(self._fill, self._take)
        kept = {spec.name for spec in self._taken}
        self._static = {
            spec.name: torch.utils.dlpack.from_dlpack(bound.outputs[spec.name]).reshape(spec.shape)
            for spec in program.output_specs
            if spec.name not in kept and donors.get(spec.name) not in self._at
        }
        self._rooms = [(spec.name, spec.shape, getattr(torch, spec.dtype)) for spec in self._taken]
        self._names = [spec.name for spec in program.input_specs]

    def fill(self, values: Sequence[torch.Tensor]) -> None:
        """Make the next launch read these values and write its outputs into new tensors.

        Raises:
            InputError: an index of an earlier call was out of bounds, which is detected only now.
        """
        if self._in_place:
            self._bind(dict(zip(self._names, values, strict=True)))
        if self._out_of_bounds[0]:
            self._out_of_bounds[0] = 0
            raise InputError(
                f"an earlier call was given an integer out of bounds, in one of {', '.join(map(repr, self._names))}: "
                "its result is not what PyTorch would have computed (found later, since a call does not wait)"
            )
        self._backend.call_on(torch._C._cuda_getCurrentRawStream(self._index))
        self._dense = [value if value.is_contiguous() else value.contiguous() for value in values]
        _point(self._fill, [self._dense[index].data_ptr() for index in self._copied])
        device = self._device
        self._outputs = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in self._rooms}
        _point(self._take, [tensor.data_ptr() for tensor in self._outputs.values()])

    def _bind(self, values: Mapping[str, torch.Tensor]) -> None:
        """Bind inputs that the program changes in place to the memory of the caller's tensors.

        The binding is renewed when these tensors move, at most `_MOST_BINDINGS` times, since each renewal captures the
        CUDA graph again.
        """
        moved = {
            name: values[name]
            for name in self._in_place
            if self._at.get(name) != values[name].data_ptr() and _has_own_dtype(values[name], self._bound.inputs[name])
        }
        if not moved or any(not value.is_contiguous() for value in moved.values()):
            return
        self._bindings += 1
        if self._bindings > _MOST_BINDINGS:
            own = {name: self._bound.inputs[name] for name in self._in_place}
            buffers = {name: self._backend.allocate_zeros(x.shape, x.dtype) for name, x in own.items()}
            self._in_place, self._at = [], {}
        else:
            buffers = {name: self._backend.borrow(value, self._bound.inputs[name]) for name, value in moved.items()}
            self._at |= {name: value.data_ptr() for name, value in moved.items()}
        self._bound.bind(inputs=buffers)
        self.follow()

    def take(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return output name → tensor for the last launch.

        Args:
            values: The caller's tensors by input name; an output written in place is one of them.
        """
        self._backend.call_on(torch._C._cuda_getCurrentRawStream(self._index))
        results, self._outputs, self._dense = self._outputs, {}, []
        for name, donor in self._program.plan.donations.items() if self._at else ():
            if donor in self._at:
                results[name] = values[donor]
        return results | self._static if self._static else results


def _point(launches: Sequence[MovingLaunch], addresses: list[int]) -> None:
    for index, launch in enumerate(launches):
        launch.copies.point_to(addresses[MOST * index : MOST * (index + 1)])


def _address(buffer: Any) -> int:
    return int(buffer.native_handle.data.ptr)


def _bounds(spec: TensorSpec) -> tuple[int, int] | None:
    if not is_int(spec.dtype):
        return None
    return spec.bounds or ((INT32_MIN, INT32_MAX) if spec.dtype == "int64" else None)


def _has_own_dtype(value: torch.Tensor, buffer: Any) -> bool:
    return str(value.dtype) == f"torch.{buffer.dtype}"
