"""The entry point of `npu-sim`. It imports next to nothing itself, so that Ctrl-C counts while the rest is imported."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from npu_sim.commands.application import app

__all__ = ["app", "main"]

INTERRUPTED = 130  # exit code


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from npu_sim.commands.application import app

    return app


def main() -> None:
    """Run the `npu-sim` script: the entry point that is installed."""
    with suppress(ValueError):  # only the main thread has signals
        signal.signal(signal.SIGINT, _end)  # a running command has a handler of its own
    from npu_sim.commands.application import app

    try:
        app(prog_name="npu-sim")
    except SystemExit as status:
        if status.code == INTERRUPTED:
            _end_quickly()
        raise


def _end_quickly() -> NoReturn:
    """End after Ctrl-C without waiting for threads and for the memory of large libraries to be freed."""
    atexit._run_exitfuncs()  # which end compilers and other processes
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(INTERRUPTED)


def _end(*_: object) -> None:
    """End at once: an exception in the middle of an import would be reported by whatever is being imported."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
