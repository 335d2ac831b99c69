"""Access to PyTorch, which may be absent: programs run without it, but tracing models and the CPU fallback need it."""

from __future__ import annotations

import functools
from types import ModuleType

from npu_compiler.errors import InputError
from npu_compiler.installing import install_command


@functools.cache
def find_torch() -> ModuleType | None:
    """The imported module `torch`; None if it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def require_torch(purpose: str) -> None:
    """Check that torch is installed.

    Args:
        purpose: Activity that needs torch, as the message's first words: "tracing a model".

    Raises:
        InputError: it is not.
    """
    if find_torch() is None:
        raise InputError(f"{purpose} needs PyTorch: {install_command('torch')}")
