"""Checks of arguments that need nothing imported or loaded; each raises `InputError`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from npu_compiler.errors import InputError


def check_file(path: Path, what: str) -> Path:
    """The path, if it is a file that can be read (or a pipe, which is not opened here)."""
    if not path.exists():
        code = errno.ENOENT
    elif path.is_dir():
        code = errno.EISDIR
    elif not os.access(path, os.R_OK):
        code = errno.EACCES
    else:
        return path
    raise InputError(f"cannot read {what} '{path}': {os.strerror(code)}")


def check_output(path: Path | None) -> Path | None:
    """The path, if a file can be written there; its folder must exist."""
    if path is None:
        return None
    if not path.name or path.is_dir():
        code = errno.EISDIR
    elif not path.parent.exists():
        code = errno.ENOENT
    elif not path.parent.is_dir():
        code = errno.ENOTDIR
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        code = errno.EACCES
    else:
        return path
    raise InputError(f"cannot write '{path}': {os.strerror(code)}")


def check_not_overwritten(output: Path | None, inputs: Iterable[Path | None]) -> None:
    """Refuse an output that is one of the files that the command reads."""
    if output is not None and output.exists():
        for path in inputs:
            if path is not None and path.exists() and path.samefile(output):
                raise InputError(f"cannot write '{output}': it is one of the files to read")


def check_text(text: str | None, what: str) -> str | None:
    """The text, if it is valid Unicode: bytes of an argument that are not UTF-8 arrive as lone surrogates."""
    if text is not None:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{what} is not UTF-8 text") from None
    return text
