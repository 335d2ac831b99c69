"""`Step`: a compiled program of the language model, bound to its buffers once and run many times."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from npu_sim.llm.sampling import Logits

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_runtime import Device, DeviceBuffer, Executor


StepName: TypeAlias = Hashable
"""What a model knows a step by, such as `DECODE`, `SAMPLING`, or the tokens of a prefill step; can be pickled."""
DECODE, SAMPLING = "decode", "sampling"


class Step:
    """A program with its executor and the input buffers that every run uses.

    After `write` or `fill`, the next run uploads all inputs that are not shared. A run without these takes what is on
    the device, such as a token that the run before chose there.

    Args:
        kept: Input buffers that are shared with other steps, by name; the others are allocated here.
    """

    def __init__(
        self,
        program: "CompiledProgram",
        executor: "Executor",
        weights: "dict[str, DeviceBuffer]",
        kept: "dict[str, DeviceBuffer]",
        device: "Device",
    ) -> None:
        self.executor = executor
        self._specs = {spec.name: spec for spec in program.input_specs if spec.name not in kept}
        self._staged = device.backend.allocate_staged(self._specs.values())
        self._bound = executor.bound(weights, {**kept, **self._staged.buffers})
        self._logits = program.output_specs[0].name
        self._is_filled = False

    def write(self, **values: Sequence[Any] | NDArray[Any]) -> None:
        """Set inputs that are not shared, by name.

        Raises:
            InputError: a value does not fit its input.
        """
        from npu_runtime.packing import pack_array

        for name, value in values.items():
            self._staged.arrays[name][...] = pack_array(np.asarray(value), self._specs[name])
        self._is_filled = True

    def fill(self, name: str, values: NDArray[Any], rest: int | None = 0) -> None:
        """Set the first part of an input, along all of its dimensions, and the rest to a number, if one is given.

        The caller has checked the values.
        """
        array = self._staged.arrays[name]
        if rest is not None and values.shape != array.shape:
            array.fill(rest)
        array[tuple(slice(size) for size in values.shape)] = values
        self._is_filled = True

    def uploads(self) -> Mapping[str, NDArray[Any]]:
        """What the next run uploads, by name; nothing if it takes what is on the device."""
        return self._staged.arrays if self._is_filled else {}

    def run(self) -> None:
        if self._is_filled:
            self._staged.upload()
            self._is_filled = False
        self._bound.run()

    def logits(self) -> Logits:
        """The logits of the last run, in float32: [vocab], or row after row."""
        return self.reader()()

    def reader(self) -> Callable[[], Logits]:
        """A function that returns what `logits` does now; it raises `DeviceError` once a later run has replaced it."""
        output = self._bound.result(self._logits)
        return lambda: np.asarray(output.to_numpy(), np.float32).reshape(-1)
