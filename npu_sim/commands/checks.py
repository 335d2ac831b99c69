"""Checks of arguments before anything is loaded, or imported that is slow; each raises an `NPUError`.

Those of one option are callbacks of its declaration in `options`. Each command begins with those of several options.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from npu_compiler.errors import InputError, WeightError

LOG_LEVELS = ("debug", "info", "warning", "error")


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


def check_program_or_ir(path: Path) -> Path:
    """The path, if it is a file that can be read: IR by its suffix, else a program."""
    return check_file(path, "IR file" if path.suffix in (".json", ".onnx") else "program")


def check_output(path: Path | None) -> Path | None:
    """The path, if a file can be written there; its folder must exist."""
    if path is None:
        return None
    if not path.name or path.is_dir():
        code = errno.EISDIR
    elif path.exists() and not path.is_file():
        raise InputError(f"cannot write '{path}': it is no regular file")
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


def check_device(name: str | None) -> str | None:
    """The device's name, if there is one of that name, which may still not be usable here."""
    from npu_runtime.device import find_device

    if name is not None:
        find_device(name)
    return name


def check_weights(path: Path | None) -> Path | None:
    """The path, if it is a file that can be read, or a folder with .safetensors files."""
    if path is None:
        return None
    if not path.exists():
        raise WeightError(f"no such weights: '{path}'")
    if not path.is_dir():
        return check_file(path, "weights")
    if not any(path.glob("*.safetensors")):
        raise WeightError(f"no weights at '{path}': the folder has no .safetensors file")
    return path


def check_inputs(assignments: list[str] | None) -> list[str] | None:
    """The `name=file.npy` or `file.npz` assignments, if their files can be read."""
    from npu_sim.arrays import assigned_files

    for path in assigned_files(assignments):
        check_file(path, "input")
    return assignments
