"""The entry point of `npu-sim`. It imports next to nothing itself, so that Ctrl-C counts while the rest is imported."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_sim.commands.application import app

__all__ = ["app", "main"]


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

    app(prog_name="npu-sim")


def _end(*_: object) -> None:
    """End at once: an exception in the middle of an import would be reported by whatever is being imported."""
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
