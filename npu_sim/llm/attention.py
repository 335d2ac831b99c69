"""Attention in traced modules: the functions that transformers calls, and the positions over which they attend.

transformers asks `visible` for a mask and hands it to the attention function of each layer. A mask is computed from a
`Places` object, which says where queries and keys stand: rows of a cache in one piece (`RowPlaces`), blocks of a pool
that paged attention reads (`PagePlaces`), or blocks that are copied out of the pool first, for attention that no kernel
computes there (`GatheredPlaces`). Which keys a query may see is asked of transformers' own mask function, whatever that
is.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from npu_compiler.errors import InputError
from npu_runtime.cpu.torch_kernels import attention
from npu_sim.llm.recurrent import folded

MaskFunction = Callable[..., Any]
"""transformers' function of (batch, head, query position, key position) → whether the query sees the key."""


@dataclass(frozen=True)
class Paging:
    """The positions of a batch's tokens and the KV blocks of its sequences, as in `engine.batch.Batch`.

    Attributes:
        positions: [N], each token's position in its sequence.
        sequences: [N], each token's row of `tables`.
        tables: [S, T], the blocks of each sequence.
        block_size: Rows per block.
    """

    positions: torch.Tensor
    sequences: torch.Tensor
    tables: torch.Tensor
    block_size: int


@dataclass(frozen=True)
class PageMask:
    """A causal mask over a paged KV pool, restricted to the last `window` positions if that is above 0."""

    paging: Paging
    window: int


class Places(ABC):
    """The positions of a step's new tokens and of the KV rows that they may attend to.

    Attributes:
        queries, keys: [N] and [S], the positions of queries and keys in their sequences.
    """

    queries: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the keys' positions for `torch.arange(places)`, and the queries' positions for `indices + places`.

        transformers calls both with the number of keys or the queries' offset, in whose place it gets this object.
        """
        (places,) = (x for x in args if isinstance(x, Places))
        if function is torch.arange:
            return places.keys
        return places.queries if function is torch.Tensor.add else NotImplemented

    def __add__(self, offset: int) -> int:
        """The number of keys plus `offset`, as for the integer that this object replaces."""
        return self.keys.shape[0] + offset

    @abstractmethod
    def mask(self, function: MaskFunction) -> Any:
        """Return the mask that a layer's attention function gets, made from transformers' mask function."""

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of a layer's updated keys or values that its attention function gets."""
        return tensor


class RowPlaces(Places):
    """Positions in a KV cache that is contiguous: row p holds position p.

    Args:
        added: The dtype of masks, which attention adds to scores. None: masks are booleans.
    """

    def __init__(self, queries: torch.Tensor, rows: int, added: torch.dtype | None = None) -> None:
        self.queries, self._added = queries, added
        self.keys = torch.arange(rows, device=queries.device)
        self._causal = (self.keys[None, :] <= queries[:, None])[None, None]

    def mask(self, function: MaskFunction) -> torch.Tensor:
        """The mask [1, 1, N, S] that transformers' mask function gives for these queries and keys."""
        mask = self._causal
        if window_of(function) != 0:
            mask = mask & _seen(function, self.queries, self.keys)
        return mask if self._added is None else additive(mask, self._added)


class GatheredPlaces(Places):
    """Positions in a KV pool whose blocks are first copied out, so that the rows of each sequence are contiguous.

    `added` as in `RowPlaces`.
    """

    def __init__(self, paging: Paging, added: torch.dtype | None = None) -> None:
        self.queries, self._added = paging.positions, added
        sequences, size = paging.tables.shape[0], paging.tables.shape[1] * paging.block_size
        inside = torch.arange(paging.block_size, device=self.queries.device)
        self._rows = (paging.tables[:, :, None] * paging.block_size + inside).reshape(-1)
        self.keys = torch.arange(size, device=self.queries.device).repeat(sequences)
        owners = torch.arange(sequences, device=self.queries.device).repeat_interleave(size)
        self._own = paging.sequences[:, None] == owners[None, :]

    def mask(self, function: MaskFunction) -> torch.Tensor:
        """The mask [1, 1, N, S · rows of a sequence]."""
        mask = self._own & (self.keys[None, :] <= self.queries[:, None])[None, None]
        if window_of(function) != 0:
            mask = mask & _seen(function, self.queries, self.keys)
        return mask if self._added is None else additive(mask, self._added)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the sequences' rows out of a pool: [rows, KV heads, D] → [1, KV heads, S · rows of a sequence, D]."""
        return tensor.index_select(0, self._rows.clamp(0, tensor.shape[0] - 1)).transpose(0, 1)[None]


class PagePlaces(Places):
    """Positions in a KV pool, whose blocks paged attention reads where they lie."""

    def __init__(self, paging: Paging) -> None:
        self.queries = self.keys = paging.positions
        self._paging = paging

    def mask(self, function: MaskFunction) -> PageMask:
        window = window_of(function)
        if window is None:
            raise InputError("its attention has a mask of its own, which paged attention does not compute")
        return PageMask(self._paging, window)


class PlacedMask:
    """A replacement for a square mask [queries, keys] that a module owns: any slice of it is the mask of the step.

    Args:
        window: Number of last positions that it shows. 0: all up to the query's.
    """

    def __init__(self, places: Places, window: int) -> None:
        self._places, self._window = places, window

    def __getitem__(self, _: Any) -> torch.Tensor:
        """The part of the mask for the step, [1, 1, N, S] of booleans, whatever the slice."""
        queries, keys = self._places.queries[:, None], self._places.keys[None, :]
        seen = keys <= queries
        return (seen & (keys > queries - self._window) if self._window else seen)[None, None]


def mask_window(mask: torch.Tensor) -> int | None:
    """The number of last positions that a square mask [1, 1, P, P] shows: 0 for all, None if it shows others."""
    full, size = mask[0, 0].bool(), mask.shape[-1]
    window = int(full[-1].sum())
    expected = torch.ones_like(full).tril()
    if not torch.equal(full, expected & ~expected.tril(-window)):
        return None
    return 0 if window == size else window


def visible(*_: Any, q_offset: Places, mask_function: MaskFunction, **__: Any) -> Any:
    """The mask that transformers asks for. `q_offset` is the `Places` object that our cache gave as the query offset.

    A padding mask that the module makes is ignored, since there is no padding. For keys that are not the cache's, such
    as an encoder's, the result is None, and the attention functions refuse to run without a mask.
    """
    return q_offset.mask(mask_function) if isinstance(q_offset, Places) else None


class _Indices(np.ndarray[Any, Any]):
    """Positions as NumPy arrays with the few tensor methods that transformers' mask functions call.

    So a mask function can be evaluated while a module is traced, without being recorded.
    """

    def new_ones(self, shape: Any, **_: Any) -> Any:
        return np.ones(shape, bool).view(_Indices)

    def to(self, *_: Any, **__: Any) -> Any:
        return self


_FAR = 2**20  # a position beyond every window


def window_of(function: MaskFunction) -> int | None:
    """The number of last positions that a mask function shows: 0 for all up to the query's own, None for other masks.

    Raises:
        InputError: the mask shows positions after the query's own.
    """

    def shown(query: int, keys: Any) -> Any:
        zero = np.zeros(1, np.int64).view(_Indices)
        seen = function(zero, zero, np.array([query]).view(_Indices), np.asarray(keys).view(_Indices))
        return np.broadcast_to(np.asarray(seen, bool), np.shape(keys))

    try:
        if shown(_FAR, _FAR + 1 + np.arange(3)).any():
            raise InputError("its attention is not causal, which is not supported")
        count = int(shown(_FAR, np.arange(_FAR + 2)).sum())
        window = 0 if count == _FAR + 1 else count
        for query in {0, 1, 5, max(window - 1, 0), window, window + 1, 3 * window + 2, _FAR}:
            keys = np.arange(query + 3)
            if not np.array_equal(shown(query, keys), (keys <= query) & ((keys > query - window) | (window == 0))):
                return None
    except InputError:
        raise
    except Exception:  # whatever a mask function does with other than tensors
        return None
    return window


def _seen(function: MaskFunction, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The values [1, 1, N, S] of a mask function: whether each query sees each key."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=queries.device)
    seen: torch.Tensor = function(zero, zero, queries[None, None, :, None], keys[None, None, None, :])
    return seen


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask as numbers to add to scores: 0 where it is True, else the lowest number of the dtype."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


@torch.library.custom_op("npu::paged_attention", mutates_args=())
def paged_attention(  # noqa: PLR0913 -- operands and parameters of the kernel
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax(scale · q·kᵀ) · v for tokens of many sequences, whose keys and values lie in blocks of one pool.

    Query [N, H, D], keys [rows, KV, D], values [rows, KV, Dv], tables [S, T], sequences and positions [N], sinks [H]
    → [N, H, Dv], in the query's dtype. The trace of a model has this as one op, which
    `npu_compiler.ops.transformer.lower_paged_attention` lowers; see there for the keys that a token attends to, and for
    the soft cap and the sinks.
    """
    where = (tables, sequences, positions, block_size)
    return attention.paged_attention(query, keys, values, *where, scale, window, soft_cap, sinks).to(query.dtype)


@paged_attention.register_fake
def _(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], values.shape[2])


@folded
def attend_to_pages(  # noqa: PLR0913 -- operands and parameters of the kernel
    module: nn.Module,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: PageMask | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers over a paged pool: query [1, H, N, D] and pools → [1, N, H, D].

    Args:
        attention_mask: Result of `PagePlaces.mask`; None is refused.
        scaling: Factor of the scores. None: 1 / √D.
        softcap: Bound c of the scores, which become c · tanh(score / c). None: they are not bounded.
        s_aux: Sinks [H], one more score of each head's softmax, which belongs to no key. None: there are none.

    Raises:
        InputError: the model asks for a feature that paged attention lacks.
    """
    _check_dropout(dropout)
    if not isinstance(attention_mask, PageMask) or keys.dim() != 3:
        raise InputError("its attention has a mask of its own, which paged attention does not compute")
    if features := asked_features(module, others):
        raise InputError(f"its attention uses {_named(features)}, which paged attention does not compute")
    paging = attention_mask.paging
    tokens, where = query[0].transpose(0, 1), (paging.tables, paging.sequences, paging.positions)
    scale, window = query.shape[-1] ** -0.5 if scaling is None else scaling, attention_mask.window
    sizes = (paging.block_size, scale, window, softcap or 0.0)
    return paged_attention(tokens, keys, values, *where, *sizes, s_aux)[None], None


@torch.library.custom_op("npu::attention", mutates_args=())
def attention_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Compute attention whose softmax has one more score for each head, that of no key.

    Query [B, H, N, D], key [B, KV, S, D], value [B, KV, S, Dv], sinks [H], and a mask that broadcasts to [B, H, N, S],
    of booleans or of numbers added to the scores → [B, H, N, Dv], in the query's dtype. The trace of a model has
    this as the op that the compiler also makes of attention in products and a softmax; see
    `npu_compiler.ops.transformer.lower_attention`, also for the soft cap.
    """
    return attention.attend(query, key, value, attn_mask, sinks, scale, soft_cap).to(query.dtype)


@attention_with_sinks.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


@folded
def attend_to_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, Any]:
    """An attention function for transformers: PyTorch's own, one with sinks, or the model's own if it needs more.

    Args:
        attention_mask: Result of `RowPlaces.mask` or `GatheredPlaces.mask`; None is refused.
        scaling: Factor of the scores. None: 1 / √D.

    Raises:
        InputError: the model's attention is not causal, or has a feature that no such function computes.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _check_dropout(dropout)
    is_added = (
        attention_mask is not None and attention_mask.is_floating_point()
    )  # what a module makes of the causal one
    if attention_mask is None or not is_added and attention_mask.dtype != torch.bool:
        raise InputError("its attention has a mask of its own instead of the causal one")
    if (chosen := others.pop("indices", None)) is not None:  # of keys, for each query
        shown = torch.zeros_like(attention_mask[:, 0], dtype=torch.bool).scatter(-1, chosen.long(), True)[:, None]
        attention_mask = attention_mask + additive(shown, attention_mask.dtype) if is_added else attention_mask & shown
    if features := asked_features(module, others):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if features in (["s_aux"], ["s_aux", "softcap"]):
            sizes = (others["s_aux"], scale, others.get("softcap") or 0.0)
            return attention_with_sinks(query, key, value, attention_mask, *sizes).transpose(1, 2), None
        mask = attention_mask if is_added else additive(attention_mask, query.dtype)
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if own is None:
            raise InputError(f"its attention uses {_named(features)}, which is not supported")
        attended: tuple[torch.Tensor, Any] = own(module, query, key, value, mask, scaling=scale, dropout=0.0, **others)
        return attended
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling)


# Arguments that say nothing about what attention computes. A window is in the mask, and so is what is causal.
_OF_CALLERS = frozenset(
    {
        *("position_ids", "cache_position", "use_cache", "layer_idx", "sliding_window", "is_causal"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"),
        *("target_dtype", "deterministic", "implementation"),
    }
)
_NAMES = {"s_aux": "attention sinks", "softcap": "softcapping of attention scores", "position_bias": "a position bias"}


def asked_features(module: nn.Module, others: Mapping[str, Any]) -> list[str]:
    """Names of arguments of an attention function that ask for more than plain causal attention, such as a soft cap."""
    return sorted(name for name, value in others.items() if value is not None and name not in _OF_CALLERS)


def _named(features: list[str]) -> str:
    described = _NAMES.get(features[0])
    return f"{described} ('{features[0]}')" if described else f"the argument '{features[0]}'"


def _check_dropout(dropout: float) -> None:
    """Raise InputError if attention weights are to be dropped at random."""
    if dropout:
        raise InputError(f"its attention uses a dropout of {dropout}, which is not supported")
