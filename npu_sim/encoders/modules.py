"""The modules of encoders that are compiled: a transformer with its pooling, or with its head for a score."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from npu_compiler.errors import InputError
from npu_sim.encoders.folder import CrossEncoderFolder, DenseLayer, EmbedderFolder, EncoderFolder
from npu_sim.llm.checkpoint import as_input_error


def load_transformer(folder: EncoderFolder, dtype: str | None) -> nn.Module:
    """The transformer of a folder with its weights.

    Args:
        dtype: Dtype of the module. None: that of the stored weights.

    Raises:
        InputError: the folder holds no transformer, it cannot be read, or weights are missing.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification

    ranks = isinstance(folder, CrossEncoderFolder)
    kind = AutoModelForSequenceClassification if ranks else AutoModel
    with as_input_error(f"cannot open {folder.name}"), _no_progress_bar():
        model, loading = kind.from_pretrained(
            folder.transformer,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype="auto" if dtype is None else getattr(torch, dtype),
            output_loading_info=True,
        )
    # Only the first token's state goes through a pooler, which embeddings by sentence-transformers do not use.
    if missing := sorted(key for key in loading["missing_keys"] if ranks or "pooler." not in key):
        raise InputError(f"cannot use {folder.name}: its files lack {len(missing)} weights, such as '{missing[0]}'")
    return model.eval()  # type: ignore[no-any-return]


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Context in which transformers shows no progress bar."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def longest_text(model: nn.Module) -> int | None:
    """Maximum tokens of a text that the model's position embeddings allow; None if its config sets no limit.

    If positions are counted from after the padding id (RoBERTa), fewer positions are usable than the table has rows.
    """
    sizes: list[int] = []
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            sizes.append(table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1))
    most = getattr(model.config, "max_position_embeddings", None)
    return min(sizes + ([most] if isinstance(most, int) and most > 0 else []), default=None)


class Encoder(nn.Module):
    """A transformer as a module that takes a batch of texts: the base class of `Scorer` and `Embedder`.

    Attributes:
        takes_types: Whether it takes token types, which distinguish the two texts of a pair.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self.takes_types = "token_type_ids" in parameters
        self._options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}

    def called(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, types: torch.Tensor | None) -> Any:
        kinds = {} if types is None else {"token_type_ids": types}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **kinds, **self._options)


class Scorer(Encoder):
    """A cross-encoder as a module that returns the score of each pair of texts, [batch, 1] in float32."""

    def __init__(self, model: nn.Module, activation: str) -> None:
        super().__init__(model)
        self.activation: nn.Module = getattr(nn, activation)()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = self.called(input_ids, attention_mask, token_type_ids).logits
        return self.activation(logits.float())  # type: ignore[no-any-return]


class Embedder(Encoder):
    """An embedding model as a module that returns a vector for each text, [batch, dimensions] in float32.

    Args:
        poolings: See `EmbedderFolder`.
        tail: The layers after the pooling.
    """

    def __init__(self, model: nn.Module, poolings: Sequence[str], tail: nn.Module) -> None:
        super().__init__(model)
        self._poolings = tuple(poolings)
        self.tail = tail

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pooled: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the vectors of a batch of texts.

        Args:
            pooled: [batch, length] in float32, 1 for the tokens that are pooled. Poolings that take only the first or
                the last token ignore this.
            token_type_ids: [batch, length], types of the tokens. None: the model takes none.
        """
        states = self.called(input_ids, attention_mask, token_type_ids).last_hidden_state.float()
        vectors = [_POOLED[name](states, pooled, attention_mask) for name in self._poolings]
        return self.tail(vectors[0] if len(vectors) == 1 else torch.cat(vectors, -1))  # type: ignore[no-any-return]


def _first(states: torch.Tensor, pooled: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states[:, 0]


def _last(states: torch.Tensor, pooled: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    places = torch.arange(mask.shape[1], device=mask.device)
    is_last = places[None] == mask.sum(1, keepdim=True) - 1
    return (states * is_last[..., None].to(states.dtype)).sum(1)


def _greatest(states: torch.Tensor, pooled: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(pooled[..., None] > 0, states, -1e9).amax(1)


def _weighted(
    states: torch.Tensor, pooled: torch.Tensor, mask: torch.Tensor, *, power: float = 1.0, by_place: bool = False
) -> torch.Tensor:
    """The weighted sum of the token vectors of each text, divided by the sum of the weights to the power `power`.

    Args:
        by_place: Whether a token's weight is its position, counted from 1, instead of 1.
    """
    if by_place:
        pooled = pooled * torch.arange(1, pooled.shape[1] + 1, device=pooled.device)
    return (states * pooled[..., None]).sum(1) / pooled.sum(1, keepdim=True).pow(power)


_POOLED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": _first,
    "max": _greatest,
    "mean": _weighted,
    "mean_sqrt_len_tokens": partial(_weighted, power=0.5),
    "weightedmean": partial(_weighted, by_place=True),
    "lasttoken": _last,
}


class Normalize(nn.Module):
    """A module that divides each vector by its length."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(vectors, dim=-1)


def tail_of(folder: EmbedderFolder) -> nn.Module:
    """The layers of an embedding model after its pooling, in float32.

    Raises:
        InputError: a layer has an unknown activation, or weights that do not fit its config.
    """
    layers = [part for layer in folder.dense for part in _dense(layer)]
    return nn.Sequential(*layers, *([Normalize()] if folder.normalized else [])).eval()


def _dense(layer: DenseLayer) -> tuple[nn.Module, nn.Module]:
    from safetensors.torch import load_file

    kind = getattr(nn, layer.activation, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__.startswith("torch.nn.modules")):
        raise InputError(f"{layer.folder} has the activation {layer.activation:.80}, which PyTorch does not have")
    linear = nn.Linear(layer.inputs, layer.outputs, bias=layer.bias)
    with as_input_error(f"the weights in {layer.folder} cannot be used"):
        state = load_file(layer.folder / "model.safetensors")
        linear.load_state_dict({key.removeprefix("linear."): value.float() for key, value in state.items()})
        return linear, kind()
