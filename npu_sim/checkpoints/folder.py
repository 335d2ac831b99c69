"""The tensors of a quantized checkpoint by parameter name: several stored tensors become one `QuantizedArray`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from npu_compiler.errors import InputError, WeightError
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_runtime.forks import free_lock
from npu_sim.checkpoints.microscaling import BlockTensors
from npu_sim.checkpoints.schemes import Layout, read_schemes
from npu_sim.lazy_tensors import LazyTensors

# What only activations and caches with scales that are known beforehand need: here they stay in 16 bits.
_OF_ACTIVATIONS = (
    *("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "activation_scale_inv"),
    *("output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale", "kv_scale"),
)
_OF_WEIGHTS = (
    *("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_shape", "weight_g_idx", "weight_zero_point"),
    *("weight_scale", "weight_scale_inv", "weight_global_scale", "qweight_type", "weight_meta", "weight_bitmask"),
)
_KEPT = 4  # arrays: a program takes the codes and the scales of a weight one after the other


def quantized_tensors(state: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> QuantizedTensors | BlockTensors:
    """A quantized checkpoint's tensors by parameter name, whichever format they have.

    Arguments and errors as of `QuantizedTensors`.
    """
    if config.get("quant_method") == "mxfp4":
        return BlockTensors(state)
    return QuantizedTensors(state, config)


class QuantizedTensors(LazyTensors[np.ndarray | QuantizedArray]):
    """A checkpoint's tensors by parameter name; a quantized one is made a `QuantizedArray` when it is looked up.

    Looking up a tensor whose scales are 0 or not finite raises WeightError.

    Args:
        state: The tensors as they are stored.
        config: The `quantization_config` of config.json.

    Attributes:
        formats: Parameter name → format of each quantized parameter, including the format to which activations are
            rounded by row if the config sets one.

    Raises:
        InputError: the method or a setting of it is not supported.
        WeightError: a module's tensors do not fit the config or each other.
    """

    def __init__(self, state: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> None:
        self._state = state
        self._quantized: dict[str, QuantizedArray] = {}
        self._lock = free_lock()
        schemes = read_schemes(config)
        marked = {key.rpartition(".")[0] for key in state if key.rpartition(".")[2] in _OF_WEIGHTS}
        self._layouts: dict[str, Layout] = {}
        activations: dict[str, str] = {}
        for module in sorted(marked):
            scheme = schemes.scheme(module)
            if scheme is None or schemes.keeps(module):
                raise WeightError(f"'{module}' is quantized, although the quantization_config says that it is not")
            self._layouts[module], activations[module] = scheme.layout, scheme.activations
        self.formats: dict[str, QuantizedFormat] = {}
        self._dense = dict.fromkeys(key for key in state if self._is_dense(key))
        super().__init__(self._dense, self.formats)
        for module, layout in self._layouts.items():
            self._check_names(module, layout)
            with _concerning(module):
                format = layout.format(self._parts(module))
                self.formats[f"{module}.weight"] = replace(format, activations=activations[module])

    def _is_dense(self, key: str) -> bool:
        """Whether a stored tensor is itself a parameter, not quantized.

        Raises WeightError for a float8 matrix without scales.
        """
        module, _, name = key.rpartition(".")
        if name in _OF_ACTIVATIONS or (module in self._layouts and (name == "weight" or name in _OF_WEIGHTS)):
            return False
        if self._state[key].dtype.itemsize == 1 and self._state[key].dtype.name.startswith("float8"):
            raise WeightError(f"'{key}' is stored as float8, but has no scales")
        return True

    def _check_names(self, module: str, layout: Layout) -> None:
        names = {name for name in (*_OF_WEIGHTS, "weight") if f"{module}.{name}" in self._state}
        if foreign := sorted(names - set(layout.names)):
            raise WeightError(f"'{module}' has a tensor '{foreign[0]}', which is of another format than the config's")
        if missing := [name for name in layout.required if name not in names]:
            raise WeightError(f"'{module}' lacks its tensor '{missing[0]}'")

    def _parts(self, module: str) -> dict[str, np.ndarray]:
        names = self._layouts[module].names
        return {name: self._state[f"{module}.{name}"] for name in names if f"{module}.{name}" in self._state}

    def __getitem__(self, key: str) -> np.ndarray | QuantizedArray:
        if key in self._dense:
            return self._state[key]
        if key not in self.formats:
            raise KeyError(key)
        with self._lock:
            array = self._quantized.pop(key, None)
            if array is None:
                module = key.removesuffix(".weight")
                with _concerning(module):
                    array = self._layouts[module].array(self._parts(module))
            self._quantized[key] = array
            if len(self._quantized) > _KEPT:
                del self._quantized[next(iter(self._quantized))]
            return array


@contextmanager
def _concerning(module: str) -> Iterator[None]:
    """Put the module's name into the message of an error about its tensors that is raised inside."""
    try:
        yield
    except (WeightError, InputError) as error:
        raise WeightError(f"'{module}' cannot be used: {error}") from error
