"""Builds the source distribution and the wheels: one of Python alone, and one for each machine to compile for.

    python -m release.wheels dist build/programs

All wheels bring the programs and facts of `release.programs`.
On Linux the machines are x86-64 and AArch64, each with a library for each of its CPU levels; auditwheel judges whether
they run on the systems that the wheel's name promises. On a Mac it is that Mac's own machine.
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
    """A kind of machine to build a wheel for.

    Attributes:
        machine: The architecture, as levels name it.
        tag: The wheel's platform tag.
        compiler: Path of the compiler.
    """

    machine: str
    tag: str
    compiler: str


def targets() -> list[Target]:
    """The machines to build for. Raises `RuntimeError` if a compiler is missing."""
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
    """Build the source distribution and all wheels into a folder; return the wheels, that of Python alone first.

    Args:
        programs: Folder of what `release.programs` has made.

    Raises:
        RuntimeError: a wheel cannot be built as it should be.
    """
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", folder, _ROOT)
    (pure,) = folder.glob("*.whl")
    with _unpacked(pure) as content:
        shutil.copytree(programs, content / _PROGRAMS)
    return [pure, *(with_kernels(pure, target) for target in targets())]


@contextmanager
def _unpacked(wheel: Path) -> Iterator[Path]:
    """The content of a wheel, in a folder that is packed again at the end, beside it, under the name of its tag."""
    with tempfile.TemporaryDirectory() as work:
        _run(sys.executable, "-m", "wheel", "unpack", "--dest", work, wheel)
        (content,) = Path(work).iterdir()
        yield content
        _run(sys.executable, "-m", "wheel", "pack", "--dest-dir", wheel.parent, content)


def with_kernels(pure: Path, target: Target) -> Path:
    """Build a machine's wheel from the one of Python alone, beside it.

    Raises:
        RuntimeError: it is too large, or needs newer systems than its tag says.
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
    """Raise `RuntimeError` unless auditwheel finds that the wheel runs wherever its tag says."""
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
    """Build into the folder of the command line, and say what was built."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", type=Path)
    given = parser.parse_args(None if arguments is None else list(arguments))
    for wheel in build_all(given.folder, given.programs):
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
