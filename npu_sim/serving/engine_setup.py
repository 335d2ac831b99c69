"""Setting up an engine for a checkpoint: the same steps for `npu-sim serve` and for each replica of a Ray cluster."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npu_compiler.errors import InputError
from npu_sim.llm.context import trained_length
from npu_sim.llm.speculation.model import ModelDrafter
from npu_sim.parallel.group import LocalWorker, StartWorker
from npu_sim.serving.engine import Engine
from npu_sim.serving.paged_model import MAX_TOKENS, PagedModel

if TYPE_CHECKING:
    from npu_runtime import Device
    from npu_sim.llm.checkpoint import Checkpoint

Report = Callable[[int, int], None]
BLOCK = 16  # tokens


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine, apart from checkpoint and device.

    Attributes:
        context_length: Maximum tokens of a prompt and its reply. None: 2048, or the model's maximum if that is less.
        cache_tokens: Capacity of the KV cache in tokens. None: 8 times the context length.
        max_batch: Maximum number of sequences generated at once.
        max_waiting: Maximum number of requests that wait for admission. None: no limit.
        prefill_tokens: Maximum prompt tokens of a step. None: as many as delay other requests little.
        speculate: Whether to guess tokens from a request's own text and verify several in a step.
        tensor_parallel: Number of devices among which the model is divided.
    """

    context_length: int | None = None
    cache_tokens: int | None = None
    max_batch: int = 128
    max_waiting: int | None = None
    prefill_tokens: int | None = None
    speculate: bool = False
    tensor_parallel: int = 1


@dataclass(frozen=True)
class ReplicaSettings:
    """The model, device and engine settings of each replica. Files and devices are those of the replica's machine.

    Attributes:
        model: Source for `load_checkpoint`.
        device: Name of the device. None: the best one of the machine.
        tune: Whether the CPU uses the kernels that measurements find the fastest.
        draft: Source for `load_checkpoint` of a smaller model that guesses tokens. None: there is none.
        cpu_level: Instruction set of the CPU kernels. None: the best one of the machine.
        adapter: Folder of the LoRA adapter that is merged into the weights. None: no adapter is.
        adapters: Names and folders of LoRA adapters that requests may choose.
        dtype, quantization, activations: Arguments of `load_checkpoint`. None: its default.
    """

    model: str
    dtype: str | None = None
    quantization: str = "checkpoint"
    activations: str = "checkpoint"
    device: str | None = None
    tune: bool = True
    engine: EngineSettings = EngineSettings()
    draft: str | None = None
    cpu_level: str | None = None
    adapter: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()


def open_model(
    checkpoint: Checkpoint,
    device: Device,
    settings: EngineSettings,
    report: Report | None = None,
    start_worker: StartWorker = LocalWorker,
) -> PagedModel:
    """Open a checkpoint's model on a device, compiling what it needs. Errors are those of `PagedModel`.

    Args:
        report: Called with (weights loaded, total weights). None: not called.
        start_worker: Starts the process for each further device.
    """
    prefill = settings.prefill_tokens
    return PagedModel(
        checkpoint,
        device=device,
        blocks=None if settings.cache_tokens is None else -(-settings.cache_tokens // BLOCK),
        block_size=BLOCK,
        context_length=settings.context_length,
        max_tokens=min(MAX_TOKENS, MAX_TOKENS if prefill is None else prefill + settings.max_batch),
        max_sequences=settings.max_batch,
        progress=report,
        tensor_parallel=settings.tensor_parallel,
        start_worker=start_worker,
    )


def open_drafts(small: Checkpoint, large: PagedModel, report: Report | None = None) -> PagedModel:
    """Open a smaller model that guesses tokens for a large one, on its device and with its sizes.

    Raises the errors of `PagedModel`.

    Args:
        report: Called with (weights loaded, total weights). None: not called.
    """
    trained = trained_length(small.config) or large.context_length
    return PagedModel(
        small,
        device=large.device,
        blocks=large.blocks,
        block_size=large.block_size,
        context_length=min(trained, large.context_length),
        max_tokens=large.max_tokens,
        max_sequences=large.max_sequences,
        progress=report,
    )


def check_same_tokens(small: Checkpoint, large: Checkpoint) -> None:
    """Raise InputError if some token id means another token in the draft model (`small`) than in the large model."""
    ours, theirs = large.tokenizer.get_vocab(), small.tokenizer.get_vocab()
    wrong = next((token for token, number in theirs.items() if ours.get(token) != number), None)
    if wrong is not None:
        there = f"is {ours[wrong]}" if wrong in ours else "does not exist"
        raise InputError(
            f"{small.name} cannot draft for {large.name}, whose tokens are others: {wrong!r} is token {theirs[wrong]} "
            f"of the first and {there} in the second; choose a smaller model of the same family"
        )
    sizes = [int(checkpoint.config.vocab_size) for checkpoint in (small, large)]
    if sizes[0] > sizes[1]:
        raise InputError(
            f"{small.name} cannot draft for {large.name}: it has {sizes[0]} token ids, the other only {sizes[1]}"
        )


def prepare_steps(model: PagedModel, report: Report) -> None:
    """Compile the programs for pieces of prompts and batches of every size now, so that no request waits for them.

    Afterwards Python's garbage collector ignores all objects that exist in this process, so that its runs stay short.

    Args:
        report: Called with (programs ready, total programs).
    """
    sizes = [min(1 << power, model.max_tokens) for power in range((model.max_tokens - 1).bit_length() + 1)]
    steps = [(size, outputs) for size in sizes for outputs in sorted({1, min(size, model.max_outputs)})]
    for done, (size, outputs) in enumerate(steps):
        report(done, len(steps))
        model.prepare(size, outputs)
        model.prepare(size, outputs, sampling=True)
    if model.shares_prefixes:
        model.prepare_copies()
    model.warm_up()
    # What is there now stays. Otherwise a full collection looks at all of it, which stops a step for half a second.
    gc.collect()
    gc.freeze()


def most_tokens(model: PagedModel) -> int:
    """Maximum number of tokens of a prompt and its reply: what the context and the KV pool hold."""
    return min(model.context_length, model.blocks * model.block_size)


def start_engine(model: PagedModel, settings: EngineSettings, drafts: PagedModel | None = None) -> Engine:
    """Start the engine of an opened model.

    Args:
        drafts: A model that guesses tokens; see `open_drafts`. None: there is none.
    """
    return Engine(
        model,
        model.checkpoint,
        max_waiting=settings.max_waiting,
        prefill_tokens=settings.prefill_tokens,
        speculate="ngram" if settings.speculate else None if drafts is None else ModelDrafter(drafts),
    )
