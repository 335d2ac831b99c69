"""Finding out what state the layers of a Hugging Face model keep, by running the model without weights or data."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from npu_compiler.errors import InputError
from npu_sim.llm.attention import (
    GatheredPlaces,
    MaskFunction,
    PagePlaces,
    Paging,
    Places,
    RowPlaces,
    attend_to_pages,
    attend_to_rows,
    window_of,
)
from npu_sim.llm.modules import PlacedCache, mask_names, placed, placed_masks, told_positions
from npu_sim.llm.own_caches import OwnCache
from npu_sim.llm.recurrent import own_states, own_tensors
from npu_sim.llm.selections import Selections
from npu_sim.llm.state import StateName
from npu_sim.llm.whole import check_causal

_TOKENS, _BLOCK = 5, 16
Build = Callable[[Callable[..., Any]], Any]
"""A function from an attention function to a module on the meta device that calls this for each layer."""


class _ProbedRows(RowPlaces):
    """`RowPlaces` whose masks have an attribute `window`: the number of last positions seen, 0 for other masks.

    Attributes:
        asked: Whether a layer has asked for a mask.
    """

    asked = False

    def mask(self, function: MaskFunction) -> torch.Tensor:
        self.asked = True
        mask = super().mask(function).clone()
        mask.window = window_of(function) or 0  # type: ignore[attr-defined]
        return mask


class _Recorder(PlacedCache):
    """A cache that records the shapes of keys and values, and returns them, or pools of such rows."""

    def __init__(self, places: Places, states: dict[StateName, torch.Tensor] | None) -> None:
        super().__init__(places, states)
        self.rows: dict[int, list[list[int]]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, ...]:
        rows = [[x.shape[1], x.shape[3]] for x in (key, value)]
        if key.shape[0] * key.shape[2] != len(self.places.queries) or self.rows.setdefault(layer_idx, rows) != rows:
            raise InputError(f"its layer {layer_idx} keeps {list(key.shape)}, not keys of each token by head")
        if isinstance(self.places, GatheredPlaces):
            return tuple(x.new_empty(1, x.shape[1], len(self.places.keys), x.shape[3]) for x in (key, value))
        if not isinstance(self.places, PagePlaces):
            return key, value
        return tuple(x.new_empty(4 * _BLOCK, x.shape[1], x.shape[3]) for x in (key, value))


@dataclass(frozen=True)
class _Run:
    """Results of running a module once.

    Attributes:
        rows: Layer → the shapes of a token's keys and values, for each layer that has some.
        windows: Layer → the number of last tokens that it attends to, 0 for all.
        calls: Number of calls of the attention function.
        states: The recurrent states after the run.
        logits: The module's result.
    """

    rows: dict[int, list[list[int]]]
    windows: dict[int, int]
    calls: int
    states: dict[StateName, torch.Tensor]
    logits: torch.Tensor


def probe_state(build: Build) -> dict[str, Any]:
    """Find the state of a module's layers, as JSON data.

    Returns:
        `layers`: number of each layer with keys and values; `rows`: the shapes of a token's keys and values in each;
        `windows`: the number of last tokens that each attends to, 0 for all; `recurrent`: name, shape and dtype of each
        recurrent state; and `is_additive`, `is_paged`, `takes_mask`, `takes_pieces`, `takes_sequences`, `is_whole`
        and `is_own` as in `StateForm`.

    Raises:
        InputError: a layer keeps a state of another kind, or the attention is of an unsupported kind.
    """
    with torch.device("meta"):
        positions = torch.empty(_TOKENS, dtype=torch.long)
        tables = torch.empty(2, 3, dtype=torch.long)
        places = _ProbedRows(positions, _TOKENS)
    takes_mask = False
    try:
        run = _run(build, attend_to_rows, places)
    except InputError:
        raise
    except Exception:  # a module that computes with the number of tokens in a cache
        takes_mask = True
        run = _run(build, attend_to_rows, places, takes_mask=True)
    rows, calls = run.rows, run.calls
    if not rows and not run.states:
        raise InputError("its layers keep no keys and values")
    if rows and not places.asked:
        raise InputError("its attention takes no causal mask, which is not supported")
    if calls and calls < sum(layer >= 0 for layer in rows):
        raise InputError("some of its layers do not use the attention function that they are given")
    is_paged = not takes_mask and (calls > 0 or not rows)
    if is_paged:
        try:
            _run(build, attend_to_pages, PagePlaces(Paging(positions, positions, tables, _BLOCK)))
        except Exception:  # whatever a module does that expects other masks or other keys
            is_paged = False
    layers = sorted(rows)
    return {
        "layers": layers,
        "rows": [rows[layer] for layer in layers],
        "windows": [run.windows.get(layer, 0) for layer in layers],
        "recurrent": [[list(name), *_described(x)] for name, x in run.states.items()],
        "is_additive": calls == 0 and bool(rows),
        "is_paged": is_paged,
        "takes_mask": takes_mask,
        "takes_pieces": _takes_pieces(build, run.states, takes_mask),
        "takes_sequences": is_paged or _takes_sequences(build, run.states, takes_mask),
        **dict.fromkeys(("is_whole", "is_own"), False),
    }


def whole_state(causal: Any) -> dict[str, Any]:
    """The state, as `probe_state` describes it, of a module that computes the whole sequence at each step.

    Args:
        causal: The module on the CPU, with any weights.

    Raises:
        InputError: the module is not causal. Any other error of its own is raised, too.
    """
    check_causal(causal)
    return {
        "layers": [0],
        "rows": [[[1, 1]]],
        "windows": [0],
        "recurrent": [],
        **dict.fromkeys(("is_additive", "is_paged", "takes_mask", "is_own"), False),
        **dict.fromkeys(("takes_pieces", "takes_sequences", "is_whole"), True),
    }


def own_state(causal: Any) -> dict[str, Any]:
    """The state, as `probe_state` describes it, of a module on the meta device that makes a cache of its own class.

    Raises:
        InputError: it keeps other than recurrent states there. Any error of its own is raised, too.
    """
    cache = OwnCache(causal)
    return {
        **dict.fromkeys(("layers", "rows", "windows"), []),
        "recurrent": [[list(name), *_described(x)] for name, x in zip(cache.names(), cache.states, strict=True)],
        **dict.fromkeys(("is_additive", "takes_mask", "takes_pieces", "is_whole"), False),
        **dict.fromkeys(("is_paged", "is_own"), True),
        "takes_sequences": cache.takes_sequences,
    }


def _described(state: torch.Tensor) -> tuple[list[int], str]:
    """The shape of one sequence's part of a state, and its dtype."""
    return list(state.shape[1:]), str(state.dtype).removeprefix("torch.")


def _sort(name: StateName) -> tuple[str, int]:
    """A key that is equal for states with the same part in different layers: the state's name there and its number."""
    return name.sort.rpartition(".")[2], name.place


def _takes_pieces(build: Build, states: dict[StateName, torch.Tensor], takes_mask: bool) -> bool:
    """Whether a step of several tokens continues from the recurrent states of the step before.

    Raises:
        InputError: a step of one token does not continue from them either, or their sizes depend on the number of
            tokens.
    """
    sorts = {_sort(name) for name in states}
    for count, sort in product((1, _TOKENS), sorts):
        with torch.device("meta"):
            places = _ProbedRows(torch.empty(count, dtype=torch.long), count)
        # Whether a new state comes from the old one: PyTorch notes it for gradients, with data or without.
        traced = {name for name in states if _sort(name) == sort}
        before = {name: torch.empty_like(x).requires_grad_(name in traced).clone() for name, x in states.items()}
        run = _run(build, attend_to_rows, places, takes_mask=takes_mask, states=before)
        if {name: _described(x) for name, x in run.states.items()} != {n: _described(x) for n, x in states.items()}:
            raise InputError("the size of its layers' recurrent states depends on the number of tokens")
        # A state that only passes what one token left to the next token is read, though no new state comes from it.
        if not (all(run.states[name].requires_grad for name in traced) or run.logits.requires_grad):
            if count == 1:
                raise InputError("its layers do not continue from the recurrent states that a cache holds")
            return False
    return True


def _takes_sequences(build: Build, states: dict[StateName, torch.Tensor], takes_mask: bool) -> bool:
    """Whether a step may have a token of each of several sequences with recurrent states."""
    if not states:
        return True
    with torch.device("meta"):
        each, tables = torch.empty(2, dtype=torch.long), torch.empty(2, 3, dtype=torch.long)
        places = GatheredPlaces(Paging(each, each, tables, _BLOCK))
    before = {name: torch.cat([x, x]) for name, x in states.items()}
    try:
        _run(build, attend_to_rows, places, takes_mask=takes_mask, states=before, sequences=2)
    except Exception:  # whatever a module does with positions that it takes for those of every sequence
        return False
    return True


def _run(
    build: Build,
    attend: Callable[..., Any],
    places: Places,
    *,
    takes_mask: bool = False,
    states: dict[StateName, torch.Tensor] | None = None,
    sequences: int = 1,
) -> _Run:
    """Run a module on the meta device, without data, and record what its layers keep and read.

    Args:
        attend: The attention function that its layers are to call.
        places: The positions of the tokens and of the keys that they may see.
        takes_mask: Whether the module is given a mask of the tokens that exist.
        states: The recurrent states with which the run begins. None: those before the first token.
        sequences: Number of sequences, each with the same number of tokens.
    """
    windows: dict[int, int] = {}
    calls = 0

    def probing(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **others: Any) -> Any:
        nonlocal calls
        calls += 1
        layer, window = getattr(module, "layer_idx", None), getattr(attention_mask, "window", 0)
        if layer is not None:
            windows[layer] = window
        return attend(module, query, key, value, attention_mask, **others)

    model, cache = build(probing), _Recorder(places, states)
    model.requires_grad_(False)
    masks = mask_names(model)
    own = placed_masks(model, places, [(name, 0) for name in masks])
    empty = [name for name, value in own_tensors(model).items() if value is None]
    kept = own_states(model, cache.states)
    with (
        torch.set_grad_enabled(bool(states)),
        torch.device("meta"),
        told_positions(model, places),
        own,
        kept,
        Selections(),
    ):
        ids = torch.empty(sequences, len(places.queries) // sequences, dtype=torch.long)
        logits = model(input_ids=ids, **placed(model, cache, takes_mask, sequences)).logits
    if states is None:
        left = own_tensors(model)
        cache.states |= {name: x for name in empty if (x := left.get(name)) is not None}
    squares = [name for name, x in model.named_buffers() if x.dim() == 4 and x.shape[-2] == x.shape[-1] > 1]
    squares = [name for name in squares if name not in masks]
    if squares and cache.rows and not calls:
        raise InputError(f"its own attention has a mask ('{squares[0]}') for queries at the end of the keys")
    return _Run(cache.rows, windows, calls, cache.states, logits)
