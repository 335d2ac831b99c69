"""The fuzzers themselves, and what they have found: each finding as the shortest change of a file that shows it."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import mutations
import targets
from drawn import drawn
from plain_data import change
from targets import TARGETS, Target, corpus

from npu_compiler import IRError, NPUError, ProgramFormatError, WeightError
from npu_compiler.errors import InputError

NAMES = list(TARGETS)


@pytest.fixture(autouse=True)
def other_tests_keep_their_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set the variable that targets set, so that it is as before after the test."""
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path / "cache"))


def node(ir: Any, op: str) -> Any:
    return next(node for node in ir["nodes"] if node["op_type"].startswith(op))


def without_an_input(ir: Any) -> None:
    node(ir, "aten.index_copy")["inputs"].pop()


def with_dim(value: Any) -> Callable[[Any], None]:
    return lambda ir: node(ir, "aten.index_copy")["attrs"].update(dim=value)


def with_eps(value: Any) -> Callable[[Any], None]:
    return lambda ir: node(ir, "aten.batch_norm")["attrs"].update(eps=value)


def with_an_output_too_many(ir: Any) -> None:
    outputs = node(ir, "aten.index_copy")["outputs"]
    outputs.append(dict(outputs[0]))
    ir["graph_outputs"][0]["producer_output_idx"] = 1


def of_many_dimensions(content: Any) -> None:
    content["header"]["empty"]["shape"] = [0] * 100


def without_a_flag(program: Any) -> None:
    call = next(call for call in program["body"]["plan"]["calls"] if "has_bias" in call["params"])
    del call["params"]["has_bias"]


def used_late(program: Any) -> None:
    buffer = next(buffer for buffer in program["body"]["plan"]["buffers"].values() if buffer["kind"] == "arena")
    buffer["last_use"] = 10**8


def with_another_size(module: Any) -> None:
    module["description"]["programs"][0]["sizes"].append(2)


def with_a_long_integer(module: Any) -> None:
    node(module["ir"], "aten.mul")["attrs"]["other"] = 10**30


def with_eos(value: Any) -> Callable[[Any], None]:
    return lambda config: config.update(eos_token_id=value)


def with_a_wide_box(tiles: Any) -> None:
    transfer = tiles[2][4][0][3][0]
    assert tiles[1][transfer[0]] == "Transfer"
    transfer[4][0][0] = transfer[4][0][2] = 2**40


FINDINGS: dict[str, tuple[str, int, Callable[[Any], None], type[NPUError], str]] = {
    "ir, a missing input": ("ir", 0, without_an_input, IRError, r"node 'index_copy' .*not enough values"),
    "ir, a dimension that is no number": ("ir", 0, with_dim("x"), IRError, r"node 'index_copy' .*must be integers"),
    "ir, a dimension that is none": ("ir", 0, with_dim(7), IRError, r"node 'index_copy' .*out of range"),
    "ir, an output too many": ("ir", 0, with_an_output_too_many, IRError, "'index_copy__1': .* fewer outputs"),
    "ir, a text for a number": ("ir", 2, with_eps("x"), IRError, "for stage 'fold_batch_norm': could not convert"),
    "ir, a list for a number": ("ir", 2, with_eps([1]), IRError, "for stage 'fold_batch_norm': float"),
    "program, a missing flag": ("program", 2, without_a_flag, ProgramFormatError, "it lacks parameter 'has_bias'"),
    "program, a lifetime": ("program", 1, used_late, ProgramFormatError, "is used by calls that it does not have"),
    "module, sizes of a program": ("module", 2, with_another_size, ProgramFormatError, "is for other sizes than those"),
    "module, a long integer": (
        "module",
        1,
        with_a_long_integer,
        ProgramFormatError,
        "is not a valid module: int too big",
    ),
    "generation, no token": ("generation", 0, with_eos(["</s>"]), InputError, "is neither a token id nor a list"),
    "generation, lists of tokens": ("generation", 0, with_eos([[2]]), InputError, "is neither a token id nor a list"),
    "tiles, a wide box": (
        "tiles",
        1,
        with_a_wide_box,
        ProgramFormatError,
        "transfer 0 on dma0 of section 'gathered': ",
    ),
    "safetensors, too many dimensions": ("safetensors", 0, of_many_dimensions, WeightError, "'empty' cannot have"),
}


@pytest.mark.parametrize(("name", "number", "edit", "error", "message"), FINDINGS.values(), ids=FINDINGS.keys())
def test_what_was_found_is_an_error_that_says_what_is_wrong(
    name: str, number: int, edit: Callable[[Any], None], error: type[NPUError], message: str, tmp_path: Path
) -> None:
    target, files = TARGETS[name], corpus(name)
    opened, seal = target.forms[0]
    content = opened(files[number])
    edit(content)
    with pytest.raises(error, match=message):
        target.prepare(tmp_path)(seal(content))


@pytest.mark.parametrize("name", drawn(NAMES, 1 / 3))
def test_the_corpus_is_read_and_each_form_gives_back_what_it_opened(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    check = target.prepare(tmp_path)
    for data in corpus(name):
        check(data)
        for opened, seal in target.forms:
            try:
                content = opened(data)
            except ValueError:
                assert name == "cache", "only caches are of several kinds"
                continue
            sealed = seal(content)
            assert opened(sealed) == opened(data)
            check(sealed)


@pytest.mark.parametrize("name", drawn([name for name in NAMES if name not in ("run", "cache")], 1 / 3))
def test_changed_files_are_refused_in_words(name: str, tmp_path: Path, seed: int) -> None:
    target, files = TARGETS[name], corpus(name)
    check, refused = target.prepare(tmp_path), 0
    for number in range(10 * target.share):
        rng = Random(f"{seed} {number}")
        try:
            check(target.mutate(rng.choice(files), rng))
        except target.refusal:
            refused += 1
    assert refused


def test_a_run_without_a_target_has_files_of_every_format() -> None:
    parts = mutations._parts(None, 1_000_000)
    assert parts.keys() == TARGETS.keys() and min(parts.values()) > 10_000
    assert abs(sum(parts.values()) - 1_000_000) < 100


class Trouble:
    """A target whose files are digits, some of which do what a reader must not."""

    @staticmethod
    def prepare(folder: Path) -> Callable[[bytes], str]:
        def check(data: bytes) -> str:
            match data:
                case b"1":
                    faulthandler.disable()  # its report would stand in the test run's own output
                    os.abort()
                case b"2":
                    time.sleep(3600)
                case b"3":
                    raise KeyError("raw")
                case b"4":
                    raise InputError("refused")
                case b"6":
                    while True:
                        pass
                case b"7":  # as on a busy machine: long by the clock, not in processor time
                    time.sleep(0.7)
            return "read"

        return check

    @staticmethod
    def mutate(data: bytes, rng: Random) -> bytes:
        return rng.choice((b"1", b"2", b"3", b"4", b"5", b"6", b"7"))


def test_crashes_hangs_and_raw_errors_are_found_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers are forked here, so that they know the target of this test."""

    class Troubled(Target):
        def mutate(self, data: bytes, rng: Random) -> bytes:
            return Trouble.mutate(data, rng)

    monkeypatch.setitem(targets.TARGETS, "trouble", Troubled(Trouble.prepare, InputError, ()))
    monkeypatch.setattr(targets, "corpus", lambda name: [b"5"])
    context = mutations.multiprocessing.get_context("fork")
    monkeypatch.setattr(mutations.multiprocessing, "get_context", lambda kind: context)
    report = mutations.run("trouble", 25, 2, 1, longest=0.5, idle=2)
    wanted = [Trouble.mutate(b"", _moved(Random(f"1 {number}"))) for number in range(25)]
    counts = {digit: wanted.count(digit) for digit in (b"1", b"2", b"3", b"4", b"5", b"6", b"7")}
    assert all(counts.values())
    crash = next(outcome for outcome in report.outcomes if outcome.startswith("crash"))
    assert report.outcomes == {
        crash: counts[b"1"],
        "hang": counts[b"2"] + counts[b"6"],
        "raw error: KeyError": counts[b"3"],
        "refused: InputError": counts[b"4"],
        "read": counts[b"5"] + counts[b"7"],
    }
    assert 0 < report.most.seconds < 0.5 and report.most.mebibytes > 10
    found = sorted(number for numbers in report.findings.values() for number in numbers)
    assert found == [number for number, digit in enumerate(wanted) if digit in (b"1", b"2", b"3", b"6")]


def _moved(rng: Random) -> Random:
    rng.choice([b"5"])  # the worker's choice of a file
    return rng


def test_changes_in_a_row_do_not_make_a_file_of_gigabytes() -> None:
    rng, largest = Random(1), 0
    for _ in range(300):
        data: object = [list(range(100)), "x"]
        for _ in range(3):
            data = change(data, rng)
        largest = max(largest, len(json.dumps(data, default=repr)))
    assert 10_000 < largest < 2**26
