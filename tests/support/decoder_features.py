"""Show that the comparison of decoders would notice each feature of a model, by leaving them out one by one.

    python tests/support/decoder_features.py [MODEL_TYPE ...]

A feature is a field of the config, such as a window or a cap, or a kind of parameter, such as attention sinks, the norm
of each head or a bias. It is changed in what we read, not in what transformers reads: a field gets another value, a
parameter becomes 0. If transformers itself then computes something else, the test that compares our traced module with
transformers must fail (`noticed`, else `missed`); if it does not, the feature says nothing in this model (`idle`).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import decoders
import numpy as np
import torch
import transformers
from decoder_answers import Answer, Eager, Outcome, compared, prompts
from safetensors.torch import load_file, save_file

TYPES = (
    *("gemma2", "gpt_oss", "gemma3_text", "cohere2", "granitemoe", "deepseek_v3", "qwen3_next", "mamba2", "bloom"),
    *("llama4_text", "qwen2_moe", "phi3", "olmo2", "minicpm3", "falcon_h1", "gptj", "stablelm", "dbrx"),
)
_OTHER_WORDS = {"silu": "relu", "gelu": "relu", "relu": "gelu", "gelu_pytorch_tanh": "relu", "gelu_new": "relu"}
_SKIPPED = frozenset({"dtype", "torch_dtype", "tie_word_embeddings", "use_cache", "vocab_size", "num_hidden_layers"})


def other_values(name: str, value: Any) -> list[Any]:
    """Return other values for a field, of which the first that has an effect is tried; none for one that is left."""
    if name in decoders._WINDOWS and isinstance(value, int):
        return [decoders.CONTEXT]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):  # of a cap, only a small value has an effect
        return [value * 2 or 0.5, value / 50 or 0.05]
    if isinstance(value, str):
        return [_OTHER_WORDS[value]] if value in _OTHER_WORDS else []
    if name == "layer_types" and "sliding_attention" in value and "full_attention" in value:
        return [["full_attention"] * len(value)]
    return []


def changed_fields(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """The path of each field of a config that has other values, and these values."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from changed_fields(value, (*path, name))
        elif name not in _SKIPPED and value is not None and (others := other_values(name, value)):
            yield (*path, name), others


def with_field(folder: Path, target: Path, path: tuple[str, ...], value: Any) -> Path:
    """A copy of a folder whose config has another value in a field."""
    shutil.copytree(folder, target)
    whole = json.loads((target / "config.json").read_text())
    inner = whole
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    (target / "config.json").write_text(json.dumps(whole))
    return target


def kinds(names: list[str]) -> dict[str, list[str]]:
    """Name of a parameter without its numbers → the parameters of that name."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    return found


def without_parameters(folder: Path, target: Path, names: list[str]) -> Path:
    """A copy of a folder in which these tensors are 0."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    zeros = {name: torch.zeros_like(tensors[name]) for name in names}
    save_file({**tensors, **zeros}, target / "model.safetensors", {"format": "pt"})
    return target


def traced_answer(folder: Path, tokens: list[int]) -> Answer:
    """The log probabilities after the first prompt by the module that we trace, run by PyTorch in one step.

    Args:
        tokens: The continuation, which is given.
    """
    from npu_runtime.packing import to_numpy
    from npu_runtime.torch_arrays import numpy_to_tensor
    from npu_sim.llm import load_checkpoint
    from npu_sim.llm.checkpoint import Widened
    from npu_sim.llm.graph import _empty_caches, _placed_model, state_form, state_with_buffers
    from npu_sim.llm.modules import CachedCausalLM

    checkpoint, prompt = load_checkpoint(folder, "float32"), prompts()[0]
    causal = _placed_model(checkpoint).to_empty(device="cpu")
    state = Widened(state_with_buffers(checkpoint), "float32")
    for name, value in state.items():
        owner, _, leaf = name.rpartition(".")
        held, tensor = causal.get_submodule(owner), numpy_to_tensor(to_numpy(value).astype(np.float32))
        if leaf in held._buffers:
            held._buffers[leaf] = tensor.to(held._buffers[leaf].dtype)
        else:
            held._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    caches = [[torch.zeros_like(x, device="cpu") for x in part] for part in _empty_caches(checkpoint, decoders.CONTEXT)]
    ids = [*prompt, *tokens[:-1]]
    with torch.no_grad():
        model = CachedCausalLM(causal, state_form(checkpoint)).eval()
        rows = torch.arange(len(prompt) - 1, len(ids))
        logits = model(torch.tensor([ids]), torch.arange(len(ids)), rows, *caches)[0]
    return Answer(prompt, tokens, logits[0].double().log_softmax(-1).numpy())


def noticed(eager: Eager, tokens: list[int], folder: Path) -> Outcome:
    """Compare a changed folder, by us and by transformers, with transformers' model of the folder before the change."""
    try:
        other = Eager(folder, strict=True)
        theirs = compared(
            Answer(prompts()[0], tokens, other.scores("float32", Answer(prompts()[0], tokens, None))), eager
        )
    except Exception:  # transformers refuses such a value, or needs other parameters
        return Outcome("unbuilt")
    if theirs.kind == "right":
        return Outcome("idle")
    ours = decoders.attempt(lambda: compared(traced_answer(folder, tokens), eager))
    return Outcome("missed" if ours.kind == "right" else "noticed", ours.detail)


def tried(model_type: str) -> dict[str, Outcome]:
    """Feature → whether the test would notice it; `whole` says whether it passes before anything is left out."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        decoders.save_tiny(model_type, folder)
        eager = Eager(folder)
        tokens = eager.continued(prompts()[0])
        outcomes = {"whole": decoders.attempt(lambda: compared(traced_answer(folder, tokens), eager))}
        if outcomes["whole"].kind != "right":
            return outcomes
        config = json.loads((folder / "config.json").read_text())
        for path, values in changed_fields(config):
            for value in values:
                other = with_field(folder, Path(place) / "other", path, value)
                outcomes[".".join(path)] = outcome = noticed(eager, tokens, other)
                shutil.rmtree(other)
                if outcome.kind != "idle":
                    break
        names = list(load_file(folder / "model.safetensors"))
        for kind, parameters in kinds(names).items():
            other = without_parameters(folder, Path(place) / "other", parameters)
            outcomes[kind] = noticed(eager, tokens, other)
            shutil.rmtree(other)
        return outcomes


def main(names: list[str]) -> int:
    decoders._import()
    faults = 0
    for name in names or TYPES:
        outcomes, seconds = decoders.isolated(partial(tried, name))
        counts = Counter(outcome.kind for outcome in outcomes.values())
        print(f"{name} {seconds:.0f} s: {dict(counts)}", flush=True)
        for kind in ("missed", "wrong", "raw", "refused", "noticed", "idle"):
            if found := [feature for feature, outcome in outcomes.items() if outcome.kind == kind]:
                print(f"  {kind}: {', '.join(found)}", flush=True)
        faults += counts["missed"] + counts["wrong"] + counts["raw"] + counts["refused"]
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # many small products
    sys.exit(main(parser.parse_args().names))
