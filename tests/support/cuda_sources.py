"""Compiles every CUDA source that the compiler generates for the test models, for every architecture.

    python tests/support/cuda_sources.py [model ...]

Needs NVRTC and no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from cuda_toolchain import HOPPER_ONLY, compile_sources  # noqa: E402
from traces import qwen_step  # noqa: E402
from zoo import ZOO  # noqa: E402
from zoo_runs import IN_BFLOAT16, extracted, extracted_in_bfloat16  # noqa: E402

import npu_compiler  # noqa: E402
from benchmarks.qwen import PROMPT  # noqa: E402
from cuda_compiler import GPU, CUDACodegenTarget  # noqa: E402
from npu_compiler import PartitionPlan, partition  # noqa: E402
from npu_sim.llm import Checkpoint, extract_graph  # noqa: E402
from npu_sim.vision import extract_model_ir, find_model  # noqa: E402

# Language models are cut to four layers: equal ones share their sources.
LAYERS = 4


def _smollm2(tokens: int) -> Any:
    """A step of SmolLM2-135M."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    return extract_graph(Checkpoint("smollm2", config, {}, "bfloat16", load_tokenizer=lambda: None), tokens, 2048)


GRAPHS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: extracted(name) for name in ZOO},  # type: ignore[misc]
    **{f"{name}-bfloat16": lambda name=name: extracted_in_bfloat16(name) for name in IN_BFLOAT16},  # type: ignore[misc]
    "qwen2.5-decode": lambda: qwen_step(1, LAYERS),
    "qwen2.5-prefill": lambda: qwen_step(PROMPT, LAYERS),
    "qwen2.5-long-prefill": lambda: qwen_step(512, LAYERS),
    "smollm2-decode": lambda: _smollm2(1),
    "smollm2-prefill": lambda: _smollm2(PROMPT),
    **{
        name: lambda name=name: extract_model_ir(find_model(name))  # type: ignore[misc]
        for name in ("resnet18", "resnet50", "efficientnet-lite0")
    },
}


def sources(name: str) -> dict[str, str]:
    """The sources of all that a model runs on the device, by name; those for older GPUs too, where they are others."""
    plan = partition(GRAPHS[name]())
    found = _sources_for(plan, CUDACodegenTarget())
    if any(HOPPER_ONLY in text for text in found.values()):
        found |= _sources_for(plan, CUDACodegenTarget(GPU(capability=80)))
    return found


def _sources_for(plan: PartitionPlan, target: CUDACodegenTarget) -> dict[str, str]:
    on_device = [part.ir_dict for part in plan.partitions if part.device == "npu"]
    programs = [
        npu_compiler.compile(ir, target, npu_compiler.CompileOptions(compute_dtype=plan.compute_dtype))
        for ir in on_device
    ]
    return {key: text for program in programs for key, text in program.plan.sources.items()}


def main(wanted: list[str]) -> int:
    found: dict[str, str] = {}
    for name in wanted or GRAPHS:
        found |= sources(name)
    print(f"{len(found)} sources of {len(wanted or GRAPHS)} models", flush=True)
    compile_sources(found.values())
    print("all compile for every architecture")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
