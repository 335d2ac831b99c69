"""What a measurement gives: the figures of a run, as JSON, merged from runs that each measured a part."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OURS, EAGER, COMPILED = "npu-sim", "PyTorch eager", "torch.compile"
Key = tuple[str | int, ...]


def _key(task: str, model: str, case: dict[str, int]) -> Key:
    """What was measured, which is also the order to list it in."""
    return (task, model, *(value for _, value in sorted(case.items())))


@dataclass(frozen=True)
class Figure:
    """A step's time beside its peers' and its floor.

    Attributes:
        task: `decode`, `prefill` or `vision`.
        case: What was varied: the cache's length and the position, the prompt's tokens, the batch.
        ms: Contender → median milliseconds of a step.
        floor_ms: What the memory or the matrix units of this GPU need at least, by `floor`.
        steady: What a steady step of ours does: CUDA graph launches, kernels in them, allocations, copies.
        errors: Contender → ‖out - ref‖ / ‖ref‖ against PyTorch in float32.
        notes: What else should be known, such as which variant of a peer was the fastest.
    """

    task: str
    model: str
    case: dict[str, int]
    ms: dict[str, float]
    floor_ms: float
    floor: str
    steady: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: str = ""

    @property
    def key(self) -> Key:
        return _key(self.task, self.model, self.case)

    @property
    def speedup(self) -> float | None:
        """How many times faster than `torch.compile`; None where that was not measured."""
        return self.ms[COMPILED] / self.ms[OURS] if COMPILED in self.ms else None


@dataclass(frozen=True)
class Account:
    """Where the time of a step of ours goes: rows of (kernel, milliseconds on the device, launches)."""

    task: str
    model: str
    case: dict[str, int]
    step_ms: float
    rows: list[tuple[str, float, float]]

    @property
    def key(self) -> Key:
        return _key(self.task, self.model, self.case)


_SAME = ("gpu", "torch", "cuda")  # in all runs whose figures stand on one page


@dataclass
class Run:
    """The figures of one run, or of several on the same kind of machine.

    Attributes:
        machine: What it is, its versions and its measured ceilings, and the date.
        other: Figures that have no peers, such as the seconds of a second start.
    """

    machine: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)
    other: dict[str, float] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def merged(self, later: Run) -> Run:
        """Both runs' figures in order; where both measured the same, the later one's.

        The machine is the later run's, unless that run has no figures whose floors were made from its ceilings.

        Raises:
            ValueError: they were made on different machines, or with other versions.
        """
        if other := [f"{key} {self.machine[key]}" for key in _SAME if self.machine[key] != later.machine[key]]:
            raise ValueError(f"the figures that are there were made with another {', '.join(other)}")
        figures = {figure.key: figure for figure in (*self.figures, *later.figures)}
        accounts = {account.key: account for account in (*self.accounts, *later.accounts)}
        return Run(
            later.machine if later.figures else self.machine,
            [figures[key] for key in sorted(figures)],
            [accounts[key] for key in sorted(accounts)],
            {**self.other, **later.other},
        )


def load_run(path: Path) -> Run:
    data = json.loads(path.read_text(encoding="utf-8"))
    accounts = [Account(**{**entry, "rows": [tuple(row) for row in entry["rows"]]}) for entry in data["accounts"]]
    return Run(data["machine"], [Figure(**entry) for entry in data["figures"]], accounts, data["other"])
