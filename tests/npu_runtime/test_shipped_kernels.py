"""Native kernels that a wheel brings: when they are used, and what is done where they do not fit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from npu_runtime.cpu import levels
from npu_runtime.cpu.native import build

COMPILER = """\
#!/bin/sh
[ "$1" = --version ] && { echo fake 1.0; exit; }
while [ "$1" != -o ]; do shift; done
cat > /dev/null < /dev/null
sleep "${DELAY:-0}"
echo code > "$2"
"""


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of shipped libraries, empty, on a machine of level x86-64-v3 without a compiler."""
    level = levels.find_level("x86-64-v3")
    monkeypatch.setattr(build, "this_cpu", lambda: levels.CPU(level.machine, "some CPU", level.features))
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.setattr(build, "_SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path / "cache"))
    for name in (levels.VARIABLE, "NPU_SIM_NATIVE", "NPU_SIM_SANITIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "shipped").mkdir()
    return tmp_path / "shipped"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "compiler"
    path.write_text(COMPILER)
    path.chmod(0o755)
    monkeypatch.setattr(build, "find_compiler", lambda: str(path))
    return path


def bring(folder: Path, *names: str) -> list[Path]:
    paths = [folder / build.shipped_name(levels.find_level(name)) for name in names]
    for path in paths:
        path.write_text("code")
    return paths


def outcome() -> object:
    return build._find.__wrapped__()


def test_the_library_of_the_best_level_is_used_without_a_compiler(shipped: Path) -> None:
    _, best, _ = bring(shipped, "x86-64-v2", "x86-64-v3", "x86-64-v4")
    assert outcome() == build.Library(best, levels.find_level("x86-64-v3"))


def test_nothing_is_compiled_where_the_library_fits(shipped: Path, compiler: Path, tmp_path: Path) -> None:
    (best,) = bring(shipped, "x86-64-v3")
    library = outcome()
    assert isinstance(library, build.Library) and (library.path, library.compiler) == (best, None)
    assert not (tmp_path / "cache").exists()


def test_a_lower_level_serves_only_where_nothing_can_be_compiled(
    shipped: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lower,) = bring(shipped, "x86-64-v2")
    compiled = outcome()
    assert isinstance(compiled, build.Library) and compiled.level.name == "x86-64-v3" and compiled.compiler
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert outcome() == build.Library(lower, levels.find_level("x86-64-v2"))


def test_a_forced_level_has_its_own_library(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower, _ = bring(shipped, "x86-64-v2", "x86-64-v3")
    monkeypatch.setattr(build, "forced_level", lambda: levels.find_level("x86-64-v2"))
    assert outcome() == build.Library(lower, levels.find_level("x86-64-v2"))


def test_a_library_of_other_sources_or_options_is_passed_over(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(shipped, "x86-64-v3")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    assert str(outcome()).startswith("no C++ compiler found")


@pytest.mark.parametrize("variable, value", [("NPU_SIM_NATIVE", "compile"), ("NPU_SIM_SANITIZE", "thread")])
def test_a_user_may_ask_for_compiled_kernels(
    shipped: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    bring(shipped, "x86-64-v3")
    monkeypatch.setenv(variable, value)
    library = outcome()
    assert isinstance(library, build.Library) and library.compiler == str(compiler)


def test_an_interrupt_ends_the_compilers(compiler: Path, tmp_path: Path) -> None:
    script = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script += "from npu_runtime.cpu.levels import find_level\nfrom npu_runtime.cpu.native.build import build\n"
    script += f"build({str(compiler)!r}, find_level('x86-64-v2'))"
    cache = tmp_path / "cache"
    environment = {**os.environ, "DELAY": "60", "NPU_SIM_CACHE": str(cache)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.DEVNULL) as running:
        deadline = time.monotonic() + 60
        while not list(cache.glob(".npu-unfinished-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        start = time.monotonic()
        running.send_signal(signal.SIGINT)
        assert running.wait(30) != 0
    assert time.monotonic() - start < 10  # half a second on an idle machine, and 60 where the compilers go on
    assert not list(cache.glob(".npu-unfinished-*"))
