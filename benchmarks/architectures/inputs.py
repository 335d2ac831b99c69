"""Inputs of transformers' models by general rules on the names of the arguments of `forward`.

A name can mean several shapes (`input_features` is frames × mel bins for one model, mel bins × frames for another), and
optional arguments can be necessary (a pair of encoders needs tokens and pixels). `candidates` lists the combinations in
order of likelihood; the first that the module accepts in eager PyTorch is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.configs import WORDS, nested

BATCH, TOKENS, TARGETS, FRAMES, SAMPLES = 2, 12, 7, 64, 4000
MOST_CANDIDATES = 48

Maker = Callable[["Sizes"], Iterator[Tensor]]


class Sizes:
    """The sizes of inputs, looked up by name in a configuration and in those nested in it."""

    def __init__(self, config: Any, generator: torch.Generator) -> None:
        self.configs, self.generator = [config, *nested(config)], generator

    def find(self, *names: str, default: Any = None) -> Any:
        """Return the first of these fields that a configuration has, outer configurations first; else the default."""
        for name in names:
            for config in self.configs:
                value = getattr(config, name, None)
                if value is not None and not isinstance(value, bool):
                    return value
        return default

    def number(self, *names: str, default: int) -> int:
        value = self.find(*names, default=default)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        return int(value) if isinstance(value, (int, float)) else default

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def words(self, tokens: int) -> Tensor:
        limit = min(WORDS.stop, self.number("vocab_size", default=WORDS.stop))
        return self.ints(min(WORDS.start, limit // 2), limit, BATCH, tokens)

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        side = self.find("image_size", "input_size", "sample_size", default=64)
        height, width = side if isinstance(side, (list, tuple)) and len(side) == 2 else (side, side)
        if not isinstance(height, int) or height < 8:
            height = width = 64
        return self.number("num_channels", "in_channels", "in_chans", default=3), height, width


def _tokens(s: Sizes) -> Iterator[Tensor]:
    yield s.words(TOKENS)


def _mask(s: Sizes) -> Iterator[Tensor]:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, -3:] = 0
    yield mask


def _targets(s: Sizes) -> Iterator[Tensor]:
    yield s.words(TARGETS)


def _pixels(s: Sizes) -> Iterator[Tensor]:
    channels, height, width = s.image
    frames = s.number("num_frames", "frames_per_clip", default=2)
    if s.find("num_frames", "frames_per_clip") is not None:
        yield s.floats(BATCH, frames, channels, height, width)
    yield s.floats(BATCH, channels, height, width)
    for side in (64, 128, 224):
        if side != height:
            yield s.floats(BATCH, channels, side, side)
    yield s.floats(BATCH, frames, channels, height, width)


def _video(s: Sizes) -> Iterator[Tensor]:
    channels, height, width = s.image
    frames = s.number("num_frames", "frames_per_clip", default=2)
    yield s.floats(BATCH, frames, channels, height, width)
    yield s.floats(BATCH, channels, frames, height, width)


def _features(s: Sizes) -> Iterator[Tensor]:
    bins = s.number("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim", default=80)
    frames = [2 * s.number("max_source_positions", default=FRAMES // 2), FRAMES, 100]
    for count in dict.fromkeys(frames):
        if count <= 4096:
            yield s.floats(BATCH, bins, count)
            yield s.floats(BATCH, count, bins)
    yield s.floats(BATCH, 1, 1001, bins)
    for width in (160, 80, 128):
        if width != bins:
            yield s.floats(BATCH, FRAMES, width)


def _samples(s: Sizes) -> Iterator[Tensor]:
    channels = s.number("audio_channels", default=1)
    bins = s.number("num_mel_bins", "feature_size", default=0)
    if s.find("max_length") and bins > 1:
        yield s.floats(BATCH, s.number("max_length", default=FRAMES), bins)
    yield s.floats(BATCH, SAMPLES)
    yield s.floats(BATCH, channels, SAMPLES)
    yield s.floats(BATCH, channels, 7680)


def _hidden(s: Sizes) -> Iterator[Tensor]:
    width = s.number("hidden_size", "d_model", "n_embd", "embed_dim", "dim", default=64)
    yield s.floats(BATCH, TOKENS, width)
    yield s.floats(BATCH, width, TOKENS)
    yield s.floats(BATCH, 16, width)
    yield s.floats(TOKENS, width)


def _boxes(s: Sizes) -> Iterator[Tensor]:
    corner = s.ints(0, 50, BATCH, TOKENS, 2)
    yield torch.cat([corner, corner + s.ints(1, 50, BATCH, TOKENS, 2)], -1)


def _pixel_mask(s: Sizes) -> Iterator[Tensor]:
    _, height, width = s.image
    yield torch.ones(BATCH, height, width, dtype=torch.long)


def _past(s: Sizes) -> int:
    lags = s.find("lags_sequence", default=[0])
    return s.number("context_length", "prediction_length", default=32) + max(lags, default=0)


def _series(s: Sizes) -> Iterator[Tensor]:
    channels = s.number("num_input_channels", "input_size", default=1)
    yield s.floats(BATCH, _past(s)) if channels == 1 else s.floats(BATCH, _past(s), channels)
    yield s.floats(BATCH, _past(s), channels)
    yield s.floats(BATCH, s.number("context_length", default=32))


def _time_features(s: Sizes) -> Iterator[Tensor]:
    yield s.floats(BATCH, _past(s), s.number("num_time_features", default=0))


def _observed(s: Sizes) -> Iterator[Tensor]:
    for values in _series(s):
        yield torch.ones_like(values)


def _codes(s: Sizes) -> Iterator[Tensor]:
    books = s.number("num_codebooks", "num_quantizers", "n_codebooks", default=4)
    size = min(s.number("codebook_size", "vocab_size", default=64), 64)
    yield s.ints(0, size, BATCH, books, TOKENS)
    yield s.ints(0, size, BATCH, TOKENS, books)
    yield s.ints(0, size, BATCH, TOKENS)


def _grid(s: Sizes) -> Iterator[Tensor]:
    yield torch.tensor([[1, 4, 4]] * BATCH)
    yield torch.tensor([[4, 4]] * BATCH)


def _patches(s: Sizes) -> Iterator[Tensor]:
    patch, channels = s.number("patch_size", default=14), s.number("in_channels", "num_channels", default=3)
    time = s.number("temporal_patch_size", default=1)
    yield s.floats(16 * BATCH, channels * time * patch * patch)
    yield s.floats(16 * BATCH, channels, patch, patch)
    yield s.floats(BATCH, 16, channels * patch * patch)


def _lengths(s: Sizes) -> Iterator[Tensor]:
    yield torch.full((BATCH,), TOKENS)


def _positions(s: Sizes) -> Iterator[Tensor]:
    yield torch.arange(TOKENS).expand(BATCH, TOKENS).contiguous()


def _zeros(s: Sizes) -> Iterator[Tensor]:
    yield torch.zeros(BATCH, TOKENS, dtype=torch.long)


def _cumulative(s: Sizes) -> Iterator[Tensor]:
    yield torch.tensor([0, 16, 32], dtype=torch.int32)


# What fits an argument, by its name.
MAKERS: Mapping[str, Maker] = {
    "input_ids": _tokens,
    "decoder_input_ids": _targets,
    "attention_mask": _mask,
    "encoder_hidden_states": _hidden,
    "inputs_embeds": _hidden,
    "hidden_states": _hidden,
    "hidden_state": _hidden,
    "query_embeds": _hidden,
    "pixel_values": _pixels,
    "images": _pixels,
    "pixel_values_videos": _video,
    "input_features": _features,
    "audio_features": _features,
    "spectrogram": _features,
    "input_values": _samples,
    "padded_audio": _samples,
    "bbox": _boxes,
    "pixel_mask": _pixel_mask,
    "past_values": _series,
    "past_time_features": _time_features,
    "past_observed_mask": _observed,
    "audio_codes": _codes,
    "codes": _codes,
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "token_type_ids": _zeros,
    "position_ids": _positions,
    "input_lengths": _lengths,
    "cu_seqlens": _cumulative,
}

# Optional arguments that models with two kinds of input need, in the order in which they are tried.
COMPANIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("decoder_input_ids",),
    ("pixel_values",),
    ("input_ids",),
    ("input_features",),
    ("input_values",),
    ("bbox",),
    ("bbox", "pixel_values"),
    ("pixel_values", "decoder_input_ids"),
    ("input_ids", "pixel_values_videos"),
    ("past_observed_mask",),
)


def candidates(model: nn.Module, config: Any, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield keyword arguments that may fit `model.forward`, the likeliest first; the seed determines their values."""
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if main in parameters and main not in needed:
        needed.insert(0, main)
    for companions in COMPANIONS:
        if any(name not in parameters or name in needed for name in companions):
            continue
        names = list(dict.fromkeys((*needed, *companions)))
        if "attention_mask" in parameters and {"input_ids"} & set(names) and "attention_mask" not in names:
            names.append("attention_mask")
        if any(name not in MAKERS for name in names):
            continue
        makers = [_patched(name, names) for name in names]
        generator = torch.Generator().manual_seed(seed)
        sizes = Sizes(config, generator)
        choices = product(*(list(maker(sizes)) for maker in makers))
        for values in islice(choices, MOST_CANDIDATES):
            kwargs: dict[str, Any] = dict(zip(names, values, strict=True))
            if "use_cache" in parameters:
                kwargs["use_cache"] = False
            yield kwargs


def _patched(name: str, names: list[str]) -> Maker:
    """Return the function that creates an argument; if there is a grid of patches, images are created as patches."""
    if {"grid_thw", "image_grid_thw", "cu_seqlens"} & set(names) and name in ("pixel_values", "hidden_states"):
        return _patches
    return MAKERS[name]
