"""Vision models in 8 bits on the CUDA device, beside our float16 and channels-last PyTorch in float16.

A network is quantized on the CPU once, at batch size 1, and kept among the benchmark's own files in the cache folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

import npu_compiler
from benchmarks.cpu.models import NETWORKS
from benchmarks.cuda.timing import Budget, Ceilings, Contender, account, agreement, medians, steady_run, time_in_turn
from benchmarks.cuda.timing import torch_contender as peer_contender
from benchmarks.cuda.vision import floor
from benchmarks.figures import COMPILED, EAGER, OURS, Account, Figure
from benchmarks.peers import compiled
from cuda_runtime import CUDABackend
from npu_runtime import Executor, NPUBuffer, load_weights
from npu_runtime.cache_folder import cache_folder
from npu_sim.vision.models import QUANTIZED_IR, QUANTIZED_WEIGHTS
from npu_sim.vision.resnet import random_images

TASK = "quantized-vision"
BATCHES = {"resnet50": (1, 64), "mobilenet-v2": (64,)}
HALF = "npu-sim float16"
_CALIBRATION_SEEDS = (1, 2)
_RATE = 2  # integer operations for one of bfloat16, as the vendor states it


def quantized(name: str) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
    """Return the IR and weights of a network quantized to 8 bits, at batch size 1."""
    import json

    from safetensors.numpy import load_file

    from npu_sim.extract import extract_ir
    from npu_sim.quantizing.networks.quantize import quantize_network

    folder = cache_folder() / "benchmarks" / f"{name}-int8"
    if not (folder / QUANTIZED_IR).is_file():
        module = NETWORKS[name].build()
        images = [random_images(1, seed=seed).numpy() for seed in _CALIBRATION_SEEDS]
        ir = extract_ir(module, (NETWORKS[name].inputs(1),))
        quantize_network(ir, module.state_dict(), images).save(folder)
    return json.loads((folder / QUANTIZED_IR).read_text()), load_file(folder / QUANTIZED_WEIGHTS)


def at_batch(ir: dict[str, Any], batch: int) -> dict[str, Any]:
    """Return IR of batch size 1 changed to another batch size: the first dimension of activations is replaced."""
    held = {spec["name"] for spec in ir["weights"]} | set(ir.get("constants") or ())

    def resized(spec: dict[str, Any]) -> dict[str, Any]:
        is_batch = spec["shape"][:1] == [1] and spec["name"] not in held
        return {**spec, "shape": [batch, *spec["shape"][1:]]} if is_batch else spec

    def all_of(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [resized(spec) for spec in specs]

    nodes = [{**node, "inputs": all_of(node["inputs"]), "outputs": all_of(node["outputs"])} for node in ir["nodes"]]
    ends = {key: all_of(ir[key]) for key in ("graph_inputs", "graph_outputs")}
    return {**ir, **ends, "nodes": nodes}


class _Ours:
    """A program of ours with a CUDA backend of its own."""

    def __init__(self, ir: Any, weights: Mapping[str, Any], images: torch.Tensor) -> None:
        self.backend = CUDABackend()
        self.program = npu_compiler.compile(
            ir, self.backend.target, npu_compiler.CompileOptions(compute_dtype="float16")
        )
        self._executor, self._weights = (
            Executor(self.program, self.backend),
            load_weights(weights, self.program, self.backend),
        )
        (spec,) = self.program.input_specs
        self._inputs = {spec.name: NPUBuffer.from_numpy(images.numpy(), self.backend, spec=spec)}

    def run(self) -> Any:
        return self._executor.run(self._inputs, self._weights)

    def logits(self) -> torch.Tensor:
        return torch.from_numpy(self.run()[self.program.output_specs[0].name].to_numpy().astype(np.float32)).cuda()


@torch.no_grad()
def measure_integers(name: str, batch: int, ceilings: Ceilings, budget: Budget) -> Iterator[Figure | Account]:
    """Time the classification of a batch of 224 × 224 images.

    The input is float16, NCHW for ours and channels-last for PyTorch.
    """
    from npu_sim.extract import extract_ir

    network = NETWORKS[name]
    module, images = network.build(), random_images(batch, 0)
    ir, weights = quantized(name)
    ours = _Ours(at_batch(ir, batch), weights, images)
    half = _Ours(extract_ir(module, (images,)), module.state_dict(), images)
    x = images.cuda()
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        reference = module.cuda()(x)
    torch.backends.cudnn.benchmark = True
    peer: nn.Module = module.to(torch.float16, memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = x.to(torch.float16).to(memory_format=torch.channels_last)
    logits = {HALF: half.logits(), EAGER: peer(x)}
    contenders = {
        OURS: Contender(ours.run, ours.backend.timed),
        HALF: Contender(half.run, half.backend.timed),
        EAGER: peer_contender(lambda: peer(x)),
    }
    torch._dynamo.reset()
    if budget.may_compile():
        faster = compiled(peer, [x], "reduce-overhead", freezing=True)
        logits[COMPILED] = faster(x).clone()
        contenders[COMPILED] = peer_contender(lambda: faster(x))
    errors = agreement(logits, reference)
    our_logits = ours.logits()
    errors[OURS] = float((our_logits - reference).norm() / reference.norm())
    ms = medians(time_in_turn(contenders, budget.rounds))
    seconds, says = floor(ours.program, Ceilings(ceilings.bandwidth, _RATE * ceilings.matrix_rate))
    case, half_ms = {"batch": batch}, ms.pop(HALF)
    same = float((our_logits.argmax(1) == reference.argmax(1)).float().mean())
    yield Figure(
        TASK,
        network.name,
        case,
        ms,
        1000 * seconds,
        says,
        steady_run(ours.backend, ours.program, ours.run),
        errors,
        f"our float16 {half_ms:.3f} ms; {same:.0%} of the classes are those of float32, with random weights",
    )
    yield Account(TASK, network.name, case, ms[OURS], account(ours.run))
