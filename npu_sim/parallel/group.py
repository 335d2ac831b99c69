"""`RankGroup`: processes that hold parts of one object and make the same calls on them, led by this process.

This process is rank 0. It starts the others (workers) and sends them the calls to make on their parts, in order;
results stay in the workers. Invariants:

1. A worker lives no longer than the group: it ends at once when the connection to rank 0 closes, however busy it is.
2. A worker that ends, reports an error or is silent for `PATIENCE` seconds ends the whole group: a watching thread lets
   the device abort everything that waits for the worker, and every later use of the group raises an error with that
   reason.
3. A worker says that it is alive from a thread of its own, so a long computation does not count as silence.
4. Calls wait in the connection while a worker is busy; when the connection is full, rank 0 waits too.
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
    """Workers with ranks 1 to size - 1, each with the object that `make` returned in its process.

    Args:
        make: `module:function`, called in each worker with a `Rank` and `arguments`, which are pickled.
        on_failure: Called once, from another thread, when a worker is lost; it must abort everything that waits for the
            worker.
        start_worker: Function from a rank and the number of ranks to a started worker. None: `LocalWorker`.

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
        """Send bytes to all workers and return them (see `npu_runtime.collectives.Share`)."""
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
        """Make a call like `call`; this process does its own part in the context's body."""
        with self.together():
            self._send("call", name, args)
            yield

    @contextlib.contextmanager
    def asking(self, name: str, *args: Any) -> Iterator[None]:
        """Make a call like `calling`, and wait at the end until all workers have made it."""
        with self.together():
            self._send("ask", name, args, expects=True)
            yield
        self.wait()

    def wait(self) -> None:
        """Wait until all workers have finished the calls sent so far. Raises NPUError if the group has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or not self._waiting)
        self.check()

    def check(self) -> None:
        """Raise the reason (NPUError) if the group has ended."""
        if self.failure is not None:
            raise self.failure

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Context for this process's part of joint work.

        An error that is raised inside because a worker is lost is replaced by the reason of the loss.
        """
        with _uninterrupted():
            try:
                yield
            except BaseException as error:
                with self._changed:
                    self._changed.wait_for(lambda: self.failure is not None, _GRACE)
                failure = DeviceError(f"rank 0 of {self.size} failed: {error}")
                self._fail(error if isinstance(error, NPUError) else failure)
                self.check()
        self.check()

    def do(self, action: Callable[[], None]) -> None:
        """Run an action that may wait for workers and cannot be aborted, until it ends or a worker is lost."""
        outcome: list[Exception | None] = []

        def act() -> None:
            try:
                action()
                failure = None
            except Exception as error:
                failure = error
            with self._changed:
                outcome.append(failure)
                self._changed.notify_all()

        threading.Thread(target=act, daemon=True).start()
        with self.together():
            with self._changed:
                self._changed.wait_for(lambda: self.failure is not None or bool(outcome))
            if outcome and outcome[0] is not None:
                raise outcome[0]

    def close(self) -> None:
        """End all workers."""
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
    """The process of a rank and the connection to it; a base class.

    Attributes:
        heard: Time of the last message from the process, by `time.monotonic`.
        connection: Connection to a process that runs `npu_sim.parallel.worker`.
    """

    connection: Connection

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.heard = time.monotonic() + _START

    @staticmethod
    @abstractmethod
    def device(first: str, rank: int) -> str:
        """The name of a rank's device in its own process, given the name of rank 0's device."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker's process at once."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait for the process to end; return whether it has ended within that many seconds."""

    @abstractmethod
    def ended(self) -> DeviceError:
        """Return the error to raise when this worker has ended."""


class LocalWorker(Worker):
    """A worker process on this machine, whose device follows that of the rank before it."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- open as long as the worker
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
    """Receive the workers' messages until the group is closed or a worker is lost."""
    by_connection: dict[Connection, Worker] = {worker.connection: worker for worker in workers}
    while True:
        try:
            ready = wait(list(by_connection), timeout=1.0)
        except (OSError, ValueError):
            return None  # closed
        owner = group()
        if owner is None or owner._closing:
            return None
        for connection in ready:
            worker = by_connection[connection]  # type: ignore[index]
            try:
                kind, *content = worker.connection.recv()
            except (EOFError, OSError):
                return None if worker.connection.closed else owner._fail(worker.ended())
            worker.heard = time.monotonic()
            if kind == "done":
                owner._answered()
            elif kind == "failed":
                error_type, text = content
                return owner._fail(error_type(f"rank {worker.rank} of {worker.size}: {text}"))
        for worker in workers:
            if (silent := time.monotonic() - worker.heard) > PATIENCE:
                reason = f"rank {worker.rank} of {worker.size} has not answered for {silent:.0f} seconds"
                return owner._fail(DeviceError(reason))
        del owner


def _end(workers: list[Worker]) -> None:
    for worker in workers:
        worker.connection.close()  # which ends the process
    for worker in workers:
        if not worker.wait(_GRACE):
            worker.kill()
            worker.wait(_GRACE)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end: a rank that stopped in the middle of an exchange would leave the others waiting."""
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
