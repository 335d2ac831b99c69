"""The support page of a chip: for each op, the dtypes in which the chip runs it and its limits, or why it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from npu_compiler.graph.dtypes import COMPUTE_DTYPES
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.registry import OPS
from npu_compiler.program.kernels import Family
from npu_model.capabilities import short_name
from npu_model.chip import Chip, Limits
from npu_model.lowering.families import CannotLower
from npu_model.lowering.mapper import Mapper
from npu_model.probes import probe
from npu_model.target import NPUTarget


@dataclass(frozen=True)
class Support:
    """Support of an op by a chip.

    Attributes:
        op: Name of the op.
        families: Families of the kernels that compute it; empty for a view.
        dtypes: Dtypes in which the chip computes it; empty if it does not.
        limits: Its limits in words.
        reason: Why the chip does not run it; empty if it does.
        is_view: Whether the op only reinterprets memory, which every chip supports.
        is_probed: Whether support was tested by lowering a small node of the op. Otherwise it is decided for each node
            when a model is compiled.
    """

    op: str
    families: tuple[str, ...]
    dtypes: tuple[str, ...]
    limits: str
    reason: str = ""
    is_view: bool = False
    is_probed: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The support as JSON data."""
        return {**vars(self), "families": list(self.families), "dtypes": list(self.dtypes)}


def find_support(chip: Chip, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Support]:
    """Determine the support of each ATen op of the compiler's op table, in the order of names.

    Args:
        progress: Called with (ops done, total).
    """
    target, mapper = NPUTarget(chip), Mapper(chip)
    names = sorted(name for name in OPS if name.startswith("aten."))
    rows = []
    for name in names:
        rows.append(_support(name, target, mapper))
        progress(len(rows), len(names))
    return rows


def _support(name: str, target: NPUTarget, mapper: Mapper) -> Support:
    if OPS[name].view is not None:
        return Support(name, (), (), "", is_view=True)
    capabilities, own = target.capabilities, short_name(name)
    sample = probe(name, target.lone)
    if sample is None:
        reason = capabilities.missing(own, ())
        return Support(name, (), (), _in_words(capabilities.limits(own, ())), reason or "", is_probed=False)
    families = capabilities.families(*sample, COMPUTE_DTYPES[-1])
    refused = {dtype: _refusal(sample, dtype, target, mapper) for dtype in COMPUTE_DTYPES}
    dtypes = [dtype for dtype, reason in refused.items() if reason is None]
    limits = capabilities.limits(own, families)
    if not capabilities.missing(own, families) and _has_integers(own, families, limits, target.chip):
        dtypes = ["int8", *dtypes]
    reason = "" if dtypes else refused[COMPUTE_DTYPES[0]] or ""
    return Support(name, tuple(family.value for family in families), tuple(dtypes), _in_words(limits), reason)


def _has_integers(name: str, families: tuple[Family, ...], limits: Sequence[tuple[str, Limits]], chip: Chip) -> bool:
    """Whether the chip runs the op in int8, in quantized networks."""
    engine = chip.matrix if {Family.MATMUL, Family.CONV} & set(families) else chip.vector
    allowed = all("int8" in each.dtypes for _, each in limits if each.dtypes is not None)
    return f"npu.integer_{name}" in OPS and engine is not None and "int8" in engine.rates and allowed


def _refusal(sample: tuple[OpNode, IRGraph], dtype: str, target: NPUTarget, mapper: Mapper) -> str | None:
    """The reason why the chip does not run a node in a dtype; None if it does."""
    node, graph = sample
    reason = target.capabilities.refusal(node, graph, dtype)
    if reason is not None:
        return reason
    plan = target.lone.plan(node, graph, dtype)
    try:
        for call in () if plan is None else plan.calls:
            mapper.choices(call)
    except CannotLower as error:
        return str(error)
    return None


def _in_words(limits: Sequence[tuple[str, Limits]]) -> str:
    words = {
        "rank": "rank at most {}",
        "size": "axes of at most {} elements",
        "elements": "tensors of at most {} elements",
        "window": "windows of at most {}",
        "stride": "strides of at most {}",
    }
    tightest: dict[str, int] = {}
    for _, each in limits:
        for name in words:
            value = getattr(each, name)
            if value is not None:
                tightest[name] = min(value, tightest.get(name, value))
    return ", ".join(words[name].format(value) for name, value in tightest.items())


def support_page(chip: Chip, rows: Sequence[Support]) -> str:
    """The support of a chip as a Markdown page."""
    run = [row for row in rows if row.is_probed and not row.is_view and not row.reason]
    lacking = [row for row in rows if row.reason]
    asked = [row for row in rows if not row.is_probed and not row.reason]
    lines = [
        f"# Ops of chip {chip.name}",
        "",
        f"{len(run)} ops run on the chip, {len(lacking)} do not; {len(asked)} depend on the node.",
        "",
        "| op | kernels | dtypes | limits |",
        "|---|---|---|---|",
        *(f"| `{row.op}` | {', '.join(row.families)} | {', '.join(row.dtypes)} | {row.limits or '–'} |" for row in run),
    ]
    if lacking:
        lines += ["", "## Not supported", "", "| op | reason |", "|---|---|"]
        lines += [f"| `{row.op}` | {row.reason} |" for row in lacking]
    if asked:
        lines += ["", "## Asked about node by node", "", ", ".join(f"`{row.op}`" for row in asked)]
    views = [row.op for row in rows if row.is_view]
    lines += ["", "## Views", "", "These compute nothing: " + ", ".join(f"`{name}`" for name in views)]
    return "\n".join(lines) + "\n"


__all__ = ["Support", "find_support", "support_page"]
