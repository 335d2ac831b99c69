"""ResNet-18 and ResNet-50 in float16 on the CUDA device and in channels-last PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import npu_compiler
from benchmarks.cuda.timing import Budget, Ceilings, Contender, account, agreement, medians, steady_run, time_in_turn
from benchmarks.cuda.timing import torch_contender as peer_contender
from benchmarks.figures import COMPILED, EAGER, OURS, Account, Figure
from benchmarks.peers import compiled
from cuda_runtime import CUDABackend
from npu_compiler import CompiledProgram
from npu_runtime import Executor, NPUBuffer, load_weights
from npu_sim.vision.resnet import random_images, resnet18, resnet50, seed_weights

MODELS: dict[str, Callable[[], nn.Module]] = {"resnet18": resnet18, "resnet50": resnet50}
BATCHES = (1, 64)
MODES = ("reduce-overhead", "max-autotune")


def extract_batch(name: str, batch: int) -> dict[str, Any]:
    from torch_ir import extract_ir

    with torch.device("meta"):
        module, images = MODELS[name]().eval(), torch.empty(batch, 3, 224, 224)
    ir: dict[str, Any] = extract_ir(module, (images,), model_name=name).to_dict()
    return ir


@torch.no_grad()
def measure_resnet(name: str, batch: int, ceilings: Ceilings, budget: Budget) -> Iterator[Figure | Account]:
    """Time the classification of a batch of 224 × 224 images in float16.

    The input is NCHW for ours and channels-last for PyTorch.
    """
    module, images = MODELS[name]().eval(), random_images(batch, 0)
    seed_weights(module, 0)
    backend = CUDABackend()
    program = npu_compiler.compile(
        extract_batch(name, batch), backend.target, npu_compiler.CompileOptions(compute_dtype="float16")
    )
    executor, weights = Executor(program, backend), load_weights(module.state_dict(), program, backend)
    spec = program.input_specs[0]
    bound = {spec.name: NPUBuffer.from_numpy(images.numpy(), backend, spec=spec)}

    def run() -> Any:
        return executor.run(bound, weights)

    x = images.cuda()
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        reference = module.cuda()(x)
    torch.backends.cudnn.benchmark = True
    peer = module.to(torch.float16, memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = x.to(torch.float16)
    x = x.to(memory_format=torch.channels_last)
    logits = {OURS: torch.from_numpy(run()[program.output_specs[0].name].to_numpy()).cuda(), EAGER: peer(x)}
    contenders = {OURS: Contender(run, backend.timed), EAGER: peer_contender(lambda: peer(x))}
    torch._dynamo.reset()
    for mode in MODES:
        if budget.may_compile():
            faster = compiled(peer, [x], mode, freezing=True)
            logits[mode] = faster(x).clone()
            contenders[mode] = peer_contender(lambda call=faster: call(x))  # type: ignore[misc]
    errors = agreement(logits, reference)
    ms = medians(time_in_turn(contenders, budget.rounds))
    modes = {mode: ms.pop(mode) for mode in MODES if mode in ms}
    if modes:
        ms[COMPILED] = min(modes.values())
    seconds, says = floor(program, ceilings)
    title = name.replace("resnet", "ResNet-")
    yield Figure(
        "vision",
        title,
        {"batch": batch},
        ms,
        1000 * seconds,
        says,
        steady_run(backend, program, run),
        errors,
        ", ".join(f"{mode} {each:.3f} ms" for mode, each in modes.items()),
    )
    yield Account("vision", title, {"batch": batch}, ms[OURS], account(run))


def floor(program: CompiledProgram, ceilings: Ceilings) -> tuple[float, str]:
    """Return a lower bound of the time in seconds, and its derivation in words.

    It is the larger of the time for all FLOP and the time to read weights and images and write logits once.
    """
    plan = program.plan
    flops = sum(call.flops for call in plan.calls)
    moved = sum(buffer.size_bytes for buffer in plan.buffers.values() if buffer.kind in ("weight", "input", "output"))
    if flops / ceilings.matrix_rate > moved / ceilings.bandwidth:
        return flops / ceilings.matrix_rate, f"{flops / 1e9:.0f} GFLOP"
    return moved / ceilings.bandwidth, f"{moved / 1e6:.0f} MB of weights and images"
