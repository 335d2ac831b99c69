"""Files that are written whole or not at all, and the seal by which a cached file is known to be whole.

1. Until it is whole, a file lies in the folder of its destination, under a name that begins with `UNFINISHED`.
2. Its writer holds a lock on it (`flock`), which ends with the process, however that ends. So an unlocked unfinished
   file is a leftover, and the next writer to the folder removes it.
3. A remover may come between a file's creation and its lock. So the writer checks, once it has the lock, that the
   file is still in the folder, and begins again if it is not.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".npu-unfinished-"
_SEAL = b"\nnpu-simulation sha256 "
_SEAL_BYTES = len(_SEAL) + 2 * hashlib.sha256().digest_size + 1
_SURELY_LEFT = 24 * 3600  # seconds, where the file system has no locks


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to a file, whole or not at all; see `atomic_file`."""
    with atomic_file(path) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Context that writes a whole file or none of it; the file is on the disk before it becomes visible.

    On entry, removes unfinished files that killed writers left in the folder, once per process.

    Returns:
        A file to write to and to seek in. It replaces the file at `path` at the end, unless there is an error.

    Raises:
        OSError: it cannot be written, or the path names no file ('.', '/') or no regular one, such as a device, which
            the file would replace.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    remove_leftovers(path.parent)
    temporary, handle = _begin(path.parent, _create_file)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


@contextmanager
def working_folder(parent: Path) -> Iterator[Path]:
    """Context with a new folder inside `parent` for a tool's output; it is removed afterwards with all its content.

    If the process is killed, the next one to write into `parent` removes the folder. Raises `OSError` as `mkdir` does.
    """
    remove_leftovers(parent)
    folder, handle = _begin(parent, _create_folder)
    try:
        yield folder
    finally:
        with suppress(OSError):  # which rmtree may raise all the same, where closing a folder fails
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            os.close(handle)


@functools.cache
def remove_leftovers(folder: Path) -> None:
    """Remove unfinished files that killed writers left in a folder.

    This is done once per process and folder, and as far as permissions allow.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(UNFINISHED):
                _remove_leftover(Path(entry.path))


def seal(content: bytes, name: str) -> bytes:
    """The content followed by its checksum as a line of text.

    Linkers and loaders ignore text after the end of a library.

    Args:
        name: Name of the file, which is part of the checksum, so that another file's content is not accepted.
    """
    return content + _seal_of(content, name)


def unseal(data: bytes, name: str) -> bytes | None:
    """The content of what `seal` returned; None for anything else (damaged, truncated, foreign)."""
    content = data[:-_SEAL_BYTES]
    return content if data[len(content) :] == _seal_of(content, name) else None


def _seal_of(content: bytes, name: str) -> bytes:
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape") + b"\0")
    digest.update(content)
    return b"%b%b\n" % (_SEAL, digest.hexdigest().encode())


def _begin(folder: Path, create: Callable[[Path], int]) -> tuple[Path, int]:
    """Create a file or folder with a new name in `folder` by `create`; returns its path, and its locked handle."""
    while True:
        path = folder / f"{UNFINISHED}{secrets.token_hex(8)}"
        handle = create(path)
        try:
            with suppress(OSError):  # some network folders have no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_at(handle, path):
                return path, handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _create_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def _create_folder(path: Path) -> int:
    path.mkdir()
    return os.open(path, os.O_RDONLY)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _remove_leftover(path: Path) -> None:
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if _is_abandoned(handle):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        finally:
            os.close(handle)


def _is_abandoned(handle: int) -> bool:
    """Whether the writer of an unfinished file is gone; if so, the handle holds the lock afterwards."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(handle).st_mtime > _SURELY_LEFT
    return True


def _sync_folder(folder: Path) -> None:
    """Write a rename in a folder to the disk, where the file system and the permissions allow it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
