"""Transfers between a caller's tensors and a program's buffers, by shared memory or, if impossible, through NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.utils.dlpack

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import FLOAT_MAX, INT32_MAX, INT32_MIN, is_int
from npu_compiler.graph.model import TensorSpec
from npu_runtime.buffer import DeviceBuffer
from npu_runtime.packing import beyond_range, out_of_bounds
from npu_runtime.program_run import BoundProgram
from npu_runtime.torch_arrays import numpy_to_tensor, tensor_to_numpy


class TensorPorts:
    """Transfers all inputs and outputs of a program that is bound to buffers.

    Args:
        program: The program.
        bound: The program bound to its buffers.
        device: The torch device of the caller's tensors.
        results: Outputs that the caller keeps, so that they need memory of their own.
        in_place: Inputs whose memory the caller allows the program to overwrite with an output.
    """

    def __init__(
        self, program: CompiledProgram, bound: BoundProgram, device: torch.device, results: set[str], in_place: set[str]
    ) -> None:
        donors = program.plan.donations
        fixed = set(donors.values()) - in_place
        self._inputs = [InputPort(spec, bound, spec.name not in fixed) for spec in program.input_specs]
        self._outputs = [
            OutputPort(spec, bound, device, spec.name in results, donors.get(spec.name, ""))
            for spec in program.output_specs
        ]
        self._ports: list[InputPort | OutputPort] = [*self._inputs, *self._outputs]
        self._in_place = {port.name: port for port in self._inputs if port.name in in_place}

    def go_home(self) -> None:
        """Bind the program to its own buffers; call this before its launches are prepared again."""
        for port in self._ports:
            port.go_home()

    def follow(self) -> None:
        """Update references to the launches after they were prepared again."""
        for port in self._ports:
            port.follow()

    def fill(self, values: Sequence[torch.Tensor]) -> None:
        """Make the next launch read these values and write its outputs to new tensors.

        Raises:
            InputError: an index is out of bounds, or a number does not fit the storage dtype.
        """
        for port, value in zip(self._inputs, values, strict=True):
            port.fill(value)
        for output in self._outputs:
            output.make_room()

    def take(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return output name → tensor for the last launch.

        Args:
            values: The caller's tensors by input name; an output written in place is one of them.
        """
        return {
            port.name: values[port.donor] if self._is_in_place(port.donor, values) else port.take()
            for port in self._outputs
        }

    def _is_in_place(self, donor: str, values: Mapping[str, torch.Tensor]) -> bool:
        """Whether the last launch wrote the output into the caller's own tensor."""
        return donor in self._in_place and self._in_place[donor].is_at(values[donor])


def shared_tensor(buffer: DeviceBuffer) -> torch.Tensor | None:
    """Return a tensor that shares a buffer's memory, without padding; None if PyTorch cannot reach that memory."""
    if buffer.dlpack_copies:
        return None
    try:
        return torch.utils.dlpack.from_dlpack(buffer)
    except (AttributeError, BufferError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


class InputPort:
    """Passes a tensor to a program's input.

    If the device can read the tensor's own memory, nothing is copied; otherwise it is copied, and cast if necessary.

    Args:
        spec: The input's shape, dtype and bounds.
        bound: The program bound to its buffers.
        may_move: Whether the input may be bound to the caller's memory.
    """

    def __init__(self, spec: TensorSpec, bound: BoundProgram, may_move: bool) -> None:
        self.name, self._spec = spec.name, spec
        self._buffer = bound.inputs[spec.name]
        self._static = shared_tensor(self._buffer)
        is_dense = spec.alloc_shape is None or spec.alloc_shape == spec.shape
        self._bound, self._may_move = bound, may_move and is_dense and self._static is not None
        self.follow()
        self._home = self._address = 0 if self._static is None else self._static.data_ptr()
        is_array = self._static is not None and self._static.is_cpu and self._static.dtype != torch.bfloat16
        self._array = self._static.numpy() if self._static is not None and is_array else None
        self._low, self._high = spec.bounds or (INT32_MIN, INT32_MAX)
        self._checks_integers = is_int(spec.dtype) and (spec.bounds is not None or spec.dtype == "int64")
        self._limit = FLOAT_MAX.get(spec.storage) if spec.storage != spec.dtype else None

    def go_home(self) -> None:
        """Bind this input to the program's own buffer again."""
        if self._move is not None:
            self._go_to(self._home)

    def follow(self) -> None:
        """Update the reference to the launches, which were prepared again and read the program's own buffer."""
        self._move = self._bound.mover(self.name) if self._may_move else None

    def is_at(self, value: torch.Tensor) -> bool:
        """Whether the input is bound to this tensor's memory."""
        return self._address == value.data_ptr()

    def fill(self, value: torch.Tensor) -> None:
        """Make the next launch read this value; the tensor must stay alive until that launch has finished.

        Raises:
            InputError: the value holds an index out of bounds, or a number that the storage dtype cannot hold.
        """
        if self._checks_integers:
            self._check_integers(value)
        elif self._limit is not None:
            self._check_floats(value, self._limit)
        static = self._static
        if static is None:
            self._buffer.write(tensor_to_numpy(value.cpu()), self._spec)
            return
        if (
            self._move is not None
            and value.dtype == static.dtype
            and value.is_contiguous()
            and value.device == static.device
        ):
            self._go_to(value.data_ptr())
            return
        if self._move is not None:
            self._go_to(self._home)
        if self._array is not None and value.dtype == static.dtype and not value.requires_grad:
            # Not `Tensor.copy_`: PyTorch's threads keep spinning for a while and delay the native kernels that follow.
            np.copyto(self._array, value.numpy())
        else:
            static.copy_(value)

    def _go_to(self, address: int) -> None:
        if address != self._address:
            assert self._move is not None
            self._move(address)
            self._address = address

    def _check_integers(self, value: torch.Tensor) -> None:
        if value.device.type != "cpu" or not value.numel():
            return
        low, high = torch.aminmax(value)
        if int(low) < self._low or int(high) > self._high:
            problem = out_of_bounds(value.numpy(), self._low, self._high)
            raise InputError(f"'{self.name}' {problem}")

    def _check_floats(self, value: torch.Tensor, limit: float) -> None:
        if value.device.type != "cpu" or not value.numel() or not value.is_floating_point():
            return
        low, high = torch.aminmax(value)
        largest = max(-float(low), float(high))
        if limit < largest < float("inf"):
            lost = beyond_range(largest, self._spec.storage)
            raise InputError(f"'{self.name}' holds {lost}; compile the module with dtype bfloat16 or float32")


class OutputPort:
    """Returns a program's output as a tensor.

    Args:
        spec: The output's shape and dtype.
        bound: The program bound to its buffers.
        device: The torch device of the tensor.
        is_result: Whether the caller keeps the output, so that it needs memory of its own.
        donor: The input whose memory the output is written to; empty if there is none.
    """

    def __init__(
        self, spec: TensorSpec, bound: BoundProgram, device: torch.device, is_result: bool, donor: str
    ) -> None:
        self.name, self.donor = spec.name, donor
        self._spec, self._device, self._is_result = spec, device, is_result
        self._buffer = bound.outputs[spec.name]
        self._static = shared_tensor(self._buffer)
        if self._static is not None and self._static.shape != spec.shape:
            whole = self._static.reshape(spec.alloc_shape or spec.shape)
            self._static = whole[tuple(slice(size) for size in spec.shape)]
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        is_dense = spec.alloc_shape is None or spec.alloc_shape == spec.shape
        is_plain = is_dense and self._static is not None and self._static.dtype == self._dtype
        is_near = self._static is not None and self._static.device == device
        self._bound, self._may_move = bound, is_result and is_plain and is_near and not donor
        self._move: Callable[[int], None] | None = None
        self._room: torch.Tensor | None = None
        self.follow()

    def go_home(self) -> None:
        """Bind this output to the program's own buffer again."""
        if self._move is not None and self._static is not None:
            self._move(self._static.data_ptr())

    def follow(self) -> None:
        """Update the reference to the launches, which were prepared again and write the program's own buffer."""
        self._move = self._bound.mover(self.name) if self._may_move else None

    def make_room(self) -> None:
        """Bind this output to a new tensor if the device can write to PyTorch's memory."""
        if self._move is not None:
            assert self._static is not None
            self._room = torch.empty_like(self._static)
            self._move(self._room.data_ptr())

    def take(self) -> torch.Tensor:
        """Return the output of the last launch.

        It is a new tensor if the caller keeps it, else one that the next launch overwrites.
        """
        if self._room is not None:
            room, self._room = self._room, None
            return room
        static = self._static
        if static is None:
            return numpy_to_tensor(self._buffer.to_numpy(self._spec)).to(self._device)
        if static.dtype != self._dtype or static.device != self._device:
            return static.to(self._device, self._dtype)
        return static.clone(memory_format=torch.contiguous_format) if self._is_result else static
