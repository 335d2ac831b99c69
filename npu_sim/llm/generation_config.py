"""A checkpoint's generation config. Each setting that changes the tokens is either followed or refused by name.

`repetition_penalty` is applied. Sampling settings are the server's defaults for requests. Elsewhere the caller's
settings replace them, and those for lengths and for speeding up the search. Everything else that changes which tokens
are chosen is not supported, and a model that asks for it is refused by that name.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from npu_compiler.errors import InputError
from npu_sim.llm.checkpoint import Checkpoint, as_ids, as_input_error

# Settings that change which tokens are chosen, with the values, besides None, that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": ([],),
    "force_words_ids": ([],),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "token_healing": (False,),
    "stop_strings": ([], ""),
    "max_time": (),
}


# Settings of sampling, with a test of their values and its words.
_SAMPLING: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value < math.inf, "a number of at least 0"),
    "top_k": (lambda value: value >= 0 and value == int(value), "a whole number"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "typical_p": (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
}


def _sampling(path: Path) -> dict[str, float]:
    """The sampling settings of a generation config, without those that change nothing; empty if it says not to sample.

    Raises:
        InputError: a setting is out of its range.
    """
    fields = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if fields.get("do_sample") is False:
        return {}
    found = {}
    for name, (fits, words) in _SAMPLING.items():
        value = fields.get(name)
        if value is None:
            continue
        if type(value) not in (int, float) or not fits(value):
            raise InputError(f"{path} says {value!r:.40} for '{name}', which is {words}")
        if not (name == "top_k" and value == 0 or name in ("top_p", "typical_p") and value == 1):
            found[name] = value
    return found


def read_generation(folder: Path, config: Any) -> dict[str, Any]:
    """Return the fields of `Checkpoint` that a folder's generation config sets, as JSON data.

    Args:
        config: The transformers config.

    Raises:
        InputError: the generation config cannot be read, or has an impossible value.
    """
    from transformers import GenerationConfig

    eos_ids = as_ids(getattr(config, "eos_token_id", None))
    path = folder / "generation_config.json"
    with as_input_error(f"{path} cannot be used"):
        # Old checkpoints have such settings in the config itself.
        old: dict[str, Any] = {} if path.is_file() else {"config_file_name": "config.json", "_from_model_config": True}
        settings = GenerationConfig.from_pretrained(folder, local_files_only=True, **old)
        eos_ids |= as_ids(settings.eos_token_id)
        penalty = getattr(settings, "repetition_penalty", None)
        penalty = 1.0 if penalty is None else penalty
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not 0 < penalty < math.inf:
            raise InputError(f"{path} says {penalty!r:.40} for 'repetition_penalty', which is a number above 0")
        sampling = _sampling(path)
        asked = {name: getattr(settings, name, None) for name in _NEUTRAL}
    unsupported = [
        f"{name}={value!r:.60}"
        for name, value in asked.items()
        if value is not None
        and not any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL[name])
        if not (isinstance(value, float) and value in _NEUTRAL[name])
    ]
    return {
        "eos_ids": sorted(eos_ids),
        "repetition_penalty": float(penalty),
        "sampling": sampling,
        "unsupported": unsupported,
    }


def check_generation(checkpoint: Checkpoint) -> None:
    """Raise InputError if a checkpoint's generation config asks for a way of choosing tokens that is not supported."""
    if checkpoint.unsupported:
        raise InputError(
            f"the generation config of {checkpoint.name} asks for {checkpoint.unsupported[0]}, which is not supported; "
            "remove it from its generation_config.json to generate without it"
        )
