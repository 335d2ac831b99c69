"""PyTorch's operator database and random modules, through every front door, against eager PyTorch."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import operator_database as database
import pytest
import torch
from drawn import drawn
from operator_database import HANG, RAW, REFUSED, RIGHT, WRONG, Problem
from random_modules import random_module

from benchmarks.pages import operators
from npu_compiler.errors import InputError
from npu_compiler.ops.registry import OPS


def faults_of_drawn_cases(seed: int, count: int) -> list[str]:
    """Return what is wrong in cases drawn from the database, in words."""
    draw = random.Random(seed)
    names = draw.choices(sorted(database.operators().keys() - database.FAULTY), k=count)
    return [fault for name in names if (fault := database.fault_of_drawn_case(name, draw)) is not None]


def faults_of_random_modules(seeds: range) -> list[str]:
    faults = []
    for seed in seeds:
        module, inputs = random_module(seed)
        for route in ("compile", "save and load", "torch.compile"):
            outcome = database.run_module(module, inputs, route)
            if outcome is not None and outcome.kind not in (RIGHT, REFUSED):
                faults.append(f"random module {seed}, {route}: {outcome.kind}: {outcome.message}: {module.source}")
    return faults


@pytest.mark.parametrize("share", drawn(range(2), 1 / 2))
def test_drawn_cases_of_the_database_are_right_or_refused_in_a_sentence(share: int, seed: int) -> None:
    assert faults_of_drawn_cases(seed, 8) == [], f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("share", range(4))
def test_many_drawn_cases_of_the_database_are_right_or_refused_in_a_sentence(share: int, seed: int) -> None:
    assert faults_of_drawn_cases(seed, 60) == [], f"seed {seed}"


def test_random_modules_answer_as_pytorch_does_or_are_refused(seed: int) -> None:
    assert faults_of_random_modules(range(seed, seed + 3)) == []


@pytest.mark.slow
@pytest.mark.parametrize("share", range(5))
def test_many_random_modules_answer_as_pytorch_does_or_are_refused(share: int, seed: int) -> None:
    assert faults_of_random_modules(range(seed, seed + 30)) == []


def test_excuses_are_few_and_have_reasons() -> None:
    assert len(database.EXCUSES) < 10
    assert all(len(reason.split()) > 4 for reason in database.EXCUSES.values())
    assert {name for name, _ in database.EXCUSES} <= database.operators().keys()


@pytest.mark.parametrize(
    ("ours", "kind"),
    [
        (lambda x: x * 2, RIGHT),
        (lambda x: x * 2.001, WRONG),
        (lambda x: (x * 2).double(), WRONG),
        (lambda x: x.mul_(2), WRONG),
        (lambda x: x[:1] * 2, WRONG),
        (lambda x: None, WRONG),
    ],
)
def test_the_judge_tells_right_from_wrong(ours: object, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(database._ROUTES, "compile", lambda module, tensors, off: (ours(y := tensors[0].clone()), (y,)))
    x = torch.tensor([[1.0, -3.0], [float("nan"), 1e-3]])
    outcome = database.run_module(Doubled(), (x,), "compile")
    assert outcome is not None and outcome.kind == kind


@pytest.mark.parametrize(
    ("error", "kind"), [(InputError("no"), REFUSED), (InputError("no\nno"), RAW), (KeyError("x"), RAW)]
)
def test_the_judge_tells_a_refusal_from_a_raw_error(
    error: Exception, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setitem(database._ROUTES, "compile", fail)
    outcome = database.run_module(Doubled(), (torch.ones(2),), "compile")
    assert outcome is not None and outcome.kind == kind


def test_a_case_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(database, "SECONDS", 1)
    monkeypatch.setitem(database._ROUTES, "compile", hang)
    outcome = database.run_module(Doubled(), (torch.ones(2),), "compile")
    assert outcome is not None and outcome.kind == HANG


def test_half_precision_is_judged_by_pytorchs_own_error() -> None:
    exact = torch.linspace(1, 2, 50, dtype=torch.float64)
    eager = exact.to(torch.bfloat16)
    assert database._float_difference(eager, eager, [exact]) is None
    assert database._float_difference(eager * 1.1, eager, [exact]) is not None


def test_a_more_exact_answer_is_right_where_pytorchs_own_is_nan() -> None:
    exact = torch.tensor([94.0366, 1.0], dtype=torch.float64)
    eager = torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16)
    assert database._float_difference(exact.to(torch.bfloat16), eager, [exact]) is None
    assert database._float_difference(exact.to(torch.bfloat16) * 1.1, eager, [exact]) is not None


def test_indices_of_equal_elements_are_alike_with_and_without_their_dimension() -> None:
    values = torch.tensor([[3, 1, 3], [2, 2, 5]])
    ours, theirs = torch.tensor([2, 0]), torch.tensor([0, 1])
    assert database._pick_the_same(values, ours, theirs)
    assert database._pick_the_same(values, ours.unsqueeze(1), theirs.unsqueeze(1))
    assert not database._pick_the_same(values, torch.tensor([1, 0]), theirs)


def test_what_a_causal_mask_hides_may_take_no_part() -> None:
    x = torch.randn(1, 4, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.testing.assert_close(database._attention(x, x, x, is_causal=True), expected)


def test_results_of_a_process_that_was_ended_as_it_wrote_are_read(tmp_path: Path) -> None:
    line = json.dumps(asdict(database.Examination("add", "float32", True, {}, {RIGHT: 3}, [])))
    (tmp_path / "results.jsonl").write_text(f'{line}\n{{"op": "sub", "dty')
    assert list(database.read_results(tmp_path / "results.jsonl")) == ["add"]


def test_special_values_are_put_into_floating_point_tensors_alone() -> None:
    x, index = torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)
    sample = database.Sample((x, index), (0, 1), None)
    special = database.with_special_values(sample, 0)
    assert not torch.equal(special.leaves[0], x) and bool(special.leaves[0].isnan().any())
    assert torch.equal(special.leaves[1], index)


def test_the_page_of_ops_is_current() -> None:
    page = operators.DOCS / "operators.md"
    written = operators.document(json.loads(database.LAST.read_text()))
    assert page.read_text() == written, "run `python -m benchmarks.pages.operators`"


def test_limits_are_read_from_the_rows() -> None:
    assert operators.limits_of(OPS["aten.narrow"]) == ["narrow from a tensor"]
    assert "prelu weight of shape …" in operators.limits_of(OPS["aten.prelu"])
    assert operators.devices_of(OPS["aten.add"]) == ["CPU", "CUDA", "Metal"]
    assert "Metal" not in operators.devices_of(OPS["npu.integer_add"])


def test_a_summary_counts_outcomes_and_names_faults() -> None:
    problem = Problem("float32", 0, "compile", WRONG, "2 for 3")
    found = {
        "add": database.Examination("add", "float32", True, {}, {RIGHT: 3}, []),
        "sub": database.Examination("sub", "float32", False, {"aten.sub": "none"}, {RIGHT: 1, WRONG: 1}, [problem]),
    }
    figures = database.summary(found)
    assert (figures["ops"], figures["on_device"]) == (2, ["add"])
    assert figures["outcomes"] == {RIGHT: 4, REFUSED: 0, WRONG: 1, RAW: 0, HANG: 0}
    assert list(figures["faults"]) == ["sub"]


class Doubled(torch.nn.Module):
    """Twice its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2
