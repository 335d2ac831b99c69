"""The error hierarchy: every failure a user can cause is an `NPUError` with one clear sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class NPUError(Exception):
    """Base of all errors that this project raises on purpose."""


class IRError(NPUError):
    """The IR is malformed: names the node and the field."""


class InPlaceError(IRError):
    """The graph writes in place through a view for which there is no out-of-place form; names both nodes."""


class ConstraintError(NPUError):
    """The graph is well formed, but the NPU cannot run it as one program; lists every violation.

    Attributes:
        nodes: Name of a node that the target cannot run after all that the compiler did → why, as far as it is known.
    """

    def __init__(self, violations: list[str], nodes: Mapping[str, str] | None = None) -> None:
        self.violations = list(violations)
        self.nodes = dict(nodes or {})
        listed = "\n".join(f"  - {violation}" for violation in self.violations)
        count = len(self.violations)
        super().__init__(f"the NPU cannot run this graph ({count} violation{'s' * (count != 1)}):\n{listed}")

    def __reduce__(self) -> tuple[type[ConstraintError], tuple[list[str], dict[str, str]]]:
        """The arguments that make it again in another process."""
        return ConstraintError, (self.violations, self.nodes)


class ProgramFormatError(NPUError):
    """A `.npubin` or `.npumod` file is truncated, corrupted, of another version, or no such file at all."""


class UntrustedProgramError(ProgramFormatError):
    """A `.npubin` file contains code, and nobody whom this user trusts vouches for it."""


class WeightError(NPUError):
    """Weights are missing, misnamed, misshapen, or hold values that no model should."""


class DeviceError(NPUError):
    """A device is absent, out of memory, or failed while running."""


class NumericalWarning(UserWarning):
    """A result holds values that are not finite, or that were clamped to the range of its dtype."""


class PrecisionWarning(UserWarning):
    """Arithmetic that PyTorch does in float64 is done in float32."""


class InputError(NPUError):
    """An input of the user (an array, a file, an argument) does not fit."""


MALFORMED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Built-in errors that are raised where data is read which is not as the code that reads it takes for granted."""


@contextmanager
def reading(refuse: Callable[[str], NPUError]) -> Iterator[None]:
    """Turn what reading malformed data raises into a format's own error, so that no reader has to foresee everything.

    Args:
        refuse: Makes that error of a reason.
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
