"""Model types of transformers that are not plain decoders, tiny and random, compiled and compared with eager PyTorch.

    python tests/support/encoder_types.py [MODEL_TYPE ...]

Of each type the base model is compiled for a batch of two, dynamic, and called with a batch of three; it is saved, and
the file is called too. The inputs are those that `forward` has of text, an image, a waveform and spectral features. The
outcomes are those of `decoders.py`; `eager` says why transformers itself runs no such model.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import decoders
import torch
import transformers
from decoder_answers import VOCAB, Outcome
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.auto import modeling_auto

import npu_sim
from npu_sim.module.library_models import register_caches
from npu_sim.module.trace import first_line

BOUND = 2e-4  # greatest difference, relative to the largest element of a result
_LARGEST = 20_000_000  # parameters, for types whose sizes have other names
_PIXELS, _LENGTH, _SHORT = 64, 24, 9
_CHANGES = {"is_decoder": False, "max_source_positions": 32, "eos_token_id": 2, "image_size": _PIXELS}


def model_types() -> list[str]:
    """All model types with a base model, but for those that only generate text."""
    decoders_only = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES | modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    )
    return [name for name in modeling_auto.MODEL_MAPPING_NAMES if name not in decoders_only]


def inputs_of(model: nn.Module, batch: int) -> dict[str, Tensor]:
    """Random inputs; the last row of a text is padded."""
    drawn = torch.Generator().manual_seed(batch)
    mask = torch.ones(batch, _LENGTH, dtype=torch.long)
    mask[-1, -5:] = 0
    bands = getattr(model.config, "num_mel_bins", 80)
    text = {"input_ids": torch.randint(3, VOCAB, (batch, _LENGTH), generator=drawn), "attention_mask": mask}
    others = {
        "decoder_input_ids": torch.randint(3, VOCAB, (batch, _SHORT), generator=drawn),
        "pixel_values": torch.randn(batch, 3, _PIXELS, _PIXELS, generator=drawn),
        "input_values": torch.randn(batch, 4000, generator=drawn),
        "input_features": torch.randn(batch, bands, 64, generator=drawn),
    }
    names = inspect.signature(model.forward).parameters
    given = text | others if "input_ids" in names else others
    return {name: value for name, value in given.items() if name in names}


def tiny_model(model_type: str) -> nn.Module:
    """A tiny random base model; raises whatever transformers does where it makes none."""
    config = decoders.tiny_config(model_type, _CHANGES)
    with torch.device("meta"):
        size = sum(x.numel() for x in transformers.AutoModel.from_config(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModel.from_config(config).float().eval().requires_grad_(False)
    drawn = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=drawn)
        weight.copy_(noise / weight[0].numel() ** 0.5 if weight.ndim > 1 else weight.nan_to_num() + 0.1 * noise)
    return model


def tensors(result: Any) -> list[Tensor]:
    """All tensors of a result, in order; arrays as tensors. A loaded module returns a cache as a record."""
    if hasattr(result, "shape"):
        return [torch.as_tensor(result).double()]
    if isinstance(result, Mapping):
        children = list(result.values())
    else:
        children = list(result) if isinstance(result, (list, tuple)) else pytree.tree_leaves(result)
    return [x for child in children if child is not result for x in tensors(child)]


def judged(ours: list[Tensor], want: list[Tensor]) -> Outcome:
    if [x.shape for x in ours] != [x.shape for x in want]:
        return Outcome("wrong", f"shapes {[list(x.shape) for x in ours]}")
    pairs = [(x, y) for x, y in zip(ours, want, strict=True) if not torch.equal(x, y)]
    gap = max((float((x - y).abs().max() / y.abs().max().clamp(min=1e-6)) for x, y in pairs), default=0.0)
    return Outcome("right" if gap <= BOUND else "wrong", f"{gap:.1e}")


@torch.no_grad()
def tried(model_type: str) -> dict[str, Outcome]:
    """The outcomes of a model type by route: `eager` alone where transformers runs no such model, or a random one."""
    try:
        model = tiny_model(model_type)
        register_caches(model)
        inputs, other = inputs_of(model, 2), inputs_of(model, 3)
        want = tensors(model(**other))
        if not want or judged(tensors(model(**other)), want).kind != "right":
            return {"eager": Outcome("fails", "other results at each call")}
    except Exception as error:  # transformers does not run such a model
        return {"eager": Outcome("fails", f"{type(error).__name__}: {first_line(error):.200}")}

    def compiled() -> Outcome:
        dims = {name: {0: torch.export.Dim("batch", min=2, max=8)} for name in inputs}
        module = npu_sim.compile(model, kwargs=inputs, dynamic_shapes=dims)
        return judged(tensors(module(**other)), want)

    def saved() -> Outcome:
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "model.npumod"
            npu_sim.compile(model, kwargs=other).save(file)
            return judged(tensors(npu_sim.load(file)(**other)), want)

    return {"compile": decoders.attempt(compiled), "save": decoders.attempt(saved)}


def main(names: Iterable[str]) -> int:
    """Try model types and print their outcomes; return 1 if one is wrong or raw."""
    decoders._import()
    return decoders.print_outcomes((name, partial(tried, name)) for name in names or model_types())


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # many small products
    sys.exit(main(sys.argv[1:]))
