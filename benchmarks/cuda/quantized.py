"""Language models with random quantized weights on the CUDA device, and PyTorch with the dequantized weights.

If torchao is installed, it quantizes the weights again to the same number of bits and runs under `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

import npu_compiler
from benchmarks.cuda.llm import Models
from benchmarks.figures import TORCHAO
from benchmarks.peers import StaticLanguageModel, quantized_by_torchao
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_sim.llm import extract_graph

LARGE_MODEL = "Llama-3.1-8B"
_SPREAD = {"int4": 4.6, "int8": 74.0, "float8_e4m3": 130.0}  # standard deviation of random codes
# The head is stored in few bits, with the embedding where the two are tied; one of its own is not read as a whole.
_TIED = ("model.embed_tokens.weight", "lm_head.weight")


class QuantizedModels(Models):
    """Compiled programs with random quantized weights, and PyTorch modules with these weights dequantized.

    Args:
        name: Name of the model.
        config: The transformers config.
        quantization: One of the named formats.
        seed: Seed of the weights.
    """

    def __init__(self, name: str, config: Any, quantization: str, seed: int) -> None:
        super().__init__(f"{name} {quantization}", config, seed)
        self.quantization = quantization
        self._rng = np.random.default_rng(seed)
        self._pool = self._rng.integers(0, 256, 1 << 26, np.uint8)
        leaves = [leaf for weight in self.program(1, 64).weight_specs.values() for leaf in weight.recipe.leaves()]
        formats = {leaf.params["key"]: leaf.format for leaf in leaves if leaf.op == "quantized"}
        self.stored = {key: self._random(tuple(self.state[key].shape), format) for key, format in formats.items()}
        self._dequantize()

    @cached_property
    def other_peers(self) -> Mapping[str, StaticLanguageModel]:
        if find_spec("torchao") is None:
            return {}
        heads = {stored.format.codes for key, stored in self.stored.items() if key in _TIED}
        names = {"int4": "int4", "int8": "int8", "float8_e4m3": "fp8"}
        model = StaticLanguageModel(self.checkpoint.config, self.state)
        return {TORCHAO: quantized_by_torchao(model, self.quantization, names[heads.pop()])}

    def program(self, tokens: int, cache_length: int) -> CompiledProgram:
        ir = extract_graph(self.checkpoint, tokens, cache_length)
        return npu_compiler.compile(
            ir,
            self.backend.target,
            npu_compiler.CompileOptions(compute_dtype="bfloat16", quantization=self.quantization),
        )

    def source(self) -> Mapping[str, Any]:
        return {**self.state, **self.stored}

    def _random(self, shape: tuple[int, ...], format: QuantizedFormat) -> QuantizedArray:
        n, k = shape
        parts = format.parts((n, k))
        start = int(self._rng.integers(1 << 20))
        codes = np.resize(self._pool[start:], parts["codes"][0])
        if format.codes == "float8_e4m3":
            codes &= 0xF7  # none is NaN
        scales = np.full(parts["scales"][0], 0.6 / _SPREAD[format.codes] / k**0.5) * self._rng.uniform(
            0.7, 1.3, parts["scales"][0]
        )
        offsets = None
        if "offsets" in parts:
            offsets = self._rng.integers(7, 10, parts["offsets"][0]).astype(np.uint8)
        return QuantizedArray(format, (n, k), codes, scales.astype(parts["scales"][1]), offsets)

    def _dequantize(self) -> None:
        """Copy the dequantized weights into the state of PyTorch's modules."""
        for key, stored in self.stored.items():
            value = _dequantized(stored)
            tied = self.checkpoint.config.tie_word_embeddings and key in _TIED
            for name in _TIED if tied else (key,):
                if name in self.state:
                    self.state[name].copy_(value)

    @property
    def weight_bytes(self) -> int:
        dense = (key for key in self.checkpoint.state if key not in self.stored and key not in _TIED)
        return sum(stored.size_bytes for stored in self.stored.values()) + 2 * sum(
            int(self.checkpoint.state[key].numel()) for key in dense
        )


def _dequantized(stored: QuantizedArray) -> Tensor:
    codes = torch.from_numpy(stored.codes).cuda()
    kind = stored.format.codes
    if kind == "int4":
        values = torch.stack((codes & 15, codes >> 4), -1).flatten(1).float()
        values -= 8 if stored.offsets is None else 0
    else:
        values = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).float()
    groups = values.view(values.shape[0], stored.scales.shape[1], -1)
    if stored.offsets is not None:
        groups -= torch.from_numpy(stored.offsets).cuda().float()[..., None]
    groups *= torch.from_numpy(stored.scales.astype(np.float32)).cuda()[..., None]
    return values
