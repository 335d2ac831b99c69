"""The contenders of the CPU benchmark for quantized SmolLM2-135M: ours and llama.cpp, on the same file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.cpu.contender import Array, Contender, Factory, torch_contender
from benchmarks.cpu.llama import LlamaServer, write_gguf
from benchmarks.cpu.llm import NAME, centred, shipped_file
from benchmarks.cpu.machine import Floor, Rates
from benchmarks.figures import OURS
from benchmarks.peers import generation_steps, language_model
from benchmarks.timing import wall_time
from npu_runtime.torch_arrays import numpy_to_tensor

if TYPE_CHECKING:
    from npu_sim.llm import LanguageModel

PROMPTS = (128, 512)
CACHE_LENGTH = 1024
DECODE = {"cache": CACHE_LENGTH, "position": PROMPTS[0]}

Case = dict[str, int]  # DECODE, or {"tokens": the prompt's length}


class QuantizedContenders:
    """The contenders for one file: prefill of two prompts, and decode of a token after the first of them.

    Args:
        kind: The ggml type of the file's matrices, `Q4_1` or `Q8_0`; the token embeddings are Q8_0 in both files.
        threads: Number of threads.
        folder: Folder for a GGUF file.
    """

    cases: tuple[Case, ...] = (DECODE, *({"tokens": tokens} for tokens in PROMPTS))

    def __init__(self, kind: str, threads: int, folder: Path) -> None:
        from npu_sim.llm import load_checkpoint

        self.name, self.threads = f"{NAME} {kind}", threads
        self.file = shipped_file() if kind == "Q4_1" else write_gguf(shipped_file(), kind, folder / f"{kind}.gguf")
        self.checkpoint = load_checkpoint(self.file, "bfloat16")
        self.vocabulary = int(self.checkpoint.config.vocab_size)
        *tokens, self.token = np.random.default_rng(0).integers(0, self.vocabulary, max(PROMPTS) + 1).tolist()
        self.prompts: dict[int, list[int]] = {count: tokens[:count] for count in PROMPTS}
        self._server: Callable[[], LlamaServer] = cache(lambda: LlamaServer(self.file, CACHE_LENGTH, threads))

    def factories(self, case: Case) -> dict[str, Factory]:
        """Return the contenders' factories by name."""
        return {OURS: partial(self._ours, case), "llama.cpp": partial(self._llama, case)}

    def floor(self, case: Case, rates: Rates) -> Floor:
        """Return a lower bound of our step's time: reading the stored weights, or its FLOP at float32's peak rate."""
        if case == DECODE:
            buffers = self._models[PROMPTS[0]].decode_program.plan.buffers.values()
            return rates.reading(sum(buffer.size_bytes for buffer in buffers if buffer.kind == "weight"))
        program = self._models[case["tokens"]].prefill_programs[case["tokens"]]
        return rates.multiplying(sum(call.flops for call in program.kernels))

    def reference(self, case: Case) -> Array:
        """Return eager PyTorch's logits in float32 with the dequantized weights."""
        prompt = self._prompt(case)
        steps = generation_steps(self._eager, prompt, self.token, CACHE_LENGTH, compiled=False)
        return centred(torch_contender(steps["decode" if case == DECODE else "prefill"]).output)

    def _prompt(self, case: Case) -> list[int]:
        return self.prompts[case["position" if case == DECODE else "tokens"]]

    @cached_property
    def _eager(self) -> torch.nn.Module:
        from npu_sim.llm import load_checkpoint

        widened = load_checkpoint(self.file, "float32", "none")
        state = {key: numpy_to_tensor(value) for key, value in widened.state.items()}
        model: torch.nn.Module = language_model(widened.config.whole, state, torch.float32)
        return model

    @cached_property
    def _models(self) -> dict[int, LanguageModel]:
        """Length of a prompt → a model that prefills a prompt of this length in one run."""
        from npu_sim.llm import LanguageModel

        return {
            tokens: LanguageModel(self.checkpoint, device="cpu", cache_length=CACHE_LENGTH, chunk=tokens)
            for tokens in PROMPTS
        }

    def _ours(self, case: Case) -> Contender:
        prompt = self._prompt(case)
        model = self._models[len(prompt)]

        def prefill() -> Array:
            model.reset()
            return model.prefill(prompt)

        def decode() -> Array:
            del model.tokens[len(prompt) :]
            return model.decode(self.token)

        prefill()
        run = decode if case == DECODE else prefill
        return Contender(wall_time(run), partial(centred, run))

    def _llama(self, case: Case) -> Contender:
        prompt, server = self._prompt(case), self._server()
        if case == DECODE:
            contender = server.decode(prompt, self.token, self.vocabulary)
        else:
            contender = server.prefill(prompt, self.vocabulary)
        return Contender(contender.seconds, partial(centred, contender.output))
