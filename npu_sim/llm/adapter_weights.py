"""The tensors of a module with LoRA adapters: one merged into its weights, or several stacked beside them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from npu_compiler.graph.quantization import QuantizedArray
from npu_runtime.packing import to_numpy
from npu_sim.lazy_tensors import LazyTensors
from npu_sim.llm.adapters import STACKED_A, STACKED_B, Adapter, Linear, adapter_ranks
from npu_sim.llm.checkpoint import widened


class Merged(LazyTensors[Any]):
    """The tensors of a module with an adapter merged into its layers' weights, in float32, when they are looked up.

    Args:
        state: The base model's tensors by the module's parameter names.
        linears: Path → linear layer of the module.
    """

    def __init__(self, state: Mapping[str, Any], adapter: Adapter, linears: Mapping[str, Linear]) -> None:
        super().__init__(state)
        self._state, self._adapter, self._linears = state, adapter, linears

    def __getitem__(self, key: str) -> Any:
        value, layer = self._state[key], key.removesuffix(".weight")
        if layer not in self._adapter.layers or layer == key:
            return value
        a, b = self._adapter.matrices(layer)
        added = a.T @ b.T if self._linears[layer].transposed else b @ a
        dense = widened(value, "float32") if isinstance(value, QuantizedArray) else to_numpy(value)
        added += dense.astype(np.float32, copy=False)
        return added


class Stacked(LazyTensors[Any]):
    """The tensors of a module, and the stacked matrices of its adapters.

    These are `LAYER.lora_a` [adapters, rank, in] and `LAYER.lora_b` [adapters, out, rank].
    """

    def __init__(self, state: Mapping[str, Any], adapters: Sequence[Adapter]) -> None:
        self._state, self._adapters = state, adapters
        ranks = adapter_ranks(adapters)
        self._stacks = {
            f"{layer}.{name}": (layer, rank) for layer, rank in ranks.items() for name in (STACKED_A, STACKED_B)
        }
        super().__init__(state, self._stacks)

    def __getitem__(self, key: str) -> Any:
        if key not in self._stacks:
            return self._state[key]
        layer, rank = self._stacks[key]
        first = next(adapter.layers[layer] for adapter in self._adapters if layer in adapter.layers)
        is_a = key.endswith(STACKED_A)
        shape = (rank, first.inputs) if is_a else (first.outputs, rank)
        stack = np.zeros((len(self._adapters), *shape), np.float32)
        for place, adapter in zip(stack, self._adapters, strict=True):
            if layer in adapter.layers:
                matrix = adapter.matrices(layer)[0 if is_a else 1]
                place[: matrix.shape[0], : matrix.shape[1]] = matrix
        return stack
