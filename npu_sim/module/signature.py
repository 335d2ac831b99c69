"""The parameters of a function as plain data, which a file can hold."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from npu_compiler.errors import ProgramFormatError

Kind = Literal["POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL", "KEYWORD_ONLY", "VAR_KEYWORD"]
_PLAIN = (bool, int, float, str, type(None))


class _OtherDefault:
    """A stand-in for a default value that a file cannot hold; it equals only itself."""

    def __repr__(self) -> str:
        return "its default"


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function (not a weight).

    Attributes:
        name: The parameter's name.
        kind: The name of one of `inspect.Parameter`'s kinds.
        default: `none` if there is no default, `plain` if it is `value`, `other` if it is not plain data.
        value: The default value, if that is plain data.
    """

    name: str
    kind: Kind
    default: Literal["none", "plain", "other"] = "none"
    value: Any = None


def parameters_of(signature: inspect.Signature) -> tuple[Parameter, ...]:
    parameters = []
    kinds = {name: name for name in get_args(Kind)}
    for name, parameter in signature.parameters.items():
        kind: Kind = kinds[parameter.kind.name]
        if parameter.default is inspect.Parameter.empty:
            parameters.append(Parameter(name, kind))
        elif type(parameter.default) in _PLAIN:
            parameters.append(Parameter(name, kind, "plain", parameter.default))
        else:
            parameters.append(Parameter(name, kind, "other"))
    return tuple(parameters)


def signature_of(parameters: Sequence[Parameter]) -> inspect.Signature:
    """Return the signature that `parameters_of` turned into these parameters.

    Raises:
        ProgramFormatError: no function can have these parameters.
    """
    rebuilt = []
    try:
        for given in parameters:
            default = {"none": inspect.Parameter.empty, "plain": given.value, "other": _OtherDefault()}[given.default]
            rebuilt.append(inspect.Parameter(given.name, getattr(inspect.Parameter, given.kind), default=default))
        return inspect.Signature(rebuilt)
    except (ValueError, TypeError, IndexError) as error:  # the last for an empty name
        raise ProgramFormatError(f"no function has its parameters: {error}") from error
