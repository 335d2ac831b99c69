"""`StepProgram`: a compiled program of a language model, bound to its buffers once and then run many times."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from npu_sim.llm.sampling import Logits
from npu_sim.parallel.group import RankGroup

if TYPE_CHECKING:
    from npu_runtime import DeviceBuffer, Executor


ProgramName: TypeAlias = Hashable
"""A model's name for one of its programs, such as "decode" or the number of tokens of a prefill run; can be pickled."""


class StepProgram:
    """A compiled program with its executor and the input buffers that every run uses.

    After `write` or `fill`, the next run uploads all inputs that are not shared. A run without them takes the values on
    the device, such as the token that the previous run chose.

    Args:
        name: The model's name for it.
        shared: Input buffers that are shared with other programs, by name; the others are allocated here.
        group: Processes for other devices, which run their program of the same name with the same uploads. None: there
            is one device.
    """

    def __init__(
        self,
        name: ProgramName,
        executor: "Executor",
        weights: "dict[str, DeviceBuffer]",
        shared: "dict[str, DeviceBuffer]",
        group: RankGroup | None = None,
    ) -> None:
        self.executor = executor
        self._name, self._group = name, group
        program = executor.program
        self._specs = {spec.name: spec for spec in program.input_specs if spec.name not in shared}
        self._staged = executor.backend.allocate_staged(self._specs.values())
        self._bound = executor.bound(weights, {**shared, **self._staged.buffers})
        self._logits = program.output_specs[0].name
        self._is_filled = False

    def write(self, **values: Sequence[Any] | NDArray[Any]) -> None:
        """Set the values of inputs that are not shared, by name.

        Raises:
            InputError: a value does not fit its input.
        """
        from npu_runtime.packing import pack_array

        for name, value in values.items():
            self._staged.arrays[name][...] = pack_array(np.asarray(value), self._specs[name])
        self._is_filled = True

    def fill(self, name: str, values: NDArray[Any], rest: int | None = 0) -> None:
        """Set the leading part of an input, along all of its dimensions.

        The rest of it is set to the number `rest` unless that is None. The caller has checked the values.
        """
        array = self._staged.arrays[name]
        if rest is not None and values.shape != array.shape:
            array.fill(rest)
        array[tuple(slice(size) for size in values.shape)] = values
        self._is_filled = True

    def run(self) -> None:
        """Launch the program, on all devices of the group, without waiting for it."""
        if self._group is None:
            self._launch()
            return
        uploads = self._staged.arrays if self._is_filled else {}
        with self._group.calling("run", self._name, uploads):
            self._launch()

    def _launch(self) -> None:
        if self._is_filled:
            self._staged.upload()
            self._is_filled = False
        self._bound.run()

    def reader(self) -> Callable[[], Logits]:
        """A function that returns the logits of the last run, [vocab] or row after row, in float32.

        The function raises `DeviceError` if a later run has replaced the logits.
        """
        output, group = self._bound.result(self._logits), self._group

        def read() -> Logits:
            with group.together() if group else nullcontext():
                return np.asarray(output.to_numpy(), np.float32).reshape(-1)

        return read
