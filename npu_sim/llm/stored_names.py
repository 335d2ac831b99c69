"""Parameter names of a module → the tensors in files that make them up, by transformers' rules, cached on disk."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from npu_compiler.errors import InputError
from npu_compiler.graph.quantization import QuantizedArray
from npu_sim.llm.expert_weights import ExpertParts

_EXPERTS = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


@dataclass(frozen=True)
class Rows:
    """Tensors of a file that are joined along the first dimension to make a parameter."""

    names: tuple[str, ...]

    @property
    def first(self) -> str:
        return self.names[0]

    def read(self, state: Mapping[str, Any]) -> Any:
        return np.concatenate([_dense(state, name) for name in self.names])


@dataclass(frozen=True)
class Piece:
    """One of the equal parts into which a file's tensor is divided along the first dimension; it is a parameter.

    Attributes:
        first: The tensor's name.
        index, count: Number of this part, from 0, and of all parts.
    """

    first: str
    index: int
    count: int

    def read(self, state: Mapping[str, Any]) -> Any:
        return np.split(_dense(state, self.first), self.count)[self.index]


@dataclass(frozen=True)
class Interleaved:
    """A file's tensor that alternates between two parts in a dimension, which follow each other in the parameter.

    Attributes:
        first: The tensor's name.
        dim: The dimension.
    """

    first: str
    dim: int

    def read(self, state: Mapping[str, Any]) -> Any:
        value = _dense(state, self.first)
        before, size, after = value.shape[: self.dim], value.shape[self.dim], value.shape[self.dim + 1 :]
        return value.reshape(*before, size // 2, 2, *after).swapaxes(self.dim, self.dim + 1).reshape(value.shape)


Stored = str | ExpertParts | Rows | Piece | Interleaved
"""The form in which files hold a parameter: the name of a tensor, or the tensors or part that make it up."""


def first_name(stored: Stored) -> str:
    """Return the name of one of the tensors that a parameter is made of."""
    return stored if isinstance(stored, str) else stored.first


def _dense(state: Mapping[str, Any], name: str) -> Any:
    value = state[name]
    if isinstance(value, QuantizedArray):
        raise InputError(
            f"'{name}' is stored in few bits and joined or divided by transformers, which is not supported"
        )
    return np.asarray(value)


def find_names(model: Any, stored: Iterable[str]) -> dict[str, Any]:
    """Find which parameter transformers makes of each tensor name in a model's files, as JSON data for `parameters`.

    Returns:
        `tensors`: name in the file → parameter; `experts`: parameter → [number of matrices of each expert, list of
        (expert, place, name)]; `rows`: parameter → names; `pieces`: parameter → [name, index, count]; `interleaved`:
        parameter → [name, dimension]; `unsupported`: name → the operation by which transformers would change its
        tensor.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules, shapes, prefix = get_model_conversion_mapping(model), model.state_dict(), model.base_model_prefix
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    sorts = ("tensors", "experts", "rows", "pieces", "interleaved", "unsupported")
    found: dict[str, Any] = {sort: {} for sort in sorts}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, shapes)
        if target not in shapes and name in shapes:
            target, pattern = name, None
        if pattern is None or target not in shapes:
            found["tensors"][name] = target
            continue
        rule = next(rule for rule in converters if pattern in rule.source_patterns)
        place, operations = rule.source_patterns.index(pattern), rule.operations
        kinds = [(type(x).__name__, getattr(x, "dim", None)) for x in operations]
        if kinds in _EXPERTS:
            renamed, _ = rename_source_key(name, renamings, [])
            number = re.search(pattern.replace("*.", r"(\d+)\."), renamed)
            parts = found["experts"].setdefault(target, [len(rule.source_patterns), []])[1]
            parts.append([int(number[1]) if number else 0, place, name])
        elif kinds == [("Concatenate", 0)]:
            found["rows"].setdefault(target, []).append((place, name))
        elif kinds == [("Chunk", 0)]:
            first, *_ = targets = rule.target_patterns
            for index, other in enumerate(targets):
                found["pieces"][target.replace(first, other)] = [name, index, len(targets)]
        elif [kind for kind, _ in kinds] == ["Interleave"] and not getattr(operations[0], "inverse", False):
            found["interleaved"][target] = [name, kinds[0][1]]
        else:
            found["unsupported"][name] = kinds[0][0]
    for names in found["rows"].values():
        names[:] = [name for _, name in sorted(names, key=lambda part: part[0])]  # the order within a place stays
    return found


def parameters(found: Mapping[str, Any]) -> dict[str, Stored]:
    """Parameter → how the files hold it, from the result of `find_names`."""
    stored: dict[str, Stored] = {target: name for name, target in found["tensors"].items()}
    stored |= {target: ExpertParts(places, parts) for target, (places, parts) in found["experts"].items()}
    stored |= {target: Rows(tuple(names)) for target, names in found["rows"].items()}
    stored |= {target: Piece(*piece) for target, piece in found["pieces"].items()}
    stored |= {target: Interleaved(*parts) for target, parts in found["interleaved"].items()}
    return stored
