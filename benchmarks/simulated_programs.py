"""The programs of `benchmarks.simulated`: real models at their published sizes, compiled for the op-level target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from npu_compiler import CompiledProgram, CompileOptions, compile

Key = tuple[str, str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True)
class Case:
    """A program, and where the time that a device took for it is written down.

    Attributes:
        chip: The shipped chip that stands for the device.
        key: Task, model and parameters, as the benchmark that measured it names them.
        values: Inputs of the program; the others are random, and integers are zeros.
    """

    chip: str
    key: Key
    dtype: str
    ir: Callable[[], dict[str, Any]]
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        task, model, parameters = self.key
        listed = ", ".join(f"{name} {value:,}" for name, value in parameters)
        return f"{model} {task if task in ('decode', 'prefill') else ''} {listed}".replace("  ", " ")

    @property
    def name(self) -> str:
        return f"{self.title} {self.dtype}"

    def program(self, folder: Path) -> CompiledProgram:
        """The program, kept in a folder between runs."""
        name = f"{self.chip} {self.title} {self.dtype}".replace("/", "-").replace(" ", "_").replace(",", "")
        path = folder / f"{name}.npubin"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            compile(self.ir(), options=CompileOptions(compute_dtype=self.dtype)).save(path)
        return CompiledProgram.load(path)


def cases() -> list[Case]:
    """The programs of the H200, whose times are documented."""
    all_cases = [
        Case("h200", ("decode", "Qwen2.5-1.5B", (("cache", 2048), ("position", 2000))), "bfloat16", partial(_qwen, 1)),
    ]
    for tokens in (128, 512, 2048):
        key: Key = ("prefill", "Qwen2.5-1.5B", (("tokens", tokens), ("cache", 2048)))
        all_cases.append(Case("h200", key, "bfloat16", partial(_qwen, tokens)))
    for name, title in (("resnet18", "ResNet-18"), ("resnet50", "ResNet-50")):
        all_cases += [
            Case("h200", ("vision", title, (("batch", batch),)), "float16", partial(_resnet, name, batch))
            for batch in (1, 64)
        ]
    for entry, title, many in (
        ("bert", "BERT-base, 128 tokens", 16),
        ("efficientnet", "EfficientNet-B0", 32),
        ("mobilenet", "MobileNetV2", 32),
        ("convnext", "ConvNeXt-T", 32),
        ("gpt2", "GPT-2, 512 tokens", 16),
        ("unet", "UNet block, 8 heads of 40, 4,096 tokens", 16),
    ):
        all_cases += [
            Case("h200", ("models", title, (("batch", batch),)), "float16", partial(_zoo, entry, batch))
            for batch in (1, many)
        ]
    all_cases += [
        Case("h200", ("alone", "ViT-B/16", (("batch", batch),)), "float16", partial(_zoo, "vit", batch))
        for batch in (1, 32)
    ]
    return all_cases


def cpu_cases() -> list[Case]:
    """The programs that are measured on the CPU device of a machine."""
    all_cases = []
    for dtype in ("bfloat16", "float32"):
        for tokens in (1, 128, 512):
            step = (("cache", 2048), ("position", 2000)) if tokens == 1 else (("tokens", tokens), ("cache", 2048))
            key: Key = ("decode" if tokens == 1 else "prefill", "Qwen2.5-1.5B", step)
            all_cases.append(Case("cpu", key, dtype, partial(_qwen, tokens), _step_inputs(tokens, 2000)))
        for tokens in (1, 128):
            step = (("cache", 512), ("position", 500)) if tokens == 1 else (("tokens", tokens), ("cache", 512))
            key = ("decode" if tokens == 1 else "prefill", "SmolLM2-135M", step)
            all_cases.append(Case("cpu", key, dtype, partial(_smollm2, tokens), _step_inputs(tokens, 500)))
    for name, title in (("resnet18", "ResNet-18"), ("resnet50", "ResNet-50")):
        for batch in (1, 64):
            key = ("vision", title, (("batch", batch),))
            all_cases.append(Case("cpu", key, "float32", partial(_resnet, name, batch)))
    for entry, title, many in (
        ("bert", "BERT-base, 128 tokens", 8),
        ("vit", "ViT-B/16", 8),
        ("mobilenet", "MobileNetV2", 8),
        ("efficientnet", "EfficientNet-B0", 8),
        ("convnext", "ConvNeXt-T", 8),
        ("gpt2", "GPT-2, 512 tokens", 4),
        ("unet", "UNet block, 8 heads of 40, 4,096 tokens", 2),
        ("swin", "Swin-T", 8),
        ("t5", "T5-base encoder, 128 tokens", 8),
    ):
        for batch in (1, many):
            key = ("models", title, (("batch", batch),))
            all_cases.append(Case("cpu", key, "float32", partial(_zoo, entry, batch)))
    return all_cases


def _step_inputs(tokens: int, position: int) -> dict[str, Any]:
    """The inputs of a decode step or a prefill that say where in the cache it is."""
    if tokens == 1:
        return {"position": [position]}
    return {"positions": range(tokens), "last": [tokens - 1]}


def _qwen(tokens: int) -> dict[str, Any]:
    from benchmarks.qwen import step_graph

    return step_graph(tokens)


def _resnet(name: str, batch: int) -> dict[str, Any]:
    import torch

    from npu_sim.extract import extract_ir
    from npu_sim.vision import resnet

    with torch.device("meta"):
        module = getattr(resnet, name)().eval()
        return extract_ir(module, (torch.empty(batch, 3, 224, 224),))


def _zoo(entry: str, batch: int) -> dict[str, Any]:
    from benchmarks.cuda.zoo import ENTRIES
    from npu_sim.extract import extract_ir

    model = ENTRIES[entry]
    return extract_ir(model.make().eval(), model.inputs(batch, 0))


def _smollm2(tokens: int) -> dict[str, Any]:
    from benchmarks.cpu.llm import CACHE_LENGTH
    from npu_sim.llm import extract_graph, load_checkpoint

    return extract_graph(load_checkpoint("smollm2", "bfloat16", "none"), tokens, CACHE_LENGTH)
