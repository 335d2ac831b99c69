"""The option `serve --ray`: replicas of a model on a Ray cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from npu_sim.commands.console import note, step
from npu_sim.commands.options import count_option

if TYPE_CHECKING:
    from npu_sim.serving.cluster.engine import RemoteEngine
    from npu_sim.serving.cluster.messages import ReplicaFacts
    from npu_sim.serving.engine_setup import ReplicaSettings


@dataclass(frozen=True)
class RaySettings:
    """Whether the model runs in replicas on a Ray cluster, and how many."""

    ray: Annotated[
        bool,
        typer.Option("--ray", help="Run the model in replicas on a Ray cluster; without --ray-address, a local one."),
    ] = False
    ray_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="The Ray cluster to join, such as auto or 10.0.0.1:6379.")
    ] = None
    replicas: Annotated[int | None, count_option("Fixed number of replicas. Default: 1.")] = None
    min_replicas: Annotated[
        int | None, count_option("Least number of replicas; it follows the number of requests.")
    ] = None
    max_replicas: Annotated[int | None, count_option("Greatest number of replicas.")] = None
    replica_cpus: Annotated[
        int | None,
        count_option("CPU cores of each rank of a replica. Default: all, evenly; 1 with --ray-address."),
    ] = None

    def check(self, device: str | None = None) -> None:
        """Raise `InputError` if the options contradict each other or the device, or Ray is not installed."""
        from npu_compiler.errors import InputError
        from npu_compiler.installing import install_command

        given = [name for name, value in vars(self).items() if value is not None and name != "ray"]
        if given and not self.ray:
            raise InputError(f"--{given[0].replace('_', '-')} is for replicas on a Ray cluster; add --ray")
        if self.replicas is not None and (self.min_replicas is not None or self.max_replicas is not None):
            raise InputError("--replicas sets a fixed number; leave it out, or --min-replicas and --max-replicas")
        if self.least > self.most:
            raise InputError(f"--min-replicas {self.least} is more than --max-replicas {self.most}")
        kind, _, number = (device or "").rpartition(":")
        if self.ray and number.isdecimal():
            raise InputError(f"--device {device}: with --ray, each replica gets a device of its own; write {kind}")
        if self.ray and find_spec("ray") is None:
            raise InputError(f"--ray needs ray, which is not installed: {install_command('ray')}")

    @property
    def least(self) -> int:
        return self.replicas or self.min_replicas or 1

    @property
    def most(self) -> int:
        return self.replicas or self.max_replicas or self.least

    @property
    def described(self) -> str:
        count = f"{self.least} to {self.most} replicas" if self.least < self.most else f"{self.most} replicas"
        return "1 replica" if self.most == 1 else count


@contextmanager
def remote_engine(
    name: str, settings: ReplicaSettings, options: RaySettings, *, capacity: int, drain_seconds: float
) -> Iterator[tuple[RemoteEngine, ReplicaFacts]]:
    """Start replicas of a model on a Ray cluster, and stop them when the context ends.

    Yields an engine that sends requests to the replicas, and facts about them.

    Args:
        name: Name of the model; a running application of the same name in the cluster is updated.
        capacity: Maximum number of requests at once.
        drain_seconds: Time for requests under way to end when a replica stops.

    Raises:
        DeviceError: there is no cluster, or the replicas do not start.
    """
    from npu_runtime.cpu.native.threads import usable_threads
    from npu_runtime.device import best_device, neighbour
    from npu_sim.serving.cluster import Deployment, RemoteEngine, Scale, cluster

    ranks = options.most * settings.engine.tensor_parallel
    cpus = options.replica_cpus or (1 if options.ray_address else max(1, usable_threads() // ranks))
    device = settings.device or best_device()
    gpus = int(neighbour(device, 1) != device)  # what a machine has several of, Ray hands out
    scale = Scale(options.least, options.most, cpus=cpus, gpus=gpus, drain_seconds=drain_seconds)
    with cluster(options.ray_address, cpus=cpus * ranks):
        note("starting the replicas; the first start with a model compiles its programs, for minutes")
        with step(f"starting {options.described}"):
            deployment = Deployment(re.sub(r"[^\w.-]+", "-", name), settings, scale)
        with ExitStack() as stack:
            if options.ray_address:  # a local cluster ends with all that runs on it
                stack.callback(deployment.release)
            engine = RemoteEngine(deployment.handle, capacity)
            stack.callback(engine.close)
            yield engine, deployment.facts
