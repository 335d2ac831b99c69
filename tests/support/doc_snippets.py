"""Code blocks of the documents: reading them, comparing them between languages, and running them."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from npu_sim.cli import app

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """A fenced code block.

    Attributes:
        line: Number of its first line of code in the document, from 1.
    """

    document: Path
    line: int
    language: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.document.name}:{self.line}"

    @property
    def can_run(self) -> bool:
        """Whether the block runs; one that cannot says so in its first line, in English: `# Needs a Mac.`."""
        return not self.code.startswith("# Needs ")


def snippets(document: Path) -> list[Snippet]:
    text = document.read_text(encoding="utf-8")
    return [
        Snippet(document, text.count("\n", 0, found.start(2)) + 1, found[1], found[2]) for found in FENCE.finditer(text)
    ]


def without_comments(snippet: Snippet) -> object:
    """Return the content of a block that is the same in every language of the document.

    Diagrams have translated labels: of them, only that they are there.
    """
    if snippet.language == "python":
        return ast.dump(ast.parse(snippet.code))
    if snippet.language == "bash":
        return shlex.split(snippet.code, comments=True)
    if snippet.language == "mermaid":
        return "mermaid"
    return re.sub(r"\s*//.*", "", snippet.code)


def table_rows(document: Path) -> list[tuple[list[str], list[str]]]:
    """Return the parts of each table row that translations keep: code in backticks, numbers with a decimal point."""
    rows = re.findall(r"^\|.*", FENCE.sub("", document.read_text(encoding="utf-8")), re.MULTILINE)
    return [(sorted(re.findall(r"`[^`]+`", row)), re.findall(r"\d+\.\d+", re.sub(r"`[^`]*`", "", row))) for row in rows]


def check_syntax(snippet: Snippet) -> None:
    """Compile Python; have bash read its own, and look up the commands and options of `npu-sim`."""
    if snippet.language == "python":
        _compiled(snippet)
    elif snippet.language == "bash":
        done = subprocess.run(["bash", "-n"], input=snippet.code, capture_output=True, text=True)
        assert done.returncode == 0, f"{snippet.place}: {done.stderr}"
        for words in _commands(snippet):
            if words[0] == "npu-sim":
                assert _unknown(words) == [], snippet.place


def _commands(snippet: Snippet) -> list[list[str]]:
    lines = snippet.code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@functools.cache
def _known_commands() -> dict[str, Any]:
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    return commands


def _unknown(words: list[str]) -> list[str]:
    """The options of a command line that the command does not have; its name, if there is no such command."""
    command = _known_commands().get(words[1])
    if command is None:
        return [words[1]]
    known = {option for parameter in command.params for option in parameter.opts}
    return [word for word in words[2:] if word.startswith("-") and word not in known]


def run(document: Path, names: dict[str, Any]) -> None:
    """Run a document's Python, with those names and its own, and its `npu-sim` commands, in this process and folder."""
    names["__name__"] = "__main__"
    for snippet in snippets(document):
        check_syntax(snippet)
        if snippet.can_run and snippet.language == "python":
            exec(_compiled(snippet), names)
        elif snippet.can_run and snippet.language == "bash":
            for words in _commands(snippet):
                _run_command(snippet, words)


def _compiled(snippet: Snippet) -> Any:
    """Compile a block with the document's own line numbers, so that a traceback leads there."""
    return compile("\n" * (snippet.line - 1) + snippet.code, str(snippet.document), "exec")


def _run_command(snippet: Snippet, words: list[str]) -> None:
    assert words[0] == "npu-sim", f"{snippet.place}: begin a block with '# Needs ...' if a test cannot run '{words[0]}'"
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, f"{snippet.place}: {shlex.join(words)}\n{done.output}"
