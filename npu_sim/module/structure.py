"""Nested structure of a module's arguments and results, and the leaves (tensors and other values), without PyTorch.

Inside a compiled module the structure is PyTorch's own (`npu_sim.module.tensors`). `Tree` holds the same information as
plain data, which a file can contain.
"""

from __future__ import annotations

import dataclasses
import keyword
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType
from typing import Any, Literal, Protocol, TypeAlias

from npu_compiler.program.codec import NOT_STORED

AnyClass: TypeAlias = type[Any]


@dataclass(frozen=True)
class InputLeaf:
    """A leaf (tensor or other value) of a call's arguments.

    Attributes:
        name: The name of the graph input, for a tensor. None: the leaf is another value, fixed in the graph by tracing.
        value: The fixed value.
        path: Position of the leaf in the arguments, in words.
    """

    name: str | None
    value: Any
    path: str


@dataclass(frozen=True)
class OutputLeaf:
    """A leaf (tensor or other value) of a call's result.

    Attributes:
        output: The index of the graph's output that is the result. None: no output is.
        source: The name of the graph input, weight or view that is the result. None: it is none of these.
        value: A result that is not a tensor. With `output` set: `NUMBER` if the result is the one element of that
            output as a Python number.
    """

    output: int | None = None
    source: str | None = None
    value: Any = None


NUMBER = "number"


def number_of(array: Any) -> Any:
    """Return the one element of a tensor or array as a Python number."""
    number = array.item()
    return number if isinstance(number, (bool, int, float, complex)) else float(number)  # of a dtype that NumPy lacks


class Structure(Protocol):
    """The nested structure of a value made of tuples, dicts and the like, with tensors or other values as leaves."""

    @property
    def is_leaf(self) -> bool: ...

    @property
    def is_flat_tuple(self) -> bool:
        """Whether the structure is a tuple of leaves."""

    @property
    def size(self) -> int:
        """The number of leaves."""

    def leaves(self, value: Any) -> list[Any] | None:
        """Return the leaves of a value in order; None if the value has another structure."""

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return a value of this structure with these leaves."""


@dataclass(frozen=True)
class Tree:
    """A `Structure` as plain data.

    Attributes:
        kind: The kind of value.
        children: The structures of its elements, in order.
        keys: Keys of a dict, or the names of a namedtuple's or object's fields; one for each child.
        type: `module:name` of a namedtuple's or object's class.
        absent: Names of an object's fields that are None.
        classes: `module:name` → class: classes of the caller's that may be created besides those of `_PACKAGES`.
    """

    kind: Literal["leaf", "tuple", "list", "dict", "namedtuple", "object"]
    children: tuple[Tree, ...] = ()
    keys: tuple[Any, ...] = ()
    type: str = ""
    absent: tuple[str, ...] = ()
    classes: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False, metadata=NOT_STORED)

    def __post_init__(self) -> None:
        if self.kind == "leaf" and self.children:
            raise ValueError("a leaf has no children")
        if self.kind in ("dict", "namedtuple", "object") and len(self.keys) != len(self.children):
            raise ValueError(f"it has {len(self.children)} children, but {len(self.keys)} keys")
        names = str if self.kind in ("namedtuple", "object") else (bool, int, float, str, type(None))
        if not all(isinstance(key, names) for key in self.keys) or len(set(self.keys)) < len(self.keys):
            raise ValueError("its keys are not different names")
        if self.kind == "namedtuple":
            namedtuple("Record", self.keys)  # which raises an error if they cannot be names of fields

    @property
    def is_leaf(self) -> bool:
        return self.kind == "leaf"

    @property
    def is_flat_tuple(self) -> bool:
        return self.kind == "tuple" and all(child.is_leaf for child in self.children)

    @property
    def size(self) -> int:
        return 1 if self.is_leaf else sum(child.size for child in self.children)

    def paths(self) -> list[str]:
        """Return each leaf's path: `output` if there is only one, else its keys and indices, as in `state.0`."""
        if self.is_leaf:
            return ["output"]
        steps = self.keys or range(len(self.children))
        named = [(step, child) for step, child in zip(steps, self.children, strict=True)]
        return [str(step) if child.is_leaf else f"{step}.{inner}" for step, child in named for inner in child.paths()]

    def leaves(self, value: Any) -> list[Any] | None:
        if self.is_leaf:
            return [value]
        parts = self._parts(value)
        if parts is None or len(parts) != len(self.children):
            return None
        leaves: list[Any] = []
        for child, part in zip(self.children, parts, strict=True):
            inner = child.leaves(part)
            if inner is None:
                return None
            leaves += inner
        return leaves

    def _parts(self, value: Any) -> Sequence[Any] | None:
        """Return the values of the children; None if the value is of another kind or has other keys."""
        match self.kind:
            case "tuple" | "list":
                return value if type(value) is (tuple if self.kind == "tuple" else list) else None
            case "dict":
                is_alike = isinstance(value, Mapping) and value.keys() == set(self.keys)
                return [value[key] for key in self.keys] if is_alike else None
            case "namedtuple":
                return value if isinstance(value, tuple) and field_names(type(value)) == self.keys else None
            case _:
                return [getattr(value, key) for key in self.keys] if _fields(value) == set(self.keys) else None

    def build(self, leaves: Sequence[Any]) -> Any:
        return self._build(iter(leaves))

    def _build(self, leaves: Iterator[Any]) -> Any:
        if self.is_leaf:
            return next(leaves)
        parts = [child._build(leaves) for child in self.children]
        match self.kind:
            case "tuple":
                return tuple(parts)
            case "list":
                return parts
            case "dict":
                return dict(zip(self.keys, parts, strict=True))
            case _:
                return self._make(**dict(zip(self.keys, parts, strict=True)))

    def with_classes(self, classes: Iterable[AnyClass]) -> Tree:
        """Return the structure with further classes that its namedtuples and objects may be instances of."""
        named = {type_path(kind): kind for kind in classes}
        return replace(self, children=tuple(child.with_classes(classes) for child in self.children), classes=named)

    @cached_property
    def _make(self) -> Callable[..., Any]:
        """Return a function from fields to a namedtuple or object, of its original class if that is allowed.

        The class is named by a file, which may be malicious. So nothing is imported for it, only modules of `_PACKAGES`
        are searched, and only a namedtuple or dataclass that has exactly these fields and runs no other code is called.
        """
        maker = self.classes.get(self.type) or _imported(self.type)
        is_class = isinstance(maker, type)
        name = self.type.rpartition(":")[2].rpartition(".")[2]
        name = name if name.isidentifier() and not keyword.iskeyword(name) else "Record"
        if self.kind == "namedtuple":
            if not is_class or not issubclass(maker, tuple) or field_names(maker) != self.keys:
                return namedtuple(name, self.keys)
            return maker if hasattr(maker, "_fields") else lambda **fields: maker(fields.values())
        if is_class and _is_plain_dataclass(maker, self.keys):
            return maker  # type: ignore[no-any-return]
        return type(name, (Record,), {"_absent": self.absent})


# The packages whose classes a file may name.
_PACKAGES = frozenset({"collections", "diffusers", "timm", "torch", "torchaudio", "torchvision", "transformers"})


def _imported(path: str) -> Any:
    """Return what an already imported module of `_PACKAGES` defines under `module:name`; None if there is nothing.

    Only module dictionaries are read, since attribute access makes some modules import others.
    """
    module, _, names = path.partition(":")
    if module.partition(".")[0] not in _PACKAGES or module not in sys.modules:
        return None
    value: Any = sys.modules[module]
    for name in names.split("."):
        value = vars(value).get(name) if isinstance(value, (type, ModuleType)) else None
    return value


class Record(dict[str, Any]):
    """Stand-in for an object whose class is not imported here; its fields are keys and attributes.

    Like the `ModelOutput` of transformers, it also returns a field by position.
    """

    _absent: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in self._absent:
            return None
        raise AttributeError(f"'{type(self).__name__}' has no field '{name}'; it has {', '.join(self)}")

    def __getitem__(self, key: Any) -> Any:
        return self.to_tuple()[key] if isinstance(key, (int, slice)) else super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.items())})"


def field_names(kind: type) -> tuple[str, ...] | None:
    """Return the field names of a named tuple type, of `collections` or `torch.return_types`; None for other types."""
    if hasattr(kind, "_fields"):
        return tuple(kind._fields)
    is_sequence = kind.__bases__ == (tuple,) and isinstance(getattr(kind, "n_fields", None), int)
    return tuple(kind.__match_args__) if is_sequence else None  # type: ignore[attr-defined]


def _fields(value: Any) -> set[str] | None:
    """Return the names of fields that are not None, of a dataclass instance or mapping; None for other values."""
    if isinstance(value, Mapping):
        return set(value.keys())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {x.name for x in dataclasses.fields(value) if getattr(value, x.name) is not None}
    return None


def _is_plain_dataclass(kind: type, given: Sequence[str]) -> bool:
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.init:  # type: ignore[attr-defined]
        return False
    is_model_output = any(
        x.__name__ == "ModelOutput" and x.__module__.startswith("transformers.") for x in kind.__mro__
    )
    if hasattr(kind, "__post_init__") and not is_model_output:
        return False
    fields = {x.name: x for x in dataclasses.fields(kind) if x.init}
    missing = dataclasses.MISSING
    needed = {x.name for x in fields.values() if x.default is missing and x.default_factory is missing}
    return needed <= set(given) <= fields.keys()


def type_path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
