"""The Ray Serve application: the replicas of a model, their number, and the resources that each of them takes."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import ApplicationStatus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from npu_compiler.errors import DeviceError, InputError
from npu_compiler.version import __version__
from npu_sim.serving.cluster.messages import ReplicaFacts
from npu_sim.serving.cluster.replica import Replica
from npu_sim.serving.cluster.routing import PrefixRouter
from npu_sim.serving.engine_setup import ReplicaSettings

DEPLOYMENT = "Model"
_HEALTH_PERIOD = 1.0  # seconds; a replica is replaced when three checks have failed
_ERROR = re.compile(r"[\w.]*(Error|Exception): ")


@dataclass(frozen=True)
class Scale:
    """The number of replicas, and the resources of each of their ranks (processes with one device).

    Attributes:
        least, most: Minimum and maximum number of replicas. Between them, the number follows that of running and
            waiting requests.
        cpus, gpus: Number of CPU cores and GPUs of each rank.
        drain_seconds: Time for the requests of a replica to end before it is stopped.
    """

    least: int = 1
    most: int = 1
    cpus: int = 1
    gpus: int = 0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InputError(f"there cannot be {self.least} to {self.most} replicas")


class Deployment:
    """The replicas of a model in the Ray cluster that this process has joined.

    If replicas of that name run already, they are used if their settings are the same; otherwise they are replaced one
    after the other.

    Args:
        name: Name of the Serve application.

    Attributes:
        handle: Ray Serve's handle, which sends a request to one of the replicas.
        facts: Facts of the model that the replicas run.

    Raises:
        DeviceError: the replicas do not start; the message says why.
    """

    def __init__(self, name: str, settings: ReplicaSettings, scale: Scale) -> None:
        self._name, self._user = name, f"{name}/{uuid.uuid4().hex}"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._mark = ray.remote(_User).options(name=self._user, num_cpus=0, scheduling_strategy=here).remote()
        try:
            self._start(name, settings, scale)
        except (RuntimeError, RayError) as error:
            reason = _reason(name) or str(error)
            self.release()
            raise DeviceError(f"the replicas of {name} do not start: {reason}") from error
        except BaseException:  # Ctrl-C: the replicas belong to the cluster, and would go on
            self.release()
            raise

    def _start(self, name: str, settings: ReplicaSettings, scale: Scale) -> None:
        """Find running replicas with these settings, or start some, and wait for them."""
        key = replicas_key(settings, scale)
        while (before := _status_of(name)) is not None and before.status == ApplicationStatus.DEPLOYING:
            time.sleep(0.5)  # another server is at it, perhaps with the same settings
        if before is not None and before.status in (ApplicationStatus.RUNNING, ApplicationStatus.UNHEALTHY):
            self.handle = serve.get_app_handle(name)
            self.facts: ReplicaFacts = self.handle.facts.remote().result()
            if self.facts.key == key:
                return
        self.handle = serve.run(model_application(settings, scale, key), name=name, route_prefix=None)
        self.facts = self.handle.facts.remote().result()

    def release(self) -> None:
        """Stop the replicas, unless another process in the cluster still uses them."""
        if all(user == self._user or not user.startswith(f"{self._name}/") for user in ray.util.list_named_actors()):
            serve.delete(self._name)


class _User:
    """A Ray actor that lives as long as a process that uses a deployment, so that others can see that it is used."""


def _status_of(name: str) -> Any:
    """The state of a Serve application, an `ApplicationStatusOverview`; None if there is none of that name."""
    return serve.status().applications.get(name)


def _reason(name: str) -> str | None:
    """The error message in the last line of the replicas' tracebacks; None if they have reported none."""
    application = _status_of(name)
    messages = [] if application is None else [one.message for one in application.deployments.values()]
    lines = [line.strip() for message in messages for line in message.splitlines()]
    return next((line.partition(": ")[2] for line in reversed(lines) if _ERROR.match(line)), None)


def replicas_key(settings: ReplicaSettings, scale: Scale) -> str:
    """A text that identifies the settings of replicas.

    Limits of the HTTP server are left out, so that servers with different limits may share replicas.
    """
    engine = replace(settings.engine, max_waiting=None)
    return repr((replace(settings, engine=engine), replace(scale, drain_seconds=0.0), __version__))


def model_application(settings: ReplicaSettings, scale: Scale, key: str = "") -> serve.Application:
    """The Serve application that runs replicas.

    Deployed under the name of a running application, it replaces that one's replicas one after the other.

    Args:
        key: Text that identifies the replicas' settings; see `replicas_key`.
    """
    batch = settings.engine.max_batch
    environment = {"NPU_SIM_THREADS": str(scale.cpus)}
    if settings.cpu_level is not None:
        environment["NPU_SIM_CPU_LEVEL"] = settings.cpu_level
    options: dict[str, Any] = {
        "max_ongoing_requests": batch,
        "request_router_config": RequestRouterConfig(request_router_class=PrefixRouter),
        "graceful_shutdown_timeout_s": scale.drain_seconds,
        "health_check_period_s": _HEALTH_PERIOD,
        "ray_actor_options": {
            "num_cpus": scale.cpus,
            "num_gpus": scale.gpus,
            "runtime_env": {"env_vars": environment},
        },
    }
    if (ranks := settings.engine.tensor_parallel) > 1:
        bundle = {"CPU": scale.cpus, **({"GPU": scale.gpus} if scale.gpus else {})}
        options |= {"placement_group_bundles": [bundle] * ranks, "placement_group_strategy": "PACK"}
    if scale.least == scale.most:
        options["num_replicas"] = scale.most
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=scale.least,
            max_replicas=scale.most,
            target_ongoing_requests=max(1, batch // 2),
        )
    return serve.deployment(Replica, name=DEPLOYMENT).options(**options).bind(settings, key)
