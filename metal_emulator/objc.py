"""Objective-C objects with pyobjc's names: selectors whose arguments are checked, reference counts, `NSError`."""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, ParamSpec, Self, TypeVar

if TYPE_CHECKING:
    from metal_emulator.device import MTLDevice

P = ParamSpec("P")
R = TypeVar("R")


class MetalUsageError(Exception):
    """An error for a call that Metal does not have or does not allow: a wrong selector, argument, order or lifetime."""


class UnknownSelectorError(MetalUsageError, AttributeError):
    """An error for a selector, class, function or constant that Metal lacks, or that the emulator does not offer."""


class Mismatch(Exception):
    """An error for an argument of the wrong kind; `str()` says what was passed."""


def spelled(name: str) -> str:
    """The Objective-C selector for a pyobjc name: `setBuffer_offset_atIndex_` → `setBuffer:offset:atIndex:`."""
    return name.replace("_", ":")


def unknown(owner: str, name: str, names: list[str]) -> UnknownSelectorError:
    """The error for a name that `owner` lacks, with the most similar one of `names` as a hint."""
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return UnknownSelectorError(f"{owner} has no {name} ({spelled(name)}){hint}", name=name)


class Kind:
    """The type of a method's argument. `accept` returns the argument converted for the method, or raises `Mismatch`."""

    want = ""

    def accept(self, value: Any, receiver: Any) -> Any:
        raise NotImplementedError


class _Unsigned(Kind):
    want = "an NSUInteger"

    def accept(self, value: Any, receiver: Any) -> int:
        if type(value) is not int:
            try:
                value = operator.index(value)
            except TypeError:
                raise Mismatch(_came(value)) from None
        if not 0 <= value < 1 << 64:
            raise Mismatch(str(value))
        return int(value)


class _Bool(Kind):
    want = "a BOOL"

    def accept(self, value: Any, receiver: Any) -> bool:
        if not isinstance(value, bool):
            raise Mismatch(_came(value))
        return value


class _Double(Kind):
    want = "a double"

    def accept(self, value: Any, receiver: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Mismatch(_came(value))
        return float(value)


class _String(Kind):
    want = "an NSString"

    def accept(self, value: Any, receiver: Any) -> str:
        if not isinstance(value, str):
            raise Mismatch(_came(value))
        return value


class _Bytes(Kind):
    want = "a pointer to bytes (bytes or another contiguous buffer)"

    def accept(self, value: Any, receiver: Any) -> memoryview:
        try:
            return memoryview(value).cast("B")
        except TypeError:
            raise Mismatch(_came(value)) from None


class _OutError(Kind):
    want = "None, for the NSError that pyobjc returns beside the result"

    def accept(self, value: Any, receiver: Any) -> None:
        if value is not None:
            raise Mismatch(_came(value))


class _Size(Kind):
    want = "an MTLSize"

    def accept(self, value: Any, receiver: Any) -> MTLSize:
        if not isinstance(value, (tuple, list)) or len(value) != 3:
            raise Mismatch(_came(value))
        return MTLSize(*(NSUINTEGER.accept(extent, receiver) for extent in value))


class _Range(Kind):
    want = "an NSRange"

    def accept(self, value: Any, receiver: Any) -> NSRange:
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise Mismatch(_came(value))
        return NSRange(*(NSUINTEGER.accept(part, receiver) for part in value))


class _Handler(Kind):
    want = "a block (a callable of one argument)"

    def accept(self, value: Any, receiver: Any) -> Any:
        if not callable(value):
            raise Mismatch(_came(value))
        return value


class Object(Kind):
    """An argument that must be an object of the class `name`, not released, and of the receiver's device."""

    def __init__(self, name: str, *, nullable: bool = False) -> None:
        self.name = name
        self.nullable = nullable
        self.want = f"{name} or None" if nullable else name

    def accept(self, value: Any, receiver: Any) -> Any:
        if value is None and self.nullable:
            return None
        if not isinstance(value, NSObject) or type(value).__name__ != self.name:
            raise Mismatch(_came(value))
        state = value._unusable()
        if state:
            raise Mismatch(f"one that {state}")
        device = receiver._device
        if device is not None and value._device is not None and value._device is not device:
            raise Mismatch("one of another device")
        return value


class ArrayOf(Kind):
    """An argument that must be an NSArray of objects of one kind, or None."""

    def __init__(self, kind: Object) -> None:
        self.kind = kind
        self.want = f"an NSArray of {kind.want} or None"

    def accept(self, value: Any, receiver: Any) -> list[Any]:
        if value is None:
            return []
        if not isinstance(value, (list, tuple)):
            raise Mismatch(_came(value))
        return [self.kind.accept(item, receiver) for item in value]


class Either(Kind):
    """An argument that must be one of a few numbers: an enumeration's values, or supported option bits."""

    def __init__(self, enumeration: str, *values: int) -> None:
        self.want = f"{enumeration} ({', '.join(map(str, values))})"
        self.values = frozenset(values)

    def accept(self, value: Any, receiver: Any) -> int:
        number = NSUINTEGER.accept(value, receiver)
        if number not in self.values:
            raise Mismatch(str(number))
        return number


def _came(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"


NSUINTEGER = _Unsigned()
BOOL = _Bool()
DOUBLE = _Double()
NSSTRING = _String()
BYTES = _Bytes()
OUT_ERROR = _OutError()
SIZE = _Size()
RANGE = _Range()
HANDLER = _Handler()


def selector(*kinds: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that offers a method under its selector.

    It checks that the receiver is not released, and that there are as many arguments as `kinds`, each of its kind. It
    goes below `@classmethod` for a selector that is sent to the class.
    """

    def offer(method: Callable[P, R]) -> Callable[P, R]:
        name = method.__name__
        arity = len(kinds)
        body: Callable[..., R] = method
        if name.count("_") != arity:
            raise TypeError(f"{name} takes {name.count('_')} arguments by its name, {arity} by its kinds")

        @functools.wraps(method)
        def call(receiver: Any, *args: Any, **keywords: Any) -> R:
            if not isinstance(receiver, type) and (receiver._retains != 1 or not receiver._ready):
                state = receiver._unusable()
                if state:
                    raise MetalUsageError(f"{called(receiver, name)}: sent to an object that {state}")
            if keywords or len(args) != arity:
                came = f"{len(args)} and the keywords {sorted(keywords)}" if keywords else str(len(args))
                raise MetalUsageError(f"{called(receiver, name)}: takes {arity} arguments, {came} came")
            accepted = []
            for kind, value in zip(kinds, args, strict=True):
                try:
                    accepted.append(kind.accept(value, receiver))
                except Mismatch as error:
                    raise MetalUsageError(
                        f"{called(receiver, name)}: argument {len(accepted) + 1}: Metal wants {kind.want}, {error} came"
                    ) from None
            return body(receiver, *accepted)

        return call  # type: ignore[return-value]

    return offer


def called(receiver: object, name: str) -> str:
    """The call of the method `name` of an object or a class in Objective-C's notation, for messages."""
    if isinstance(receiver, type):
        return f"+[{receiver.__name__} {spelled(name)}]"
    return f"-[{type(receiver).__name__} {spelled(name)}]"


class NSObject:
    """An object with a reference count.

    pyobjc holds one reference for Python; only an explicit `release()` drops it early.
    """

    __slots__ = ("__weakref__", "_device", "_label", "_ready", "_retains")

    def __init__(self, device: MTLDevice | None) -> None:
        self._device = device
        self._label: str | None = None
        self._ready = True
        self._retains = 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise unknown(type(self).__name__, name, offered(type(self)))

    def _unusable(self) -> str:
        """The reason why the object may not receive messages; empty if it may."""
        if not self._ready:
            return "was allocated but not initialized"
        return "was released" if self._retains < 1 else ""

    def _dealloc(self) -> None:
        """Release the references that the object holds, when its own last reference is dropped."""

    def _fail(self, method: str, why: str) -> NoReturn:
        raise MetalUsageError(f"{called(self, method)}: {why}")

    def _check(self, allowed: bool, method: str, why: str) -> None:
        if not allowed:
            self._fail(method, why)

    @selector()
    def retain(self) -> Self:
        self._retains += 1
        return self

    @selector()
    def release(self) -> None:
        self._retains -= 1
        if not self._retains:
            self._dealloc()


class Labelled(NSObject):
    """An object with a debug label that callers may set."""

    __slots__ = ()

    @selector(NSSTRING)
    def setLabel_(self, label: str) -> None:
        self._label = label

    @selector()
    def label(self) -> str | None:
        return self._label


class Allocatable(NSObject):
    """A class that callers instantiate by `Class.alloc().init…()`; Metal's protocols cannot be instantiated so."""

    __slots__ = ()

    def __init__(self) -> None:
        raise MetalUsageError(f"{type(self).__name__}: objects are made by alloc().init…()")

    @classmethod
    def alloc(cls) -> Self:
        allocated = cls.__new__(cls)
        NSObject.__init__(allocated, None)
        allocated._ready = False
        return allocated

    def _begin(self, method: str, device: MTLDevice | None = None) -> None:
        """Mark an allocated object as initialized; initializing it twice is a usage error."""
        self._check(not self._ready, method, "initialized twice")
        self._device = device
        self._ready = True


def initializer(*kinds: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a `selector` decorator for an init method, which is sent to an allocated, uninitialized object."""

    def offer(method: Callable[P, R]) -> Callable[P, R]:
        checked: Callable[..., R] = selector(*kinds)(method)

        @functools.wraps(method)
        def call(receiver: Any, *args: Any, **keywords: Any) -> R:
            receiver._begin(method.__name__)
            try:
                return checked(receiver, *args, **keywords)
            except BaseException:
                receiver._ready = False
                raise

        return call  # type: ignore[return-value]

    return offer


class Plain(Allocatable):
    """An allocatable class whose initializer takes no arguments."""

    __slots__ = ()

    @initializer()
    def init(self) -> Self:
        self._defaults()
        return self

    def _defaults(self) -> None:
        """Set every property to its documented default."""


def offered(cls: type) -> list[str]:
    """The pyobjc names of all public methods of a class, sorted."""
    return sorted(name for name in dir(cls) if not name.startswith("_"))


class MTLSize(NamedTuple):
    """The number of threads or threadgroups along each dimension of a grid."""

    width: int
    height: int
    depth: int


class NSRange(NamedTuple):
    """A range of bytes or of slots."""

    location: int
    length: int


class NSError(NSObject):
    """An error reported by a Metal method: domain, code and description."""

    __slots__ = ("_code", "_description", "_domain")

    def __init__(self, domain: str, code: int, description: str) -> None:
        super().__init__(None)
        self._domain = domain
        self._code = code
        self._description = description

    def __repr__(self) -> str:
        return f"Error Domain={self._domain} Code={self._code} {self._description!r}"

    @selector()
    def domain(self) -> str:
        return self._domain

    @selector()
    def code(self) -> int:
        return self._code

    @selector()
    def localizedDescription(self) -> str:
        return self._description


class NSURL(NSObject):
    """The URL of a file."""

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        super().__init__(None)
        self._path = path

    @classmethod
    @selector(NSSTRING)
    def fileURLWithPath_(cls, path: str) -> NSURL:
        return cls(Path(path).absolute())

    @selector()
    def path(self) -> str:
        return str(self._path)
