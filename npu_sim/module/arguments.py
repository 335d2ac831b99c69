"""Conversion of a call's arguments to a graph's input tensors, and of its output tensors to a module's results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npu_compiler.errors import InputError
from npu_sim.module.structure import NUMBER, InputLeaf, OutputLeaf, Structure, number_of


class Arguments:
    """Flattens a call's arguments into a list of tensors, by the nested structure that was traced.

    An argument may be given by position or by keyword, however it was given in tracing. One that was traced with its
    default value may be left out.

    Args:
        signature: Signature of the module's `forward`; None if it is not known, as for a `.pt2` file.
        leaves: The leaves of (args, kwargs) when the module was traced.
        positional: The structure of each positional argument.
        keywords: The structure of each keyword argument.
        tensor: The class whose instances count as tensors.
    """

    def __init__(
        self,
        signature: inspect.Signature | None,
        leaves: Sequence[InputLeaf],
        positional: Sequence[Structure],
        keywords: Mapping[str, Structure],
        tensor: type,
    ) -> None:
        self._signature, self._leaves, self._tensor = signature, tuple(leaves), tensor
        self._positional = len(positional)
        self._keys: tuple[str, ...] = tuple(keywords)
        self._key_set = set(self._keys)
        self._structures = (*positional, *keywords.values())
        self._is_flat = all(structure.is_leaf for structure in self._structures)
        self._fixed = [(index, leaf) for index, leaf in enumerate(self._leaves) if leaf.name is None]
        self._tensors = [(index, leaf) for index, leaf in enumerate(self._leaves) if leaf.name is not None]
        self._names = self._parameter_names()

    def _parameter_names(self) -> list[str]:
        if self._signature is None:
            return [f"args[{index}]" for index in range(self._positional)] + list(self._keys)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        named = [p.name for p in self._signature.parameters.values() if p.kind in kinds]
        rest = [f"args[{index}]" for index in range(len(named), self._positional)]
        return [*(*named, *rest)[: self._positional], *self._keys]

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the tensors of a call, in the order of the graph's inputs.

        Raises:
            InputError: an argument is missing or unknown, has another structure, or differs from a value, such as a
                flag, that was traced into the graph.
        """
        if len(args) == self._positional and kwargs.keys() == self._key_set:
            values = (*args, *(kwargs[key] for key in self._keys)) if kwargs else args
        else:
            values = self._rebound(args, kwargs)
        return self.chosen(values if self._is_flat else self._flattened(values))

    def chosen(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the tensors among the leaves of all arguments. Raises `InputError` as `tensors` does."""
        for index, leaf in self._fixed:
            if leaves[index] is not leaf.value and not self._is_same(leaves[index], leaf.value):
                raise InputError(
                    f"argument '{leaf.path}' is {self._shown(leaves[index])}, but the module was compiled with "
                    f"{self._shown(leaf.value)}, which is a part of its graph; compile it again for another value"
                )
        values = []
        for index, leaf in self._tensors:
            value = leaves[index]
            if not isinstance(value, self._tensor):
                raise InputError(
                    f"argument '{leaf.path}' is {self._shown(value)}, but the module was compiled for a tensor"
                )
            values.append(value)
        return values

    def _rebound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments in the traced order.

        The call may give them by position or keyword, or leave out defaults, unlike the traced call.

        Raises:
            InputError: the arguments do not fit the signature or the traced call.
        """
        if self._signature is None:
            raise InputError(
                f"the call has {len(args)} positional arguments and the keywords {sorted(kwargs)}; "
                f"exported were {self._positional} and {list(self._keys)}"
            )
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"the arguments do not fit the module's forward(): {error}") from error
        bound.apply_defaults()
        given: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            match self._signature.parameters[name].kind:
                case inspect.Parameter.VAR_POSITIONAL:
                    start = len(given)
                    given |= {f"args[{start + index}]": item for index, item in enumerate(value)}
                case inspect.Parameter.VAR_KEYWORD:
                    given |= value
                case _:
                    given[name] = value
        for name in given.keys() - set(self._names):
            parameter = self._signature.parameters.get(name)
            default = parameter.default if parameter is not None else inspect.Parameter.empty
            if not self._is_same(given[name], default):
                raise InputError(f"argument '{name}' was not given when the module was compiled; compile it with it")
        missing = [name for name in self._names if name not in given]
        if missing:
            raise InputError(f"missing arguments: {', '.join(missing)}")
        return tuple(given[name] for name in self._names)

    def _flattened(self, values: Sequence[Any]) -> list[Any]:
        leaves: list[Any] = []
        for name, value, structure in zip(self._names, values, self._structures, strict=True):
            if structure.is_leaf:
                leaves.append(value)
                continue
            inner = structure.leaves(value)
            if inner is None:
                raise InputError(
                    f"argument '{name}' is of another structure than the one that the module was compiled with"
                )
            leaves += inner
        return leaves

    def _is_same(self, value: Any, example: Any) -> bool:
        if isinstance(value, self._tensor) or isinstance(example, self._tensor):
            return value is example
        return type(value) is type(example) and bool(value == example)

    def _shown(self, value: Any) -> str:
        if isinstance(value, self._tensor):
            return "a tensor"
        is_plain = value is None or isinstance(value, (bool, int, float, str))
        return repr(value) if is_plain else f"of type {type(value).__name__}"


class Results:
    """Builds a module's result, in the structure that `forward` returns, from the graph's outputs."""

    def __init__(self, leaves: Sequence[OutputLeaf], structure: Structure) -> None:
        self._leaves, self._structure = tuple(leaves), structure
        is_computed = all(leaf.output == index and leaf.value is None for index, leaf in enumerate(leaves))
        self._is_one = structure.is_leaf and is_computed
        self._is_tuple = structure.is_flat_tuple and is_computed

    def of(self, outputs: Sequence[Any], source: Callable[[str], Any]) -> Any:
        """Return the module's result for a call.

        Args:
            outputs: The graph's outputs, in order.
            source: Returns the tensor of this call for a graph input's name or a weight's key.
        """
        if self._is_one:
            return outputs[0]
        if self._is_tuple:
            return tuple(outputs[: len(self._leaves)])
        return self._structure.build([self._value(leaf, outputs, source) for leaf in self._leaves])

    @staticmethod
    def _value(leaf: OutputLeaf, outputs: Sequence[Any], source: Callable[[str], Any]) -> Any:
        if leaf.output is not None:
            return number_of(outputs[leaf.output]) if leaf.value == NUMBER else outputs[leaf.output]
        return leaf.value if leaf.source is None else source(leaf.source)
