"""Takes every barrier and every bounds guard out of the Metal kernels, one at a time, and looks for a case that fails.

    python tests/support/metal_mutants.py [softmax.metal ...]

lists each with the case that noticed. What has to fail is a kernel's differential test or one of the emulator's checks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from metal_harness import Case, all_cases, run_case, run_in_several_orders  # noqa: E402

import metal_emulator  # noqa: E402
from metal_emulator.compiler import Mutant  # noqa: E402
from npu_compiler.errors import DeviceError  # noqa: E402
from npu_compiler.program.target import MetalCodegenTarget  # noqa: E402
from npu_runtime import MetalBackend  # noqa: E402

DTYPE = "float16"


@dataclass(frozen=True)
class Verdict:
    """Outcome of a mutant: the case that failed and its message, or None for a mutant that survived."""

    mutant: Mutant
    killer: str | None
    complaint: str


def source_of(case: Case) -> str:
    """The shader file of a case's kernel."""
    return MetalCodegenTarget().source(case.kernel)


def cases_by_file() -> dict[str, list[Case]]:
    files: dict[str, list[Case]] = {}
    for case in all_cases():
        files.setdefault(source_of(case), []).append(case)
    return files


def judge(cases: list[Case]) -> Iterator[Verdict]:
    """The verdicts on all mutants of one file's kernels, given the cases of that file."""
    api = metal_emulator.api(mutants=True)
    backend = MetalBackend(api, mps=False)
    for case in cases:
        run_case(case, backend, DTYPE, 1)
    mutants = api.emulator.mutants
    assert mutants is not None
    for mutant in list(mutants):
        api.emulator.mutant = mutant.id
        yield _judge(mutant, sorted(cases, key=lambda case: case.kernel != mutant.function), backend, api)


def _judge(mutant: Mutant, cases: list[Case], backend: MetalBackend, api: metal_emulator.MetalAPI) -> Verdict:
    for case in cases:
        try:
            run_in_several_orders(case, backend, api.emulator, DTYPE)
        except (AssertionError, DeviceError) as error:
            return Verdict(mutant, f"{case.id}-{DTYPE}", " ".join(str(error).split()))
    return Verdict(mutant, None, "")


def main(wanted: list[str]) -> int:
    survivors = 0
    for name, cases in sorted(cases_by_file().items()):
        if wanted and name not in wanted:
            continue
        for verdict in judge(cases):
            mutant = verdict.mutant
            print(f"{name}: {mutant.file}:{mutant.line} {mutant.function}: without {mutant.kind} {mutant.text}")
            print(f"    {verdict.killer or 'SURVIVED'}{': ' if verdict.killer else ''}{verdict.complaint[:150]}")
            survivors += verdict.killer is None
    print(f"{survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
