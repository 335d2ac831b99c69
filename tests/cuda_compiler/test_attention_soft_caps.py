"""Attention on CUDA over keys and values in one piece, whose scores have a soft cap."""

from __future__ import annotations

from pathlib import Path

import cuda_toolchain
import pytest
from cuda_on_cpu import EmulatedBackend
from drawn import drawn
from metal_cases.attention import attention, mask
from metal_harness import Case, call_of, run_case

from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.rules.table import expand
from cuda_compiler.specialization.specializer import Specializer

AMPERE = GPU(capability=80)  # whose kernels need no clusters
CASES = [
    (attention("plain", 2, 45, 13, soft_cap=0.5, mask=mask(1, 2, 2, 45, "bool")), ["attention_plain"]),
    (attention("once", 2, 45, 16, heads=(4, 2), soft_cap=0.5, mask=mask(1, 4, 2, 45, "bool")), ["attention_once"]),
    (attention("causal", 9, 33, 16, heads=(2, 1), soft_cap=1.5, causal=True), ["attention_once"]),
    (attention("split", 1, 300, 16, heads=(4, 2), soft_cap=1.5), ["attention_split", "attention_combine"]),
    (attention("wide", 1, 30, 136, soft_cap=1.0), ["attention_once"]),
    (attention("tiles", 64, 40, 16, batch=24, heads=(4, 4), soft_cap=1.0, causal=True, atol=1e-3), ["attention_tiled"]),
]


@pytest.mark.parametrize("chosen", drawn(CASES, 1 / 2, lambda chosen: chosen[0].name))
def test_kernels_of_capped_scores_attend_as_the_reference_does(
    chosen: tuple[Case, list[str]], tmp_path: Path, seed: int
) -> None:
    case, wanted = chosen
    assert [call.kernel for call in expand(Specializer(AMPERE), call_of(case, "bfloat16"))] == wanted
    run_case(case, EmulatedBackend(tmp_path, CUDACodegenTarget(AMPERE)), "bfloat16", seed)


def sources(capability: int, soft_cap: float) -> list[str]:
    """The sources of attention of one query over few and many keys, and of a prompt."""
    make = Specializer(GPU(capability=capability))
    for queries, keys in ((1, 64), (1, 2048), (2048, 2048)):
        case = attention("any", queries, keys, 128, heads=(12, 2), soft_cap=soft_cap, causal=queries > 1)
        expand(make, call_of(case, "bfloat16"))
    return list(make.sources.values())


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_sources_with_a_soft_cap_compile(capability: int) -> None:
    cuda_toolchain.compile_in_turn(sources(capability, 50.0), capability)


@pytest.mark.parametrize("capability", [80, 90])
def test_sources_mention_a_soft_cap_only_if_there_is_one(capability: int) -> None:
    def words(soft_cap: float) -> set[str]:
        texts = sources(capability, soft_cap)
        return {word for word in ("soft_cap", "tanhf") if any(word in text for text in texts)}

    assert words(0.0) == set()
    assert words(50.0) == {"soft_cap", "tanhf"}
