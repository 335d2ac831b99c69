"""docs/adding_an_op.md, done as it stands on a copy of the packages: edits made, code run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "npu_compiler",
    "cuda_compiler",
    "npu_runtime",
    "cuda_runtime",
    "metal_kernels",
    "metal_emulator",
    "npu_sim",
)
TEXT = (ROOT / "docs" / "adding_an_op.md").read_text(encoding="utf-8")
EDIT = re.compile(r"(Append\s+to|New\s+file)\s+`([^`]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Compiled for every architecture by NVRTC, which needs no GPU.
COMPILE_CUDA = "\nfrom cuda_toolchain import compile_sources\ncompile_sources(program.plan.sources.values())\n"


def edits() -> list[tuple[str, str, str]]:
    """(`Append to` or `New file`, path, text) of every edit that the page tells to make."""
    return [(" ".join(what.split()), path, text) for what, path, text in EDIT.findall(TEXT)]


def code_to_run() -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", EDIT.sub("", TEXT), re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages with all edits made."""
    folder = tmp_path_factory.mktemp("packages")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for what, path, text in edits():
        target = folder / path
        assert target.exists() == (what == "Append to"), path
        before = target.read_text(encoding="utf-8") + "\n\n" if target.exists() else ""
        target.write_text(before + text, encoding="utf-8")
    return folder


def test_an_op_on_every_device_takes_five_places() -> None:
    touched = {path for _, path, _ in edits()}
    assert len(edits()) == len(touched) == 5
    assert {Path(path).parts[0] for path in touched} == {
        "npu_compiler",
        "npu_runtime",
        "metal_kernels",
        "cuda_compiler",
    }


def test_the_page_runs_on_the_cpu_the_metal_emulator_and_compiled_for_cuda(edited: Path) -> None:
    assert "MetalBackend(api=metal_emulator.api())" in code_to_run()
    code = code_to_run() + COMPILE_CUDA
    paths = os.pathsep.join((str(edited), str(ROOT / "tests" / "support")))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=edited, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_without_the_edits_the_new_op_is_refused() -> None:
    code = code_to_run()
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0 and "linalg_cross" in result.stderr
