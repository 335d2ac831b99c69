"""`npu_sim.compile` with dynamic sizes: one trace, a program per sizes, one set of weights, one arena, buckets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import npu_sim
from npu_compiler import InputError, IRError
from npu_compiler.errors import FixedSizeError
from npu_sim.module.trace import export


class Encoder(nn.Module):
    """Attends over tokens that a mask admits; returns states and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(ids)
        q = x.view(*x.shape[:2], 4, 8).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None].bool())
        x = x + self.layer.linear2(torch.relu(self.layer.linear1(seen.transpose(1, 2).flatten(2))))
        weights = mask[..., None] / mask.sum(1)[:, None, None]
        return x, (x * weights).sum(1)


BATCH, LENGTH = Dim("batch", min=1, max=8), Dim("length", min=2, max=40)
SIZES = {name: {0: BATCH, 1: LENGTH} for name in ("ids", "mask")}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(4)
    return Encoder().eval()


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.no_grad():
        yield


def words(batch: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 60, (batch, length), generator=generator)
    mask = (torch.rand(batch, length, generator=generator) > 0.3).float()
    mask[:, 0] = 1
    return ids, mask


def compiled(model: nn.Module, **options: Any) -> Any:
    return npu_sim.compile(model, words(2, 7), dynamic_shapes=SIZES, **options)


def test_any_sizes_of_the_range_get_pytorchs_answer_without_tracing_again(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = compiled(model)
    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: pytest.fail("it was traced again"))
    for batch, length in ((1, 2), (2, 7), (8, 40), (3, 11), (1, 2)):
        args = words(batch, length, batch)
        for ours, theirs in zip(module(*args), model(*args), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(module.report().programs) == 4
    assert {"batch": 8, "length": 40} in [program.sizes for program in module.report().programs]


def test_programs_share_weights_and_arena_and_the_oldest_is_dropped(model: nn.Module) -> None:
    module = compiled(model, programs=3)
    for length in (3, 9, 20, 39):
        module(*words(1, length))
    loaded = module._programs._loaded
    kept = [program.sizes["length"] for program in module.report().programs]
    assert kept == [9, 20, 39]
    for length in (9, 20, 39):
        args = words(1, length)
        torch.testing.assert_close(module(*args)[0], model(*args)[0], rtol=1e-4, atol=1e-5)
    weights, arenas = {id(buffer) for buffer in loaded.cache.values()}, set()
    for step in _steps(module):
        memory, plan = step.bound._run.memory, step.bound._plan
        assert {id(memory[name]) for name in plan.weights} <= weights
        arenas |= {id(memory[name]) for name, buffer in plan.buffers.items() if buffer.kind == "arena"}
    assert arenas == {id(loaded.arena.memory)}
    assert loaded.arena.memory.size_bytes == max(step.bound._plan.arena_bytes for step in _steps(module))


def _steps(module: Any) -> list[Any]:
    return [step for runner in module._programs.runners.values() for step in runner._steps]


@pytest.mark.parametrize(
    ("batch", "length", "message"),
    [
        (9, 7, "size 'batch' is 9, but the module was compiled for 1 to 8"),
        (2, 41, "size 'length' is 41, but the module was compiled for 2 to 40"),
    ],
)
def test_a_size_outside_its_range_is_an_error(model: nn.Module, batch: int, length: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compiled(model)(*words(batch, length))


def test_sizes_that_disagree_are_an_error(model: nn.Module) -> None:
    ids, mask = words(2, 7)
    with pytest.raises(InputError, match=r"argument 'args\[1\]' has shape \[2, 6\]"):
        compiled(model)(ids, mask[:, :6])


def test_a_size_that_is_only_a_part_of_others_is_an_error() -> None:
    class Pairs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(x.shape[0], -1, 2).sum(-1)

    half = Dim("half", min=1, max=9)
    with pytest.raises((IRError, InputError), match="is no input's dimension by itself"):
        npu_sim.compile(Pairs().eval(), (torch.randn(3, 8),), dynamic_shapes={"x": {1: 2 * half}})


class WritesBeforeResizing(nn.Module):
    """Writes in place beside inactive dropout, for which the graph is traced again, and then changes the map's size."""

    def __init__(self, resize: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.resize = resize

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(nn.functional.dropout(x, 0.5, training=False))
        y.add_(1)
        return self.resize(y)


RESIZED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nearest": partial(nn.functional.interpolate, scale_factor=2),
    "nearest-exact": partial(nn.functional.interpolate, size=(3, 9), mode="nearest-exact"),
    "bilinear": partial(nn.functional.interpolate, scale_factor=1.5, mode="bilinear"),
    "bicubic": partial(nn.functional.interpolate, size=(5, 3), mode="bicubic", align_corners=True),
    "adaptive mean": partial(nn.functional.adaptive_avg_pool2d, output_size=3),
    "reflected": partial(nn.functional.pad, pad=(1, 2, 0, 1), mode="reflect"),
    "shuffled": partial(nn.functional.pixel_shuffle, upscale_factor=2),
}


@pytest.mark.parametrize("name", RESIZED)
def test_an_op_that_changes_sizes_leaves_the_batch_open(name: str) -> None:
    module = WritesBeforeResizing(RESIZED[name]).eval()
    compiled = npu_sim.compile(module, torch.randn(2, 4, 6, 8), dynamic_shapes=({0: BATCH},))
    for batch in (2, 5):
        x = torch.randn(batch, 4, 6, 8)
        torch.testing.assert_close(compiled(x), module(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "suggested"),
    [
        (lambda x, y: x.view(2, -1) + y, "batch = 2"),
        (lambda x, y: x[:1] + 1 if x.shape[0] % 2 else y, "_batch = Dim('_batch', min=1, max=4), batch = 2*_batch"),
    ],
)
def test_the_sizes_that_a_module_takes_are_said(function: Callable[..., torch.Tensor], suggested: str) -> None:
    module = nn.Module()
    module.forward = function
    with pytest.raises(FixedSizeError) as error:
        export(module, (torch.ones(2, 3), torch.ones(2, 3)), dynamic_shapes=({0: BATCH}, {0: BATCH}))
    assert str(error.value).endswith(f"sizes that the module does not take; PyTorch suggests {suggested}")


def test_a_weight_that_changes_is_seen_by_all_programs(model: nn.Module) -> None:
    module = compiled(model)
    for length in (5, 12):
        module(*words(1, length))
    model.layer.linear1.weight.mul_(-1)
    try:
        for length in (5, 12, 19):
            args = words(1, length)
            torch.testing.assert_close(module(*args)[0], model(*args)[0], rtol=1e-4, atol=1e-5)
    finally:
        model.layer.linear1.weight.mul_(-1)


def test_buckets_keep_programs_few_and_answers_right(model: nn.Module) -> None:
    module = compiled(model, buckets={"length": npu_sim.Buckets((40, 16), mask="args[1]")})
    for length in (3, 7, 15, 16, 17, 33):
        args = words(2, length, length)
        for ours, theirs in zip(module(*args), model(*args), strict=True):
            assert ours.shape == theirs.shape and ours.is_contiguous()
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert [program.sizes["length"] for program in module.report().programs] == [16, 40]


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        (
            {"height": npu_sim.Buckets((8,), "args[1]")},
            "'height', which is no dynamic size; there are: 'batch', 'length'",
        ),
        ({"length": npu_sim.Buckets((8, 64), "args[1]")}, r"are \[8, 64\], but its sizes are 2 to 40"),
        ({"length": npu_sim.Buckets((), "args[1]")}, r"are \[\], but its sizes are 2 to 40"),
        (
            {"length": npu_sim.Buckets((8,), "attention")},
            "need a mask of that size, and 'attention' is no such argument",
        ),
    ],
)
def test_buckets_that_do_not_fit_are_errors(model: nn.Module, buckets: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compiled(model, buckets=buckets)


def test_a_size_above_the_largest_bucket_is_an_error(model: nn.Module) -> None:
    module = compiled(model, buckets={"length": npu_sim.Buckets((8, 16), mask="args[1]")})
    with pytest.raises(InputError, match="size 'length' is 17, but its largest bucket is 16"):
        module(*words(1, 17))
