"""Weights of mixture-of-experts layers: from a file's tensors to one matrix [E · N, K] for a layer's E experts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npu_compiler.errors import InputError
from npu_compiler.graph.quantization import PARTS, QuantizedArray


@dataclass(frozen=True)
class Joined:
    """A parameter that holds one matrix for each expert and is stored as a single matrix [E · N, K].

    Attributes:
        shape: Its shape in transformers: [E, N, K], or [E, K, N] where it is transposed.
        transposed: Whether the matrices are transposed.
    """

    shape: tuple[int, int, int]
    transposed: bool

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Number of experts E, and rows N and columns K of each matrix."""
        count, rows, width = self.shape
        return (count, width, rows) if self.transposed else self.shape

    def join(self, value: Any) -> Any:
        """A file's tensor of all experts as one matrix [E · N, K].

        A quantized value, or one that is joined already, is returned as it is.
        """
        if isinstance(value, QuantizedArray) or value.ndim != 3:
            return value
        matrices = value.swapaxes(1, 2) if self.transposed else value
        return matrices.reshape(-1, matrices.shape[2])


class ExpertParts:
    """The tensors of a file, one or more for each expert, that make up one parameter of a layer.

    Args:
        places: Number of tensors of one expert, whose rows follow each other.
        parts: Number of the expert, number among the expert's tensors and name of each tensor.
    """

    def __init__(self, places: int, parts: Iterable[tuple[int, int, str]]) -> None:
        self._places = places
        self._names = {(expert, place): name for expert, place, name in parts}

    @property
    def first(self) -> str:
        return next(iter(self._names.values()))

    def names(self, count: int) -> list[str]:
        """The names of the tensors of `count` experts, in the order of their rows.

        Raises:
            InputError: a tensor is missing, or the files hold more than `count` experts.
        """
        wanted = [(expert, place) for expert in range(count) for place in range(self._places)]
        if missing := [where for where in wanted if where not in self._names]:
            raise InputError(f"the files lack a matrix of expert {missing[0][0]} beside '{self.first}'")
        if len(self._names) > len(wanted):
            raise InputError(
                f"the files hold {1 + max(expert for expert, _ in self._names)} experts like '{self.first}', but the "
                f"config says {count}"
            )
        return [self._names[where] for where in wanted]

    def parameter(self, state: Mapping[str, Any], shape: Sequence[int], joined: Joined | None) -> Any:
        """The parameter, from a checkpoint's tensors.

        Args:
            shape: Its shape in transformers.
            joined: Its form if it is one matrix [E · N, K]. None: it has the shape of transformers.

        Raises:
            InputError: as in `matrix`; or its experts are stored in few bits, but not read as one matrix.
        """
        count, rows, width = shape
        matrix = self.matrix(state, joined or Joined((count, rows, width), transposed=False))
        if joined is not None:
            return matrix
        if isinstance(matrix, QuantizedArray):
            raise InputError(
                f"the experts like '{self.first}' are stored in few bits, which this model does not support"
            )
        return matrix.reshape(shape)

    def matrix(self, state: Mapping[str, Any], joined: Joined) -> Any:
        """The parameter as one matrix [E · N, K], from a checkpoint's tensors.

        Raises:
            InputError: a tensor is missing, superfluous or of another shape, or the experts are stored in several
                formats.
        """
        count, rows, width = joined.matrices
        names = self.names(count)
        parts = [state[name] for name in names]
        each = [rows // self._places, width]
        for name, part in zip(names, parts, strict=True):
            if list(part.shape) != each:
                raise InputError(f"'{name}' has the shape {list(part.shape)}, but its config says {each}")
        if not any(isinstance(part, QuantizedArray) for part in parts):
            return np.concatenate([np.asarray(part) for part in parts])
        if len({part.format if isinstance(part, QuantizedArray) else None for part in parts}) > 1:
            raise InputError(f"the experts like '{self.first}' are stored in several formats, which is not supported")
        merged = {
            name: np.concatenate([part.part(name) for part in parts])
            for name in PARTS
            if getattr(parts[0], name) is not None
        }
        return QuantizedArray(parts[0].format, (count * rows, width), **merged)
