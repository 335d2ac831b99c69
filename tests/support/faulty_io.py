"""Fault injection for operations that write files: each system call fails in turn, or the process is killed there.

    LD_PRELOAD=faulty_io.so python tests/support/faulty_io.py FOLDER COMPILER

prints, as JSON, for each operation how many calls it makes and what went wrong. All cases are in one process, which a
fork is killed for, since importing takes seconds.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram, compile, files
from npu_compiler.errors import InputError
from npu_compiler.files import UNFINISHED
from npu_runtime import cache_folder
from npu_runtime.cpu import levels
from npu_runtime.cpu.native import build
from npu_runtime.cpu.tuning import Choice, ChoiceTable
from npu_sim.cache import cached_facts, cached_program
from npu_sim.module.saved_file import SavedModule, StoredTensor, write_module
from npu_sim.module.structure import OutputLeaf, Tree

KILL = -1  # in faulty_io.c
FAULTS = {"disk full": errno.ENOSPC, "input/output error": errno.EIO, "interrupted": errno.EINTR, "killed": KILL}
_shim = ctypes.CDLL(None)

Snapshot = dict[str, bytes]


@dataclass(frozen=True)
class Operation:
    """Something that writes into a folder.

    Attributes:
        prepare: Makes what is there before.
        act: Writes, in the process that a fault hits; returns what it says of a failure.
        must_not_fail: Whether a failure is a warning that the cache folder cannot be written, and no more.
    """

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path], str | None]
    must_not_fail: bool = True


def program(name: str) -> CompiledProgram:
    return compile(ir(name))


def ir(name: str) -> dict[str, Any]:
    g = IRBuilder(name)
    g.output(g("aten.relu.default", g.input("x", 2, 3)))
    return g.ir()


def save(folder: Path) -> str | None:
    try:
        NEW.save(folder / "model.npubin")
    except InputError as error:
        message = str(error)
        return message if message.startswith(f"cannot write '{folder / 'model.npubin'}': ") else f"UNCLEAR {message}"
    return None


def save_module(folder: Path) -> str | None:
    tensors = {name: StoredTensor("float32", (3,), lambda: np.ones(3, np.float32)) for name in ("a", "b")}
    leaf = Tree("leaf")
    module = SavedModule(
        "m", "1", b"{}", (), (), {}, {}, {}, None, {}, None, (), {}, (), (OutputLeaf(),), leaf, (), (), ()
    )
    try:
        write_module(folder / "model.npumod", module, tensors)
    except InputError as error:
        message = str(error)
        return message if message.startswith(f"cannot write '{folder / 'model.npumod'}': ") else f"UNCLEAR {message}"
    return None


def build_kernels(folder: Path) -> str | None:
    outcome = build._find.__wrapped__()
    return outcome if isinstance(outcome, str) else None


def keep_choice(folder: Path) -> None:
    ChoiceTable({"processor": "one"}, folder).keep("a call", Choice("sgemm", {"sgemm": 1.0}))


def nothing(folder: Path) -> None:
    pass


def damage(folder: Path, act: Callable[[Path], object]) -> None:
    act(folder)
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-3])


OLD, NEW = program("old"), program("new")


def facts(folder: Path) -> None:
    cached_facts("fact", "key", lambda: {"a": list(range(100))})


def cached(folder: Path) -> None:
    cached_program("new", "key", lambda: ir("new"))


OPERATIONS = [
    Operation("save", lambda folder: OLD.save(folder / "model.npubin"), save, must_not_fail=False),
    Operation("save where nothing is", nothing, save, must_not_fail=False),
    Operation("module", nothing, save_module, must_not_fail=False),
    Operation("facts", nothing, facts),
    Operation("facts over damaged ones", lambda folder: damage(folder, facts), facts),
    Operation("program", nothing, cached),
    Operation("program over a damaged one", lambda folder: damage(folder, cached), cached),
    Operation("tuning table", lambda f: ChoiceTable({"processor": "one"}, f).keep("b", Choice("x", {})), keep_choice),
    Operation("native build", nothing, build_kernels),
]


def started_anew(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `act` as if this process had just started; return its result, or its error as `{"raised": …}`."""
    files.remove_leftovers.cache_clear()
    cache_folder._warn_once.cache_clear()
    try:
        return act()
    except Exception as error:
        return {"raised": repr(error)}


def killed(act: Callable[[], object]) -> dict[str, Any]:
    """Runs `act` in a fork of this process, which it must not survive."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return {"killed": True} if os.WIFSIGNALED(status) else {"raised": "nothing: the process went on"}


def report(operation: Operation, folder: Path, at: int, fault: int) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _shim.faulty_arm(str(folder).encode(), at, fault)
        try:
            said = operation.act(folder)
        finally:
            calls = _shim.faulty_calls()
            _shim.faulty_arm(b"", 0, 0)
    return {"calls": calls, "said": said, "warnings": [str(warning.message) for warning in caught]}


def snapshot(folder: Path) -> Snapshot:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(UNFINISHED)}


def examine(operation: Operation, folder: Path) -> dict[str, Any]:
    """Return the operation's number of system calls, and a sentence for each property that does not hold."""
    fresh(folder, {})
    operation.prepare(folder)
    before = snapshot(folder)
    calls = started_anew(lambda: report(operation, folder, 0, 0))["calls"]
    after = snapshot(folder)
    wrong: list[str] = []
    for (fault, error), at in itertools.product(FAULTS.items(), range(1, calls + 1)):
        fresh(folder, before)
        act = functools.partial(report, operation, folder, at, error)
        answer = started_anew(functools.partial(killed, act) if error == KILL else act)
        found = snapshot(folder)
        problems = [name for name in found if found[name] not in (before.get(name), after.get(name))]
        problems += sorted(before.keys() - found.keys())
        problems += unclear(operation, answer, found == after)
        started_anew(lambda: report(operation, folder, 0, 0))
        left = sorted(path.name for path in folder.iterdir())
        if left != sorted(after) or snapshot(folder) != after:
            problems.append(f"after the next start there is {left}")
        wrong += [f"call {at} of {calls}, {fault}: {problem}" for problem in problems]
    return {"calls": calls, "wrong": wrong}


def unclear(operation: Operation, answer: dict[str, Any], is_done: bool) -> Iterator[str]:
    """Yield the faults of a process's answer after an injected fault."""
    if "killed" in answer:
        return
    if "raised" in answer:
        yield f"raised {answer['raised']}"
        return
    said, warned = answer["said"], answer["warnings"]
    if said and ("UNCLEAR" in said or "\n" in said or operation.must_not_fail):
        yield f"said {said!r}"
    if len(warned) > 1 or any(
        "cannot write to the cache folder" not in x and "ignoring the t" not in x for x in warned
    ):
        yield f"warned {warned}"
    if not (said or warned or is_done):
        yield "said nothing, and wrote nothing"


def fresh(folder: Path, content: Snapshot) -> None:
    for path in (folder, Path(tempfile.gettempdir())):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    for name, data in content.items():
        (folder / name).write_bytes(data)


def main(folder: Path, compiler: str) -> None:
    tempfile.tempdir = str(folder / "temporary")
    os.environ["NPU_SIM_CACHE"] = str(folder / "cache")
    build.find_compiler = lambda: compiler
    build._ROOM = 4096
    build._UNITS, (unit, *_) = (), build._units()
    build._units = lambda: [unit]
    levels.forced_level = build.forced_level = lambda: None
    build.this_cpu = lambda: levels.CPU("none", "some CPU", frozenset())
    print(json.dumps({operation.name: examine(operation, folder / "cache") for operation in OPERATIONS}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
