"""The numbers that a compiled module returns: their dtypes, the signs of zeros, integers beyond 32 bits, precision."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from metal_harness import CPU_AND_METAL
from torch import nn

import npu_sim
from npu_compiler import DeviceError, InputError, IRError, PrecisionWarning

EXAMPLES = {
    torch.uint8: (0, 1, 44, 127, 255),
    torch.int8: (0, 1, -24, 127, -128),
    torch.int16: (0, 1, -1, 2**15 - 1, -(2**15)),
    torch.int32: (0, 1, -1, 2**31 - 1, -(2**31)),
    torch.int64: (0, 1, -1, 300, -129),
    torch.bool: (True, False, True, False, True),
}
SCALARS = (True, False, 0, 1, -1, 44, 300, 1000, -129, 0.5, 1.0, -0.0, 300.5)
COMPARISONS = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def compiled(function: Callable[..., Any], *args: torch.Tensor) -> Any:
    return npu_sim.compile(Calls(function).eval(), args, device="cpu")


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, where: str = "") -> None:
    assert ours.dtype == theirs.dtype, where
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7)), where
    if theirs.is_floating_point():
        assert torch.equal(ours.signbit()[~theirs.isnan()], theirs.signbit()[~theirs.isnan()]), where


@pytest.mark.parametrize("dtype", EXAMPLES, ids=str)
def test_comparisons_with_any_number_are_pytorchs(dtype: torch.dtype) -> None:
    """A uint8 above 300 is one above 44."""
    x = torch.tensor(EXAMPLES[dtype], dtype=dtype)
    cases = list(itertools.product(COMPARISONS, SCALARS))

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [compare(x, scalar) for compare, scalar in cases]

    for ours, theirs, case in zip(compiled(function, x)(x), function(x), cases, strict=True):
        assert_same(ours, theirs, str(case))


def test_adding_zero_keeps_or_changes_the_sign_of_a_zero_as_in_pytorch() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, torch.nan])

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        sums = [x + 0, x + 0.0, x + (-0.0), x - 0, x - 0.0, x - (-0.0), 0.0 - x, -0.0 - x, torch.sub(x, 0.0, alpha=2)]
        return [*sums, x * 1, x * -1, x / 1, x**1, torch.add(x, -0.0, alpha=-1)]

    for ours, theirs in zip(compiled(function, x)(x), function(x), strict=True):
        assert_same(ours, theirs)


def test_a_boolean_to_the_power_of_a_boolean_is_one() -> None:
    x = torch.tensor([True, False])
    for exponent in (True, False):
        assert_same(compiled(lambda x, exponent=exponent: x**exponent, x)(x), x**exponent)
    with pytest.raises(IRError, match="a boolean to the power of a boolean as int64, but computes bool; convert"):
        compiled(lambda x: x**True + 1, x)


def test_integers_beyond_32_bits_are_pytorchs_or_refused() -> None:
    x, y = torch.tensor([2.0**31, -(2.0**40), 3.0]), torch.tensor([2.0**31, 5.0, 2.0**33])
    for function in (
        lambda x, y: x.long(),
        lambda x, y: x.long() + y.long(),
        lambda x, y: x.long() * 3 - 1,
        lambda x, y: x.sum(dtype=torch.int64),
    ):
        assert_same(compiled(function, x, y)(x, y), function(x, y))
    with pytest.raises(InputError, match="is outside"):
        compiled(lambda x, y: x.long() % 10, x, y)(x, y)


def test_extremes_of_booleans_run() -> None:
    x = torch.tensor([[True, False], [False, False]])

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [*x.max(1), *x.min(0), x.amax(), x.any(1)]

    for ours, theirs in zip(compiled(function, x)(x), function(x), strict=True):
        assert_same(ours, theirs)


def test_integer_products_cut_fractions_off_their_factors() -> None:
    m, a, b = (torch.arange(12).reshape(shape) - 5 for shape in ((4, 3), (4, 3), (3, 4)))

    def function(m: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.addmm(m[:, 0], a, b, alpha=-2.5, beta=1.5),
            torch.baddbmm(m[None, :, :1], a[None], b[None], alpha=0.5, beta=2.5),
            torch.addmv(m[:, 0], a, b[:, 0], alpha=1.5, beta=0.5),
        ]

    for ours, theirs in zip(compiled(function, m, a, b)(m, a, b), function(m, a, b), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("index", [7, -1])
@pytest.mark.parametrize("computed", [False, True])
def test_scattering_out_of_range_is_an_error(index: int, computed: bool) -> None:
    at, x = torch.tensor([index, 0]), torch.zeros(5)

    def function(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return x.scatter(0, at.abs() * at.sign() if computed else at, 1.0)

    module = compiled(function, x, torch.tensor([1, 0]))
    assert_same(module(x, torch.tensor([1, 0])), function(x, torch.tensor([1, 0])))
    with pytest.raises((InputError, DeviceError), match="outside|out of"):
        module(x, at)


def test_a_module_of_float64_says_that_it_computes_in_float32() -> None:
    x = torch.rand(3, dtype=torch.float64)
    with pytest.warns(PrecisionWarning, match=r"computes float64 in float32 \(1 nodes, such as aten\.softmax"):
        module = compiled(lambda x: x.softmax(0), x)
        assert module(x).dtype == torch.float64
    assert "in float32 instead of float64: 1 nodes" in str(module.report())


def test_a_module_that_only_converts_to_float64_gives_no_warning() -> None:
    x = torch.rand(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        module = compiled(lambda x: (x + 1).double(), x)
        assert_same(module(x), (x + 1).double())
    assert module.report().programs[0].narrowed == 0


class Counter(nn.Module):
    """A module that adds to a buffer and to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.sum.add_(x)
        x.mul_(2)
        return x + 1, self.sum * 2


@pytest.mark.parametrize("device", CPU_AND_METAL)
def test_results_and_writes_reach_the_caller_on_every_device(device: str) -> None:
    ours, theirs = Counter().eval(), Counter().eval()
    module = npu_sim.compile(ours, (torch.ones(4),), device=device)
    for _ in range(2):
        given, wanted = torch.arange(4.0), torch.arange(4.0)
        torch.testing.assert_close(module(given), theirs(wanted))
        torch.testing.assert_close((given, ours.sum), (wanted, theirs.sum))


@pytest.mark.parametrize("device", CPU_AND_METAL)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_cast_to_16_bits_rounds_in_a_float32_module(device: str, half: torch.dtype) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        narrow = x.to(half)
        return narrow.float(), (narrow * 3).float() + x, narrow.float() @ narrow.float().T, narrow.to(torch.float16)

    x = torch.tensor([[1.0001, 3.14159, 70000.0], [1e-9, -2.7182818, 0.1]])
    module = npu_sim.compile(Calls(function).eval(), (x,), device=device)
    torch.testing.assert_close(module(x), function(x), rtol=1e-6, atol=0)


def test_a_module_under_autocast_computes_in_16_bits_as_pytorch_does() -> None:
    layer = nn.Linear(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).float()

    x = torch.randn(5, 8)
    module = Calls(function).eval()
    module.layer = layer
    with torch.no_grad():
        result = npu_sim.compile(module, (x,))(x)
        torch.testing.assert_close(result, function(x), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(result, result.bfloat16().float(), rtol=0, atol=0)


class TrainedNorm(nn.Module):
    """A batch normalization that updates its statistics though the module is in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=True)


def test_statistics_of_a_batch_norm_in_training_are_updated() -> None:
    ours, theirs, x = TrainedNorm().eval(), TrainedNorm().eval(), torch.randn(4, 3)
    module = npu_sim.compile(ours, (x,))
    for _ in range(2):
        torch.testing.assert_close(module(x), theirs(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close((ours.mean, ours.var), (theirs.mean, theirs.var))
