"""`run_server`: runs the application with uvicorn until a signal, and ends it in order.

The first SIGTERM or SIGINT begins a drain: new requests are refused with 503 while the running ones go on, until they
have ended or the time for it is over. A second signal ends all requests at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn

from npu_compiler.errors import InputError
from npu_sim.serving.http.app import Application
from npu_sim.serving.http.limits import Limits
from npu_sim.serving.http.logs import log
from npu_sim.serving.http.protocol import limited_protocol

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_OTHER_FILES = 200  # open files of a server besides its connections
_FORCED_SECONDS = 2  # for responses to end after their sequences were cancelled


def allow_connections(count: int) -> int:
    """Raise this process's limit on open files, if needed, for `count` connections.

    Returns the number of connections that are then possible.
    """
    needed = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return count
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return min(count, allowed - _OTHER_FILES)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0 means any free port.

    Raises:
        InputError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InputError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or --port"
        ) from None
    return listener


class Server(uvicorn.Server):
    """uvicorn's server, changed so that signals begin a drain (see above).

    Args:
        drain_seconds: Time for requests under way to end after the first signal.
    """

    def __init__(self, application: Application, limits: Limits, drain_seconds: float) -> None:
        config = uvicorn.Config(
            application.guard,
            http=limited_protocol(limits, application.metrics),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=math.ceil(limits.header_seconds),
            timeout_graceful_shutdown=_FORCED_SECONDS,
        )
        super().__init__(config)
        self._application = application
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(ValueError, RuntimeError):  # only the main thread has signals
                for number in SIGNALS:
                    before = signal.getsignal(number)
                    loop.add_signal_handler(number, self.stop)
                    stack.callback(signal.signal, number, before)
                    stack.callback(loop.remove_signal_handler, number)
            yield

    def stop(self) -> None:
        """Begin the drain or, if called again, end at once. To be called in the event loop."""
        if self._draining is None:
            self._application.guard.draining = True
            log("draining", active=self._application.guard.active)
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        elif self._ending is None:
            log("stopping at once", active=self._application.guard.active)
            self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _drain(self) -> None:
        engine, guard = self._application.service.engine, self._application.guard
        end = time.monotonic() + self._drain_seconds
        await asyncio.to_thread(engine.drain, self._drain_seconds)
        while guard.active and time.monotonic() < end:  # replies that are still being sent
            await asyncio.sleep(0.02)
        log("drain timed out" if guard.active else "drained", active=guard.active)
        await self._end()

    async def _end(self) -> None:
        try:
            await asyncio.to_thread(self._application.service.engine.close)
        finally:
            self.should_exit = True


def run_server(
    application: Application,
    limits: Limits,
    listener: socket.socket,
    *,
    drain_seconds: float,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until a signal, then close the engine.

    Args:
        ready: Called with the server's address as soon as it accepts requests.
    """

    async def run() -> None:
        server = Server(application, limits, drain_seconds)
        task = asyncio.ensure_future(server.serve([listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started:
            ready(url_of(listener))
        await task

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run())
    finally:
        application.service.engine.close()
        application.service.close()
        listener.close()


def url_of(listener: socket.socket) -> str:
    """The URL of a listening socket for clients."""
    host, port = listener.getsockname()[:2]
    name = "localhost" if host in ("127.0.0.1", "::1") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The function that makes uvloop's event loop; None if uvloop is not installed."""
    return uvicorn.Config(lambda: None, loop="auto", log_config=None).get_loop_factory()
