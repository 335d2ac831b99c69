"""The entry point of `npu-sim`; it imports almost nothing, so that Ctrl-C ends the program during slower imports."""

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
    """Run the `npu-sim` command line: the function that the installed script calls."""
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
    """Exit with code 130 after running exit handlers, without waiting for threads or for libraries to free memory."""
    atexit._run_exitfuncs()  # which end compilers and other processes
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(INTERRUPTED)


def _end(*_: object) -> None:
    """Exit at once on SIGINT; a `KeyboardInterrupt` during an import would be reported by the imported module."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
