"""Docstrings say what they are about, without the code: none begins with a fragment, and no public name lacks one."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from npu_compiler.graph.quantization import NAMED_FORMATS

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/py.typed"))
FOLDERS = [*PACKAGES, "benchmarks", "docs", "examples", "tests"]

# First words of a text that says nothing without the code: a relative or prepositional clause, a participle, a
# pronoun whose noun is elsewhere, or "have" with somebody else's work.
FRAGMENTS = frozenset(
    """
    about above according across after against alone along also although among and are around as asked at because been
    before behind being below beneath beside besides between beyond but by caused despite done down during either else
    enough even except followed for found from given going had has have having he hence how however in inside instead
    into is it its just kept known lacking left less lest like likely likewise made meanwhile more moreover most must
    named near neither never nevertheless next nonetheless nor not nothing now of off often on once onto or otherwise
    ours over passed past per perhaps rather regarding said same seen shall should shown since so somehow stands such
    taken than that their theirs them then thence there thereby therefore therein these they those though through
    throughout thus till timed to together told too toward towards traced under underneath unless unlike until up upon
    via was were what whatever when whence whenever where whereas whereby wherever which whichever while who whoever
    whom whose why will with within without would yet you your
    """.split()
)


def is_fragment(docstring: str) -> bool:
    """Whether a docstring begins as a fragment does; formulas and `Given:`, which heads a graph, do not."""
    if re.match(r"\s*(the|much the|just the) same\b", docstring, re.IGNORECASE):
        return True
    word = re.match(r"\s*([A-Za-z]+)(?=[\s,.;:!?]|$)(?! *=)", docstring)
    return word is not None and word[1].lower() in FRAGMENTS and not docstring.lstrip().startswith("Given:")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of a module, its classes, functions and attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for before, statement in zip([None, *node.body], node.body, strict=False):
            if before is not None and not isinstance(before, ast.Assign | ast.AnnAssign):
                continue
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_begins_with_a_fragment(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {' '.join(text.split()[:8])}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if is_fragment(text)
    ]
    assert not wrong, "say what it does, returns or is:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "Of a message.",
        "What a call takes.",
        "The same for PyTorch.",
        "Whose keys are new.",
        "Have others wait.",
        "How many.\n\nMore.",
        "As `trace`, but later.",
    ],
)
def test_fragments_are_recognized(text: str) -> None:
    assert is_fragment(text)


@pytest.mark.parametrize(
    "text",
    [
        "Number of new tokens.",
        "Return a copy.",
        "Given:\n    x",
        "out = a + b",
        "Whether it is.",
        "At-most-once sends.",
    ],
)
def test_what_says_something_is_no_fragment(text: str) -> None:
    assert not is_fragment(text)


def test_docstrings_of_all_kinds_are_found() -> None:
    source = '"m"\nx = 1\n"a"\nclass C:\n    "c"\n    y: int = 1\n    "b"\n    def f(self):\n        "f"\n'
    assert [text for _, text in docstrings(ast.parse(source))] == ["m", "a", "c", "b", "f"]


def lists_of_formats(text: str) -> list[str]:
    """The lists in a text that begin with `int4`, of the form "a, b or c", without quotes and line breaks."""
    plain = " ".join(re.sub(r'"\s+"|`|\*\*', "", text).split())
    return re.findall(r"\bint4, (?:\w+, )*\w+ or \w+", plain)


def test_texts_list_the_formats_that_there_are() -> None:
    *first, last = NAMED_FORMATS
    wanted = f"{', '.join(first)} or {last}"
    texts = {
        path: lists_of_formats(path.read_text("utf-8")) for name in PACKAGES for path in (ROOT / name).rglob("*.py")
    }
    assert sum(map(len, texts.values())) > 5, "the form of these lists has changed"
    wrong = [f"{path.relative_to(ROOT)}: {each}" for path, found in texts.items() for each in found if each != wanted]
    assert not wrong, f"the formats are {wanted}:\n" + "\n".join(wrong)


def test_lists_of_formats_are_found_across_quotes_and_lines() -> None:
    assert lists_of_formats('text="Stored as int4,"\n  " int8 or fp8."') == ["int4, int8 or fp8"]
    assert lists_of_formats("`int4`, `int8`,\n   `fp8` or `q5`") == ["int4, int8, fp8 or q5"]


# Words that say when a function returns None; and types whose own docstring says it, once for all that return them.
SAYS_WHEN_NONE = re.compile(r"\b(?:none|if|any|where|unless|otherwise|else|without)\b", re.IGNORECASE)
EXPLAINED = {"NativeLaunch": "npu_runtime/cpu/native/bindings.py", "Shards": "npu_compiler/ops/registry.py"}


def may_be_none(annotation: ast.expr | None) -> bool:
    """Whether an annotation has the form `X | None`."""
    if not isinstance(annotation, ast.BinOp):
        return False
    return any(isinstance(side, ast.Constant) and side.value is None for side in (annotation.left, annotation.right))


def silent_about_none(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Documented public functions that may return None, but do not say when."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        text = ast.get_docstring(node)
        if not text or not may_be_none(node.returns) or SAYS_WHEN_NONE.search(text):
            continue
        assert isinstance(node.returns, ast.BinOp)
        if ast.unparse(node.returns.left) not in EXPLAINED:
            yield node


@pytest.mark.parametrize("folder", PACKAGES)
def test_docstrings_say_when_a_result_is_none(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in silent_about_none(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not wrong, "say when it returns None:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", EXPLAINED)
def test_types_that_explain_none_do(name: str) -> None:
    tree = ast.parse((ROOT / EXPLAINED[name]).read_text("utf-8"))
    (own,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    assert "returns None" in (ast.get_docstring(own) or "")


def test_functions_silent_about_none_are_found() -> None:
    source = """
def f() -> int | None: "Return the size."
def g() -> int | None: "Return the size, or None if it is not known."
def h() -> int: "Return the size."
def _f() -> int | None: "Return the size."
def launch() -> NativeLaunch | None: "Prepare it."
"""
    assert [node.name for node in silent_about_none(ast.parse(source))] == ["f"]


def public_names() -> Iterator[tuple[str, Any]]:
    """Dotted name → function, class or public member of a class, for all that packages export."""
    for module in [*PACKAGES, "npu_sim.llm", "npu_sim.verify", "npu_sim.vision"]:
        package = importlib.import_module(module)
        for name in getattr(package, "__all__", ()):
            value = getattr(package, name)
            if not inspect.isclass(value) and not inspect.isroutine(value):
                continue
            yield f"{module}.{name}", value
            for member in vars(value) if inspect.isclass(value) else ():
                found = inspect.getattr_static(value, member)
                if not member.startswith("_") and (inspect.isroutine(found) or isinstance(found, property)):
                    yield f"{module}.{name}.{member}", getattr(value, member)


def test_public_names_have_docstrings() -> None:
    without = sorted(name for name, value in public_names() if not inspect.getdoc(value))
    assert without == []
