"""Checks of command-line arguments before anything is loaded or slow modules are imported; each raises an `NPUError`.

A check of a single option is a callback of its declaration in `options`. A check of several options together is called
at the beginning of the command.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from npu_compiler.errors import InputError, WeightError

LOG_LEVELS = ("debug", "info", "warning", "error")


def check_file(path: Path, what: str) -> Path:
    """Return the path if it is a readable file or a pipe (which is not opened), else raise `InputError`.

    Args:
        what: The kind of file, for the error message.
    """
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
    """Return the path if it is a readable file, else raise `InputError`.

    The message calls the file an IR file or a program, by its suffix.
    """
    return check_file(path, "IR file" if path.suffix in (".json", ".onnx") else "program")


def check_output(path: Path | None) -> Path | None:
    """Return the path if a file can be written there, in a folder that exists, else raise `InputError`.

    None stays None.
    """
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
    """Raise `InputError` if the output file is also one of the files that the command reads.

    Args:
        output: None: no file is written.
        inputs: Files to read; None entries are skipped.
    """
    if output is not None and output.exists():
        for path in inputs:
            if path is not None and path.exists() and path.samefile(output):
                raise InputError(f"cannot write '{output}': it is one of the files to read")


def check_text(text: str | None, what: str) -> str | None:
    """Return the text if it is valid Unicode, else raise `InputError`. None stays None.

    Bytes of a command-line argument that are not UTF-8 arrive as lone surrogates, which cannot be encoded.
    """
    if text is not None:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{what} is not UTF-8 text") from None
    return text


def check_device(name: str | None) -> str | None:
    """Return the name if it names a known device, usable here or not, else raise `DeviceError`. None stays None."""
    from npu_runtime.device import find_device

    if name is not None:
        find_device(name)
    return name


def check_weights(path: Path | None) -> Path | None:
    """Return the path if it is a readable file or a folder with .safetensors files, else raise an error.

    None stays None.
    """
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
    """Return `name=file.npy` or `file.npz` assignments if their files are readable, else raise `InputError`."""
    from npu_sim.arrays import assigned_files

    for path in assigned_files(assignments):
        check_file(path, "input")
    return assignments
