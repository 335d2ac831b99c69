"""No barrier and no bounds guard in the Metal kernels is there for nothing: without any one of them, a case fails."""

from __future__ import annotations

import pytest
from metal_mutants import cases_by_file, judge

FILES = cases_by_file()
# Every thread of these has an element of its own, and none too many run.
WITHOUT_MUTANTS = {"add_relu.metal", "elementwise.metal", "elementwise_extended.metal", "elementwise_special.metal"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_barrier_and_guard_is_missed(name: str) -> None:
    verdicts = list(judge(FILES[name]))
    assert (not verdicts) == (name in WITHOUT_MUTANTS), f"{len(verdicts)} barriers and guards were found"
    survivors = [v.mutant for v in verdicts if v.killer is None]
    assert [f"{m.file}:{m.line} {m.function}: {m.kind} {m.text}" for m in survivors] == []
