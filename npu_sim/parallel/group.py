"""`RankGroup`: processes that hold parts of one thing and do the same with it, led by this one.

This process is rank 0. It starts the others and sends them what to call on their parts, in order; results stay where
they are. What holds:

1. A worker lives no longer than the group: it ends at once when the connection to rank 0 closes, however busy it is.
2. A worker that ends, reports an error or is silent for `PATIENCE` seconds ends the whole group: the watcher has the
   device abort what waits for it, and every use of the group raises that reason from then on.
3. A worker says that it is alive from a thread of its own, so a long computation does not count as silence.
4. Calls wait in the connection while a worker is busy; where there is no more room, rank 0 waits too.
5. Nothing interrupts rank 0 between sending a call and making it itself, so all ranks make the same calls.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any, TypeAlias

from npu_compiler.errors import DeviceError, InputError, NPUError
from npu_runtime.cpu.native.threads import usable_threads
from npu_runtime.device import neighbour

PATIENCE = 20.0  # seconds of silence after which a worker counts as stuck
_START = 100.0  # seconds more for its interpreter to start
_GRACE = 3.0  # seconds that a worker has to end by itself, and a watcher to find out what failed


class RankGroup:
    """Workers 1 to size - 1, each with an object that `make` returned there.

    Args:
        make: `module:function`, called in each worker with a `Rank` and `arguments`, which are pickled.
        on_failure: Called once, from another thread, when a worker is lost: ends what waits for it.
        start_worker: Starts a worker, given its rank and the number of ranks. Default: `LocalWorker`.

    Raises:
        DeviceError: a worker did not start.
    """

    def __init__(
        self,
        size: int,
        make: str,
        arguments: Mapping[str, Any],
        on_failure: Callable[[], None],
        start_worker: StartWorker | None = None,
    ) -> None:
        self.size = size
        self.failure: NPUError | None = None
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting = 0
        self._closing = False
        self._workers = [(start_worker or LocalWorker)(rank, size) for rank in range(1, size)]
        self._finalizer = weakref.finalize(self, _end, self._workers)
        self._watcher = threading.Thread(target=_watch, args=(weakref.ref(self), self._workers), daemon=True)
        atexit.register(self._finalizer)
        self._watcher.start()
        self._send("make", make, dict(arguments), expects=True)

    def share(self, value: bytes | None) -> bytes:
        """Hand all workers some bytes (see `npu_runtime.collectives.Share`)."""
        assert value is not None, "rank 0 gives the value"
        self._send("share", value)
        return value

    def call(self, name: str, *args: Any) -> None:
        """Call a method of every worker's object, without waiting for it.

        Raises:
            NPUError: the group has ended; the message says why.
        """
        self._send("call", name, args)

    @contextlib.contextmanager
    def calling(self, name: str, *args: Any) -> Iterator[None]:
        """`call`, while this process does the same in the context's body."""
        with self.together():
            self._send("call", name, args)
            yield

    @contextlib.contextmanager
    def asking(self, name: str, *args: Any) -> Iterator[None]:
        """`calling`; at its end all have done it."""
        with self.together():
            self._send("ask", name, args, expects=True)
            yield
        self.wait()

    def wait(self) -> None:
        """Wait until all workers have done what they were asked to. Raises NPUError if the group has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or not self._waiting)
        self.check()

    def check(self) -> None:
        """Raise the reason if the group has ended."""
        if self.failure is not None:
            raise self.failure

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run this process's part of a common action: an error that comes of a lost worker becomes that reason."""
        with _uninterrupted():
            try:
                yield
            except BaseException as error:
                with self._changed:
                    self._changed.wait_for(lambda: self.failure is not None, _GRACE)
                found = DeviceError(f"rank 0 of {self.size} failed: {error}")
                self._fail(error if isinstance(error, NPUError) else found)
                self.check()
        self.check()

    def do(self, action: Callable[[], None]) -> None:
        """Do something that may wait for workers where nothing can abort it: no longer than until one is lost."""
        outcome: list[Exception | None] = []

        def act() -> None:
            try:
                action()
                found = None
            except Exception as error:
                found = error
            with self._changed:
                outcome.append(found)
                self._changed.notify_all()

        threading.Thread(target=act, daemon=True).start()
        with self.together():
            with self._changed:
                self._changed.wait_for(lambda: self.failure is not None or bool(outcome))
            if outcome and outcome[0] is not None:
                raise outcome[0]

    def close(self) -> None:
        """End the workers."""
        self._closing = True
        self.failure = self.failure or InputError("this model's processes have been ended; make another one")
        self._finalizer()
        atexit.unregister(self._finalizer)

    def _send(self, *message: Any, expects: bool = False) -> None:
        self.check()
        if expects:
            with self._changed:
                self._waiting += len(self._workers)
        for worker in self._workers:
            try:
                worker.connection.send(message)
            except OSError:
                with self._changed:
                    self._changed.wait_for(lambda: self.failure is not None, _GRACE)
                self._fail(worker.ended())
                self.check()

    def _answered(self) -> None:
        with self._changed:
            self._waiting -= 1
            self._changed.notify_all()

    def _fail(self, reason: NPUError) -> None:
        with self._changed:
            if self.failure is not None:
                return
            self.failure = reason
            self._changed.notify_all()
        if not self._closing:
            self._on_failure()
        for worker in self._workers:
            worker.kill()


class Worker(ABC):
    """A rank's process and the connection to it.

    Attributes:
        heard: Time at which it last said that it is alive, by `time.monotonic`.
        connection: Connection to a process that runs `npu_sim.parallel.worker`.
    """

    connection: Connection

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.heard = time.monotonic() + _START

    @staticmethod
    @abstractmethod
    def device(first: str, rank: int) -> str:
        """The name of a rank's device, as its process calls it, where that of rank 0 is `first`."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait for the process to end; whether it has."""

    @abstractmethod
    def ended(self) -> DeviceError:
        """The error for a worker that is gone."""


class LocalWorker(Worker):
    """A process of this machine, on the device after that of the rank before."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.output: IO[bytes] = tempfile.TemporaryFile()
        ours, theirs = Pipe()
        self.connection = ours
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "NPU_SIM_THREADS": str(max(1, usable_threads() // size)),
        }
        command = [sys.executable, "-m", "npu_sim.parallel.worker", str(theirs.fileno()), str(rank), str(size)]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            env=environment,
        )
        theirs.close()

    @staticmethod
    def device(first: str, rank: int) -> str:
        return neighbour(first, rank)

    def kill(self) -> None:
        self.process.kill()

    def wait(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def ended(self) -> DeviceError:
        self.wait(_GRACE)
        code = self.process.returncode
        how = "its connection broke" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").strip().splitlines()
        said = f": {lines[-1]}" if lines and code is not None and code > 0 else ""
        return DeviceError(f"rank {self.rank} of {self.size} has ended ({how}){said}")


StartWorker: TypeAlias = type[Worker]


def _watch(group: weakref.ref[RankGroup], workers: list[Worker]) -> None:
    """Hear what workers say until the group is gone or one of them is."""
    by_connection: dict[Connection, Worker] = {worker.connection: worker for worker in workers}
    while True:
        try:
            ready = wait(list(by_connection), timeout=1.0)
        except (OSError, ValueError):
            return  # closed
        found = group()
        if found is None or found._closing:
            return
        for connection in ready:
            worker = by_connection[connection]  # type: ignore[index]
            try:
                kind, *content = worker.connection.recv()
            except (EOFError, OSError):
                return None if worker.connection.closed else found._fail(worker.ended())
            worker.heard = time.monotonic()
            if kind == "done":
                found._answered()
            elif kind == "failed":
                error_type, text = content
                return found._fail(error_type(f"rank {worker.rank} of {worker.size}: {text}"))
        for worker in workers:
            if (silent := time.monotonic() - worker.heard) > PATIENCE:
                reason = f"rank {worker.rank} of {worker.size} has not answered for {silent:.0f} seconds"
                return found._fail(DeviceError(reason))
        del found


def _end(workers: list[Worker]) -> None:
    for worker in workers:
        worker.connection.close()  # which ends the process
    for worker in workers:
        if not worker.wait(_GRACE):
            worker.kill()
            worker.wait(_GRACE)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: a rank that stopped in the middle of an exchange would leave the others there."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        handler(signal.SIGINT, pressed[-1])
