"""Calls of a CUDA program that are joined, dropped or written in place; `test_cuda_conv.py` tests their results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cuda_llms import step_of
from cuda_products import products_of
from torch import Tensor, nn
from zoo_runs import extract

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import launch_of
from npu_compiler import CompiledProgram
from npu_compiler.options import Stage


class Applied(nn.Module):
    """A function of some layers and the inputs."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]], **layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleDict(layers)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(self.layers, *inputs)


def program(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    *shapes: tuple[int, ...],
    capability: int = 90,
    **layers: nn.Module,
) -> CompiledProgram:
    ir = extract(Applied(function, **layers).eval(), [torch.empty(shape) for shape in shapes])
    return npu_compiler.compile(
        ir, CUDACodegenTarget(GPU(capability=capability)), npu_compiler.CompileOptions(compute_dtype="float16")
    )


def kernels(made: CompiledProgram) -> list[str]:
    return [call.kernel for call in made.plan.calls]


def tokens(images: Tensor) -> Tensor:
    return images.flatten(2).transpose(1, 2)


IMAGES = (2, 32, 12, 12)


def test_a_layout_change_between_a_convolution_and_a_norm_costs_nothing() -> None:
    def block(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        return layers["linear"](layers["norm"](tokens(layers["conv"](x))))

    made = program(block, IMAGES, conv=nn.Conv2d(32, 32, 3, padding=1), norm=nn.LayerNorm(32), linear=nn.Linear(32, 48))
    assert kernels(made)[-2] == "layernorm_kernel"
    assert [launch.n for launch in products_of(made)] == [48]
    assert "copy_kernel" not in kernels(made)


def test_tokens_that_a_convolution_adds_stay_as_they_are() -> None:
    def block(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y = layers["linear"](tokens(layers["conv"](x)))
        images = (y + y).transpose(1, 2).reshape(x.shape)
        return layers["norm"](tokens(images + layers["depthwise"](images)))

    made = program(
        block,
        (2, 32, 40, 40),
        conv=nn.Conv2d(32, 32, 3, padding=1),
        linear=nn.Linear(32, 32),
        depthwise=nn.Conv2d(32, 32, 3, padding=1, groups=32),
        norm=nn.LayerNorm(32),
    )
    into_channels_last, *others = kernels(made)
    assert into_channels_last == "transpose" and not {"transpose", "copy_kernel"} & set(others)


@pytest.mark.parametrize("activation", [F.gelu, F.silu, F.relu])
def test_an_activation_behind_a_transposed_view_is_the_convolutions(activation: Callable[[Tensor], Tensor]) -> None:
    made = program(lambda layers, x: activation(tokens(layers["conv"](x))), IMAGES, conv=nn.Conv2d(32, 32, 1))
    assert not any(name.startswith(("gelu", "silu", "relu", "fused")) for name in kernels(made))


def test_a_result_that_is_read_twice_is_kept_as_it_is() -> None:
    def both(layers: nn.ModuleDict, x: Tensor) -> tuple[Tensor, ...]:
        made = tokens(layers["conv"](x))
        return F.gelu(made), made

    assert any("gelu" in name for name in kernels(program(both, IMAGES, conv=nn.Conv2d(32, 32, 1))))


def test_a_residual_behind_a_reshape_is_the_products() -> None:
    def block(layers: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
        return x + layers["linear"](y.reshape(128, 64)).reshape(2, 64, 32)

    made = program(block, (2, 64, 32), (2, 64, 64), linear=nn.Linear(64, 32))
    assert len(made.plan.calls) == 1
    assert [launch.has_residual for launch in products_of(made)] == [True]


def test_a_residual_that_is_written_later_stays_apart() -> None:
    def block(layers: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
        first = layers["linear"](x)
        return first.reshape(2, 64, 32) + F.softmax(y, -1)

    made = program(block, (128, 64), (2, 64, 32), linear=nn.Linear(64, 32))
    assert [launch.has_residual for launch in products_of(made)] == [False]


def squeeze_excite(layers: nn.ModuleDict, x: Tensor) -> Tensor:
    x = layers["conv"](x)
    hidden = F.silu(layers["squeeze"](F.adaptive_avg_pool2d(x, 1)))
    return layers["project"](x * torch.sigmoid(layers["excite"](hidden)))


@pytest.mark.parametrize("capability", [80, 90])
def test_squeeze_and_excitation_is_one_kernel_where_there_are_clusters(capability: int) -> None:
    layers = {
        "conv": nn.Conv2d(32, 32, 3, padding=1),
        "squeeze": nn.Conv2d(32, 6, 1),
        "excite": nn.Conv2d(6, 32, 1),
        "project": nn.Conv2d(32, 16, 1),
    }
    found = kernels(program(squeeze_excite, IMAGES, capability=capability, **layers))
    assert ("squeeze_excite" in found) == (capability == 90)
    assert ("adaptive_avg_pool2d_kernel" in found) == (capability == 80)


def test_a_concatenation_is_written_in_place() -> None:
    def block(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        return layers["last"](torch.cat([layers["first"](x), F.relu(layers["second"](x))], 1))

    layers = {"first": nn.Conv2d(32, 16, 1), "second": nn.Conv2d(32, 24, 3, padding=1), "last": nn.Conv2d(40, 8, 1)}
    found = kernels(program(block, IMAGES, **layers))
    assert "copy_kernel" not in found[:-1]


def test_a_group_norm_applies_its_activation() -> None:
    def block(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        return layers["conv"](F.silu(layers["norm"](layers["first"](x))))

    layers = {"first": nn.Conv2d(32, 32, 1), "norm": nn.GroupNorm(4, 32), "conv": nn.Conv2d(32, 32, 3)}
    found = kernels(program(block, IMAGES, **layers))
    assert "groupnorm_cluster" in found and not any("silu" in name for name in found)


@pytest.mark.parametrize(
    ("rows", "capability", "apart"), [(64, 80, False), (24000, 80, True), (64, 90, False), (24000, 90, False)]
)
def test_only_large_products_without_warpgroups_leave_an_exact_gelu_to_another_kernel(
    rows: int, capability: int, apart: bool
) -> None:
    made = program(
        lambda layers, x: F.gelu(layers["linear"](x)),
        (rows, 768),
        capability=capability,
        linear=nn.Linear(768, 3072),
    )
    assert (kernels(made) == ["cublas_gemm", "linear_epilogue"]) == apart
    assert len(made.plan.calls) == 1 + apart


def test_products_with_an_odd_number_of_columns_are_ours() -> None:
    made = program(lambda layers, x: layers["linear"](x), (64, 256), linear=nn.Linear(256, 1001, bias=False))
    assert kernels(made)[0].startswith("conv_")


def test_images_change_their_order_by_squares() -> None:
    made = program(lambda layers, x: layers["conv"](x), (2, 64, 40, 40), conv=nn.Conv2d(64, 64, 3, padding=1))
    assert kernels(made) == ["transpose", kernels(made)[1], "transpose"]


def test_narrow_rows_share_a_warp() -> None:
    made = program(lambda layers, x: layers["norm"](x), (20000, 32), norm=nn.LayerNorm(32))
    (call,) = made.plan.calls
    assert "team_lanes = 1;" in made.plan.sources[call.source] or "team_lanes = 2;" in made.plan.sources[call.source]


def test_a_valid_convolution_pads_its_own_input() -> None:
    def block(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        weight = layers["conv"].weight
        assert isinstance(weight, Tensor)
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), weight, None, 2, "valid")

    assert "pad_kernel" not in kernels(program(block, IMAGES, conv=nn.Conv2d(32, 32, 3)))


NEEDED = ("generate_prologue", "generate_kernels")


@pytest.mark.parametrize("name", [name for name, _ in CUDACodegenTarget().stages() if name not in NEEDED])
def test_each_stage_can_be_cut(name: str) -> None:
    def without(stages: list[Stage]) -> list[Stage]:
        return [stage for stage in stages if stage[0] != name]

    ir, target = step_of("qwen2", 1), CUDACodegenTarget()
    cut = npu_compiler.compile(ir, target, npu_compiler.CompileOptions(stages=without)).plan
    assert all(launch_of(call) for call in (*cut.prologue, *cut.calls))
    if name == "form_resident_kernels":
        assert "resident" not in {call.kernel for call in cut.calls}


def test_the_stages_are_traced_behind_those_of_the_graph() -> None:
    layers = {"up": nn.Linear(32, 64), "norm": nn.LayerNorm(64)}
    ir = extract(Applied(lambda x, y: x["norm"](F.silu(x["up"](y))), **layers).eval(), [torch.empty(4, 32)])
    trace = list(npu_compiler.trace_compilation(ir, CUDACodegenTarget()))
    names = [name for name, _ in trace]
    own = [name for name, _ in CUDACodegenTarget().stages()]
    assert names[-len(own) - 2 :] == ["generate_calls", *own, "plan_memory"]
    assert trace[-1][1].calls == npu_compiler.compile(ir, CUDACodegenTarget()).plan.calls
