"""Search for the first wrong kernel of a program.

Each kernel is judged by itself: the program runs launch by launch, every kernel's output is read back, and PyTorch
computes the same tensor from the device's own values of the tensors before it. So errors that a kernel only passes on
are not attributed to it, and one run finds the wrong kernel without compiling anything again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.aliases import view_rule
from npu_runtime import execute_cpu_partition
from npu_sim.verify.criteria import excess_error
from npu_sim.verify.recording import Recorded
from npu_sim.verify.reference import Reference

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Culprit:
    """A kernel and the error of its result with respect to its own inputs; it is wrong if the error is above 1.

    Attributes:
        node, op: The node of the compiled graph that launched the kernel, and its op.
        kernel: The kernel's name.
        tensor: The output that was compared.
        nodes: The IR nodes that the kernel computes, last first.
        error: The error as a multiple of what rounding explains.
    """

    node: str
    op: str
    kernel: str
    tensor: str
    nodes: tuple[str, ...]
    error: float

    def __str__(self) -> str:
        fused = f", which computes {', '.join(self.nodes)}" if len(self.nodes) > 1 else ""
        return (
            f"the first wrong kernel is {self.kernel} of node '{self.node}' ({self.op}){fused}: "
            f"its error is {self.error:.3g} times what rounding explains"
        )


def find_culprit(
    final: IRGraph, records: Mapping[str, Recorded], inputs: Arrays, exact: Reference, half: Reference, dtype: str
) -> Culprit | None:
    """Return the first wrong kernel of a recorded run, in the order of the compiled graph; None if all are right.

    The arguments are those of `kernel_errors`.
    """
    return next(
        (culprit for culprit in kernel_errors(final, records, inputs, exact, half, dtype) if culprit.error > 1), None
    )


def kernel_errors(
    final: IRGraph, records: Mapping[str, Recorded], inputs: Arrays, exact: Reference, half: Reference, dtype: str
) -> Iterator[Culprit]:
    """Yield the error of each kernel of a recorded run, in the order of the compiled graph.

    Kernels whose results PyTorch cannot compute are left out.

    Args:
        final: The graph from which the program was generated.
        records: Result of `recording.record`.
        inputs: Graph input name → array.
        exact, half: The references in float32 and in `dtype`.
        dtype: The compute dtype.
    """
    values: dict[str, np.ndarray] = {name: np.asarray(inputs[name]) for name in final.inputs}
    producer: dict[str, tuple[OpNode, str]] = {}
    for node in final.nodes:
        for out in node.outputs:
            if out in records:
                values[out], producer[out] = records[out].value, (node, records[out].kernel)
            elif view_rule(node) is not None and node.inputs[0] in producer and set(node.inputs) <= values.keys():
                values[out], producer[out] = _follow_alias(final, node, values), producer[node.inputs[0]]
            else:
                continue
            if out not in exact.graph.tensors:
                continue
            before = values.keys() - {out}
            part = exact.part(out, before)
            if not part.nodes:
                continue
            wanted = exact.run(values, part)[out]
            error = excess_error(values[out], wanted, half.run(values, half.part(out, before))[out], dtype)
            blamed, kernel = producer[out]
            names = tuple(node.name for node in reversed(part.nodes) if node.name not in exact.casts)
            yield Culprit(blamed.name, blamed.op_type, kernel, out, names, error)


def _follow_alias(graph: IRGraph, node: OpNode, values: Arrays) -> np.ndarray:
    """Return the output of a view op, which no kernel computes, from the device's value of its input."""
    specs = {name: replace(graph.tensors[name], dtype=values[name].dtype.name) for name in node.inputs}
    out = node.outputs[0]
    specs[out] = replace(graph.tensors[out], dtype=values[node.inputs[0]].dtype.name)
    single = IRGraph(node.name, [node], specs, list(dict.fromkeys(node.inputs)), [out], [out], {}, {})
    return execute_cpu_partition(single, {name: values[name] for name in single.inputs})[out]
