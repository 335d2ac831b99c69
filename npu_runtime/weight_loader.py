"""Checkpoint → device buffers: map, check, transform as the program's recipes say, upload each tensor once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import saturating_cast
from npu_compiler.errors import WeightError
from npu_compiler.graph_optimizer import WeightTransformRecipe
from npu_compiler.weight_recipe import apply_recipe
from npu_runtime.backend import Backend, DeviceBuffer
from npu_runtime.buffer import as_backend

if TYPE_CHECKING:
    from npu_runtime.device import Device

Progress = Callable[[int, int], None]


def load_weights(
    source: str | Path | Mapping[str, Any],
    program: CompiledProgram,
    device: Device | Backend,
    *,
    strict: bool = True,
    progress: Progress | None = None,
    cache: dict[str, DeviceBuffer] | None = None,
) -> dict[str, DeviceBuffer]:
    """Load a program's weights onto a device.

    Args:
        source: A `.safetensors` file, a folder of them, or a mapping of `state_dict` key → array or torch tensor.
        strict: Refuse keys that the model does not know.
        progress: Called with (weights done, weights in all) after each.
        cache: Shared between programs over the same checkpoint: a weight that both make alike is uploaded once.

    Raises:
        WeightError: lists every weight that is missing, unknown, misshapen or holds NaN.
    """
    backend = as_backend(device)
    with_state = source if isinstance(source, Mapping) else MappedCheckpoint(Path(source))
    buffers: dict[str, DeviceBuffer] = {}
    problems = _name_problems(program, with_state, strict)
    for index, (name, weight) in enumerate(program.weight_specs.items()):
        spec = weight.spec
        shared = f"{weight.recipe}|{spec.storage}|{spec.alloc_shape or spec.shape}"
        if cache is not None and shared in cache:
            buffers[name] = cache[shared]
        else:
            state = {key: to_numpy(with_state[key]) for key in dict.fromkeys(weight.recipe.keys()) if key in with_state}
            problems += [p for key, array in state.items() for p in check_weight(key, array, weight.source_shapes[key])]
            if not problems:
                value = saturating_cast(apply_recipe(weight.recipe, state), spec.storage)
                buffers[name] = backend.allocate_buffer(value, spec=spec)
                if cache is not None:
                    cache[shared] = buffers[name]
        if progress is not None:
            progress(index + 1, len(program.weight_specs))
    if problems:
        raise weight_error(f"program '{program.name}'", problems)
    return buffers


def weight_error(model: str, problems: list[str]) -> WeightError:
    listed = "\n".join(f"  - {problem}" for problem in dict.fromkeys(problems))
    return WeightError(f"the weights do not fit {model}:\n{listed}")


def _name_problems(program: CompiledProgram, state: Mapping[str, Any], strict: bool) -> list[str]:
    needed = {key for weight in program.weight_specs.values() for key in weight.recipe.keys()}
    problems = [f"missing: '{key}'{_suggest(key, state)}" for key in sorted(needed - set(state))]
    if strict:
        known = needed | set(program.plan.unused_weights)
        problems += [f"unknown: '{key}'" for key in sorted(set(state) - known)]
    return problems


def _suggest(key: str, state: Mapping[str, Any]) -> str:
    if "lifted_tensor" in key:
        return " (made inside forward(): extraction on the meta device loses its value; extract from CPU tensors)"
    tail = key.split(".")[-2:]
    close = [other for other in state if other.split(".")[-2:] == tail and (other in key or key in other)]
    return f" (there is '{close[0]}')" if close else ""


def check_weight(key: str, array: np.ndarray, shape: tuple[int, ...]) -> Iterator[str]:
    """What is wrong with one tensor of a checkpoint, in words."""
    if tuple(array.shape) != shape:
        yield f"misshapen: '{key}' is {list(array.shape)}, the model wants {list(shape)}"
    elif holds_nan(array):
        yield f"not a number: '{key}' holds NaN"


_EXPONENT = {"float16": (np.uint16, 0x7C00, 0x7FFF), "bfloat16": (np.uint16, 0x7F80, 0x7FFF)}


def holds_nan(array: np.ndarray) -> bool:
    """Whether any element is NaN; 16-bit floats are checked by their bits, which is faster than widening them."""
    if array.dtype.name in _EXPONENT:
        word, infinity, mask = _EXPONENT[array.dtype.name]
        return bool(((array.view(word) & mask) > infinity).any())
    return array.dtype.kind == "f" and bool(np.isnan(array).any())


def to_numpy(value: Any) -> np.ndarray:
    """A NumPy array of an array or torch tensor; bfloat16 as ml_dtypes.bfloat16."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):
        from npu_runtime.cpu_backend import tensor_to_numpy

        return tensor_to_numpy(value.cpu())
    return np.asarray(value)


class MappedCheckpoint(Mapping[str, np.ndarray]):
    """A safetensors file, or a folder of them, mapped: a tensor is read when asked for."""

    def __init__(self, path: Path) -> None:
        import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
        from safetensors import SafetensorError, safe_open

        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise WeightError(f"no weights at '{path}': give a .safetensors file or a folder that holds some")
        self._where: dict[str, Any] = {}
        for file in files:
            try:
                opened = safe_open(str(file), framework="pt")
                self._where.update(dict.fromkeys(opened.keys(), opened))
            except (SafetensorError, OSError) as error:
                raise WeightError(f"'{file}' is not a readable safetensors file: {error}") from error

    def __getitem__(self, key: str) -> np.ndarray:
        return to_numpy(self._where[key].get_tensor(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


__all__ = ["WeightTransformRecipe", "check_weight", "holds_nan", "load_weights", "to_numpy", "weight_error"]
