"""The modules that are traced and compiled: a Hugging Face model with its KV cache as inputs and outputs.

Some choose the next token themselves.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from npu_compiler.errors import InputError
from npu_runtime.cpu.torch_kernels import attention


class _Cache:
    """A KV cache for Hugging Face attention that writes new rows in place and returns the whole tensors.

    `index_copy` is what the compiler turns into an in-place update of a buffer that the caller donates.

    Args:
        rows: Indices of the new rows. In tensors [1, KV heads, S, head dim] they are positions, in pools [rows, KV
            heads, head dim] slots.
    """

    is_compileable = True

    def __init__(self, rows: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self._rows = rows
        self._tensors = list(keys), list(values)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        """Take keys and values [1, KV heads, N, head dim]."""
        for layers, new in zip(self._tensors, (key, value), strict=True):
            if layers[layer_idx].dim() == 3:
                layers[layer_idx] = torch.index_copy(layers[layer_idx], 0, self._rows, new[0].transpose(0, 1))
            else:
                layers[layer_idx] = torch.index_copy(layers[layer_idx], 2, self._rows, new)
        return tuple(layers[layer_idx] for layers in self._tensors)

    def updated(self) -> Iterator[torch.Tensor]:
        """The updated keys and values of each layer in turn."""
        return (tensor for pair in zip(*self._tensors, strict=True) for tensor in pair)


def _placed(causal: Any, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments by which a Hugging Face model is told its tokens' positions: some versions take them twice."""
    takes_both = "cache_position" in inspect.signature(causal.forward).parameters
    return {"position_ids": positions[None], **({"cache_position": positions} if takes_both else {})}


class CachedCausalLM(nn.Module):
    """A Hugging Face causal LM as a function of its KV cache; parameter names stay Hugging Face's.

    forward: input_ids [B, T], positions [T], last [1] or None, k and v: per layer [B, KV heads, S, head dim]
    → logits [B, 1, vocab] of the token at index `last` (None: T is 1), then the updated k and v of each layer in turn.
    B is 1 but where programs are only simulated: all sequences stand at the same positions.
    The logits are float32: bfloat16 numbers near 25 are 0.125 apart, so the best candidates would often tie.

    Token t attends to cache rows 0..positions[t] only, so the contents of later rows never matter.
    """

    def __init__(self, causal: Any) -> None:
        super().__init__()
        for name, child in causal.named_children():
            self.add_module(name, child)
        self._causal = (causal,)  # in a tuple, so that its parameters are not registered a second time

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor | None,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        (causal,) = self._causal
        rows = torch.arange(k[0].shape[2], device=positions.device)
        mask = (rows[None, :] <= positions[:, None])[None, None]
        cache = _Cache(positions, k, v)
        with _only_row(causal.get_output_embeddings(), last):
            logits = causal(
                input_ids=input_ids,
                attention_mask=mask,
                **_placed(causal, positions),
                past_key_values=cache,
                use_cache=True,
            ).logits
        return (logits.float(), *cache.updated())


@contextlib.contextmanager
def _only_row(lm_head: nn.Module, last: torch.Tensor | None) -> Iterator[None]:
    """Apply the LM head to one row only: the logits of a whole prompt would cost more than all layers together."""
    if last is None:
        yield
        return
    hook = lm_head.register_forward_pre_hook(lambda _, args: (torch.index_select(args[0], 1, last),))
    try:
        yield
    finally:
        hook.remove()


class SelfFeedingDecode(nn.Module):
    """A greedy decode step whose outputs are the inputs of the next one, so that the host need not wait between steps.

    forward: token [1], position [1], history [S], k, v as in `CachedCausalLM`
    → float32 logits [1, 1, vocab], their argmax (the lowest id on ties), position + 1, history with that token at index
    `position`, the updated k and v. All outputs but the logits update their inputs in place, which the caller donates.
    If the greatest logit is not finite, the token is -1.
    """

    def __init__(self, causal: Any) -> None:
        super().__init__()
        for name, child in causal.named_children():
            self.add_module(name, child)
        self._step = (CachedCausalLM(causal),)  # in a tuple, so that its parameters are not registered a second time

    def forward(
        self,
        token: torch.Tensor,
        position: torch.Tensor,
        history: torch.Tensor,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        logits, *cache = self._step[0](token[None], position, None, k, v)
        best = logits.flatten().argmax(0, keepdim=True)
        return (logits, *_fed_back(logits, best, best, token, position, history), *cache)


class SamplingDecode(SelfFeedingDecode):
    """`SelfFeedingDecode` with a sampled token.

    forward: token, position, history as there, settings [3] (temperature, top_k, top_p, as `drawn` takes them),
    uniforms [S] (random numbers from [0, 1); the step uses the one at index `position`), k, v
    → the same outputs, with the sampled token instead of the argmax.
    """

    def forward(  # type: ignore[override]
        self,
        token: torch.Tensor,
        position: torch.Tensor,
        history: torch.Tensor,
        settings: torch.Tensor,
        uniforms: torch.Tensor,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        logits, *cache = self._step[0](token[None], position, None, k, v)
        order = logits.flatten().argsort(descending=True, stable=True)
        place = drawn(logits.flatten().index_select(0, order), settings, uniforms.index_select(0, position))
        chosen = order.index_select(0, place)
        return (logits, *_fed_back(logits, order[:1], chosen, token, position, history), *cache)


def drawn(scores: torch.Tensor, settings: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index [..., 1] of a sampled token in descending logits [..., vocab]; the same rule as `sampling.Drawing`.

    Args:
        scores: Logits in descending order.
        settings: [..., 3], float32: temperature > 0, top_k >= 1, top_p in (0, 1].
        uniform: [..., 1], a random number from [0, 1).
    """
    temperature, top_k, top_p = settings.split(1, -1)
    places = torch.arange(scores.shape[-1], dtype=scores.dtype, device=scores.device)
    weights = torch.where(places < top_k, torch.exp((scores - scores[..., :1]) / temperature), 0)
    reached = weights.cumsum(-1)
    kept = reached - weights < top_p * reached[..., -1:]
    passed = kept & (reached > uniform * torch.where(kept, reached, 0).amax(-1, keepdim=True))
    return torch.where(passed, 1.0, 0.0).argmax(-1, keepdim=True)


def _fed_back(
    logits: torch.Tensor,
    best: torch.Tensor,
    chosen: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    history: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The chosen token, position + 1, and history with the token in it, each as an in-place update of its input."""
    token_or_error = torch.where(logits.flatten().index_select(0, best).abs() < torch.inf, chosen, -1)
    only = torch.zeros(1, dtype=torch.long, device=token.device)
    history = torch.index_copy(history, 0, position, token_or_error)
    return torch.index_copy(token, 0, only, token_or_error), torch.index_copy(position, 0, only, position + 1), history


@dataclass(frozen=True)
class Paging:
    """The places of a batch's keys and values, as in `engine.batch.Batch`.

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


@torch.library.custom_op("npu::paged_attention", mutates_args=())
def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """See `npu_compiler.ops.transformer.lower_paged_attention`."""
    attended = attention.paged_attention(query, keys, values, tables, sequences, positions, block_size, scale)
    return attended.to(query.dtype)


@paged_attention.register_fake
def _(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], values.shape[2])


def attend_to_pages(
    module: nn.Module,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    paging: Paging | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers: query [1, H, N, head dim] and pools → [1, N, H, head dim].

    A window is not looked at: `cache_capacity` has seen to it that no sequence is longer.

    Raises:
        InputError: the model asks for more than causal attention.
    """
    _check_causal(module, dropout, is_causal, others)
    if attention_mask is not None:
        raise InputError("its attention has a mask of its own, which paged attention does not compute")
    if paging is None:
        raise InputError(
            "its layers do not tell their attention where the keys are, so it cannot be served; generate can"
        )
    tokens, where = query[0].transpose(0, 1), (paging.tables, paging.sequences, paging.positions)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return paged_attention(tokens, keys, values, *where, paging.block_size, scale)[None], None


def attend_to_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers: PyTorch's own, of what it computes only.

    Raises:
        InputError: the model asks for more than causal attention, or for a window that is shorter than the keys.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _check_causal(module, dropout, is_causal, others)
    if attention_mask is None or attention_mask.dtype != torch.bool:
        raise InputError("its attention has a mask of its own instead of the causal one")
    if sliding_window is not None and sliding_window < key.shape[2]:
        raise InputError(f"it uses a sliding attention window of {sliding_window} tokens; choose a cache no longer")
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling)


# Arguments that say nothing about what attention computes.
_OF_CALLERS = frozenset(
    {
        *("position_ids", "cache_position", "use_cache", "layer_idx", "paging"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"),
        *("target_dtype", "deterministic", "implementation"),
    }
)
_NAMES = {"s_aux": "attention sinks", "softcap": "softcapping of attention scores", "position_bias": "a position bias"}


def _check_causal(module: nn.Module, dropout: float, is_causal: bool | None, others: Mapping[str, Any]) -> None:
    """Refuse arguments of an attention function that ask for more than causal attention.

    Raises:
        InputError: one does.
    """
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _OF_CALLERS)
    if unknown:
        described = _NAMES.get(unknown[0])
        feature = f"{described} ('{unknown[0]}')" if described else f"the argument '{unknown[0]}'"
        raise InputError(f"its attention uses {feature}, which is not supported")
    if dropout:
        raise InputError(f"its attention uses a dropout of {dropout}, which is not supported")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise InputError("its attention is not causal, which is not supported")


class PagedCausalLM(nn.Module):
    """A Hugging Face causal LM as a function of a batch of tokens and of pools of keys and values.

    forward: tokens, positions, sequences [N], slots [N] (the row of the pools that a token's keys and values are
    written to), tables [S, T] (see `Paging`); outputs [R], indices of the tokens after which a token is to be chosen;
    history [H], tokens that earlier steps have chosen; places [R], where in it to write the chosen ones; k and v: per
    layer [rows, KV heads, head dim]
    → logits [R, vocab] after the tokens at `outputs`, in float32; the history with the chosen tokens, which are the
    argmax (the lowest id on ties), or -1 where that logit is not finite; the updated k and v of each layer in turn.

    A token of -1 - p stands for the one at place p of the history, so that a step can be launched before the result
    of the one before is known.

    Args:
        causal: A module with `attend_to_pages` as its attention function.
        block_size: Rows per block of the pools.
    """

    def __init__(self, causal: Any, block_size: int) -> None:
        super().__init__()
        for name, child in causal.named_children():
            self.add_module(name, child)
        self._causal = (causal,)  # in a tuple, so that its parameters are not registered a second time
        self._block_size = block_size

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        sequences: torch.Tensor,
        slots: torch.Tensor,
        tables: torch.Tensor,
        outputs: torch.Tensor,
        history: torch.Tensor,
        places: torch.Tensor,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        return self._step((tokens, positions, sequences, slots, tables, outputs), history, places, k, v, _best_tokens)

    def _step(
        self,
        batch: tuple[torch.Tensor, ...],
        history: torch.Tensor,
        places: torch.Tensor,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        choose: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """`forward` with a function from logits [R, vocab] to tokens [R]."""
        (causal,) = self._causal
        tokens, positions, sequences, slots, tables, outputs = batch
        earlier = history.index_select(0, (-1 - tokens).clamp(min=0))
        tokens = torch.where(tokens < 0, earlier, tokens).clamp(min=0)
        cache = _Cache(slots, k, v)
        with _only_row(causal.get_output_embeddings(), outputs):
            logits = causal(
                input_ids=tokens[None],
                **_placed(causal, positions),
                past_key_values=cache,
                use_cache=True,
                paging=Paging(positions, sequences, tables, self._block_size),
            ).logits.float()[0]
        history = torch.index_copy(history, 0, places, choose(logits))
        return (logits, history, *cache.updated())


class PagedSampling(PagedCausalLM):
    """`PagedCausalLM` with sampled tokens.

    forward: the inputs of that up to `places`, settings [R, 3] as `drawn` takes them (a row with temperature 0 is
    greedy), uniforms [R] (a random number from [0, 1) each), k, v → the same outputs.
    """

    def forward(  # type: ignore[override]
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        sequences: torch.Tensor,
        slots: torch.Tensor,
        tables: torch.Tensor,
        outputs: torch.Tensor,
        history: torch.Tensor,
        places: torch.Tensor,
        settings: torch.Tensor,
        uniforms: torch.Tensor,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        batch, choose = (tokens, positions, sequences, slots, tables, outputs), _Drawing(settings, uniforms)
        return self._step(batch, history, places, k, v, choose)


def _best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The argmax of each row, or -1 where that logit is not finite."""
    best = logits.argmax(-1, keepdim=True)
    return torch.where(logits.gather(1, best).abs() < torch.inf, best, -1)[:, 0]


@dataclass(frozen=True)
class _Drawing:
    """A token of each row by `drawn`, or its argmax where the temperature is 0; -1 where no logit is finite."""

    settings: torch.Tensor
    uniforms: torch.Tensor

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        order = logits.argsort(dim=-1, descending=True, stable=True)
        best, temperature = order[:, :1], self.settings[:, :1]
        settings = torch.cat((torch.where(temperature > 0, temperature, 1.0), self.settings[:, 1:]), 1)
        place = drawn(logits.gather(1, order), settings, self.uniforms[:, None])
        chosen = torch.where(temperature > 0, order.gather(1, place), best)
        return torch.where(logits.gather(1, best).abs() < torch.inf, chosen, -1)[:, 0]


class CopyRows(nn.Module):
    """Rows `source` [P] of each pool replace its rows `target` [P]; the updated pools are the outputs."""

    def forward(self, source: torch.Tensor, target: torch.Tensor, pools: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.index_copy(pool, 0, target, pool.index_select(0, source)) for pool in pools]
