"""`Step`: a compiled program of the language model, bound to its buffers once and run many times."""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from npu_sim.llm.sampling import Logits

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_runtime import Device, DeviceBuffer, Executor


StepName: TypeAlias = Hashable
"""What a model knows a step by, such as `DECODE`, `SAMPLING`, or the tokens of a prefill step; can be pickled."""
DECODE, SAMPLING = "decode", "sampling"


class Step:
    """A program with its executor and the input buffers that every run uses.

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
        from npu_runtime import NPUBuffer

        self.executor = executor
        self._weights = weights
        self._specs = {spec.name: spec for spec in program.input_specs if spec.name not in kept}
        self._inputs = {name: NPUBuffer.zeros(spec.shape, device, spec.storage) for name, spec in self._specs.items()}
        self._bound = {**self._inputs, **kept}
        self._logits = program.output_specs[0].name
        self._outputs: dict[str, DeviceBuffer] = {}

    def write(self, **values: "Sequence[Any] | np.ndarray") -> None:
        """Set inputs that are not shared, by name."""
        for name, value in values.items():
            self._inputs[name].write(np.asarray(value), self._specs[name])

    def run(self) -> None:
        self._outputs = self.executor.run(self._bound, self._weights)

    def logits(self) -> Logits:
        """The logits of the last run, in float32: [vocab], or row after row."""
        return self.reader()()

    def reader(self) -> Callable[[], Logits]:
        """A function that returns what `logits` does now; it raises `DeviceError` once a later run has replaced it."""
        output = self._outputs[self._logits]
        return lambda: np.asarray(output.to_numpy(), np.float32).reshape(-1)
