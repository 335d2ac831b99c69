"""A Ray cluster for the time of a command: started on this machine, or an existing one that is joined and left."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OBJECT_STORE = 256 << 20  # bytes; only requests and updates pass through it
# No telemetry; replicas have the same priority as the server in front of them; a busy machine may take longer than
# Ray's 30 seconds to start its control service, and the agents that its node waits for.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
}
_STARTS = 4  # attempts on this machine: Ray waits 30 seconds for its node, which cannot be set
_QUIET: dict[str, Any] = {"namespace": "npu-simulation", "log_to_driver": False, "logging_level": logging.ERROR}


@contextlib.contextmanager
def cluster(address: str | None, cpus: int) -> Iterator[None]:
    """Context of membership in a Ray cluster: an existing one, or a new one on this machine that ends with it.

    Args:
        cpus: Number of CPU cores of a cluster that is started.
        address: Address of an existing cluster. None: start a new one.

    Raises:
        DeviceError: there is no cluster at that address, or none can be started.
    """
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    import ray
    from ray import serve

    from npu_compiler.errors import DeviceError

    try:
        if address:
            ray.init(address, **_QUIET)
        else:
            _start(cpus)
    except Exception as error:  # Ray raises that class itself
        ray.shutdown()
        where = f"there is no Ray cluster at {address}" if address else "no Ray cluster can be started here"
        raise DeviceError(f"{where}: {error}") from error
    try:
        serve.start(proxy_location="Disabled")  # the HTTP server is another one
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # after `start`, which sets it
        yield
    finally:
        ray.shutdown()  # which ends all processes of a cluster that this one has started


def _start(cpus: int) -> None:
    """Start a cluster on this machine; try again if starting took too long on a busy machine."""
    import psutil
    import ray

    folder = str(Path(ray.__file__).parent)
    for starts in range(1, _STARTS + 1):
        try:
            ray.init("local", num_cpus=cpus, include_dashboard=False, object_store_memory=_OBJECT_STORE, **_QUIET)
            return
        except Exception:  # Ray raises that class itself
            ray.shutdown()
            for process in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                    if any(part.startswith(folder) for part in process.cmdline()):  # Ray's own, which it leaves running
                        process.kill()
                        process.wait()
            if starts == _STARTS:
                raise
