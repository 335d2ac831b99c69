"""The zoo's models on simulated chips: as close to PyTorch as on other devices, or refused in words."""

from __future__ import annotations

import pytest
import torch
from drawn import drawn
from on_chips import chip
from zoo import ZOO
from zoo_runs import build, check, draw, extracted, run_compiled, run_partitioned, run_torch, weights_of

from npu_compiler import ConstraintError, partition
from npu_model import NPUBackend

REFUSED = {"CRNN": "lstm_kernel"}
ON_ODD_CHIP = ("ResNet", "MobileNetV3", "UNet", "YoloHead", "bert", "gpt2", "llama", "vit", "convnext", "whisper")


def check_on(name: str, chip_name: str, seed: int) -> None:
    """Run a model on a chip and compare with PyTorch."""
    samples, model = draw(name, seed), build(name)
    ours = run_compiled(extracted(name), weights_of(model), samples, NPUBackend(chip(chip_name)))
    check(ours, run_torch(model, torch.float32, samples), run_torch(model, torch.float16, samples), seed)


@pytest.mark.parametrize("name", drawn([name for name in ZOO if name not in REFUSED], 1 / 15))
def test_models_are_right_on_edge(name: str, seed: int) -> None:
    check_on(name, "edge", seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_ODD_CHIP)
def test_models_are_right_on_a_chip_of_odd_sizes(name: str, seed: int) -> None:
    check_on(name, "odd", seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_the_others_are_refused_in_words_and_run_with_the_hosts_help(name: str, seed: int) -> None:
    samples, model, device = draw(name, seed), build(name), NPUBackend(chip("edge"))
    with pytest.raises(ConstraintError, match=REFUSED[name]):
        run_compiled(extracted(name), weights_of(model), samples, device)
    plan = partition(extracted(name), target=device.target)
    assert [part.device for part in plan.partitions] == ["npu", "cpu", "npu"]
    ours = run_partitioned(plan, weights_of(model), samples, device)
    check(ours, run_torch(model, torch.float32, samples), run_torch(model, torch.float16, samples), seed)
    assert device.simulated_seconds > 0


def test_almost_all_models_run() -> None:
    assert len(REFUSED) <= 0.05 * len(ZOO)
