"""The contenders of the CPU benchmark for SmolLM2-135M: decode of one token and prefill of a prompt.

All use the weights of the model's file in bfloat16, except llama.cpp's quantized files. Logits are compared after their
mean is subtracted, because llama.cpp returns them up to an additive constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.cpu.contender import DTYPES, Array, Contender, Factory, torch_contender
from benchmarks.cpu.llama import LlamaServer, write_gguf
from benchmarks.cpu.machine import Floor, Rates
from benchmarks.cpu.onnx import export, onnx_runtime, openvino
from benchmarks.figures import OURS
from benchmarks.peers import generation_steps, language_model
from benchmarks.timing import wall_time
from npu_runtime.torch_arrays import numpy_to_tensor

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_sim.llm import LanguageModel
    from npu_sim.llm.checkpoint import Checkpoint

NAME = "SmolLM2-135M"
PROMPT = 128
CACHE_LENGTH = 512
CASES = {"decode": {"cache": CACHE_LENGTH, "position": PROMPT}, "prefill": {"tokens": PROMPT}}

Pair = dict[str, Contender]  # by task


class WithPast(nn.Module):
    """The model in the form that is exported to ONNX, with the KV cache as inputs and outputs.

    forward: ids [1, T], positions [1, T], and for each layer the past's keys and values [1, KV heads, P, D], or none
    without a past → the last token's logits [1, 1, vocab], and the keys and values of P + T tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        logits = self.model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        return logits, *(x for layer in cache.layers for x in (layer.keys, layer.values))


class LanguageContenders:
    """The contenders for a prompt of `PROMPT` tokens and for one more token, which is decoded at position `PROMPT`.

    Args:
        threads: Number of threads.
        folder: Folder for GGUF files.
    """

    def __init__(self, threads: int, folder: Path) -> None:
        from npu_sim.llm import load_checkpoint

        self.threads, self.folder = threads, folder
        self.checkpoint = load_checkpoint("smollm2", "bfloat16", "none")
        self.file = shipped_file()
        self.state: dict[str, Tensor] = {key: numpy_to_tensor(x) for key, x in self.checkpoint.state.items()}
        self.vocabulary = int(self.checkpoint.config.vocab_size)
        *prompt, self.token = np.random.default_rng(0).integers(0, self.vocabulary, PROMPT + 1).tolist()
        self.prompt: list[int] = prompt
        self._pair: Callable[[str], Pair] = cache(self._make)
        self._model: Callable[[str], LanguageModel] = cache(self._load)

    def factories(self, task: str) -> dict[str, Factory]:
        """Return the contenders' factories by name; both tasks share the models that a contender loads."""
        names = [f"{OURS} {dtype}" for dtype in DTYPES]
        for kind in ("PyTorch eager", "torch.compile"):
            names += [f"{kind} float32", f"{kind} bfloat16"]
        names += ["ONNX Runtime float32", "OpenVINO float32", "OpenVINO default"]
        names += ["llama.cpp BF16", "llama.cpp Q8_0", "llama.cpp Q4_1"]
        return {name: partial(self._contender, name, task) for name in names}

    def _contender(self, name: str, task: str) -> Contender:
        return self._pair(name)[task]

    def reference(self, task: str) -> Array:
        return self._pair("PyTorch eager float32")[task].output()

    def floor(self, task: str, rates: Rates) -> Floor:
        """Return a lower bound of our step's time in bfloat16, from the machine's peak rates."""
        if task == "decode":
            buffers = self._model("bfloat16").decode_program.plan.buffers.values()
            return rates.reading(sum(buffer.size_bytes for buffer in buffers if buffer.kind == "weight"))
        return rates.multiplying(sum(call.flops for call in self.program("prefill", "bfloat16").kernels))

    def program(self, task: str, dtype: str) -> CompiledProgram:
        """Return our program for a task."""
        model = self._model(dtype)
        return model.decode_program if task == "decode" else model.prefill_programs[PROMPT]

    def _make(self, name: str) -> Pair:
        kind, _, dtype = name.rpartition(" ")
        if kind == OURS:
            return self._ours(dtype)
        if kind == "llama.cpp":
            return self._llama(dtype)
        if kind in ("ONNX Runtime", "OpenVINO"):
            return self._onnx(kind, dtype)
        return self._torch(getattr(torch, dtype), kind == "torch.compile")

    def weights(self, dtype: str) -> Mapping[str, Any]:
        """Return the weights of our programs in the form that `load_weights` takes."""
        from npu_sim.llm.graph import state_with_buffers

        return state_with_buffers(self._checkpoint_in(dtype))

    def _checkpoint_in(self, dtype: str) -> Checkpoint:
        """Return the checkpoint with its bfloat16 weights converted to another dtype."""
        state = {key: value.to(getattr(torch, dtype)) for key, value in self.state.items()}
        return replace(self.checkpoint, state=state, dtype=dtype)

    def _load(self, dtype: str) -> LanguageModel:
        from npu_sim.llm import LanguageModel

        checkpoint = self._checkpoint_in(dtype)
        return LanguageModel(checkpoint, device="cpu", cache_length=CACHE_LENGTH, chunk=PROMPT)

    def _ours(self, dtype: str) -> Pair:
        model = self._model(dtype)
        model.prefill(self.prompt)

        def prefill() -> Array:
            model.reset()
            return model.prefill(self.prompt)

        def decode() -> Array:
            del model.tokens[PROMPT:]
            return model.decode(self.token)

        return _pair(decode=Contender(wall_time(decode), decode), prefill=Contender(wall_time(prefill), prefill))

    @cached_property
    def _eager_models(self) -> dict[torch.dtype, Any]:
        dtypes = (torch.float32, torch.bfloat16)
        return {dtype: language_model(self.checkpoint.config.whole, self.state, dtype) for dtype in dtypes}

    def _torch(self, dtype: torch.dtype, compiled: bool) -> Pair:
        model = self._eager_models[dtype]
        steps = generation_steps(model, self.prompt, self.token, CACHE_LENGTH, compiled)
        return _pair(**{task: torch_contender(step) for task, step in steps.items()})

    @cached_property
    def _exported(self) -> dict[str, tuple[Path, dict[str, Array]]]:
        """The ONNX file and the inputs of each task."""
        module = WithPast(self._eager_models[torch.float32])
        prompt, token = torch.tensor([self.prompt]), torch.tensor([[self.token]])
        with torch.no_grad():
            _, *past = module(prompt, torch.arange(PROMPT)[None])
        inputs = {"decode": (token, torch.tensor([[PROMPT]]), *past), "prefill": (prompt, torch.arange(PROMPT)[None])}
        files = {task: self.folder / f"{task}.onnx" for task in inputs}
        return {task: (files[task], export(module, inputs[task], files[task])) for task in inputs}

    def _onnx(self, kind: str, dtype: str) -> Pair:
        if kind == "ONNX Runtime":
            return _pair(**{task: onnx_runtime(*exported, self.threads) for task, exported in self._exported.items()})
        precision = "f32" if dtype == "float32" else dtype
        return _pair(
            **{task: openvino(*exported, self.threads, precision) for task, exported in self._exported.items()}
        )

    def _llama(self, kind: str) -> Pair:
        path = self.file if kind == "Q4_1" else write_gguf(self.file, kind, self.folder / f"{kind}.gguf")
        server = LlamaServer(path, CACHE_LENGTH, self.threads)
        return _pair(
            decode=server.decode(self.prompt, self.token, self.vocabulary),
            prefill=server.prefill(self.prompt, self.vocabulary),
        )


def shipped_file() -> Path:
    """Return the path of the GGUF file in the PyPI package of the model."""
    from npu_sim.llm.loading import SHORTHANDS

    package, file, _ = SHORTHANDS["smollm2"]
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"the package {package} is not installed")
    return Path(spec.submodule_search_locations[0]) / file


def _pair(**contenders: Contender) -> Pair:
    return {task: replace(c, output=partial(centred, c.output)) for task, c in contenders.items()}


def centred(output: Callable[[], Array]) -> Array:
    """Return the output minus its mean, since llama.cpp's logits are known up to an additive constant."""
    logits = output().reshape(-1)
    centred: Array = logits - logits.mean()
    return centred
