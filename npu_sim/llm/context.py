"""The length of a language model's context: its default and its limits."""

from typing import Any

from npu_compiler.errors import InputError
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.families import longest_context

DEFAULT_LENGTH = 2048  # tokens
_CHUNK = 128  # tokens, of which the default length is a multiple


def trained_length(config: Any) -> int | None:
    """The number of positions that a config says its model was trained for; None if it says none."""
    stated = getattr(config, "max_position_embeddings", None)
    if stated is None:
        stated = config.to_dict().get("max_seq_len")
    return stated if isinstance(stated, int) and stated > 0 else None


def context_length(checkpoint: Checkpoint, cache_length: int | None, chunk: int) -> tuple[int, int]:
    """Choose the tokens per prefill run and the length of the KV cache, a multiple of them; return both.

    The multiple is the next one above the wanted length, or below it where `longest_context` would be exceeded.

    Args:
        cache_length: Wanted length in tokens. None: 2048, or the model's maximum context length if that is less.
        chunk: Tokens per run of a prefill program; reduced to the length of a smaller cache.

    Raises:
        InputError: a length is below 1 or beyond the model's maximum.
    """
    trained = trained_length(checkpoint.config) or DEFAULT_LENGTH
    limit = longest_context(checkpoint.config.to_dict(), trained)
    length = min(DEFAULT_LENGTH, trained, limit or trained) if cache_length is None else cache_length
    if length < 1 or chunk < 1:
        raise InputError(f"cache length and chunk must be at least 1, not {length} and {chunk}")
    if length > trained:
        raise InputError(
            f"a cache of {length} tokens exceeds the context length that {checkpoint.name} was trained for, {trained}"
        )
    if limit is not None and length > limit:
        raise InputError(
            f"{checkpoint.name} has other rotary frequencies for sequences of more than {limit} tokens (longrope), "
            "which is not supported; choose a cache no longer (--cache-length, or --context-length of a server)"
        )
    chunk = min(chunk, length)
    whole = -(-length // chunk) * chunk
    return chunk, whole if limit is None or whole <= limit else whole - chunk


def cache_capacity(checkpoint: Checkpoint, cache_length: int | None = None) -> int:
    """Number of tokens that the KV cache of a `LanguageModel` with these arguments holds.

    Args:
        cache_length: See `context_length`. None: the default.

    Raises:
        InputError: the length is beyond the model's maximum.
    """
    return context_length(checkpoint, cache_length, _CHUNK)[1]
