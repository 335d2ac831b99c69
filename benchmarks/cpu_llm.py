"""The contenders of the CPU benchmark for SmolLM2-135M: decode of one token and prefill of a prompt.

All have the weights of the shipped file in bfloat16, but for llama.cpp's quantized files. The logits are compared less
their mean, because llama.cpp returns them up to a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cpu_llama import LlamaServer, write_gguf
from benchmarks.cpu_peers import DTYPES, Array, Contender, Factory, torch_contender
from benchmarks.figures import OURS
from benchmarks.peers import generation_steps, language_model
from benchmarks.timing import wall_time

if TYPE_CHECKING:
    from npu_sim.llm import LanguageModel

NAME = "SmolLM2-135M"
PROMPT = 128
CACHE_LENGTH = 512
TASKS = ("decode", "prefill")

Pair = dict[str, Contender]  # by task


class LanguageContenders:
    """The contenders for one prompt of `PROMPT` tokens and one more token, which is decoded at position `PROMPT`.

    Args:
        folder: Where GGUF files may be written.
    """

    def __init__(self, threads: int, folder: Path) -> None:
        from npu_sim.llm import load_checkpoint
        from npu_sim.llm.loading import _resolve_shorthand

        self.threads, self.folder = threads, folder
        self.file = _resolve_shorthand("smollm2")
        self.checkpoint = load_checkpoint("smollm2", "bfloat16")
        self.state: dict[str, Tensor] = dict(self.checkpoint.state)
        self.vocabulary = int(self.checkpoint.config.vocab_size)
        *prompt, self.token = np.random.default_rng(0).integers(0, self.vocabulary, PROMPT + 1).tolist()
        self.prompt: list[int] = prompt
        self._pair: Callable[[str], Pair] = cache(self._make)

    def factories(self, task: str) -> dict[str, Factory]:
        """By the contender's name; both tasks share what a contender loads."""
        names = [f"{OURS} {dtype}" for dtype in DTYPES]
        for kind in ("PyTorch eager", "torch.compile"):
            names += [f"{kind} float32", f"{kind} bfloat16"]
        names += ["llama.cpp BF16", "llama.cpp Q8_0", "llama.cpp Q4_1"]
        return {name: lambda name=name: self._pair(name)[task] for name in names}  # type: ignore[misc]

    def reference(self, task: str) -> Array:
        return self._pair("PyTorch eager float32")[task].output()

    def weight_bytes(self) -> int:
        """The bytes of the weights that a decode step of ours in bfloat16 reads."""
        buffers = self.model("bfloat16").decode_program.plan.buffers.values()
        return sum(buffer.size_bytes for buffer in buffers if buffer.kind == "weight")

    def flops(self) -> int:
        program = self.model("bfloat16").prefill_program
        assert program is not None
        return sum(call.flops for call in program.kernels)

    def _make(self, name: str) -> Pair:
        kind, _, dtype = name.rpartition(" ")
        if kind == OURS:
            return self._ours(dtype)
        if kind == "llama.cpp":
            return self._llama(dtype)
        return self._torch(getattr(torch, dtype), kind == "torch.compile")

    @cache
    def model(self, dtype: str) -> LanguageModel:
        from npu_sim.llm import LanguageModel

        state = {key: value.to(getattr(torch, dtype)) for key, value in self.state.items()}
        checkpoint = replace(self.checkpoint, state=state, dtype=dtype)
        return LanguageModel(checkpoint, device="cpu", cache_length=CACHE_LENGTH, chunk=PROMPT)

    def _ours(self, dtype: str) -> Pair:
        model = self.model(dtype)
        model.prefill(self.prompt)

        def prefill() -> Array:
            model.reset()
            return centred(model.prefill(self.prompt))

        def decode() -> Array:
            del model.tokens[PROMPT:]
            return centred(model.decode(self.token))

        return {"decode": Contender(wall_time(decode), decode), "prefill": Contender(wall_time(prefill), prefill)}

    @cached_property
    def _eager_models(self) -> dict[torch.dtype, Any]:
        dtypes = (torch.float32, torch.bfloat16)
        return {dtype: language_model(self.checkpoint.config, self.state, dtype) for dtype in dtypes}

    def _torch(self, dtype: torch.dtype, compiled: bool) -> Pair:
        model = self._eager_models[dtype]
        steps = generation_steps(model, self.prompt, self.token, CACHE_LENGTH, compiled)
        return {
            task: replace(contender, output=_centred_output(contender))
            for task, contender in ((task, torch_contender(step)) for task, step in steps.items())
        }

    def _llama(self, kind: str) -> Pair:
        path = self.file if kind == "Q4_1" else write_gguf(self.file, kind, self.folder / f"{kind}.gguf")
        server = LlamaServer(path, CACHE_LENGTH, self.threads)
        pair = {
            "decode": server.decode(self.prompt, self.token, self.vocabulary),
            "prefill": server.prefill(self.prompt, self.vocabulary),
        }
        return {task: replace(contender, output=_centred_output(contender)) for task, contender in pair.items()}


def _centred_output(contender: Contender) -> Callable[[], Array]:
    return lambda: centred(contender.output())


def centred(logits: Array) -> Array:
    found: Array = logits.reshape(-1) - logits.mean()
    return found
