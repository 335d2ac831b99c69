"""No module imports itself through others: not at the top, not inside a function, not for type hints, not when used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# `metal_emulator` is not among them: its objects refer to each other, as Metal's own do.
PACKAGES = ["npu_compiler", "cuda_compiler", "npu_runtime", "cuda_runtime", "metal_kernels", "npu_sim"]


def modules(package: str) -> dict[str, Path]:
    """Dotted name → file."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules among `known` that a file imports, those that `deferred` imports when they are used included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from (x for x in ([name] if name in known else [node.module]) if x in known)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "deferred":
            package = ".".join(path.relative_to(ROOT).parts[:-1])
            yield from (f"{package}.{module}" for module in literal(tree, node.args[1]).values())


def literal(tree: ast.Module, node: ast.expr) -> dict[str, str]:
    """The value of a dict, written in place or under a name of the module."""
    if isinstance(node, ast.Name):
        assignments = [x for x in tree.body if isinstance(x, ast.Assign)]
        (node,) = [x.value for x in assignments if isinstance(x.targets[0], ast.Name) and x.targets[0].id == node.id]
    value: dict[str, str] = ast.literal_eval(node)
    return value


def find_circle(arrows: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring, or nothing."""
    waiting = {name: set(targets) for name, targets in arrows.items()}
    while free := [name for name, targets in waiting.items() if not targets]:
        waiting = {name: targets.difference(free) for name, targets in waiting.items() if name not in free}
    if not waiting:
        return []
    ring = [next(iter(waiting))]
    while ring[-1] not in ring[:-1]:
        ring.append(min(waiting[ring[-1]]))
    return ring[ring.index(ring[-1]) :]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    known = modules(package)
    arrows = {name: set(imported(path, known)) - {name} for name, path in known.items()}
    assert len(arrows) == 1 or any(arrows.values())
    assert find_circle(arrows) == []


def test_a_circle_is_found() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]


# What the folders of `npu_compiler` may import, besides what lies at their own height: errors, configuration, versions.
FLOORS = {
    "graph": set(),
    "program": {"graph"},
    "ops": {"graph", "program"},
    "passes": {"graph", "program", "ops"},
    "fusions": {"graph", "program", "ops"},
}
GROUND = {"errors", "target_config", "version"}


@pytest.mark.parametrize("folder", FLOORS)
def test_the_compilers_folders_import_only_those_below_them(folder: str) -> None:
    known = modules("npu_compiler")
    wrong = [
        f"{name} imports {target}"
        for name, path in known.items()
        if name.split(".")[1:2] == [folder]
        for target in imported(path, known)
        if target.split(".")[1] not in {folder, *FLOORS[folder], *GROUND}
    ]
    assert wrong == []
