"""Packages that only language models need; the error for a missing one says what to install."""

from importlib.metadata import PackageNotFoundError, version

from npu_compiler.errors import InputError
from npu_compiler.installing import install_command


def require_packages(purpose: str, *names: str) -> None:
    """Check that packages are installed, without importing them.

    Args:
        purpose: The purpose, as the message's first words: "opening a GGUF file".

    Raises:
        InputError: a package is not installed.
    """
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        raise InputError(f"{purpose} needs {' and '.join(missing)}, which is not installed: {install_command('llm')}")


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
