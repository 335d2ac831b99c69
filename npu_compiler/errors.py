"""The error hierarchy: every failure a user can cause is an `NPUError` with one clear sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class NPUError(Exception):
    """Base of all errors that this project raises on purpose."""


class IRError(NPUError):
    """An error for malformed IR, which names the node and the field."""


class InPlaceError(IRError):
    """An error for an in-place write through a view that has no out-of-place form, which names both nodes."""


class FixedSizeError(IRError):
    """A module takes only some of the sizes that it should take."""


class ConstraintError(NPUError):
    """An error for a well-formed graph that the NPU cannot run as one program, which lists every violation.

    Attributes:
        nodes: Name of a node that the target cannot run after all compiler stages → the reason, if it is known.
    """

    def __init__(self, violations: list[str], nodes: Mapping[str, str] | None = None) -> None:
        self.violations = list(violations)
        self.nodes = dict(nodes or {})
        listed = "\n".join(f"  - {violation}" for violation in self.violations)
        count = len(self.violations)
        super().__init__(f"the NPU cannot run this graph ({count} violation{'s' * (count != 1)}):\n{listed}")

    def __reduce__(self) -> tuple[type[ConstraintError], tuple[list[str], dict[str, str]]]:
        """The class and arguments from which pickle rebuilds the error in another process."""
        return ConstraintError, (self.violations, self.nodes)


class ProgramFormatError(NPUError):
    """An error for a `.npubin` or `.npumod` file that is missing, truncated, corrupted, or of another version."""


class UntrustedProgramError(ProgramFormatError):
    """An error for a `.npubin` file with code that was not authenticated by anyone whom this user trusts."""


class WeightError(NPUError):
    """An error for weights that are missing, misnamed, of the wrong shape, or not finite."""


class DeviceError(NPUError):
    """An error of a device that is absent, out of memory, or failed while running."""


class NumericalWarning(UserWarning):
    """A warning about a result with values that are not finite, or that were clamped to the range of its dtype."""


class PrecisionWarning(UserWarning):
    """A warning that arithmetic which PyTorch does in float64 is done in float32."""


class InputError(NPUError):
    """An error for an input of the user (an array, a file, an argument) that cannot be used."""


MALFORMED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Built-in errors that code which reads data may raise if the data is malformed."""


@contextmanager
def reading(refuse: Callable[[str], NPUError]) -> Iterator[None]:
    """Context that turns built-in errors, as malformed data raises them, into a file format's own error.

    Readers thus need not foresee every defect.

    Args:
        refuse: Function that makes that error from a reason.
    """
    try:
        yield
    except MALFORMED as error:
        raise refuse(reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """Return the message of a built-in error about data that was read."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, KeyError):
        return f"{text:.80} is missing or unknown"
    return f"{text:.200}" if text else f"its parts contradict each other ({type(error).__name__})"
