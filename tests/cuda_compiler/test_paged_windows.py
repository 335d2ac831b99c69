"""Paged attention on CUDA with windows of keys, capped scores or sinks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cuda_toolchain
import pytest
from cuda_on_cpu import EmulatedBackend
from drawn import drawn
from metal_cases.attention import paged
from metal_harness import Case, call_of, run_case

from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.rules.table import expand
from cuda_compiler.specialization.specializer import Specializer

AMPERE = GPU(capability=80)  # whose kernels need no clusters
# Windows that begin and end in a tile, in a block of the pool and at their borders; sequences shorter than a window.
CASES = [
    (paged("plain", [(45, 1), (3, 1), (0, 9)], 13, window=7, soft_cap=0.5), ["paged_plain"]),
    (paged("once", [(45, 1), (3, 2)], 16, heads=(2, 1), window=7), ["paged_once"]),
    (paged("tokens", [(30, 9), (0, 5)], 16, heads=(2, 1), window=16, soft_cap=1.5), ["paged_once"]),
    (paged("cap", [(40, 1), (3, 2)], 16, heads=(2, 1), soft_cap=0.5), ["paged_once"]),
    (
        paged("split", [(300, 1), (90, 1)], 16, heads=(2, 1), window=150, soft_cap=1.5),
        ["paged_split", "attention_combine"],
    ),
    (paged("small-blocks", [(37, 2)], 16, heads=(2, 1), block_size=8, window=17), ["paged_once"]),
    (paged("wide", [(40, 1)], 136, heads=(2, 1), window=9, soft_cap=1.0), ["paged_once"]),
    (paged("prompt", [(40, 256)], 16, heads=(1, 1), window=24, soft_cap=1.0, atol=1e-3), ["paged_once"]),
    (paged("plain-sinks", [(45, 1), (3, 1), (0, 9)], 13, sinks="float32"), ["paged_plain"]),
    (paged("sinks", [(45, 1), (3, 2)], 16, heads=(6, 2), window=7, sinks="compute"), ["paged_once"]),
    (paged("prompt-sinks", [(0, 256)], 16, heads=(2, 1), sinks="compute", atol=1e-3), ["paged_once"]),
    (
        paged("split-sinks", [(300, 1), (90, 1)], 16, heads=(4, 2), sinks="float32"),
        ["paged_split", "attention_combine"],
    ),
]


@pytest.mark.parametrize("chosen", drawn(CASES, 1 / 8, lambda chosen: chosen[0].name))
def test_kernels_of_windows_caps_and_sinks_attend_as_the_reference_does(
    chosen: tuple[Case, list[str]], tmp_path: Path, seed: int
) -> None:
    case, wanted = chosen
    assert [call.kernel for call in expand(Specializer(AMPERE), call_of(case, "bfloat16"))] == wanted
    run_case(case, EmulatedBackend(tmp_path, CUDACodegenTarget(AMPERE)), "bfloat16", seed)


def sources(case: Case, **gpu: int) -> list[str]:
    make = Specializer(GPU(**gpu))  # type: ignore[arg-type]
    expand(make, call_of(case, "bfloat16"))
    return list(make.sources.values())


# What a window, a soft cap or sinks add to a source.
FEATURES = ("window", "hidden", "first_seen", "soft_cap", "tanhf", "sink")
STEPS = {
    "decode": [(700, 1), (33, 1)],
    "drafts": [(700, 8), (90, 8)],
    "prompt": [(100, 300)],
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", STEPS)
def test_sources_mention_a_window_a_soft_cap_or_sinks_only_if_there_are_some(name: str, capability: int) -> None:
    def words(**features: Any) -> set[str]:
        case = paged(name, STEPS[name], 64, heads=(8, 2), **features)
        return {word for text in sources(case, capability=capability)[:1] for word in FEATURES if word in text}

    assert words() == set()
    assert words(soft_cap=50.0) == {"soft_cap", "tanhf"}
    assert words(window=64) == {"window", "hidden", "first_seen"}
    assert words(sinks="compute") == {"sink"}


def test_a_windows_keys_are_divided_among_as_few_blocks_as_a_short_contexts() -> None:
    def splits(known: int, window: int) -> int:
        (call,) = expand(Specializer(GPU()), call_of(paged("", [(known, 1)], 64, window=window), "bfloat16"))
        return int(call.params["grid"][2])

    assert splits(8000, 0) == 8 and splits(8000, 64) == splits(80, 0) < 8


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "width"), [(80, 64), (80, 256), (90, 64), (90, 256), (90, 20)])
def test_sources_with_all_features_compile(capability: int, width: int) -> None:
    features: dict[str, Any] = {"window": 40, "soft_cap": 50.0, "sinks": "float32"}
    texts = [
        text
        for name, lengths in STEPS.items()
        for text in sources(paged(name, lengths, width, heads=(8, 2), **features), capability=capability)
    ]
    cuda_toolchain.compile_in_turn(texts, width)
