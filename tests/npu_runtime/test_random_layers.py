"""Layers drawn at random agree with PyTorch on every device and CPU level; one that ends its process is named."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
import random_layers
import torch
from cuda_gpu import DEVICES, PROBLEM
from drawn import SHARE
from metal_harness import METAL_DEVICE, ON_A_MAC
from random_layers import KINDS, Outcome, difference, draw, run

from npu_runtime.cpu import levels, native

# The levels that this machine runs, its own last.
LEVELS = [level.name for level in levels.this_cpu().levels() if level is not levels.PORTABLE]
OTHERS = [pytest.param(METAL_DEVICE, marks=[] if ON_A_MAC else pytest.mark.slow)]
if PROBLEM:
    OTHERS.append(pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skip(reason=PROBLEM)]))
MOST_OFF = 0.1  # part of the layers of a kind that the op table may leave to PyTorch
_ALL = round(10_000 * SHARE)


def check(outcome: Outcome, device: str, layers: int) -> None:
    shown = "\n".join(outcome.failures)
    assert not outcome.failures, f"python {random_layers.__file__} repeats each of these on {device}:\n{shown}"
    assert outcome.on.total() + outcome.off.total() == layers
    for kind in KINDS if layers >= 1000 else ():
        off, all_of_it = outcome.off[kind], outcome.on[kind] + outcome.off[kind]
        assert off <= MOST_OFF * all_of_it, f"{kind}: {off} of {all_of_it} layers are not on {device}"


@pytest.mark.parametrize("device", [*DEVICES, *OTHERS])
def test_layers_drawn_at_random_agree_with_pytorch(device: str, seed: int) -> None:
    layers = 40 if device == METAL_DEVICE else 200
    check(run(device, seed, 0, layers), device, layers)


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.failure_reason()}")
def test_thousands_of_layers_agree_with_pytorch_at_every_cpu_level(seed: int) -> None:
    """Each level has layers of its own, so that they share out the number; two processes run at once."""
    each = -(-_ALL // len(LEVELS))
    with ThreadPoolExecutor(2) as pool:
        parts = [pool.submit(run, "cpu", seed, i * each, each, level) for i, level in enumerate(LEVELS)]
        outcomes = [part.result() for part in parts]
    for outcome, level in zip(outcomes, LEVELS, strict=True):
        check(outcome, f"CPU level {level}", each)


def test_a_layer_is_the_same_whenever_it_is_drawn(seed: int) -> None:
    for number in range(5):
        first, again = draw(seed, number), draw(seed, number)
        assert first.describe() == again.describe()
        for name, value in first.values.items():
            assert torch.equal(value, again.values[name])


def test_a_wrong_result_is_told_from_rounding(seed: int) -> None:
    layers = (draw(seed, number) for number in count())
    layer = next(layer for layer in layers if layer.values[layer.g.outputs[0]].numel())
    right = layer.values[layer.g.outputs[0]].double().numpy()
    assert difference(layer, right) == ""
    assert difference(layer, right[..., None]).startswith("shape")
    wrong = right.copy()
    wrong.flat[0] = np.nan if np.isfinite(wrong.flat[0]) else 0.0
    assert difference(layer, wrong).startswith(f"1 of {right.size} elements, the first at (0")


def test_a_layer_that_ends_its_process_is_named_and_others_go_on(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, random_layers, sys\n"
        "checks = random_layers.Bench.check\n"
        "dies = lambda self, layer, number: os.abort() if number == 2 else checks(self, layer, number)\n"
        "random_layers.Bench.check = dies\n"
        "sys.exit(random_layers.main())\n"
    )
    monkeypatch.setattr(random_layers, "SCRIPT", str(script))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    outcome = run("cpu", seed, 0, 4)
    (failure,) = outcome.failures
    assert f"--device cpu --seed {seed} --first 2 --layers 1" in failure
    assert draw(seed, 2).describe() in failure and failure.endswith("ended the process, SIGABRT")
    assert outcome.on.total() + outcome.off.total() == 3
