"""Check that a graph can run as one NPU program; report every violation at once."""

from __future__ import annotations

from npu_compiler.errors import ConstraintError
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.op_support import supports_node
from npu_compiler.ops.registry import UNSUPPORTED_DTYPES, unsupported_reason
from npu_compiler.ops.rotary_region import OPAQUE_OP
from npu_compiler.passes.integer_ranges import find_integer_ranges
from npu_compiler.program.target import CodegenTarget

ADVICE = "use partition() and DAGExecutor, which run it on the CPU (see `npu-sim partition`)"


def find_violations(graph: IRGraph, target: CodegenTarget | None = None, compute_dtype: str = "") -> list[str]:
    """One sentence per violation, which names the node, its unsupported feature and a remedy.

    Args:
        target: A target to ask about each node too. None asks the op table only.
    """
    violations = []
    for name in graph.inputs:
        spec = graph.tensors[name]
        if spec.dtype in UNSUPPORTED_DTYPES:
            violations.append(
                f"graph input '{name}' {list(spec.shape)} has dtype {spec.dtype}; split it into real parts"
            )
    reasons = {node.name: unsupported_reason(node, graph) for node in graph.nodes}
    unsupported = [name for name, reason in reasons.items() if reason is not None]
    reasons |= find_integer_ranges(graph, on_cpu=unsupported).overflows
    for node in graph.nodes:
        reason = reasons[node.name]
        if reason is None and target is not None:
            reason = target.refusal(node, graph, compute_dtype)
        if reason is not None:
            advice = "extract the IR under torch.no_grad()" if node.op_type == OPAQUE_OP else ADVICE
            violations.append(_violation(node, graph, reason, advice))
    return violations


def _violation(node: OpNode, graph: IRGraph, reason: str, advice: str) -> str:
    shapes = ", ".join(str(list(graph.tensors[out].shape)) for out in node.outputs) or "nothing"
    return f"node '{node.name}' ({node.op_type} → {shapes}): {reason}; {advice}"


def check_constraints(graph: IRGraph, target: CodegenTarget | None = None, compute_dtype: str = "") -> IRGraph:
    """Return the graph unchanged if it can run as one program; arguments are those of `find_violations`.

    Raises:
        ConstraintError: it cannot; lists all violations.
    """
    violations = find_violations(graph, target, compute_dtype)
    if violations:
        raise ConstraintError(violations)
    return graph


def check_target(graph: IRGraph, target: CodegenTarget) -> IRGraph:
    """Return the graph unchanged if the target has all ops that are left after all fusions.

    Raises:
        ConstraintError: the target lacks some; lists all of their nodes.
    """
    reason = target_reason(target)
    violations = [_violation(node, graph, reason, ADVICE) for node in graph.nodes if not supports_node(target, node)]
    if violations:
        raise ConstraintError(violations)
    return graph


def target_reason(target: CodegenTarget) -> str:
    """The sentence that says that a target lacks a node's op."""
    return f"the target '{target.config.name}' does not support it"
