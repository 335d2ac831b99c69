"""The modules whose graphs are compiled: a Hugging Face model as a function of its KV cache, and a decode step that
feeds itself."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


class _IndexedCache:
    """What Hugging Face attention takes for a KV cache: it writes new rows at `positions` of fixed buffers.

    `index_copy` is what the compiler can do in place, on a buffer that the caller donates.
    """

    is_compileable = True

    def __init__(self, positions: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self.positions = positions
        self.keys = list(keys)
        self.values = list(values)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[layer_idx] = torch.index_copy(self.keys[layer_idx], 2, self.positions, key)
        self.values[layer_idx] = torch.index_copy(self.values[layer_idx], 2, self.positions, value)
        return self.keys[layer_idx], self.values[layer_idx]


class CachedCausalLM(nn.Module):
    """A Hugging Face causal LM as a function of its KV cache; parameter names stay Hugging Face's.

    forward: input_ids [1, T], positions [T], last [1] or None, k and v: per layer [1, KV heads, S, head dim]
    → float32 logits [1, 1, vocab] of the token at index `last` (None: T is 1), then the updated k and v. In bfloat16,
    logits around 25 would be 0.125 apart, and candidates would tie.

    Row t attends to cache rows 0..positions[t], so rows beyond a query's own position never count.
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
        cache = _IndexedCache(positions, k, v)
        with _only_row(causal.get_output_embeddings(), last):
            logits = causal(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=positions[None],
                past_key_values=cache,
                use_cache=True,
            ).logits
        return (logits.float(), *(tensor for pair in zip(cache.keys, cache.values, strict=True) for tensor in pair))


@contextlib.contextmanager
def _only_row(lm_head: nn.Module, last: torch.Tensor | None) -> Iterator[None]:
    """Let the LM head see one row: logits of a whole prompt would cost more than all layers together."""
    if last is None:
        yield
        return
    hook = lm_head.register_forward_pre_hook(lambda _, args: (torch.index_select(args[0], 1, last),))
    try:
        yield
    finally:
        hook.remove()


class SelfFeedingDecode(nn.Module):
    """A decode step that takes its own result as its next input, so that steps can be run without looking at them.

    forward: token [1], position [1], history [S], k, v as in `CachedCausalLM`
    → float32 logits [1, 1, vocab], the likeliest token (of equals the first), position + 1, history with that token at
    index `position`, the updated k and v. All but the logits replace their inputs, which the caller donates. Where the
    best of the logits is not finite, the token is -1.
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
    """`SelfFeedingDecode` with a token that is drawn.

    forward: token, position, history as there, settings [3] (temperature, top_k, top_p, as `drawn` takes them),
    uniforms [S] (numbers from [0, 1), of which the one at index `position` decides), k, v
    → the same, with the drawn token for the likeliest.
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
    """A place [1] in scores [vocab] that descend, drawn as `sampling.make_sampler` does.

    Args:
        settings: [3], float32: temperature above 0; top_k from 1; top_p from (0, 1].
        uniform: [1], a number from [0, 1).
    """
    temperature, top_k, top_p = settings.split(1)
    places = torch.arange(len(scores), dtype=scores.dtype, device=scores.device)
    weights = torch.where(places < top_k, torch.exp((scores - scores[:1]) / temperature), 0)
    reached = weights.cumsum(0)
    kept = reached - weights < top_p * reached[-1:]
    passed = kept & (reached > uniform * torch.where(kept, reached, 0).amax(0, keepdim=True))
    return torch.where(passed, 1.0, 0.0).argmax(0, keepdim=True)


def _fed_back(
    logits: torch.Tensor,
    best: torch.Tensor,
    chosen: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    history: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The chosen token, the position after `position`, and history with the token in it, each in its input's place."""
    found = torch.where(logits.flatten().index_select(0, best).abs() < torch.inf, chosen, -1)
    only = torch.zeros(1, dtype=torch.long, device=token.device)
    history = torch.index_copy(history, 0, position, found)
    return torch.index_copy(token, 0, only, found), torch.index_copy(position, 0, only, position + 1), history
