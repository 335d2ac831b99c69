"""`ChoiceTable`: the implementation that was the fastest for each kernel call, in one JSON file per machine."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from npu_compiler.errors import ProgramFormatError
from npu_compiler.files import unseal
from npu_compiler.program.codec import decoder
from npu_runtime.cache_folder import cache_folder, keep_entry
from npu_runtime.cpu.levels import cpu_identity
from npu_runtime.cpu.native.build import library_path
from npu_runtime.cpu.native.threads import usable_threads
from npu_runtime.pytorch import torch_version

_FORMAT = 2


@dataclass(frozen=True)
class Choice:
    """The result of a trial.

    Attributes:
        chosen: Name of the implementation.
        microseconds: Name → the time of one call, for all implementations that were tried.
        spreads: Name → microseconds by which the median of its rounds was longer, for those measured more than once.
    """

    chosen: str
    microseconds: dict[str, float]
    spreads: dict[str, float] = field(default_factory=dict)


@dataclass
class _Content:
    """Content of the table's file."""

    format: int
    machine: dict[str, str]
    choices: dict[str, Choice] = field(default_factory=dict)


def machine(native: bool) -> dict[str, str]:
    """Everything that decides which implementation is the fastest, besides the call itself.

    Args:
        native: Whether native kernels are among the implementations.
    """
    library = library_path() if native else None
    return {
        "processor": cpu_identity(),
        "threads": str(usable_threads()),
        "native kernels": library.stem if library is not None else "none",
        "torch": torch_version() or "none",
    }


class ChoiceTable:
    """The choices of one machine.

    A file that cannot be read, or that belongs to another machine, is ignored with a warning and replaced by the next
    `keep`. Processes that write at the same time leave a whole file; one of them may lose an entry, which is then tried
    again.

    Args:
        identity: Result of `machine`, from which the file is named.
    """

    def __init__(self, identity: Mapping[str, str], folder: Path | None = None) -> None:
        self._machine = dict(identity)
        digest = hashlib.sha256(json.dumps(self._machine, sort_keys=True).encode()).hexdigest()[:20]
        self.path = (folder or cache_folder()) / f"cpu-choices-{digest}.json"

    @cached_property
    def choices(self) -> dict[str, Choice]:
        """Key of a call → choice; read from the file at first use."""
        try:
            return self._read()
        except (OSError, ValueError, ProgramFormatError) as error:
            warnings.warn(
                f"ignoring the table of measured CPU kernels '{self.path}', which will be replaced: {error}",
                stacklevel=2,
            )
            return {}

    def keep(self, key: str, choice: Choice) -> None:
        """Add a choice to this table and to the file.

        Failure to write is ignored, as it only makes the next start slower.
        """
        self.choices[key] = choice
        try:
            others = self._read()
        except (OSError, ValueError, ProgramFormatError):
            others = {}
        content = _Content(_FORMAT, self._machine, {**others, **self.choices})
        keep_entry(self.path, json.dumps(asdict(content), indent=1).encode())

    def _read(self) -> dict[str, Choice]:
        """The choices in the file; empty if there is no file.

        Raises:
            OSError: the file exists, but cannot be read.
            ValueError: it is damaged or no JSON, or belongs to another machine or version.
            ProgramFormatError: its JSON does not have the structure of a table.
        """
        try:
            data = unseal(self.path.read_bytes(), self.path.name)
        except FileNotFoundError:
            return {}
        if data is None:
            raise ValueError("it is damaged, or was written by something else")
        content: _Content = decoder(_Content)(json.loads(data), 0)
        if content.format != _FORMAT:
            raise ValueError(f"it has format {content.format} instead of {_FORMAT}")
        differing = {name for name in content.machine.keys() | self._machine if not self._agrees(content, name)}
        if differing:
            raise ValueError(f"it was measured elsewhere: another {', another '.join(sorted(differing))}")
        return content.choices

    def _agrees(self, content: _Content, name: str) -> bool:
        return content.machine.get(name) == self._machine.get(name)
