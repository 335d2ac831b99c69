"""A worker of a `RankGroup`: `python -m npu_sim.parallel.worker CONNECTION RANK SIZE`, which only a group starts."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from npu_compiler.errors import DeviceError, InputError, NPUError, WeightError

_BEAT = 1.0  # seconds between signs of life


@dataclass
class Rank:
    """A worker's place in its group.

    Attributes:
        rank: From 1; rank 0 is the process that started the group.
        size: The number of ranks.
    """

    rank: int
    size: int
    _shared: queue.SimpleQueue[bytes] = field(default_factory=queue.SimpleQueue)

    def share(self, value: bytes | None) -> bytes:
        """The next bytes that rank 0 shares (see `npu_runtime.collectives.Share`)."""
        assert value is None, "rank 0 gives the value"
        return self._shared.get()


def named(text: str) -> Any:
    """What `module:name` stands for."""
    module, _, name = text.partition(":")
    return getattr(import_module(module), name)


class _Worker:
    def __init__(self, connection: Connection, rank: Rank) -> None:
        self._connection, self._rank = connection, rank
        self._sending = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def run(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            _, made, arguments = self._calls.get()
            subject = named(made)(self._rank, **arguments)
            self._send("done")
            while True:
                kind, name, args = self._calls.get()
                getattr(subject, name)(*args)
                if kind == "ask":
                    self._send("done")
        except Exception as error:
            text = str(error) if isinstance(error, NPUError) else f"{type(error).__name__}: {error}"
            kinds = (each for each in (InputError, WeightError) if isinstance(error, each))
            self._send("failed", next(kinds, DeviceError), text)
            time.sleep(_BEAT)  # rank 0 ends this process once it has read that
            os._exit(1)

    def _send(self, *message: Any) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            os._exit(1)

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT)
            self._send("alive")

    def _listen(self) -> None:
        """Take messages at all times, so that the end of rank 0 is noticed whatever this process is doing."""
        try:
            while True:
                kind, *content = self._connection.recv()
                if kind == "share":
                    self._rank._shared.put(content[0])
                else:
                    self._calls.put((kind, *content))
        except (EOFError, OSError):
            os._exit(1)


def serve_rank(connection: Connection, rank: Rank) -> None:
    """Do what rank 0 sends, until the connection closes, which ends this process."""
    _Worker(connection, rank).run()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; rank 0 decides
    handle, rank, size = (int(text) for text in sys.argv[1:4])
    serve_rank(Connection(handle), Rank(rank, size))


if __name__ == "__main__":
    main()
