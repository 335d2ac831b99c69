"""`verify`: comparison of a device with PyTorch and, if they differ, a search for the kernel and fusion to blame."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from npu_compiler import CompileOptions, compile, trace_stages
from npu_compiler.compiler import normalize
from npu_compiler.errors import DeviceError, InputError, NPUError
from npu_compiler.fusion_patterns import FUSIONS
from npu_compiler.graph.model import IRGraph, TensorSpec
from npu_compiler.graph.reader import read_ir
from npu_compiler.options import Stage
from npu_compiler.passes.precision import assign_storage, choose_compute_dtype
from npu_runtime import Device, Executor, load_weights
from npu_sim.verify.criteria import OutputReport, compare_output, rms, widen
from npu_sim.verify.culprit import Culprit, find_culprit, kernel_errors
from npu_sim.verify.recording import record
from npu_sim.verify.reference import original_reference, references

Arrays = Mapping[str, np.ndarray]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class VerifyReport:
    """The comparison of every output and, if one fails, the cause.

    Attributes:
        compute_dtype: The compute dtype.
        outputs: The comparison of each output.
        culprit: The first wrong kernel; None if the outputs pass or every kernel is right by itself.
        fusions: The fusions that are each to blame: with only that one disabled, the model passes.
        stages: The stages of the device's target that are each to blame: without only that one, the model passes.
        only_fused: Whether the model passes with all fusions disabled.
        failure: The device's error message if it could not run the program at all, else empty.
        remark: Limit of the comparison: PyTorch could not run the IR as it was read, or normalizing it changed its
            result; else empty.
    """

    compute_dtype: str
    outputs: tuple[OutputReport, ...]
    culprit: Culprit | None = None
    fusions: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    only_fused: bool = False
    failure: str = ""
    remark: str = ""

    @property
    def passed(self) -> bool:
        """Whether the program ran and all outputs pass."""
        return not self.failure and all(output.passed for output in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {"passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{'output':24} {'Pearson r':>10} {'RMS error':>11} {'PyTorch ' + self.compute_dtype:>18}"]
        for output in self.outputs:
            r = "-" if output.pearson is None else f"{output.pearson:.6f}"
            lines.append(f"{output.name:24} {r:>10} {output.rms_error:11.3e} {output.reference_error:18.3e}")
            lines += [f"    {problem}" for problem in output.problems]
        lines += [text for text in (self.failure, self.remark) if text]
        if self.passed:
            return "\n".join([*lines, "the device agrees with PyTorch"])
        lines.append("the device differs from PyTorch")
        if self.culprit is not None:
            lines.append(str(self.culprit))
        elif not self.failure:
            lines.append("every kernel is right by itself: either they interact wrongly, or small errors accumulate")
        if self.fusions:
            lines.append("it passes without the fusion " + ", or without ".join(f"'{name}'" for name in self.fusions))
        elif self.only_fused:
            lines.append("it passes with all fusions disabled, but not with any single one disabled")
        if self.stages:
            lines.append("it passes without the stage " + ", or without ".join(f"'{name}'" for name in self.stages))
        return "\n".join(lines)


def input_specs(graph: IRGraph, compute_dtype: str | None = None) -> list[TensorSpec]:
    """Return the specs of the graph's inputs, with the bounds on indices that a compiled program checks.

    Args:
        compute_dtype: None: the compiler's choice for this model.
    """
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
    """Compare a device with PyTorch.

    Args:
        ir: A path, a dict or a graph, as for `npu_compiler.compile`.
        weights: `state_dict` key → array or tensor.
        inputs: One mapping of input name → array for each run.
        device: Default: the best one on this machine.
        compute_dtype: `float16`, `bfloat16` or `float32`. Default: the compiler's choice for this model.
        progress: Called with (steps done, total steps), from 0 again for each phase. None: no progress is reported.

    Raises:
        IRError, ConstraintError: the graph cannot be compiled as one program.
        WeightError, InputError: the weights or inputs do not fit.
    """
    return _Verification(read_ir(ir), weights, inputs, device or Device(), compute_dtype, progress).report()


def verify_kernels(
    ir: Any,
    weights: Mapping[str, Any],
    inputs: Arrays,
    device: Device,
    *,
    compute_dtype: str | None = None,
) -> list[Culprit]:
    """Compare each kernel of a program with PyTorch, on the inputs that the kernel had on the device.

    Arguments and errors are those of `verify`, for one set of inputs. Kernels whose output is not a tensor of PyTorch's
    graph, such as those that write a part of a tensor, are left out.
    """
    return _Verification(read_ir(ir), weights, [inputs], device, compute_dtype, None).kernels()


def _is_same_result(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two float32 results differ only by rounding; elements that are not finite in both are ignored."""
    one, other = widen(left), widen(right)
    finite = np.isfinite(one) & np.isfinite(other)
    return rms((one - other)[finite]) <= 1e-3 * rms(one[finite]) + 1e-30


def _moved(half: np.ndarray, exact: np.ndarray, original: np.ndarray) -> np.ndarray:
    """Return the original graph's result plus PyTorch's rounding error on the normalized graph.

    Args:
        half: Result of the normalized graph in the compute dtype.
        exact: Result of the normalized graph in float32.
        original: Result of the graph as it was read, in float32.
    """
    if half.dtype.kind not in "fV":
        return half
    with np.errstate(invalid="ignore"):
        return np.asarray(widen(original) + (widen(half) - widen(exact)))


class _Verification:
    """The verification of one model: its references, and programs compiled without some fusions and stages."""

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
        # Let the device check weights and inputs before PyTorch does: its error messages are clearer.
        self.program = self._compile(())
        self.loaded = load_weights(weights, self.program, device, strict=False)
        for arrays in inputs:
            for spec in self.program.input_specs:
                if spec.name not in arrays:
                    raise InputError(f"missing input '{spec.name}'")
                device.backend.allocate_buffer(np.asarray(arrays[spec.name]), spec=spec)
        self.exact, self.half = references(self.normal, weights, self.dtype)
        self.original = original_reference(graph, weights)
        self.expected: list[
            tuple[list[np.ndarray], list[np.ndarray]]
        ] = []  # per run: PyTorch's outputs, exact and half
        self.remark = ""

    def _options(self, disabled: Collection[str]) -> CompileOptions:
        """Return compile options that leave out the named fusions and stages of the target."""

        def without(stages: list[Stage]) -> list[Stage]:
            return [stage for stage in stages if stage[0] not in disabled]

        return CompileOptions(self.dtype, disabled_fusions=set(disabled) & set(FUSIONS), stages=without)

    def _compile(self, disabled: Collection[str]) -> Any:
        return compile(self.graph, self.device.backend.target, self._options(disabled))

    def report(self) -> VerifyReport:
        for index, arrays in enumerate(self.inputs):
            self.expected.append(self._expect(arrays))
            self._advance(index + 1, len(self.inputs))
        try:
            outputs = self._outputs(())
        except DeviceError as error:
            return VerifyReport(self.dtype, (), failure=str(error), remark=self.remark)
        if all(output.passed for output in outputs):
            return VerifyReport(self.dtype, outputs, remark=self.remark)
        only_fused = self._passes(tuple(FUSIONS))
        culprit = self._locate(() if only_fused else tuple(FUSIONS))
        fusions = self._blamed(tuple(FUSIONS)) if only_fused else ()
        stages = self._blamed([name for name, _ in self.device.backend.target.stages()])
        return VerifyReport(self.dtype, outputs, culprit, fusions, stages, only_fused, remark=self.remark)

    def kernels(self) -> list[Culprit]:
        """Return the error of each kernel on the first set of inputs, in the order of the compiled graph."""
        records = record(self.program, self._final_graph(()), self.device.backend, self.inputs[0], self.loaded)
        return list(kernel_errors(self._final_graph(()), records, self.inputs[0], self.exact, self.half, self.dtype))

    def _expect(self, arrays: Arrays) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return PyTorch's outputs: of the graph as it was read in float32, and in the compute dtype."""
        normal = self.exact.run(arrays)
        exact = [normal[tensor] for tensor in self.normal.outputs]
        try:
            half = self.half.run(arrays)
        except DeviceError:  # PyTorch refuses scalars that the dtype cannot hold
            half = normal
        near = [half[tensor] for tensor in self.normal.outputs]
        try:
            read = self.original.run(arrays)
            original = [read[tensor] for tensor in self.original.graph.outputs]
        except DeviceError as error:
            self.remark = f"PyTorch cannot run the IR as it is, so the normalized graph is the reference: {error}"
        else:
            if not all(map(_is_same_result, original, exact)):
                self.remark = "normalizing the graph changes its result: the compiler's first passes are to blame"
            return original, list(map(_moved, near, exact, original))
        return exact, near

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
                [exact[index] for exact, _ in self.expected],
                [half[index] for _, half in self.expected],
                self.dtype,
            )
            for index, name in enumerate(self.normal.output_names)
        )

    def _passes(self, disabled: Collection[str]) -> bool:
        try:
            return all(output.passed for output in self._outputs(disabled))
        except NPUError:
            return False

    def _blamed(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return those of the named fusions or stages without which alone the model passes."""
        blamed = []
        for index, name in enumerate(names):
            if self._changes(name) and self._passes((name,)):
                blamed.append(name)
            self._advance(index + 1, len(names))
        return tuple(blamed)

    def _changes(self, name: str) -> bool:
        """Whether leaving out a fusion or stage changes the program's kernels; False if it cannot be compiled then."""
        try:
            return bool(self._compile((name,)).kernels != self.program.kernels)
        except NPUError:
            return False

    def _final_graph(self, disabled: Collection[str]) -> IRGraph:
        """Return the graph from which the program is generated when these fusions and stages are left out."""
        *_, (_, final) = trace_stages(self.graph, self.device.backend.target, self._options(disabled))
        return final

    def _locate(self, disabled: Collection[str]) -> Culprit | None:
        """Return the first wrong kernel over all sets of inputs, in the program compiled with these fusions disabled.

        None if every kernel is right.
        """
        program = self._compile(disabled)
        final = self._final_graph(disabled)
        loaded = load_weights(self.weights, program, self.device, strict=False)
        order = {node.name: index for index, node in enumerate(final.nodes)}
        culprits = []
        for arrays in self.inputs:
            records = record(program, final, self.device.backend, arrays, loaded)
            culprit = find_culprit(final, records, arrays, self.exact, self.half, self.dtype)
            if culprit is not None:
                culprits.append(culprit)
        return min(culprits, key=lambda culprit: order[culprit.node], default=None)
