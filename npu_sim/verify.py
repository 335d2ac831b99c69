"""`verify`: hold a device against PyTorch and, where they differ, find the first kernel that departs.

Kernels are judged one by one. A program runs launch by launch, each kernel's output is read back, and PyTorch computes
the same tensor *from the device's own values* of the tensors before it. Errors that merely passed through a kernel
are therefore not held against it, and one run finds the culprit without recompiling anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from npu_compiler import compile, trace_stages
from npu_compiler.compiler import normalize
from npu_compiler.errors import DeviceError, InputError
from npu_compiler.fusion_patterns import FUSIONS
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec
from npu_compiler.graph.reader import read_ir
from npu_compiler.ops.aliases import is_alias
from npu_compiler.passes.precision import assign_storage, choose_compute_dtype
from npu_runtime import Device, Executor, execute_cpu_partition, load_weights
from npu_sim.compare import OutputReport, compare_output, departs
from npu_sim.recording import Recorded, record
from npu_sim.reference import Reference, references

Arrays = Mapping[str, np.ndarray]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Culprit:
    """The first kernel whose result does not follow from its inputs.

    Attributes:
        nodes: The IR nodes that the kernel stands for, last first.
        error: How many times what rounding explains.
    """

    node: str
    op: str
    kernel: str
    tensor: str
    nodes: tuple[str, ...]
    error: float

    def __str__(self) -> str:
        stands = f", which computes {', '.join(self.nodes)}" if len(self.nodes) > 1 else ""
        return (
            f"the first kernel that departs is {self.kernel} of node '{self.node}' ({self.op}){stands}: "
            f"its error is {self.error:.3g} times what rounding explains"
        )


@dataclass(frozen=True)
class VerifyReport:
    """The comparison of every output and, where one fails, who is to blame.

    Attributes:
        fusions: Fusions each of which, switched off alone, makes the model pass.
        only_fused: Whether it passes with all fusions off.
        failure: What the device said, where it could not run the program at all.
    """

    compute_dtype: str
    outputs: tuple[OutputReport, ...]
    culprit: Culprit | None = None
    fusions: tuple[str, ...] = ()
    only_fused: bool = False
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and all(output.passed for output in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{'output':24} {'Pearson r':>10} {'RMS error':>11} {'PyTorch ' + self.compute_dtype:>18}"]
        for output in self.outputs:
            r = "-" if output.pearson is None else f"{output.pearson:.6f}"
            lines.append(f"{output.name:24} {r:>10} {output.rms_error:11.3e} {output.reference_error:18.3e}")
            lines += [f"    {problem}" for problem in output.problems]
        if self.failure:
            lines.append(self.failure)
        if self.passed:
            return "\n".join([*lines, "the device agrees with PyTorch"])
        lines.append("the device differs from PyTorch")
        if self.culprit is not None:
            lines.append(str(self.culprit))
        elif not self.failure:
            lines.append("every kernel by itself is right: they interact wrongly, or small errors add up")
        if self.fusions:
            lines.append("it passes without the fusion " + ", or without ".join(f"'{name}'" for name in self.fusions))
        elif self.only_fused:
            lines.append("it passes with all fusions off, but no single fusion explains it")
        return "\n".join(lines)


def input_specs(graph: IRGraph, compute_dtype: str | None = None) -> list[TensorSpec]:
    """The graph inputs with the index bounds that a program would check."""
    normal = normalize(graph)
    stored = assign_storage(normal, choose_compute_dtype(normal, compute_dtype))
    return [stored.tensors[name] for name in stored.inputs]


def verify(
    ir: Any,
    weights: Mapping[str, Any],
    inputs: Sequence[Arrays],
    device: Device | None = None,
    *,
    compute_dtype: str | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compare a device with PyTorch on sets of inputs.

    Args:
        ir: Whatever `compile` takes.
        weights: `state_dict` key → array or tensor.
        progress: Called with (comparisons done, in all).

    Raises:
        IRError, ConstraintError: the graph cannot be compiled as one program.
        WeightError, InputError: the weights or inputs do not fit.
    """
    return _Verification(read_ir(ir), weights, inputs, device or Device(), compute_dtype, progress).report()


class _Verification:
    """One model, its references, and the device's programs for it with various fusions off."""

    def __init__(
        self,
        graph: IRGraph,
        weights: Mapping[str, Any],
        inputs: Sequence[Arrays],
        device: Device,
        compute_dtype: str | None,
        progress: Progress | None,
    ) -> None:
        self.graph, self.weights, self.inputs, self.device, self.progress = graph, weights, inputs, device, progress
        self.dtype = choose_compute_dtype(graph, compute_dtype)
        self.normal = normalize(graph)
        # The device refuses what does not fit before PyTorch meets it, with the better message.
        self.program = self._compile(())
        self.loaded = load_weights(weights, self.program, device, strict=False)
        for arrays in inputs:
            for spec in self.program.input_specs:
                if spec.name not in arrays:
                    raise InputError(f"missing input '{spec.name}'")
                device.backend.allocate_buffer(np.asarray(arrays[spec.name]), spec=spec)
        self.exact, self.half = references(self.normal, weights, self.dtype)
        self.expected: list[tuple[Arrays, Arrays]] = []

    def _compile(self, disabled: Collection[str]) -> Any:
        target = self.device.backend.target
        return compile(self.graph, target, compute_dtype=self.dtype, disabled_fusions=disabled)

    def report(self) -> VerifyReport:
        for index, arrays in enumerate(self.inputs):
            self.expected.append((self.exact.run(arrays), self.half.run(arrays)))
            self._advance(index + 1, len(self.inputs))
        try:
            outputs = self._outputs(())
        except DeviceError as error:
            return VerifyReport(self.dtype, (), failure=str(error))
        if all(output.passed for output in outputs):
            return VerifyReport(self.dtype, outputs)
        only_fused = self._passes(tuple(FUSIONS))
        culprit = self._locate(() if only_fused else tuple(FUSIONS))
        fusions = self._blame_fusions() if only_fused else ()
        return VerifyReport(self.dtype, outputs, culprit, fusions, only_fused)

    def _advance(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)

    def _outputs(self, disabled: Collection[str]) -> tuple[OutputReport, ...]:
        program = self.program if not disabled else self._compile(disabled)
        loaded = load_weights(self.weights, program, self.device, strict=False)
        executor = Executor(program, self.device)
        results = []
        for arrays in self.inputs:
            buffers = executor.run(arrays, loaded)
            results.append({spec.name: buffers[spec.name].to_numpy(spec=spec) for spec in program.output_specs})
        return tuple(
            compare_output(
                name,
                [result[name] for result in results],
                [exact[tensor] for exact, _ in self.expected],
                [half[tensor] for _, half in self.expected],
                self.dtype,
            )
            for name, tensor in zip(self.normal.output_names, self.normal.outputs, strict=True)
        )

    def _passes(self, disabled: Collection[str]) -> bool:
        try:
            return all(output.passed for output in self._outputs(disabled))
        except DeviceError:
            return False

    def _blame_fusions(self) -> tuple[str, ...]:
        kernels = [(call.kernel, call.node) for call in self.program.kernels]
        blamed = []
        for index, name in enumerate(FUSIONS):
            changed = [(call.kernel, call.node) for call in self._compile((name,)).kernels] != kernels
            if changed and self._passes((name,)):
                blamed.append(name)
            self._advance(index + 1, len(FUSIONS))
        return tuple(blamed)

    def _locate(self, disabled: Collection[str]) -> Culprit | None:
        """The first departing kernel over all sets of inputs, of the program without the disabled fusions."""
        program = self._compile(disabled)
        target = self.device.backend.target
        *_, (_, final) = trace_stages(self.graph, target, compute_dtype=self.dtype, disabled_fusions=disabled)
        loaded = load_weights(self.weights, program, self.device, strict=False)
        order = {node.name: index for index, node in enumerate(final.nodes)}
        found = []
        for arrays in self.inputs:
            records = record(program, final, self.device.backend, arrays, loaded)
            culprit = _first_departure(final, records, arrays, self.exact, self.half, self.dtype)
            if culprit is not None:
                found.append(culprit)
        return min(found, key=lambda culprit: order[culprit.node], default=None)


def _first_departure(
    final: IRGraph, records: Mapping[str, Recorded], inputs: Arrays, exact: Reference, half: Reference, dtype: str
) -> Culprit | None:
    """Judge every recorded tensor in the order of the final graph, given the device's values of those before it."""
    known: dict[str, np.ndarray] = {name: np.asarray(inputs[name]) for name in final.inputs}
    maker: dict[str, tuple[OpNode, str]] = {}
    for node in final.nodes:
        for out in node.outputs:
            if out in records:
                known[out], maker[out] = records[out].value, (node, records[out].kernel)
            elif is_alias(node) and node.inputs[0] in maker and set(node.inputs) <= known.keys():
                known[out], maker[out] = _follow_alias(final, node, known), maker[node.inputs[0]]
            else:
                continue
            if out not in exact.graph.tensors:
                continue
            before = known.keys() - {out}
            part = exact.part(out, before)
            if not part.nodes:
                continue
            wanted = exact.run(known, part)[out]
            error = departs(known[out], wanted, half.run(known, half.part(out, before))[out], dtype)
            if error > 1:
                blamed, kernel = maker[out]
                names = tuple(node.name for node in reversed(part.nodes) if node.name not in exact.casts)
                return Culprit(blamed.name, blamed.op_type, kernel, out, names, error)
    return None


def _follow_alias(graph: IRGraph, node: OpNode, known: Arrays) -> np.ndarray:
    """What a view op shows of a value that the device made."""
    specs = {name: replace(graph.tensors[name], dtype=known[name].dtype.name) for name in node.inputs}
    out = node.outputs[0]
    specs[out] = replace(graph.tensors[out], dtype=known[node.inputs[0]].dtype.name)
    single = IRGraph(node.name, [node], specs, list(dict.fromkeys(node.inputs)), [out], [out], {}, {})
    return execute_cpu_partition(single, {name: known[name] for name in single.inputs})[out]
