"""The results of a benchmark: saving them as JSON, and merging runs that each measured a part."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OURS, EAGER, COMPILED, TORCHAO = "npu-sim", "PyTorch eager", "torch.compile", "torchao, torch.compile"
Key = tuple[str | int, ...]


def _key(task: str, model: str, case: dict[str, int]) -> Key:
    """Return a key that identifies a measurement and by which results are sorted."""
    return (task, model, *(value for _, value in sorted(case.items())))


@dataclass(frozen=True)
class Figure:
    """The time of a step for every contender, and its lower bound.

    Attributes:
        task: `decode`, `large-decode`, `quantized-decode`, `prefill` or `vision`.
        model: Name of the model.
        case: The parameters: cache length and position, prompt tokens, or batch size.
        ms: Contender → median milliseconds per step.
        floor_ms: The lower bound that the machine's bandwidth or matrix rate sets; `floor` is its derivation in words.
        steady: Counters of one step of ours: kernels, CUDA graph launches, allocations, copies.
        errors: Contender → ‖logits - reference‖ / ‖reference‖, with PyTorch in float32 as the reference.
        notes: Anything else, such as which variant of a peer was the fastest.
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
        """The time of `torch.compile` divided by ours; None if it was not measured."""
        return self.ms[COMPILED] / self.ms[OURS] if COMPILED in self.ms else None


@dataclass(frozen=True)
class Account:
    """The time of a step of ours by kernel: rows of (kernel, milliseconds on the device, launches)."""

    task: str
    model: str
    case: dict[str, int]
    step_ms: float
    rows: list[tuple[str, float, float]]

    @property
    def key(self) -> Key:
        return _key(self.task, self.model, self.case)


_SAME = ("gpu", "cuda", "cpu", "level", "threads", "torch", "versions")  # must be equal in runs that are merged


@dataclass
class Run:
    """The results of one run, or of several on the same kind of machine.

    Attributes:
        machine: The GPU or CPU, versions, measured peak rates, and the date.
        figures: Times of steps, ours and others'.
        accounts: Our time by kernel.
        other: Results that are not compared with peers, such as start-up times, by name.
    """

    machine: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)
    other: dict[str, float] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def merged(self, later: Run) -> Run:
        """Return the results of both runs in order; the later result counts if both measured the same case.

        The machine is the later run's if that has figures, whose lower bounds depend on its peak rates.

        Raises:
            ValueError: the runs used different machines or versions.
        """
        if other := [
            f"{key} {self.machine.get(key)}" for key in _SAME if self.machine.get(key) != later.machine.get(key)
        ]:
            raise ValueError(f"the results to merge with were measured with another {', '.join(other)}")
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
