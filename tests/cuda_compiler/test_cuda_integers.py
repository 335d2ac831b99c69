"""Integer kernels on the CUDA device: what they become, that sources compile, that every form is exact on the GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from cuda_gpu import PROBLEM, cuda_backends
from cuda_integers import CONVOLUTIONS, OTHERS
from cuda_reference import ReferenceBackend
from cuda_toolchain import compile_in_turn
from metal_harness import Case, call_of, plan_of, run_case
from quantized_networks import BACKENDS, Network

import npu_compiler
from benchmarks.cuda.integers import at_batch
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import ConvolutionLaunch, launch_of
from cuda_runtime import CUDABackend, tuned_convolutions
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_runtime import Executor, load_weights

COPY, SUMS, TILES = "to_channels_last", "weight_sums", "tensor cores"


def plan(case: Case, capability: int = 90) -> ExecutionPlan:
    return plan_of(call_of(case, "float16"), CUDACodegenTarget(GPU(capability=capability)))


def kernels(case: Case) -> list[str]:
    return [
        TILES if call.kernel.startswith(("integer_tiled", "integer_wgmma")) else call.kernel
        for call in plan(case).calls
    ]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("pointwise", [TILES]),
        ("wide-tiles", [SUMS, TILES]),
        ("three-by-three", [COPY, SUMS, TILES]),
        ("stem", [COPY, COPY, SUMS, TILES]),
        ("odd-channels", [COPY, COPY, SUMS, TILES]),
        ("depthwise", ["copy_kernel", "integer_depthwise"]),
        ("grouped", ["integer_conv2d_kernel"]),
        ("weight-zeros", ["integer_conv2d_kernel"]),
    ],
)
def test_forms(name: str, wanted: list[str]) -> None:
    (case,) = [case for case in CONVOLUTIONS if case.name == name]
    assert kernels(case) == wanted


def test_layers_of_one_shape_share_their_kernels() -> None:
    (case,) = [case for case in CONVOLUTIONS if case.name == "residual"]
    scales = {"x_scale": 0.1, "residual_scale": 0.2, "out_scale": 0.3}
    assert plan(case).sources == plan(replace(case, params={**case.params, **scales})).sources


@pytest.mark.slow
@pytest.mark.parametrize("capability", [70, 90])
def test_the_sources_compile(capability: int) -> None:
    sources: dict[str, str] = {}
    for case in (*CONVOLUTIONS, *OTHERS):
        found = plan(case, capability)
        first = {call.kernel: call.source for call in found.calls}
        others = {kernel: source for call in found.calls for kernel, source, *_ in call.params.get("alternatives", ())}
        sources |= {name: found.sources[name] for name in {**others, **first}.values()}
    compile_in_turn(sources.values())


@pytest.fixture(scope="module")
def backend() -> CUDABackend:
    (device,) = cuda_backends()
    return device


@pytest.mark.gpu
@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
@pytest.mark.parametrize("case", [*CONVOLUTIONS, *OTHERS], ids=lambda case: case.id)
def test_every_form_is_exact(case: Case, backend: CUDABackend, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = [call for call in plan(case).calls if isinstance(launch_of(call), ConvolutionLaunch)]
    forms: list[KernelCall | None] = [form for call in tuned for form in tuned_convolutions.kernels_of(call)] or [None]
    if tuned:
        backend.compile([form for form in forms if form is not None], plan(case).sources)
    monkeypatch.setattr(backend._convolutions, "tune", lambda calls: None)
    for form in forms:
        if form is not None:
            monkeypatch.setattr(
                backend._convolutions, "form", lambda call, form=form: tuned_convolutions.over(form, call)
            )
        run_case(case, backend, "float16", 1)


class OtherBackend(CUDABackend):
    """The GPU with the kernels of one that has less."""

    @property
    def target(self) -> CUDACodegenTarget:
        return CUDACodegenTarget(GPU(capability=75, shared_memory=64 * 1024))


@pytest.mark.gpu
@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: case.id)
def test_kernels_for_smaller_gpus_are_exact_too(case: Case) -> None:
    run_case(case, OtherBackend(), "float16", 1)


def test_a_network_takes_one_kernel_a_layer(seed: int) -> None:
    rng, net = np.random.default_rng(seed), Network()
    value = net.rounded(net.g.input("x", 1, 32, 9, 8), 0.02, 0)
    for layer in range(3):
        weight = rng.integers(-127, 128, (32, 32, 1, 1)).astype(np.int8)
        value = net.g("aten.conv2d.default", value, net.weight(f"w{layer}", weight, np.full(32, 0.01)))
        value = net.rounded(net.g("aten.relu.default", value), 0.03, 0)
    net.g.output(value)
    calls = npu_compiler.compile(
        net.g.ir(), CUDACodegenTarget(), npu_compiler.CompileOptions(compute_dtype="float16")
    ).plan.calls
    assert Counter(call.kernel for call in calls) == {"quantize_kernel": 1, "integer_tiled": 3, "dequantize_kernel": 1}


def mixed(net: Network, rng: np.random.Generator) -> None:
    """Integer convolutions with one between them that stays in floats."""
    value = net.rounded(net.g.input("x", 1, 3, 12, 10), 0.02, 120)
    for layer, (i, o) in enumerate([(3, 16), (16, 24), (24, 8)]):
        if layer == 1:
            net.state["float"] = rng.normal(size=(o, i, 3, 3)).astype(np.float32) / 9
            weight = net.g.weight("float", o, i, 3, 3)
        else:
            codes = rng.integers(-127, 128, (o, i, 3, 3)).astype(np.int8)
            weight = net.weight(f"w{layer}", codes, rng.uniform(1e-3, 2e-3, o))
        value = net.g("aten.conv2d.default", value, weight, None, [1, 1], [1, 1])
        value = net.g("aten.relu.default", value)
        if layer != 0:
            value = net.rounded(value, 0.05, 7)
    net.g.output(value)


def test_layers_in_floats_between_integer_ones_change_no_result(seed: int) -> None:
    rng, net = np.random.default_rng(seed), Network()
    mixed(net, rng)
    inputs = {"x": rng.normal(size=(1, 3, 12, 10)).astype(np.float32)}
    want = net.run(inputs, only="torch")["torch"]
    backend = ReferenceBackend()
    program = npu_compiler.compile(net.g.ir(), backend.target, npu_compiler.CompileOptions(compute_dtype="float32"))
    kernels = [call.kernel for call in program.plan.calls]
    assert kernels.count("integer_conv2d_kernel") == 2 and "conv2d_kernel" in kernels
    (spec,) = program.output_specs
    found = Executor(program, backend).run(inputs, load_weights(net.state, program, backend))[spec.name].to_numpy(spec)
    assert np.abs(found - want).max() < 0.051, "a value in the middle between two codes may go to either"
    assert (found == want).mean() > 0.99


def test_the_benchmark_turns_one_image_into_several(seed: int) -> None:
    rng, net = np.random.default_rng(seed), Network()
    mixed(net, rng)
    images = rng.normal(size=(3, 3, 12, 10)).astype(np.float32)
    backend = BACKENDS["torch"]
    program = npu_compiler.compile(
        at_batch(net.g.ir(), 3), backend.target, npu_compiler.CompileOptions(compute_dtype="float32")
    )
    (spec,) = program.output_specs
    weights = load_weights(net.state, program, backend)
    found = Executor(program, backend).run({"x": images}, weights)[spec.name].to_numpy(spec)
    alone = [net.run({"x": image[None]}, only="torch")["torch"] for image in images]
    assert np.abs(found - np.concatenate(alone)).max() < 0.051, "a value in the middle may go to either code"
