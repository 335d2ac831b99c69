"""Reading and writing arrays: inputs from files or at random, weights from common file formats, outputs to .npz."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np

from npu_compiler.errors import InputError, WeightError
from npu_compiler.graph.dtypes import FLOAT_DTYPES, numpy_dtype
from npu_compiler.graph.model import TensorSpec
from npu_runtime.packing import check_array
from npu_runtime.pytorch import require_torch

RANDOM_INDEX_LIMIT = 16


def read_inputs(assignments: Sequence[str], specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Read the inputs that `name=file.npy` or `file.npz` assignments give.

    Args:
        assignments: One per .npy file; an .npz file holds several arrays by input name.
        specs: The inputs; each must be given exactly once.

    Raises:
        InputError: an assignment is malformed, an input is unknown, repeated or missing, a file cannot be read, or an
            array does not fit its spec.
    """
    arrays = read_arrays(assignments, [spec.name for spec in specs])
    for spec in specs:
        check_array(arrays[spec.name], spec)
    return arrays


def read_arrays(assignments: Sequence[str], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read arrays for the named inputs from `name=file.npy` or `file.npz` assignments.

    Dtypes and shapes are not checked, unlike in `read_inputs`. Raises `InputError` for unknown, repeated and missing
    names.
    """
    arrays: dict[str, np.ndarray] = {}
    for assignment in assignments:
        name, path = split_assignment(assignment)
        loaded = _load_npz(path) if name is None else {name: _load_npy(path)}
        for key, array in loaded.items():
            if key not in names:
                raise InputError(f"unknown input '{key}'; the inputs are {', '.join(names)}")
            if key in arrays:
                raise InputError(f"input '{key}' is given twice")
            arrays[key] = array
    missing = [name for name in names if name not in arrays]
    if missing:
        raise InputError(
            f"missing input {', '.join(missing)}; give all inputs (--input name=file.npy), or none for random ones"
        )
    return arrays


def assigned_files(assignments: list[str] | None) -> list[Path]:
    """Paths of the files that `name=file.npy` or `file.npz` assignments name; empty for None."""
    return [split_assignment(assignment)[1] for assignment in assignments or ()]


def split_assignment(assignment: str) -> tuple[str | None, Path]:
    """Split `name=file.npy` into (name, path), and `file.npz` into (None, path).

    Raises `InputError` for any other text.
    """
    name, separator, path = assignment.partition("=")
    if not separator and assignment.endswith(".npz"):
        return None, Path(assignment)
    if not (name and path):
        raise InputError(f"cannot parse input '{assignment}': write name=file.npy, or the name of an .npz file")
    return name, Path(path)


def _load_npy(path: Path) -> np.ndarray:
    loaded = _load(path)
    if isinstance(loaded, dict):
        raise InputError(f"'{path}' holds several arrays; give the file without 'name=', or give an .npy file")
    return loaded


def _load_npz(path: Path) -> dict[str, np.ndarray]:
    loaded = _load(path)
    if not isinstance(loaded, dict):
        raise InputError(f"'{path}' is an .npy file, despite its suffix: it holds one array without a name")
    return loaded


def _load(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    """Read the array of an .npy file, or the arrays of an .npz file by name; everything is read, to detect damage."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            arrays = dict(loaded)
    except FileNotFoundError:
        raise InputError(f"no such file: '{path}'") from None
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise InputError(f"'{path}' is not a readable .npy or .npz file: {error}") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise InputError(f"'{path}' is not a readable .npz file: its member '{name}' is not an array")
    return arrays


def random_inputs(specs: Sequence[TensorSpec], seed: int) -> dict[str, np.ndarray]:
    """Draw a random array for each input, by input name.

    Floats are standard normal; booleans are true with probability 0.9. Integers are uniform: from 0 to 15 or, for an
    input that indexes a table, over the rows of the table.
    """
    generator = np.random.default_rng(seed)
    return {spec.name: _random(spec, generator) for spec in specs}


def _random(spec: TensorSpec, generator: np.random.Generator) -> np.ndarray:
    dtype = numpy_dtype(spec.dtype)
    if spec.dtype in FLOAT_DTYPES:
        return generator.standard_normal(spec.shape, np.float32).astype(dtype)
    if spec.dtype == "bool":
        return generator.random(spec.shape) < 0.9
    if spec.dtype.startswith("complex"):
        parts = generator.standard_normal((2, *spec.shape))
        return np.asarray(parts[0] + 1j * parts[1], dtype)
    low, high = spec.bounds if spec.bounds and spec.is_index else (0, RANDOM_INDEX_LIMIT - 1)
    return generator.integers(low, high, spec.shape, endpoint=True).astype(dtype)


def choose_inputs(
    assignments: Sequence[str], specs: Sequence[TensorSpec], seed: int | None
) -> tuple[dict[str, np.ndarray], int | None]:
    """Read inputs from files or, without any assignments, draw random ones; return them with the seed that was used.

    The seed reproduces random inputs; it is None if the inputs come from files.

    Args:
        assignments: Assignments, as for `read_inputs`.
        seed: Seed of random inputs. Default: a random one.

    Raises:
        InputError: see `read_inputs`.
    """
    if assignments:
        return read_inputs(assignments, specs), None
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    return random_inputs(specs, seed), seed


def read_weights(path: Path | None) -> Mapping[str, Any]:
    """Read a state dict: parameter name → array or tensor.

    Args:
        path: A .safetensors file or a folder of them (memory-mapped), an .npz file, or a file written by `torch.save`
            that holds only tensors (.pt, .pth, .bin, .ckpt, .tar), or an .onnx file. None gives an empty state dict.

    Raises:
        WeightError: the file does not exist, is damaged, or holds no state dict.
    """
    if path is None:
        return {}
    if not path.exists():
        raise WeightError(f"no such weights: '{path}'")
    if path.suffix == ".npz":
        try:
            return _load_npz(path)
        except InputError as error:
            raise WeightError(str(error)) from error
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".tar"):
        return _read_torch(path)
    if path.suffix == ".onnx":
        from npu_sim.onnx.sources import weights_of_file

        return weights_of_file(path)
    from npu_runtime.weight_loader import MappedCheckpoint

    return MappedCheckpoint(path)


def _read_torch(path: Path) -> Mapping[str, Any]:
    require_torch(f"reading '{path}'")
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:  # the unpickler raises errors of many types on damaged data
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightError(f"'{path}' is not a readable PyTorch weights file: {reason}") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise WeightError(f"'{path}' holds no state dict (a dict of tensors by parameter name)")
    return state


def write_outputs(path: Path, outputs: Mapping[str, np.ndarray]) -> Path:
    """Write arrays to an .npz file atomically and return its path; bfloat16, which .npz cannot store, becomes float32.

    Raises:
        InputError: the file cannot be written.
    """
    import io

    from npu_compiler.files import write_atomically

    storable: dict[str, Any] = {
        name: value.astype(np.float32) if value.dtype.kind == "V" else value for name, value in outputs.items()
    }
    data = io.BytesIO()
    np.savez(data, **storable)
    try:
        write_atomically(path, data.getvalue())
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error.strerror or error}") from error
    return path
