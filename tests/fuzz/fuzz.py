"""A coverage-guided fuzzer of one target, with atheris.

    python tests/fuzz/fuzz.py ir -max_total_time=60

Everything behind the target's name is for libFuzzer. The changes are those of `mutations.py`. A finding is an uncaught
exception, a hang of 30 s or the use of 4 GiB; libFuzzer writes the file that caused it to build/findings and ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from pathlib import Path
from random import Random

import atheris

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

FINDINGS = Path("build/findings")
OURS = ["npu_compiler", "npu_model", "npu_runtime", "npu_sim"]

with atheris.instrument_imports(include=OURS):
    from targets import TARGETS, corpus


def main() -> None:
    name, *options = sys.argv[1:] or [""]
    if name not in TARGETS:
        sys.exit(f"usage: fuzz.py TARGET [libFuzzer's options]; targets are {', '.join(TARGETS)}")
    target = TARGETS[name]
    FINDINGS.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as grown:
        with atheris.instrument_imports(include=OURS):  # much is imported when it is used
            check = target.prepare(Path(folder))
            for number, data in enumerate(corpus(name)):
                check(data)
                Path(grown, str(number)).write_bytes(data)

        def read(data: bytes) -> None:
            with contextlib.suppress(target.refusal):
                check(data)

        def mutate(data: bytes, longest: int, seed: int) -> bytes:
            return target.mutate(data, Random(seed))[:longest]

        limits = ["-timeout=30", "-max_len=65536", "-rss_limit_mb=4096"]
        settings = [*limits, "-verbosity=0", "-print_final_stats=1", f"-artifact_prefix={FINDINGS}/{name}-"]
        atheris.Setup([sys.argv[0], *settings, *options, grown], read, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
    os._exit(0)
