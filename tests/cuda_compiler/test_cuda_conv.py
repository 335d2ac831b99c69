"""Convolutions on the CUDA device: the channels-last layout, which kernels they become, and how one is chosen."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_convolutions import CASES, SAME, heads, nhwc
from cuda_gpu import PROBLEM, cuda_backends
from cuda_on_cpu import run_on_cpu
from cuda_reference import LaidOut, ReferenceBackend
from cuda_toolchain import compile_in_turn
from drawn import drawn
from ir_builder import IRBuilder
from metal_cases.conv import conv, transposed
from metal_harness import Case, T, call_of, plan_of, run_case
from reference_kernels import reference_launch
from zoo_runs import build, check, draw, extracted, run_compiled, run_torch, weights_of

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import ConvolutionLaunch, GemmLaunch, KernelLaunch, convolution_of, launch_of
from cuda_runtime import CUDABackend, tuned_convolutions
from cuda_runtime.cudnn import ConvolutionPlan, PlanChoice
from cuda_runtime.tuned_convolutions import TunedConvolutions
from npu_compiler.files import unseal
from npu_compiler.program.kernels import KernelCall

CONVOLUTIONAL = [
    "ResNet",
    "MobileNet",
    "MobileNetV3",
    "EfficientNet",
    "DenseNet",
    "ShuffleNet",
    "SqueezeNet",
    "UNet",
    "DeepLab",
    "YoloHead",
    "OddConvolutions",
    "WaveNet",
    "ConvTasNet",
    "PointNet",
    "DiffusionTransformer",
    "Conformer",
    "vit",
    "convnext",
    "mobilenet_v2",
]


@pytest.mark.parametrize("name", drawn(CONVOLUTIONAL, 1 / 3))
def test_the_layout_changes_no_result(name: str, seed: int) -> None:
    model, samples = build(name), draw(name, seed)
    reference, half = run_torch(model, torch.float32, samples), run_torch(model, torch.float16, samples)
    check(run_compiled(extracted(name), weights_of(model), samples, ReferenceBackend()), reference, half, seed)


def expanded(case: Case, dtype: str = "float16") -> list[KernelCall]:
    """The calls that a convolution becomes, copies around it included."""
    return plan_of(call_of(case, dtype), CUDACodegenTarget()).calls


def convolution(case: Case, dtype: str = "float16") -> KernelCall:
    (call,) = [call for call in expanded(case, dtype) if call.kernel.startswith(("conv", "direct_conv"))]
    return call


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("pointwise", "conv_tiled"),
        ("stem", "conv_tiled"),
        ("odd-channels", "conv_tiled"),
        ("depthwise", "conv_depthwise"),
        ("grouped", "conv_window"),
        ("groups-of-four", "conv_window"),
        ("wide-groups", "conv_wgmma"),
        ("odd-groups", "conv_tiled"),
        ("few-odd-groups", "conv_tiled"),
        ("depthwise-multiplied", "conv_window"),
        ("depthwise-odd", "conv_depthwise"),
        ("depthwise-seven", "conv_depthwise"),
        ("transposed", "conv_tiled"),
        ("transposed-groups", "conv_tiled"),
        ("transposed-depthwise", "conv_transpose2d_kernel"),
        ("float", "conv2d_kernel"),
    ],
)
def test_forms(name: str, wanted: str) -> None:
    (case,) = [case for case in CASES if case.name == name]
    call = convolution(case)
    assert call.kernel == wanted
    launch = launch_of(call)
    # cuDNN does not know how the weights of depthwise convolutions lie; ours have several forms for large windows.
    is_short = name in ("depthwise", "depthwise-odd")
    assert isinstance(launch, ConvolutionLaunch) == (not is_short and wanted != "conv_transpose2d_kernel")
    if isinstance(launch, ConvolutionLaunch):
        assert launch.computes.only_ours == (wanted == "conv_depthwise" or name.startswith("transposed"))
        assert {form.kernel for form in launch.alternatives} <= {wanted, "conv_wgmma", "conv_tiled", "conv_window"}


def forms(call: KernelCall) -> list[KernelLaunch]:
    """The launches of all kernels that a call could be made by."""
    launch = launch_of(call)
    assert not isinstance(launch, GemmLaunch)
    if isinstance(launch, KernelLaunch):
        return [launch]
    return [launch.first, *(form.launch for form in launch.alternatives)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_forms_fit_into_the_memory_of_a_smaller_gpu(case: Case) -> None:
    for call in plan_of(call_of(case, "float16"), CUDACodegenTarget(GPU(capability=75, shared_memory=64 * 1024))).calls:
        assert all(form.shared <= 64 * 1024 for form in forms(call))


SMALL = [
    transposed("overlapping", (2, 16, 3, 4), (16, 24, 4, 4), stride=(2, 2), padding=(1, 1), bias="float32"),
    transposed("odd", (1, 5, 4, 3), (5, 3, 3, 3), stride=(2, 2), padding=(1, 1), output_padding=(1, 1), bias="compute"),
    transposed("uneven-groups", (1, 16, 5, 4), (16, 8, 3, 3), stride=(3, 1), padding=(0, 1), groups=2),
    transposed("dilated", (1, 8, 7, 8), (8, 8, 3, 3), padding=(1, 3), dilation=(2, 3)),
    transposed("depthwise", (1, 8, 5, 4), (8, 1, 4, 4), stride=(2, 2), padding=(1, 1), groups=8, bias="float32"),
    conv("heads", heads(3, 16, 5, 4), (24, 16, 3, 3), padding=(1, 1, 1, 1), residual="compute"),
    conv("heads-depthwise", heads(3, 16, 9, 8), (16, 1, 3, 3), groups=16, padding=(1, 1, 1, 1), stride=(2, 2)),
    conv("odd-groups", T((2, 9, 5, 4)), (15, 3, 3, 3), groups=3, padding=(1, 1, 1, 1), residual="compute"),
    conv("one-channel", T((3, 1, 1, 40)), (1, 1, 1, 5), padding=(0, 0, 2, 2), bias="float32"),
    conv("odd-depthwise", T((1, 13, 5, 6)), (13, 1, 3, 3), groups=13, bias="float32", activation="relu"),
    conv("large-depthwise", T((1, 6, 9, 8)), (6, 1, 5, 7), groups=6, padding=(2, 2, 3, 3), bias="float32"),
    conv(
        "sparse-depthwise",
        T((2, 4, 15, 9)),
        (4, 1, 5, 5),
        groups=4,
        stride=(2, 1),
        padding=(3, 3, 2, 2),
        dilation=(2, 1),
    ),
]


@pytest.mark.parametrize("case", drawn(SMALL, 1 / 4, lambda case: case.name))
def test_small_convolutions_on_a_cpu(case: Case, seed: int, tmp_path: Path) -> None:
    """The kernels as GPUs without tensor cores run them, which is the same text but for the products of a step."""
    compare_on_a_cpu(case, GPU(capability=70, shared_memory=64 * 1024), "", seed, tmp_path)


FEW_CHANNELS = [
    conv("first", nhwc(2, 8, 19, 35), (32, 8, 3, 3), **SAME, bias="float32", activation="relu"),
    conv("folded", nhwc(1, 16, 17, 20), (64, 16, 4, 4), bias="float32", residual="compute"),
    conv("many-terms", nhwc(1, 64, 9, 21), (64, 64, 3, 3), **SAME, bias="compute", activation="silu"),
    conv("shared-outputs", nhwc(1, 24, 9, 10), (192, 24, 3, 3), **SAME, residual="compute"),
    conv("uneven-outputs", nhwc(2, 8, 9, 10), (12, 8, 3, 3), **SAME, bias="float32"),
    conv("strided", nhwc(2, 32, 21, 20), (48, 32, 3, 3), stride=(2, 2), padding=(1, 1, 1, 1), bias="compute"),
    conv("many-images", nhwc(1100, 8, 3, 2), (8, 8, 3, 3), **SAME, bias="float32"),
    conv("dilated", nhwc(2, 40, 12, 13), (16, 40, 3, 2), dilation=(2, 3), padding=(1, 2, 0, 3)),
    conv("heads", heads(3, 24, 9, 10), (48, 24, 3, 3), **SAME, bias="compute", activation="relu"),
    conv("groups-of-four", nhwc(2, 64, 12, 13), (64, 4, 3, 3), groups=16, **SAME, bias="float32"),
    conv("groups-of-twelve", nhwc(2, 48, 12, 13), (96, 12, 5, 2), groups=4, bias="compute", activation="gelu"),
    conv("groups-of-sixteen", nhwc(2, 64, 12, 13), (64, 16, 3, 3), groups=4, **SAME, residual="compute"),
]


@pytest.mark.parametrize("capability", [70, 90])
@pytest.mark.parametrize("case", drawn(FEW_CHANNELS, 1 / 3, lambda case: case.name))
def test_windows_on_a_cpu(case: Case, capability: int, seed: int, tmp_path: Path) -> None:
    compare_on_a_cpu(case, GPU(capability=capability), "conv_window", seed, tmp_path)


def compare_on_a_cpu(case: Case, gpu: GPU, kernel: str, seed: int, tmp_path: Path) -> None:
    """Run a case's kernels, compiled for the CPU, and compare with the reference.

    Args:
        kernel: The kernel to make a convolution by; a drawn one if empty.
    """
    rng, call = np.random.default_rng(seed), call_of(case, "float16")
    plan = plan_of(call, CUDACodegenTarget(gpu))
    calls = [
        Random(seed).choice([form for form in tuned_convolutions.kernels_of(part) if kernel in form.kernel])
        if isinstance(launch_of(part), ConvolutionLaunch)
        else part
        for part in plan.calls
    ]
    assert any(kernel in part.kernel for part in calls)
    values = {
        view.buffer: rng.standard_normal(plan.buffers[view.buffer].alloc_shape).astype(view.dtype)
        for view in call.inputs
    }
    memory = run_on_cpu(replace(plan, calls=calls), values, tmp_path)
    (view,) = call.outputs
    operands = [
        torch.from_numpy(values[view.buffer]).as_strided(view.shape, view.strides, view.offset) for view in call.inputs
    ]
    expected = torch.empty(view.shape)
    reference_launch(call, operands, [expected])()
    result = torch.from_numpy(memory[view.buffer]).as_strided(view.shape, view.strides, view.offset)
    torch.testing.assert_close(result.float(), expected, rtol=2e-3, atol=2e-3)


def test_few_pixels_with_many_terms_fill_the_gpu() -> None:
    (case,) = [case for case in CASES if case.name == "few-pixels-many-terms"]
    tiles, _, splits = forms(convolution(case))[0].grid
    assert splits > 1 and tiles * splits >= 100


def test_a_network_is_converted_at_its_ends_only() -> None:
    g = IRBuilder()
    x = g.input("x", 1, 3, 16, 16)
    y = g("aten.conv2d.default", x, g.weight("a", 16, 3, 3, 3), g.weight("b", 16), [2, 2], [1, 1])
    y = g("aten.max_pool2d.default", g("aten.relu.default", y), [3, 3], [2, 2], [1, 1])
    z = g("aten.conv2d.default", y, g.weight("c", 16, 16, 3, 3), g.weight("d", 16), [1, 1], [1, 1])
    g.output(g("aten.mul.Tensor", z, g("aten.sigmoid.default", y)))
    plan = npu_compiler.compile(g.ir(), LaidOut()).plan
    assert [call.kernel.removesuffix("_kernel") for call in plan.calls] == [
        "to_channels_last",
        "conv2d",
        "max_pool2d",
        "conv2d",
        "sigmoid",
        "mul",
    ]
    shapes = {buffer.alloc_shape for buffer in plan.buffers.values() if buffer.kind == "arena"}
    assert shapes == {(1, 9, 9, 16), (1, 8, 8, 16), (1, 4, 4, 16)}
    assert [buffer.alloc_shape for buffer in plan.buffers.values() if buffer.kind == "persistent"] == [
        (16, 2, 2, 16),
        (16, 3, 3, 16),
    ]


def test_only_a_weight_that_no_call_writes_is_read_ahead_of_time() -> None:
    g = IRBuilder()
    x, written = g.input("x", 1, 16, 16, 16), g.input("written", 16, 16, 3, 3)
    y = g("aten.conv2d.default", x, g.weight("constant", 16, 16, 3, 3), g.weight("b", 16), [1, 1], [1, 1])
    g.output(g("aten.conv2d.default", y, written, g.weight("d", 16), [1, 1], [1, 1]))
    plan = npu_compiler.compile(g.ir(), CUDACodegenTarget()).plan
    texts = [plan.sources[call.source] for call in plan.calls if call.kernel == "conv_tiled"]
    assert ["bool constant_weight = true;" in text for text in texts] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sources_compile(dtype: str) -> None:
    names = ("three-by-three", "few-pixels-many-terms", "odd-channels", "depthwise-strided", "grouped")
    sources: dict[tuple[str, str], str] = {}
    for case in CASES:
        if case.name in names:
            plan = plan_of(call_of(case, dtype), CUDACodegenTarget())
            sources |= {(call.kernel, call.source): plan.sources[call.source] for call in plan.calls}
    compile_in_turn(sources[key] for key in sorted(sources))  # so that each kernel meets each architecture


class FakeCudnn:
    """Knows one plan, which it has as long as it is the version that made it."""

    def __init__(self, version: int = 9, has_plan: bool = True) -> None:
        self.version, self.has_plan = version, has_plan

    def plan(self, call: KernelCall, choice: PlanChoice) -> ConvolutionPlan | None:
        return ConvolutionPlan(self, None, 0, choice) if self.has_plan else None  # type: ignore[arg-type]


class Tuned(TunedConvolutions):
    """Chooses what it is told instead of trying."""

    def __init__(self, folder: Path, choice: int | PlanChoice, cudnn: FakeCudnn | None = None) -> None:
        gpu = SimpleNamespace(
            properties={"name": b"GPU", "multiProcessorCount": 132},
            arch=90,
            counters=Counter(),
            runtime=SimpleNamespace(memGetInfo=lambda: (2**40, 2**40)),
            allocate=lambda size, what: None,
        )
        super().__init__(gpu, folder, lambda call, places: lambda: None, cudnn)  # type: ignore[arg-type]
        self.counters, self.choice = gpu.counters, choice

    def _fastest_kernel(self, call: KernelCall, memory: object) -> tuple[Any, float]:
        if isinstance(self.choice, PlanChoice):
            return ConvolutionPlan(self._cudnn, None, 0, self.choice), 1e-6  # type: ignore[arg-type]
        return tuned_convolutions.kernels_of(call)[self.choice], 1e-6


PLAN = PlanChoice(7, {"TILE_SIZE": 3})


def test_a_choice_is_kept_for_the_next_process(tmp_path: Path) -> None:
    call = convolution(CASES[0])
    first = Tuned(tmp_path / "new", 2)
    assert len(first.kernels(call)) == 1 + len(convolution_of(call).alternatives)
    first.tune([call, call])
    assert first.counters == {"tuned": 1}
    second = Tuned(tmp_path / "new", 0)
    second.tune([call])
    assert not second.counters
    form = second.form(call)
    assert second.kernels(call) == [form] == [first.form(call)]
    assert isinstance(form, KernelCall)
    chosen = convolution_of(call).alternatives[1]
    assert (form.source, launch_of(form)) == (chosen.source, chosen.launch)


def test_a_plan_of_cudnn_is_kept_by_engine_and_knobs(tmp_path: Path) -> None:
    call = convolution(CASES[0])
    Tuned(tmp_path, PLAN, FakeCudnn()).tune([call])
    second = Tuned(tmp_path, 0, FakeCudnn())
    form = second.form(call)
    assert isinstance(form, ConvolutionPlan) and form.choice == PLAN
    assert second.kernels(call) == [], "nothing of ours needs to be compiled"


@pytest.mark.parametrize(
    "cudnn", [None, FakeCudnn(version=10), FakeCudnn(has_plan=False)], ids=["none", "new", "lacks"]
)
def test_a_plan_that_cannot_be_had_is_chosen_anew(tmp_path: Path, cudnn: FakeCudnn | None) -> None:
    call = convolution(CASES[0])
    Tuned(tmp_path, PLAN, FakeCudnn()).tune([call])
    again = Tuned(tmp_path, 1, cudnn)
    again.tune([call])
    assert again.counters == {"tuned": 1}


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"source": "0123"}', '{"source": null}', '{"source": null, "engine": "x", "knobs": []}']
)
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    call = convolution(CASES[0])
    Tuned(tmp_path, 1).tune([call])
    (path,) = tmp_path.iterdir()
    content = path.read_text()
    path.write_text(damage)
    again = Tuned(tmp_path, 1)
    again.tune([call])
    assert again.counters == {"tuned": 1}
    assert path.read_text() == content and json.loads(unseal(content.encode(), path.name) or "")["microseconds"] == 1


def test_what_there_was_no_time_for_is_tried_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tried = convolution(CASES[0]), []

    class Slow(Tuned):
        def _fastest_kernel(self, call: KernelCall, memory: object) -> tuple[Any, float]:
            return super()._fastest_kernel(call, memory)[0], 1.0

        def _faster_plan(self, call: KernelCall, memory: Any, best: Any, least: float) -> tuple[Any, float]:
            tried.append(call)
            return best, least

    for seconds, count in ((-1.0, 0), (60.0, 1), (60.0, 1)):
        monkeypatch.setattr(tuned_convolutions, "_MOST_SECONDS", seconds)
        process = Slow(tmp_path, 1)
        process.tune([call])
        assert len(tried) == count and len(list(tmp_path.iterdir())) == count
        assert process.form(call) == tuned_convolutions.kernels_of(call)[1]


def test_what_was_not_tuned_is_made_as_the_compiler_suggests(tmp_path: Path) -> None:
    call = convolution(CASES[0])
    form = Tuned(tmp_path, 1).form(call)
    assert isinstance(form, KernelCall) and form.source == call.source


@pytest.fixture(scope="module")
def backend() -> CUDABackend:
    (device,) = cuda_backends()
    return device


@pytest.mark.gpu
@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_form_does_what_the_reference_does(
    case: Case, dtype: str, backend: CUDABackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = convolution(case, dtype)
    if not isinstance(launch_of(call), ConvolutionLaunch):
        run_case(case, backend, dtype, 1)
        return
    convolutions = backend._convolutions
    kernels = tuned_convolutions.kernels_of(call)
    forms: list[Any] = list(kernels)
    if convolutions._cudnn is not None and convolutions._cudnn.takes(call):
        forms += islice(convolutions._cudnn.plans(call), 3)
    backend.compile(kernels, plan_of(call_of(case, dtype), backend.target).sources)
    monkeypatch.setattr(convolutions, "tune", lambda calls: None)
    for form in forms:
        monkeypatch.setattr(convolutions, "form", lambda call, form=form: tuned_convolutions.over(form, call))
        run_case(case, backend, dtype, 1)
