"""Attention on CUDA over keys and values in one piece, with capped scores or sinks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cuda_toolchain
import numpy as np
import pytest
from cuda_on_cpu import EmulatedBackend
from drawn import drawn
from metal_cases.attention import attention, mask
from metal_harness import Case, call_of, run_case

from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.rules.table import expand
from cuda_compiler.specialization.specializer import Specializer

AMPERE = GPU(capability=80)  # whose kernels need no clusters
EMPTY = mask(1, 4, 2, 45, "bool", np.arange(2)[:, None] * np.arange(45) % 2 == 1)  # of the first query
BEGUN = mask(1, 4, 2, 300, "compute", np.where(np.arange(300) < 200, 0.5, -np.inf))
SEEN = mask(24, 8, 64, 70, "bool", np.arange(70) % 48 < 30)
CASES = [
    (attention("plain", 2, 45, 13, soft_cap=0.5, mask=mask(1, 2, 2, 45, "bool")), ["attention_plain"]),
    (attention("once", 2, 45, 16, heads=(4, 2), soft_cap=0.5, mask=mask(1, 4, 2, 45, "bool")), ["attention_once"]),
    (attention("causal", 9, 33, 16, heads=(2, 1), soft_cap=1.5, causal=True), ["attention_once"]),
    (attention("split", 1, 300, 16, heads=(4, 2), soft_cap=1.5), ["attention_split", "attention_combine"]),
    (attention("wide", 1, 30, 136, soft_cap=1.0), ["attention_once"]),
    (attention("tiles", 64, 40, 16, batch=24, heads=(4, 4), soft_cap=1.0, causal=True, atol=1e-3), ["attention_tiled"]),
    (attention("plain-sinks", 2, 45, 13, heads=(4, 2), sinks="float32", mask=EMPTY), ["attention_plain"]),
    (attention("once-sinks", 2, 45, 16, heads=(4, 2), sinks="compute", mask=EMPTY), ["attention_once"]),
    (attention("both", 9, 33, 16, heads=(2, 1), soft_cap=1.5, sinks="float32", causal=True), ["attention_once"]),
    (
        attention("split-sinks", 2, 300, 16, heads=(4, 2), sinks="float32", mask=BEGUN),
        ["attention_split", "attention_combine"],
    ),
    (attention("wide-sinks", 1, 30, 136, heads=(6, 2), sinks="compute"), ["attention_once"]),
    (
        attention("tiles-sinks", 64, 40, 16, batch=24, heads=(8, 4), sinks="compute", causal=True, atol=1e-3),
        ["attention_tiled"],
    ),
    (
        attention("surveyed-sinks", 64, 70, 16, batch=24, heads=(8, 4), sinks="compute", mask=SEEN, atol=1e-3),
        ["attention_survey", "attention_tiled"],
    ),
]


@pytest.mark.parametrize("chosen", drawn(CASES, 1 / 2, lambda chosen: chosen[0].name))
def test_kernels_of_capped_scores_and_sinks_attend_as_the_reference_does(
    chosen: tuple[Case, list[str]], tmp_path: Path, seed: int
) -> None:
    case, wanted = chosen
    assert [call.kernel for call in expand(Specializer(AMPERE), call_of(case, "bfloat16"))] == wanted
    run_case(case, EmulatedBackend(tmp_path, CUDACodegenTarget(AMPERE)), "bfloat16", seed)


def sources(capability: int, **features: Any) -> list[str]:
    """The sources of attention of one query over few and many keys, and of a prompt."""
    make = Specializer(GPU(capability=capability))
    for queries, keys in ((1, 64), (1, 2048), (2048, 2048)):
        case = attention("any", queries, keys, 128, heads=(12, 2), causal=queries > 1, **features)
        expand(make, call_of(case, "bfloat16"))
    return list(make.sources.values())


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_sources_with_a_soft_cap_and_sinks_compile(capability: int) -> None:
    cuda_toolchain.compile_in_turn(sources(capability, soft_cap=50.0, sinks="compute"), capability)


@pytest.mark.parametrize("capability", [80, 90])
def test_sources_mention_a_soft_cap_or_sinks_only_if_there_are_some(capability: int) -> None:
    def words(**features: Any) -> set[str]:
        texts = sources(capability, **features)
        return {word for word in ("soft_cap", "tanhf", "sink") if any(word in text.lower() for text in texts)}

    assert words() == set()
    assert words(soft_cap=50.0) == {"soft_cap", "tanhf"}
    assert words(sinks="compute") == {"sink"}
