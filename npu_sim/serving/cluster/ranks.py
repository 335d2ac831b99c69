"""`BundleWorker`: a rank of a replica that runs as a Ray actor in a bundle of the replica's placement group."""

from __future__ import annotations

import os
import secrets
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import cast

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from npu_compiler.errors import DeviceError
from npu_runtime.cpu.gloo import ADDRESS
from npu_sim.parallel.group import Worker
from npu_sim.parallel.worker import serve_rank

_START_SECONDS = 120.0  # for an actor to start in a bundle that is reserved for it


class BundleWorker(Worker):
    """The worker of rank n in bundle n, maybe on another machine, with the devices that Ray has assigned to it."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        use_this_address()
        group = get_current_placement_group()
        bundle = group.bundle_specs[rank]
        key = secrets.token_bytes(32)
        self._actor = (
            ray.remote(_RankProcess)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            .remote(key)
        )
        try:
            address = ray.get(self._actor.address.remote(), timeout=_START_SECONDS)
            self._run = self._actor.run.remote(rank, size)
            self.connection = Client(address, authkey=key)
        except (ray.exceptions.RayError, OSError, EOFError, AuthenticationError) as error:
            raise DeviceError(f"rank {rank} of {size} does not start: {error}") from error

    @staticmethod
    def device(first: str, rank: int) -> str:
        return first  # each process sees its own devices only, counted from 0

    def kill(self) -> None:
        if ray.is_initialized():
            ray.kill(self._actor)

    def wait(self, seconds: float) -> bool:
        return not ray.is_initialized() or bool(ray.wait([self._run], timeout=seconds)[0])

    def ended(self) -> DeviceError:
        return DeviceError(f"rank {self.rank} of {self.size} has ended")


class _RankProcess:
    """The Ray actor of a rank: a process that serves rank 0 through its own connection until that closes."""

    def __init__(self, key: bytes) -> None:
        self._listener = Listener((use_this_address(), 0), authkey=key)

    def address(self) -> tuple[str, int]:
        return cast(tuple[str, int], self._listener.address)

    def run(self, rank: int, size: int) -> None:
        with self._listener:
            connection = self._listener.accept()
        serve_rank(connection, rank, size)


def use_this_address() -> str:
    """Let other ranks connect to this process by its machine's address, and return the address."""
    os.environ[ADDRESS] = address = str(ray.util.get_node_ip_address())
    return address
