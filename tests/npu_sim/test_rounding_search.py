"""Rounding few weights together: how much better that is than one by one, and that no code can do better alone."""

from __future__ import annotations

import numpy as np
import torch

from npu_sim.quantizing.networks.quantize import quantize_weight
from npu_sim.quantizing.networks.rounding_search import searched


def channels(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of 32 depthwise channels, and the moments of inputs whose neighbours are alike, as in photographs."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(9.0)
    rows, columns = place // 3, place % 3
    distance = (rows[:, None] - rows).abs() + (columns[:, None] - columns).abs()
    hessian = (0.9**distance).expand(32, 9, 9) * torch.rand(32, 1, 1, generator=generator).add(0.1)
    return torch.randn(32, 1, 9, generator=generator), hessian


def output_error(found: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    lost = found - weight
    return float(((lost @ hessian) * lost).sum())


def test_outputs_are_nearer_than_with_weights_rounded_one_by_one(seed: int) -> None:
    weight, hessian = channels(seed)
    codes, scales = searched(weight, hessian)
    assert codes.abs().max() <= 127 and bool((codes == codes.round()).all())
    alone = torch.from_numpy(quantize_weight(weight.reshape(32, 1, 3, 3).numpy()).dequantize()).reshape(32, 1, 9)
    ours, theirs = (output_error(x, weight, hessian) for x in (codes * scales[..., None], alone))
    assert ours < theirs / 8


def test_no_single_code_can_be_better(seed: int) -> None:
    weight, hessian = channels(seed)
    codes, scales = searched(weight, hessian)
    errors = []
    for step in (0, -1, 1):
        for place in range(9):
            moved = codes.clone()
            moved[..., place] = (moved[..., place] + step).clamp(-127, 127)
            lost = moved * scales[..., None] - weight
            errors.append(((lost @ hessian) * lost).sum(2))
    # The last scale is found after the codes, and what keeps a Hessian invertible counts as well.
    better = torch.stack(errors).amin(0) < 0.9 * errors[0]
    assert float(better.float().mean()) < 0.1


def test_channels_of_zeros_and_without_inputs_have_scales() -> None:
    weight = torch.randn(2, 1, 9, generator=torch.Generator().manual_seed(0))
    weight[0] = 0
    codes, scales = searched(weight, torch.zeros(2, 9, 9))
    assert bool((codes[0] == 0).all()) and bool((scales > 0).all())
    np.testing.assert_allclose((codes[1] * scales[1]).numpy(), weight[1].numpy(), atol=0.02)
