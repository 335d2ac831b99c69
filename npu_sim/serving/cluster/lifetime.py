"""A Ray cluster for the time of a command: started on this machine, or joined, and left as it was found."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

_OBJECT_STORE = 256 << 20  # bytes; only requests and updates pass through it
# No telemetry; replicas have the same priority as the server in front of them; a busy machine may take longer than
# Ray's 30 seconds to start a cluster.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_gcs_server_port_wait_time_s": "120",
}


@contextlib.contextmanager
def cluster(address: str | None, cpus: int) -> Iterator[None]:
    """Join the cluster at an address, or start one on this machine, which ends with the context.

    Args:
        cpus: What a cluster that is started counts as its CPU cores.

    Raises:
        DeviceError: there is no cluster at that address, or none can be started.
    """
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    import ray
    from ray import serve

    from npu_compiler.errors import DeviceError

    own: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    try:
        ray.init(
            address or "local",
            namespace="npu-simulation",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({} if address else own),
        )
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
