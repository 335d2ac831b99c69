"""The page of ops: the op table with limits and devices, and the outcomes for PyTorch's operator database.

`python -m benchmarks.pages.operators` writes `docs/operators.md` from the op table and from `docs/operators.json`,
which `make test-operators` writes.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from cuda_compiler.cuda_templates import RULES
from npu_compiler.ops.registry import OPS, ByteStorage, Op
from npu_compiler.program.kernels import KERNELS
from npu_runtime.cpu.kernels.registry import CPU_KERNELS

DOCS = Path(__file__).parents[2] / "docs"


def document(database: Mapping[str, Any]) -> str:
    """Return the page in Markdown.

    Args:
        database: The content of `docs/operators.json`.
    """
    rows = {name: op for name, op in sorted(OPS.items()) if not name.startswith("npu.")}
    lines = [
        "# Ops",
        "",
        "The rows of the op table, and what became of PyTorch's operator database. Written by",
        "`python -m benchmarks.pages.operators`.",
        "",
        "## PyTorch's operator database",
        "",
        *_database(database),
        "",
        "## The op table",
        "",
        f"{len(rows)} ops have a row. An overload or in-place variant without a row of its own has that of its op. An",
        "op without a row is taken apart into ops with one where that is possible; else PyTorch runs it on the CPU.",
        "All ops compute on floating-point tensors in the compute dtype (float32, float16 or bfloat16); the second",
        "column says which integer results an op may have. Complex tensors, and tensors of more than eight dimensions,",
        "stay with PyTorch. A limit is what the compiler says of a call that it leaves to PyTorch.",
        "",
        "| op | integer results | limits | devices |",
        "|---|---|---|---|",
    ]
    for name, op in rows.items():
        limits = "; ".join(_cell(limit) for limit in limits_of(op))
        lines.append(f"| `{name}` | {integers_of(op)} | {limits} | {', '.join(devices_of(op))} |")
    return "\n".join(lines) + "\n"


def _database(database: Mapping[str, Any]) -> list[str]:
    """Return the figures of the last run as Markdown, with the ops that are not on the device and the reasons."""
    outcomes = database["outcomes"]
    listed = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    on_device, total = len(database["on_device"]), database["ops"]
    lines = [
        f"The {total} entries of `torch.testing._internal.common_methods_invocations.op_db` of PyTorch",
        f"{database['torch']}, in float32, float16, bfloat16, int64 and bool, through `npu_sim.compile` and",
        "`torch.compile`, saved and loaded, with in-place variants and special values (NaN, infinities, -0, denormals,",
        "extremes),",
        f"against eager PyTorch: {listed}.",
        "Refused means an error of one sentence. Random ops and uninitialized memory are compared in shape and dtype.",
        "",
        f"**{on_device} of {total} are wholly on the device** in float32 (in their first dtype where they lack it):",
        "every sample, after decomposition. What the others leave to PyTorch:",
        "",
        "| op that leaves the device | entries | reason |",
        "|---|---|---|",
    ]
    entries: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for off in database["off_device"].values():
        named = {op: reason for op, reason in off.items() if not op.startswith("<built-in")}
        entries.update(named.keys())
        for op, reason in named.items():
            reasons.setdefault(op, "no row" if reason.endswith("is not in the op table") else reason)
    ordered = sorted(entries.items(), key=lambda item: (-item[1], item[0]))
    return lines + [f"| `{op}` | {count} | {_cell(reasons[op])} |" for op, count in ordered]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def integers_of(op: Op) -> str:
    """Return a phrase for the integer dtypes that an op's results may have."""
    allows_bytes = op.byte_storage is not ByteStorage.NONE
    if op.moves:
        return "all"
    if op.integer_range is not None or op.is_cast:
        return "32 bits" + (", bytes" if allows_bytes else "")
    return "bytes" if allows_bytes else "none"


def limits_of(op: Op) -> list[str]:
    """Return the reasons for which an op may refuse a node, read from the source of its `unsupported` function."""
    return list(dict.fromkeys(_reasons(op.unsupported, set())))


def _reasons(function: Callable[..., Any], seen: set[Any]) -> Iterator[str]:
    if function in seen or not isinstance(function, FunctionType) or not function.__module__.startswith("npu_compiler"):
        return
    seen.add(function)
    tree = _tree(function)
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    returned += [node.body for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    for expression in returned:
        for part in () if expression is None else _results(expression):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value
            elif isinstance(part, ast.JoinedStr):
                yield "".join(str(x.value) if isinstance(x, ast.Constant) else "…" for x in part.values)
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
                yield from _reasons(_named(function, part.func.id), seen)


def _tree(function: FunctionType) -> ast.AST:
    """Return the parsed source of a function; for a lambda, that of the lambda alone."""
    source = textwrap.dedent(inspect.getsource(function))
    if function.__name__ != "<lambda>":
        return ast.parse(source)
    text = source[source.index("lambda") :]
    for end in range(len(text), 0, -1):
        try:
            tree = ast.parse(text[:end].strip().rstrip(","), mode="eval")
        except SyntaxError:
            continue
        if isinstance(tree.body, ast.Lambda):
            return tree
    raise ValueError(f"cannot read the lambda in {source!r}")


def _named(function: FunctionType, name: str) -> Any:
    closed = inspect.getclosurevars(function)
    return {**closed.globals, **closed.nonlocals}.get(name)


def _results(expression: ast.expr) -> Iterator[ast.expr]:
    """Yield the branches of conditional and boolean expressions: the expressions whose value may be the result."""
    if isinstance(expression, ast.IfExp):
        yield from _results(expression.body)
        yield from _results(expression.orelse)
    elif isinstance(expression, ast.BoolOp):
        for value in expression.values:
            yield from _results(value)
    else:
        yield expression


def devices_of(op: Op) -> list[str]:
    """Return the devices that have all kernels that an op's lowering names.

    Kernels of element-wise ops and copies are not counted, since all devices have them.
    """
    kernels = kernels_of(op)
    names = []
    if kernels <= CPU_KERNELS.keys():
        names.append("CPU")
    if kernels <= RULES.keys():
        names.append("CUDA")
    if all(KERNELS[name].source for name in kernels):
        names.append("Metal")
    return names


def kernels_of(op: Op) -> set[str]:
    """Return the kernels named in an op's lowering function or in functions that it calls."""
    kernels: set[str] = set()
    _collect(op.lower, kernels, set())
    return kernels


def _collect(function: Any, kernels: set[str], seen: set[Any]) -> None:
    if not isinstance(function, FunctionType) or function in seen or not function.__module__.startswith("npu_compiler"):
        return
    seen.add(function)
    for code in _codes(function.__code__):
        kernels.update(x for x in code.co_consts if isinstance(x, str) and x in KERNELS)
        for name in code.co_names:
            _collect(function.__globals__.get(name), kernels, seen)
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        kernels.update({value} & KERNELS.keys() if isinstance(value, str) else ())
        _collect(value, kernels, seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def main() -> None:
    database = json.loads((DOCS / "operators.json").read_text())
    (DOCS / "operators.md").write_text(document(database))


if __name__ == "__main__":
    main()
