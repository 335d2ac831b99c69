"""Schemes of a `quantization_config`: which modules of a checkpoint are stored in which layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npu_compiler.errors import InputError
from npu_sim.checkpoints.bits import COMPRESSED_BITS
from npu_sim.checkpoints.layouts import AWQ, GPTQ, Packed, Plain
from npu_sim.checkpoints.microscaling import Microscaled

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
Layout = GPTQ | AWQ | Packed | Plain | Microscaled
_PLAIN_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")
_MICROSCALED = {
    "mxfp4-pack-quantized": Microscaled(4, 32),
    "mxfp8-quantized": Microscaled(8, 32),
    "nvfp4-pack-quantized": Microscaled(4, 16, is_divided=True),
}


@dataclass(frozen=True)
class Scheme:
    """A layout, and the modules that are stored in it.

    Attributes:
        activations: Format to which the modules' inputs are quantized, as in `QuantizedFormat`; "none": they are not.
        targets: Module names, regular expressions after "re:", or "Linear" and "Embedding" for all of a class.
    """

    layout: Layout
    targets: tuple[str, ...]
    activations: str = "none"


@dataclass(frozen=True)
class Schemes:
    """The schemes of a checkpoint, and the modules that stay unquantized even if a scheme targets them.

    Attributes:
        kept: Names or regular expressions as in `Scheme.targets`; where `kept_parts` is True, also parts of names.
    """

    schemes: tuple[Scheme, ...]
    kept: tuple[str, ...] = ()
    kept_parts: bool = False

    def keeps(self, module: str) -> bool:
        """Whether the config lists a module as not quantized."""
        if any(_matches(module, target) for target in self.kept):
            return True
        return self.kept_parts and any(f".{target.strip('.')}." in f".{module}." for target in self.kept)

    def scheme(self, module: str) -> Scheme | None:
        """The scheme of a module; None if no scheme targets it.

        Of several, the one with the most specific target counts: a name, then an expression, then a class.
        """
        matches = [
            (_rank(target), place)
            for place, scheme in enumerate(self.schemes)
            for target in scheme.targets
            if _matches(module, target)
        ]
        return self.schemes[min(matches)[1]] if matches else None


_CLASSES = ("Linear", "Embedding")


def _rank(target: str) -> int:
    """Return a sort key that is smaller for more specific targets."""
    return 2 if target in _CLASSES else int(target.startswith("re:"))


def _matches(module: str, target: str) -> bool:
    if target in _CLASSES:
        return (target == "Embedding") == module.endswith("embed_tokens")
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def read_schemes(config: Mapping[str, Any]) -> Schemes:
    """The schemes of a `quantization_config`.

    Raises:
        InputError: the config's method, format or one of its settings is not supported, or its fields have wrong
            values.
    """
    method = str(config.get("quant_method", "")).replace("_", "-")
    readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8}
    if method not in readers:
        raise InputError(f"it is quantized by {method[:80]!r}; supported are {', '.join(METHODS)}, and GGUF files")
    try:
        return readers[method](config)
    except KeyError as error:
        raise InputError(f"its quantization_config is malformed: it has no {error}") from error
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise InputError(f"its quantization_config is malformed: {error}") from error


def _gptq(config: Mapping[str, Any]) -> Schemes:
    bits = _one_of(config, "bits", (4, 8))
    version = _one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if config.get("dynamic"):
        raise InputError("its modules have settings of their own ('dynamic'), which is not supported for GPTQ")
    layout = GPTQ(bits, _group(config), bool(config.get("sym", True)), version == "gptq")
    return Schemes((Scheme(layout, ("Linear",)),), _names(config, "modules_to_not_convert"), kept_parts=True)


def _awq(config: Mapping[str, Any]) -> Schemes:
    _one_of(config, "bits", (4,), 4)
    _one_of({"version": str(config.get("version", config.get("format", "gemm"))).lower()}, "version", ("gemm",))
    kept = _names(config, "modules_to_not_convert")
    return Schemes((Scheme(AWQ(_group(config)), ("Linear",)),), kept, kept_parts=True)


def _fp8(config: Mapping[str, Any]) -> Schemes:
    _one_of(config, "fmt", ("e4m3",), "e4m3")
    block = config.get("weight_block_size")
    layout = Plain("weight_scale_inv", None if block is None else _block(block))
    return Schemes((Scheme(layout, ("Linear",)),), _names(config, "modules_to_not_convert"), kept_parts=True)


def _compressed_tensors(config: Mapping[str, Any]) -> Schemes:
    if config.get("transform_config"):
        raise InputError("its layers apply transforms ('transform_config'), which are not supported")
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise InputError(f"its weights are sparse ({sparsity['format']!r:.80}), which is not supported")
    whole = config.get("format")
    schemes = []
    for name, group in config["config_groups"].items():
        if not isinstance(group, Mapping):
            raise InputError(f"its scheme {name!r:.80} is a preset; only schemes that are written out are supported")
        if group.get("weights") is not None:
            layout = _compressed_layout(group.get("format") or whole, group["weights"])
            activations = _dynamic_activations(group.get("input_activations") or {})
            schemes.append(Scheme(layout, _names(group, "targets"), activations))
    return Schemes(tuple(schemes), _names(config, "ignore"))


def _compressed_layout(format: Any, weights: Mapping[str, Any]) -> Layout:
    strategy, symmetric = _strategy(weights), bool(weights.get("symmetric", True))
    if (layout := _MICROSCALED.get(str(format))) is not None and symmetric:
        _one_of(weights, "type", ("float",))
        _one_of(weights, "num_bits", (layout.bits,))
        _one_of(weights, "group_size", (layout.group,))
        return layout
    kind = _one_of(weights, "type", ("int", "float"), "int")
    group = int(weights["group_size"]) if strategy == "group" else 0
    if weights.get("actorder") in ("group", "dynamic", True):
        raise InputError("its columns were quantized in another order (actorder), which is not supported")
    if format == "pack-quantized" and kind == "int" and strategy != "block":
        return Packed(_one_of(weights, "num_bits", COMPRESSED_BITS, 8), group, symmetric)
    if format in _PLAIN_FORMATS:
        _one_of(weights, "num_bits", COMPRESSED_BITS if kind == "int" else (8,), 8)
        block = {"block": weights.get("block_structure"), "group": (1, group)}.get(strategy, (1, 0))
        return Plain("weight_scale", _block(block), symmetric)
    supported = ", ".join(("pack-quantized", *_PLAIN_FORMATS, *_MICROSCALED))
    raise InputError(f"its weights are {strategy} {kind} in the format {format!r:.80}; supported are {supported}")


def _dynamic_activations(settings: Mapping[str, Any]) -> str:
    """Return the format to which rows of activations are quantized at run time; "none" for unsupported settings."""
    by_row = settings.get("dynamic") is True and settings.get("strategy") == "token" and settings.get("num_bits") == 8
    if not by_row or not settings.get("symmetric", True):
        return "none"
    return {"int": "int8", "float": "float8_e4m3"}.get(str(settings.get("type", "int")), "none")


def _strategy(weights: Mapping[str, Any]) -> str:
    size = weights.get("group_size")
    guessed = "tensor" if size is None else "group" if size > 0 else "channel"
    strategy = weights.get("strategy") or guessed
    return str(_one_of({"strategy": strategy}, "strategy", ("tensor", "channel", "group", "block", "tensor_group")))


def _one_of(config: Mapping[str, Any], name: str, choices: Sequence[Any], default: Any = None) -> Any:
    value = config.get(name, default)
    value = default if value is None else value
    if value not in choices:
        raise InputError(f"its quantization has the {name} {value!r:.80}; supported: {', '.join(map(str, choices))}")
    return value


def _group(config: Mapping[str, Any]) -> int:
    """Number of elements that share a scale; 0 stands for the whole row, which configs write as -1."""
    size = config.get("group_size", 128)
    if type(size) is not int or size < -1 or size == 0:
        raise InputError(
            f"its quantization has the group_size {size!r:.80}, which is not a whole number above 0, or -1"
        )
    return max(size, 0)


def _block(block: Any) -> tuple[int, int]:
    if isinstance(block, str):
        block = [int(size) for size in block.split("x")]
    rows, columns = block
    if type(rows) is not int or type(columns) is not int or rows < 1 or columns < 0:
        raise InputError(f"its quantization has blocks of {block!r:.80}, which are not two whole numbers above 0")
    return rows, columns


def _names(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    names = config.get(name) or ()
    if not isinstance(names, list | tuple) or not all(isinstance(x, str) for x in names):
        raise InputError(f"its '{name}' is {names!r:.80}, which is not a list of names")
    return tuple(names)
