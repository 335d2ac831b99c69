"""A language model on several devices: this process leads, and one further process for each other device follows it.

All processes make the same `CompiledModel`, each with its part of the weights and of the state. The leader sends the
others the values for a program's inputs and the order to run it; everything else stays on its device.
"""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from npu_compiler.errors import DeviceError, InputError
from npu_runtime.device import Device
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.graph import layer_states
from npu_sim.llm.state import is_recurrent
from npu_sim.llm.step_program import ProgramName
from npu_sim.parallel.group import LocalWorker, RankGroup, StartWorker
from npu_sim.parallel.worker import Rank, named


def start_group(
    checkpoint: Checkpoint,
    device: Device,
    ranks: int,
    model: type,
    settings: Mapping[str, Any],
    start_worker: StartWorker = LocalWorker,
) -> RankGroup:
    """Start the processes of ranks 1 to ranks - 1, connect their devices with this one, and return the group.

    A rank is the number of a process; its device is that many places after this one's.

    Args:
        model: The `CompiledModel` that every process makes with these settings.
        start_worker: Starts the process of a rank.

    Raises:
        InputError: that many devices cannot share the model, or other processes cannot open the checkpoint.
        DeviceError: there are fewer devices, or they cannot exchange data.
    """
    check_ranks(checkpoint, ranks)
    if checkpoint.opened_by is None:
        raise InputError(f"{checkpoint.name} was not opened by load_checkpoint, so other processes cannot open it")
    if not device.backend.joins_groups:
        raise DeviceError(f"{device.name} devices cannot share a model: they exchange nothing with each other")
    arguments = {
        "opened_by": checkpoint.opened_by,
        "devices": [start_worker.device(device.name, rank) for rank in range(ranks)],
        "model": f"{model.__module__}:{model.__qualname__}",
        "settings": dict(settings),
    }
    group = RankGroup(ranks, f"{__name__}:{RankedModel.__name__}", arguments, lambda: _abort(device), start_worker)
    group.wait()
    group.call("join")
    group.do(lambda: device.backend.join(0, ranks, group.share))
    group.call("build", device.backend.target.key)
    return group


def _abort(device: Device) -> None:
    if device.backend.collectives is not None:
        device.backend.collectives.abort()


class RankedModel:
    """The part of a model that a process other than the leader holds; the leader calls its methods."""

    def __init__(
        self,
        rank: Rank,
        opened_by: tuple[str, tuple[Any, ...]],
        devices: list[str],
        model: str,
        settings: dict[str, Any],
    ) -> None:
        opener, arguments = opened_by
        self._checkpoint: Checkpoint = named(opener)(*arguments)
        self._device = Device(devices[rank.rank])
        self._rank, self._type, self._settings = rank, model, settings

    def join(self) -> None:
        """Connect this rank's device with those of the others."""
        self._device.backend.join(self._rank.rank, self._rank.size, self._rank.share)

    def build(self, target: str) -> None:
        """Make this rank's part of the model. Raises DeviceError if the device needs other programs than `target`."""
        if (own := self._device.backend.target.key) != target:
            raise DeviceError(f"its device runs programs for '{own}', but rank 0 has them for '{target}'")
        place = {"rank": self._rank.rank, "tensor_parallel": self._rank.size}
        self._model = named(self._type)(self._checkpoint, device=self._device, **place, **self._settings)

    def prepare(self, name: ProgramName) -> None:
        """Load this rank's program of that name, so that it is ready for `run`."""
        self._model.program(name)

    def run(self, name: ProgramName, values: Mapping[str, NDArray[Any]]) -> None:
        """Set inputs of this rank's program of that name, and run it; its outputs stay on this rank's device.

        Args:
            values: Input name → value.
        """
        program = self._model.program(name)
        for key, value in values.items():
            program.fill(key, value)
        program.run()


def check_ranks(checkpoint: Checkpoint, ranks: int) -> None:
    """Raise InputError if the model has recurrent states, or heads that so many devices cannot share evenly."""
    if ranks == 1:
        return
    if is_recurrent(layer_states(checkpoint)):
        reason = "its layers have recurrent states, which devices cannot share; leave out --tensor-parallel"
        raise InputError(f"{checkpoint.name} cannot be divided among {ranks} devices: {reason}")
    config = checkpoint.config
    heads = config.num_attention_heads
    shared = min(
        row[state.kind.sharded_axis]
        for state in layer_states(checkpoint)
        for row in state.rows
        if state.kind.sharded_axis is not None
    )
    if ranks < 1:
        raise InputError(f"a model is divided among 1 or more devices, not {ranks}")
    if not _shares_heads(heads, shared, ranks):
        able = [n for n in range(1, heads + 1) if _shares_heads(heads, shared, n)]
        raise InputError(
            f"{checkpoint.name} has {heads} attention heads and {shared} KV heads, which {ranks} devices cannot share "
            f"evenly; choose {', '.join(map(str, able))}"
        )


def _shares_heads(heads: int, shared: int, ranks: int) -> bool:
    return heads % ranks == 0 and (shared % ranks == 0 or ranks % shared == 0)
