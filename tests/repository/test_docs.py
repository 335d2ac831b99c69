"""References of the documents exist: links and their sections, files, public names, sections that the code cites."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in ("build", "dist") for part in path.relative_to(ROOT).parts)
)
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PACKAGES = sorted(path.parent for path in ROOT.glob("*/py.typed"))
TOP_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}
DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def prose(document: Path) -> str:
    """A document without its code blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """The names under which a document's headings can be linked to; a translated heading may give its own."""
    headings = re.findall(r"^#+ (.+?)(?: \{ #(\S+) \})?$", prose(document), re.MULTILINE)
    return {name or re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading, name in headings}


@DOCUMENT
def test_links_lead_to_files_and_sections_that_exist(document: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if "://" in link:
            continue
        path, _, section = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (section and section not in anchors(target)):
            wrong.append(link)
    assert wrong == []


@DOCUMENT
def test_files_that_a_document_names_exist(document: Path) -> None:
    """A path in backticks that starts with a folder of the repository; the walk-throughs' new files aside."""
    text = re.sub(r"(?:New file|새 파일)\s+`[^`]+`", "", prose(document))
    named = {path for path in re.findall(r"`([\w./*-]+)`", text) if path.split("/")[0] in TOP_FOLDERS and "/" in path}
    missing = [path for path in named if not any(ROOT.glob(path.rstrip("/")))]
    assert sorted(missing) == []


@DOCUMENT
def test_benchmarks_that_a_document_names_can_be_run(document: Path) -> None:
    """Modules after `python -m`, but for a changelog, which names those of its time."""
    if document.name == "CHANGELOG.md":
        return
    for name in re.findall(r"python -m\s+(benchmarks(?:\.\w+)+)", document.read_text(encoding="utf-8")):
        path = ROOT / name.replace(".", "/")
        sources = [file for file in (path.with_suffix(".py"), path / "__main__.py") if file.is_file()]
        assert sources and '__name__ == "__main__"' in sources[0].read_text(encoding="utf-8"), name


def doors() -> dict[str, list[str]]:
    """Door → the modules that it leads to, as the table has them."""
    table = ARCHITECTURE.read_text(encoding="utf-8").split("## 8. Doors")[1]
    rows = re.findall(r"^\| `([\w.]+)` \| (.+) \|$", table, re.MULTILINE)
    return {door: re.findall(r"`([\w.]+)`", targets) for door, targets in rows}


def statements(module: Path) -> list[ast.stmt]:
    """A module's statements, its docstring aside."""
    body = ast.parse(module.read_text(encoding="utf-8")).body
    return body[1:] if body and isinstance(body[0], ast.Expr) else body


def only_imports(module: Path) -> bool:
    """Whether a module has imports from its own project and `__all__`, and nothing else."""
    code = statements(module)
    names = [ast.unparse(target) for node in code if isinstance(node, ast.Assign) for target in node.targets]
    return (
        bool(code)
        and names in ([], ["__all__"])
        and all(isinstance(node, ast.ImportFrom | ast.Assign) for node in code)
    )


def test_the_table_of_doors_is_complete() -> None:
    modules = [path for package in PACKAGES for path in package.rglob("*.py") if path.stem != "__init__"]
    found = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules if only_imports(path)}
    assert sorted(doors()) == sorted(found)


@pytest.mark.parametrize("door", doors())
def test_a_door_leads_where_the_table_says(door: str) -> None:
    importlib.import_module(door)
    sources = {
        node.module
        for node in statements(ROOT / f"{door.replace('.', '/')}.py")
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert all(
        any(source == target or source.startswith(f"{target}.") for target in doors()[door]) for source in sources
    )
    assert all(
        any(source == target or source.startswith(f"{target}.") for source in sources) for target in doors()[door]
    )


def test_sections_that_the_code_cites_are_those_of_the_architecture() -> None:
    sections = set(re.findall(r"^## (\d+)\. ", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE))
    files = [path for folder in (*PACKAGES, ROOT / "tests", ROOT / "benchmarks") for path in folder.rglob("*.py")]
    wrong = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"\bsection (\d+)", text):
            place, number = text[max(0, match.start() - 30) : match.start()], match[1]
            if number not in sections or "docs/architecture.md" not in place:
                wrong.append(f"{path.relative_to(ROOT)}: {place}section {number}")
    assert wrong == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
