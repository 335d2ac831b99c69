"""Finding out what state the layers of a Hugging Face model keep, by running it without weights or data."""

from collections.abc import Callable
from typing import Any

import torch

from npu_compiler.errors import InputError
from npu_sim.llm.attention import (
    MaskFunction,
    PagePlaces,
    Paging,
    Places,
    RowPlaces,
    attend_to_pages,
    attend_to_rows,
    window_of,
)
from npu_sim.llm.modules import PlacedCache, placed, told_positions

_TOKENS, _BLOCK = 5, 16
Build = Callable[[Callable[..., Any]], Any]
"""Function from an attention function to a module on the meta device that calls it."""


class _ProbedRows(RowPlaces):
    """Rows whose masks say in `window` which they are: the number of last positions that is seen, 0 for others.

    Attributes:
        asked: Whether a mask was made.
    """

    asked = False

    def mask(self, function: MaskFunction) -> torch.Tensor:
        self.asked = True
        mask = super().mask(function).clone()
        mask.window = window_of(function) or 0  # type: ignore[attr-defined]
        return mask


class _Recorder(PlacedCache):
    """A cache that notes the shapes of keys and values, and returns them, or pools of their shape."""

    def __init__(self, places: Places) -> None:
        super().__init__(places)
        self.rows: dict[int, list[list[int]]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, ...]:
        rows = [[x.shape[1], x.shape[3]] for x in (key, value)]
        if key.shape[0] != 1 or key.shape[2] != _TOKENS or self.rows.setdefault(layer_idx, rows) != rows:
            raise InputError(f"its layer {layer_idx} keeps {list(key.shape)}, not keys of each token by head")
        if not isinstance(self.places, PagePlaces):
            return key, value
        return tuple(x.new_empty(4 * _BLOCK, x.shape[1], x.shape[3]) for x in (key, value))


def probe_state(build: Build) -> dict[str, Any]:
    """Find the state of a module's layers, as JSON data.

    Returns:
        `layers`: number of each layer with keys and values; `rows`: the shapes of a token's keys and values in each;
        `windows`: the number of last tokens that each attends to, 0 for all; and `is_additive`, `is_paged` and
        `takes_mask` as in `StateForm`.

    Raises:
        InputError: a layer keeps something else.
    """
    with torch.device("meta"):
        positions = torch.empty(_TOKENS, dtype=torch.long)
        tables = torch.empty(2, 3, dtype=torch.long)
        places = _ProbedRows(positions, _TOKENS)
    takes_mask = False
    try:
        rows, windows, calls = _run(build, attend_to_rows, places)
    except InputError:
        raise
    except Exception:  # a module that computes with the number of tokens in a cache
        takes_mask = True
        rows, windows, calls = _run(build, attend_to_rows, places, takes_mask=True)
    if not rows:
        raise InputError("its layers keep no keys and values")
    if not places.asked:
        raise InputError("its attention takes no causal mask, which is not supported")
    if calls and calls < sum(layer >= 0 for layer in rows):
        raise InputError("some of its layers do not use the attention function that they are given")
    is_paged = calls > 0 and not takes_mask
    if is_paged:
        try:
            _run(build, attend_to_pages, PagePlaces(Paging(positions, positions, tables, _BLOCK)))
        except Exception:  # whatever a module does that expects other masks or other keys
            is_paged = False
    layers = sorted(rows)
    return {
        "layers": layers,
        "rows": [rows[layer] for layer in layers],
        "windows": [windows.get(layer, 0) for layer in layers],
        "is_additive": calls == 0,
        "is_paged": is_paged,
        "takes_mask": takes_mask,
    }


def _run(
    build: Build, attend: Callable[..., Any], places: Places, *, takes_mask: bool = False
) -> tuple[dict[int, list[list[int]]], dict[int, int], int]:
    """Run a module once: the rows and windows of its layers, and how often it called the attention function."""
    windows: dict[int, int] = {}
    calls = 0

    def probing(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **others: Any) -> Any:
        nonlocal calls
        calls += 1
        layer, window = getattr(module, "layer_idx", None), getattr(attention_mask, "window", 0)
        if layer is not None:
            windows[layer] = window
        return attend(module, query, key, value, attention_mask, **others)

    model, cache = build(probing), _Recorder(places)
    with torch.no_grad(), torch.device("meta"), told_positions(model, places):
        ids = torch.empty(1, _TOKENS, dtype=torch.long)
        model(input_ids=ids, **placed(model, places, takes_mask), past_key_values=cache, use_cache=True)
    squares = [name for name, x in model.named_buffers() if x.dim() == 4 and x.shape[-2] == x.shape[-1] > 1]
    if squares and not calls:
        raise InputError(f"its own attention has a mask ('{squares[0]}') for queries at the end of the keys")
    return cache.rows, windows, calls
