"""All that is known of an op stands on its row: nobody else names ops (docs/architecture.md, section 3)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("npu_compiler", "cuda_compiler", "npu_runtime", "cuda_runtime", "metal_emulator", "npu_sim")
# The op table, the patterns that fusions look for, what hands ops to PyTorch, what takes them apart, and what builds
# graphs to be measured.
NAME_OPS = (
    "npu_compiler/ops/",
    "npu_compiler/fusions/",
    "npu_runtime/cpu_fallback.py",
    "npu_sim/module/own_decompositions/",
    "npu_sim/calibration/probes.py",
)


def spelled_ops(path: Path) -> Iterator[str]:
    """Each ATen name in a file's strings, docstrings aside, with its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = (node.body[0] for node in ast.walk(tree) if isinstance(node, holders) and node.body)
    docstrings = {id(statement.value) for statement in first if isinstance(statement, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            for name in re.findall(r"\baten\.\w+", node.value):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_only_the_op_table_the_fusions_and_the_cpu_fallback_name_ops(package: str) -> None:
    files = [path for path in (ROOT / package).rglob("*.py") if path.relative_to(ROOT).as_posix().startswith(NAME_OPS)]
    others = set((ROOT / package).rglob("*.py")) - set(files)
    assert [found for path in sorted(others) for found in spelled_ops(path)] == []


def test_the_search_finds_names() -> None:
    assert len(list(spelled_ops(ROOT / "npu_compiler/ops/aliases.py"))) > 30
