"""Builds the source distribution and the wheels: one of pure Python, and one with compiled kernels for each machine.

    python -m release.wheels dist build/programs

All wheels contain the cache entries of `release.programs`. On Linux the machines are x86-64 and AArch64, each with a
library for each of its CPU levels (sets of instruction set extensions); auditwheel checks that they run on the systems
that the wheel's platform tag promises. On a Mac, only that Mac's own architecture is built.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from npu_runtime.cache_folder import read_entry
from npu_runtime.cpu.levels import LEVELS, this_cpu
from npu_runtime.cpu.native.build import build, find_compiler, shipped_name
from npu_sim.cache import SHIPPED

_ROOT = Path(__file__).resolve().parents[1]
_KERNELS = Path("npu_runtime", "cpu", "native", "shipped")
_PROGRAMS = SHIPPED.relative_to(_ROOT)
_MOST_BYTES = 15_000_000
_MACOS = "11.0"  # the first macOS on AArch64


@dataclass(frozen=True)
class Target:
    """An architecture to build a wheel for.

    Attributes:
        machine: The architecture's name, as in `npu_runtime.cpu.levels`.
        tag: The wheel's platform tag.
        compiler: Path of the C++ compiler.
    """

    machine: str
    tag: str
    compiler: str


def targets() -> list[Target]:
    """The architectures to build for on this system. Raises `RuntimeError` if a compiler is missing."""
    own = this_cpu().machine
    if platform.system() == "Darwin":
        os.environ["MACOSX_DEPLOYMENT_TARGET"] = _MACOS
        architecture = {"aarch64": "arm64"}.get(own, own)
        return [Target(own, f"macosx_{_MACOS.replace('.', '_')}_{architecture}", _found(find_compiler(), "c++"))]
    machines = ("x86_64", "aarch64")
    names = {machine: f"{machine}-linux-gnu-g++" for machine in machines}
    compilers = {x: find_compiler() if x == own else shutil.which(names[x]) for x in machines}
    return [Target(x, f"manylinux_2_28_{x}", _found(compilers[x], names[x])) for x in machines]


def _found(compiler: str | None, name: str) -> str:
    if compiler is None:
        raise RuntimeError(f"the wheels need {name}: on Debian, apt-get install g++ g++-aarch64-linux-gnu")
    return compiler


def build_all(folder: Path, programs: Path) -> list[Path]:
    """Build the source distribution and all wheels into a folder; return the wheels, the pure Python one first.

    Args:
        folder: Emptied before.
        programs: Folder with the cache entries of `release.programs`.

    Raises:
        RuntimeError: a build command fails, a compiler is missing, or a wheel is too large or needs too new a system.
    """
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", folder, _ROOT)
    (pure,) = folder.glob("*.whl")
    with _unpacked(pure) as content:
        shutil.copytree(programs, content / _PROGRAMS)
    return [pure, *(with_kernels(pure, target) for target in targets())]


@contextmanager
def _unpacked(wheel: Path) -> Iterator[Path]:
    """Unpack a wheel and yield the folder.

    On exit, pack it into a wheel beside the first, named by the tag it has by then.
    """
    with tempfile.TemporaryDirectory() as work:
        _run(sys.executable, "-m", "wheel", "unpack", "--dest", work, wheel)
        (content,) = Path(work).iterdir()
        yield content
        _run(sys.executable, "-m", "wheel", "pack", "--dest-dir", wheel.parent, content)


def with_kernels(pure: Path, target: Target) -> Path:
    """Build a machine's wheel beside the pure Python wheel, from its content and compiled kernels; return its path.

    Raises:
        RuntimeError: the wheel is too large, or needs newer systems than its platform tag says.
    """
    with _unpacked(pure) as content:
        _add_libraries(content / _KERNELS, target)
        (description,) = content.glob("*.dist-info/WHEEL")
        text = re.sub(r"(?m)^Root-Is-Purelib: .*$", "Root-Is-Purelib: false", description.read_text())
        description.write_text(re.sub(r"(?m)^Tag: .*$", f"Tag: py3-none-{target.tag}", text))
    (wheel,) = pure.parent.glob(f"*-{target.tag}.whl")
    size = wheel.stat().st_size
    if size > _MOST_BYTES:
        raise RuntimeError(f"{wheel.name} has {size / 1e6:.1f} MB; the most is {_MOST_BYTES / 1e6:.0f} MB")
    if target.tag.startswith("manylinux"):
        _audit(wheel, target.tag)
    return wheel


def _add_libraries(folder: Path, target: Target) -> None:
    folder.mkdir()
    for level in LEVELS:
        if level.machine == target.machine:
            print(f"{target.tag}: {level.name}", flush=True)
            path = build(target.compiler, level, tuning=None).path
            content = read_entry(path)
            if content is None:
                raise RuntimeError(f"'{path}' is damaged; build again")
            (folder / shipped_name(level)).write_bytes(content)


def _audit(wheel: Path, tag: str) -> None:
    """Raise `RuntimeError` if auditwheel finds that the wheel needs a newer system than its platform tag says."""
    options = ("--json", "--disable-isa-ext-check")
    verdict = json.loads(_run(sys.executable, "-m", "auditwheel", "show", *options, wheel))
    if not _is_older_or_same(verdict["overall_tag"], tag):
        raise RuntimeError(f"auditwheel finds that {wheel.name} needs {verdict['overall_policy']}: {verdict}")


def _is_older_or_same(policy: str, tag: str) -> bool:
    versions = [tuple(map(int, re.findall(r"_(\d+)", name)[:2])) for name in (policy, tag)]
    return policy.startswith("manylinux_") and versions[0] <= versions[1]


def _run(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def main(arguments: Iterable[str] | None = None) -> None:
    """Build into the folder that the command line names, and print each wheel's name and size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", type=Path)
    given = parser.parse_args(None if arguments is None else list(arguments))
    for wheel in build_all(given.folder, given.programs):
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
