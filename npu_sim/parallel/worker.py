"""A worker of a `RankGroup`: `python -m npu_sim.parallel.worker CONNECTION RANK SIZE`, which only a group starts."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from npu_compiler.errors import DeviceError, InputError, NPUError, WeightError

_BEAT = 1.0  # seconds between signs of life


@dataclass(frozen=True)
class Rank:
    """A worker's place in its group.

    Attributes:
        rank: Number of the worker, from 1; rank 0 is the process that started the group.
        size: The number of ranks.
        receive: Function that waits for the next message of rank 0 and returns it.
    """

    rank: int
    size: int
    receive: Callable[[], tuple[Any, ...]]

    def share(self, value: bytes | None) -> bytes:
        """Receive the next bytes that rank 0 shares (see `npu_runtime.collectives.Share`); `value` is ignored."""
        assert value is None, "rank 0 gives the value"
        kind, shared = self.receive()
        assert kind == "share", "rank 0 sends what it shares before the next call"
        return bytes(shared)


def named(text: str) -> Any:
    """Import and return the object that `module:name` names."""
    module, _, name = text.partition(":")
    return getattr(import_module(module), name)


def serve_rank(connection: Connection, rank: int, size: int) -> None:
    """Make the calls that rank 0 sends, until it closes the connection, which ends this process."""
    sending = threading.Lock()

    def receive() -> tuple[Any, ...]:
        try:
            return tuple(connection.recv())
        except (EOFError, OSError):
            os._exit(1)

    def send(*message: Any) -> None:
        try:
            with sending:
                connection.send(message)
        except OSError:
            os._exit(1)

    def beat() -> None:
        while True:
            time.sleep(_BEAT)
            send("alive")

    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    threading.Thread(target=beat, daemon=True).start()
    try:
        _, maker, arguments = receive()
        subject = named(maker)(Rank(rank, size, receive), **arguments)
        send("done")
        while True:
            kind, name, args = receive()
            getattr(subject, name)(*args)
            if kind == "ask":
                send("done")
    except Exception as error:
        text = str(error) if isinstance(error, NPUError) else f"{type(error).__name__}: {error}"
        kinds = (each for each in (InputError, WeightError) if isinstance(error, each))
        send("failed", next(kinds, DeviceError), text)
        time.sleep(_BEAT)  # rank 0 ends this process once it has read that
        os._exit(1)


def _end_with(connection: Connection) -> None:
    """End this process when rank 0 closes the connection, whatever it is doing.

    On systems that do not report a closed connection while messages wait to be read, sending the next sign of life
    fails.
    """
    closed = select.poll()
    closed.register(connection.fileno(), getattr(select, "POLLRDHUP", 0))
    closed.poll()
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; rank 0 decides
    handle, rank, size = (int(text) for text in sys.argv[1:4])
    serve_rank(Connection(handle), rank, size)


if __name__ == "__main__":
    main()
