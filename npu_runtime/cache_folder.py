"""The folder for files that are computed once per machine: compiled kernels, programs, facts, measured choices.

Each entry carries its checksum, which is verified before the entry is used, and is written whole or not at all (see
`npu_compiler.files`). Missing or damaged entries are computed again. A folder that cannot be written costs time and a
warning.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
import warnings
from importlib.resources import files
from pathlib import Path

from npu_compiler.files import remove_leftovers, seal, unseal, write_atomically

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """$NPU_SIM_CACHE, else ~/.cache/npu-simulation; it may not exist yet."""
    return Path(os.environ.get("NPU_SIM_CACHE") or Path.home() / ".cache" / "npu-simulation")


def read_entry(path: Path) -> bytes | None:
    """The content that `keep_entry` or `write_entry` wrote; None if the file is absent or damaged."""
    remove_leftovers(path.parent)
    try:
        content = unseal(path.read_bytes(), path.name)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.info("cannot read the cached '%s', which is made again: %s", path, error.strerror or error)
        return None
    if content is None:
        _log.info("the cached '%s' is damaged or foreign, and made again", path)
    return content


def write_entry(path: Path, content: bytes) -> None:
    """Write an entry, whole or not at all, with its checksum. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, seal(content, path.name))


def keep_entry(path: Path, content: bytes) -> None:
    """Write an entry as `write_entry` does; a failure only warns, once per folder and reason."""
    try:
        write_entry(path, content)
    except OSError as error:
        warn_of_cache(path.parent, error)


def keep_file(path: Path, data: bytes) -> None:
    """Write a file whose format has a checksum of its own; a failure only warns, as in `keep_entry`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        warn_of_cache(path.parent, error)


def warn_of_cache(folder: Path, error: OSError) -> None:
    """Warn that the folder cannot be written, once per process and reason."""
    _warn_once(str(folder), error.strerror or str(error))


@functools.cache
def _warn_once(folder: str, reason: str) -> None:
    warnings.warn(
        f"cannot write to the cache folder '{folder}' ({reason}): what it lacks is made again at each start. "
        "NPU_SIM_CACHE can name another folder",
        stacklevel=4,
    )


def users_temporary_folder() -> Path:
    """A temporary folder of the user's own, for files that the cache folder cannot store.

    Raises:
        OSError: it cannot be created, or others can write there, who could thus make this process run their code.
    """
    folder = Path(tempfile.gettempdir()) / f"npu-simulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = folder.lstat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o022 or folder.is_symlink():
        raise PermissionError(f"'{folder}' is another user's, or others can write there")
    return folder


@functools.cache
def source_digest(*packages: str) -> str:
    """The SHA-256 of packages' sources, as hexadecimal digits; a package that is not installed counts as empty."""
    digest = hashlib.sha256()
    for package in packages:
        try:
            root = Path(str(files(package)))
        except ModuleNotFoundError:
            continue
        for source in sorted(root.rglob("*")):
            if source.suffix in (".py", ".metal", ".h", ".cu", ".cuh"):
                digest.update(source.read_bytes())
    return digest.hexdigest()
