"""The modules that are traced and compiled: a Hugging Face model with its KV cache as inputs and outputs.

Some of them also choose the next token.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from npu_compiler.errors import InputError
from npu_sim.llm.adapter_rows import AdapterRows
from npu_sim.llm.attention import GatheredPlaces, PagePlaces, Paging, PlacedMask, Places, RowPlaces
from npu_sim.llm.recurrent import RecurrentCache, own_states, read_lanes, write_lanes
from npu_sim.llm.selections import Selections
from npu_sim.llm.state import StateForm, StateName
from npu_sim.llm.whole import kept_tokens, paged_logits, whole_logits


class OtherStateError(InputError, AttributeError):
    """The error of a module that calls a cache method which `PlacedCache` lacks."""

    def __init__(self, name: str) -> None:
        super().__init__(f"its layers keep more than keys, values and recurrent states ('{name}' of the cache)")


class _NoLayers:
    """The layers of a cache that hold something else, such as the keys of an image: there are none."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, _: Any) -> Any:
        raise OtherStateError("layers")


class PlacedCache(RecurrentCache):
    """A cache with the methods that transformers calls, for tokens whose `Places` say which keys they may see."""

    is_compileable = is_initialized = True
    is_sliding = ()
    layers = _NoLayers()

    def __init__(self, places: Places, states: dict[StateName, torch.Tensor] | None = None) -> None:
        """Begin with these recurrent states; None: all of them begin with zeros."""
        self.places, self.states = places, states or {}

    def get_query_offset(self, *_: Any) -> Places:
        """Return the `Places` object, which transformers hands to `visible` as the offset of the queries."""
        return self.places

    def get_mask_sizes(self, *_: Any) -> tuple[Places, int]:
        return self.places, 0

    def get_seq_length(self, *_: Any) -> torch.Tensor:
        """The positions of the new tokens minus 0, 1, 2, … ([N]); transformers adds 0, 1, 2, … to them again."""
        positions = self.places.queries
        return positions - torch.arange(positions.shape[0], device=positions.device)

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Take one more vector [1, N, D] of each token, by which a layer chooses keys; return all [1, S, D].

        The vectors are stored as keys and values, half a vector each, of an additional layer.
        """
        first, second = keys[:, None].chunk(2, -1)
        return torch.cat(self.update(first, second, -1 - layer_idx), -1)[:, 0]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, ...]:
        """Take a layer's new keys and values [1, KV heads, N, head dim]; return the rows that its attention reads."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        raise OtherStateError(name)


class _Cache(PlacedCache):
    """A KV cache for Hugging Face attention that writes new rows in place and returns the rows that attention reads.

    `index_copy` is what the compiler turns into an in-place update of a buffer that the caller donates.

    Args:
        rows: Indices of the new rows: positions for tensors [1, KV heads, S, head dim], rows of the pool for tensors
            [rows, KV heads, head dim].
        tensors: Two lists, of keys and of values, with one tensor for each layer that has them.
        layers: Numbers of these layers in the model. None: 0, 1, 2, …
        states: Recurrent states of the step's sequences; None: the model has none.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        tensors: Sequence[Sequence[torch.Tensor]],
        places: Places,
        layers: Sequence[int] | None = None,
        states: dict[StateName, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(places, states)
        self._rows = rows
        self._tensors = [list(layer_tensors) for layer_tensors in tensors]
        self._index = {layer: index for index, layer in enumerate(range(len(tensors[0])) if layers is None else layers)}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, ...]:
        """Write a layer's new keys and values [1, KV heads, N, head dim]; return the rows that its attention reads.

        For a pool they may also come as [S, KV heads, T, head dim], T tokens of each of S sequences.
        """
        index = self._index[layer_idx]
        for layers, new in zip(self._tensors, (key, value), strict=True):
            if layers[index].dim() == 3:
                rows = new[0].transpose(0, 1) if new.shape[0] == 1 else new.transpose(1, 2).flatten(0, 1)
                layers[index] = torch.index_copy(layers[index], 0, self._rows, rows)
            else:
                layers[index] = torch.index_copy(layers[index], 2, self._rows, new)
        return tuple(self.places.read(layers[index]) for layers in self._tensors)

    def updated(self) -> Iterator[torch.Tensor]:
        """The updated tensors: keys and values of the first layer, of the second, and so on."""
        return (tensor for pair in zip(*self._tensors, strict=True) for tensor in pair)


def placed(causal: Any, cache: PlacedCache, takes_mask: bool, sequences: int = 1) -> dict[str, Any]:
    """Keyword arguments that give a Hugging Face model its cache and positions, of those that its `forward` accepts.

    Args:
        takes_mask: As in `StateForm`.
        sequences: Number of sequences, each with the same number of tokens.
    """
    taken, positions = inspect.signature(causal.forward).parameters, cache.places.queries
    own = positions[None] if sequences == 1 else positions.reshape(sequences, -1)
    given: dict[str, Any] = {"position_ids": own + first_position(causal), "cache_position": positions}
    if any(name.endswith("token_type_ids") for name, _ in causal.named_buffers()):  # which end somewhere
        given["token_type_ids"] = torch.zeros_like(own)
    if takes_mask:
        given["attention_mask"] = torch.ones_like(cache.places.keys)[None]
    given = {name: value for name, value in given.items() if name in taken}
    return {**given, "cache_params" if "cache_params" in taken else "past_key_values": cache, "use_cache": True}


@contextlib.contextmanager
def told_positions(causal: Any, places: Places) -> Iterator[None]:
    """Give positions to those parts of a model that would derive them from the length of its cache.

    They are modules that take `past_key_values_length`; they get `position_ids` [N] or [1, N] instead.
    """

    def tell(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = inspect.signature(module.forward).bind(*args, **named)
        if bound.arguments.get("position_ids") is None:
            bound.arguments["position_ids"] = places.queries
        # A tensor in a graph: some modules ask of a number whether their table of positions is long enough.
        none = torch.zeros((), dtype=torch.long, device=places.queries.device)
        bound.arguments["past_key_values_length"] = none if torch.compiler.is_compiling() else 0
        return bound.args, bound.kwargs

    hooks = [
        module.register_forward_pre_hook(tell, with_kwargs=True)
        for module in causal.modules()
        if {"past_key_values_length", "position_ids"} <= inspect.signature(module.forward).parameters.keys()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def mask_names(causal: Any) -> list[str]:
    """Names of the buffers [1, 1, P, P] that are masks of queries by keys, which no file holds."""
    return [
        f"{path}.{name}"
        for path, module in causal.named_modules()
        for name, x in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set and x.dtype == torch.bool
        if x.dim() == 4 and x.shape[:2] == (1, 1) and x.shape[2] == x.shape[3] > 1
    ]


@contextlib.contextmanager
def placed_masks(causal: Any, places: Places, masks: Iterable[tuple[str, int]]) -> Iterator[None]:
    """Let masks that a model's own attention slices by numbers of queries and keys be those of a step's places.

    Args:
        masks: As in `StateForm`.
    """
    held = []
    for path, window in masks:
        owner, _, name = path.rpartition(".")
        module = causal.get_submodule(owner)
        held.append((module, name, module._buffers.pop(name)))
        setattr(module, name, PlacedMask(places, window))
    try:
        yield
    finally:
        for module, name, buffer in held:
            delattr(module, name)
            module._buffers[name] = buffer


def first_position(causal: Any) -> int:
    """The number that a Hugging Face model gives to the first position: 0, or the one after its padding id."""
    for module in causal.modules():
        number = getattr(type(module), "create_position_ids_from_input_ids", None)
        if number is not None and isinstance(padding := getattr(module, "padding_idx", None), int):
            return padding + 1
    return 0


class CachedCausalLM(nn.Module):
    """A Hugging Face causal LM as a function of its KV cache; parameter names stay Hugging Face's.

    forward: input_ids [B, T], positions [T], last [1] or None, k and v: per layer [B, KV heads, S, head dim], r: the
    recurrent states, each [B, …]
    → logits [B, 1, vocab] of the token at index `last` (None: T is 1), then the updated k and v of each layer in turn,
    then the updated r.

    B is 1 except in programs that are only simulated; all sequences stand at the same positions. The logits are
    float32: bfloat16 numbers near 25 are 0.125 apart, so the best candidates would often tie.

    Token t attends to cache rows 0..positions[t] only, so the contents of later rows never matter.
    """

    def __init__(self, causal: Any, form: StateForm) -> None:
        super().__init__()
        for name, child in causal.named_children():
            self.add_module(name, child)
        self._causal = (causal,)  # in a tuple, so that its parameters are not registered a second time
        self._form = form

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor | None,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        r: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, ...]:
        (causal,), form = self._causal, self._form
        if form.is_whole:
            tokens = kept_tokens(input_ids, positions, k[0])
            rows = positions if last is None else positions.index_select(0, last)
            return whole_logits(causal, tokens[:, 0, :, 0], rows)[None], tokens
        length, added = (k[0].shape[2], k[0].dtype if form.is_additive else None) if k else (0, None)
        places = RowPlaces(positions, length, added)
        lanes = torch.arange(input_ids.shape[0], device=positions.device)
        states = read_lanes(form.recurrent, r, lanes, positions[:1])
        if form.is_own:
            logits, new = causal.own_cache.step(causal, input_ids, list(states.values()))
            states = dict(zip(form.recurrent, new, strict=True))
            return (logits[:, None], *write_lanes(states, form.recurrent, r, lanes))
        cache = _Cache(positions, (k, v), places, form.layers, states)
        own = placed_masks(causal, places, form.masks)
        only = _only_row(causal.get_output_embeddings(), last)
        with own_states(causal, cache.states), own, told_positions(causal, places), only, Selections():
            logits = causal(input_ids=input_ids, **placed(causal, cache, form.takes_mask)).logits
        return (logits.float(), *cache.updated(), *write_lanes(cache.states, form.recurrent, r, lanes))


@contextlib.contextmanager
def _only_row(lm_head: nn.Module, last: torch.Tensor | None) -> Iterator[None]:
    """Context in which the LM head computes the row `last` only, if this is not None.

    The logits of a whole prompt would cost more than all layers together.
    """
    if last is None:
        yield
        return
    with _hooked(lm_head, lambda x: torch.index_select(x, 1, last)):
        yield


@contextlib.contextmanager
def _hooked(lm_head: nn.Module, select: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Context in which the LM head computes only what `select` returns for its input."""
    hook = lm_head.register_forward_pre_hook(lambda _, args: (select(args[0]),))
    try:
        yield
    finally:
        hook.remove()


def _chosen_rows(lm_head: nn.Module, rows: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Context in which the LM head computes the tokens `rows` only: [S, T, hidden size] → [1, R, vocab].

    The indices count the tokens of all sequences, one sequence after the other.
    """
    return _hooked(lm_head, lambda x: torch.index_select(x if x.shape[0] == 1 else x.flatten(0, 1)[None], 1, rows))


class _CachedStep(nn.Module):
    """A module that runs a `CachedCausalLM`, and whose parameters have the names that they have in the model."""

    def __init__(self, causal: Any, form: StateForm) -> None:
        super().__init__()
        for name, child in causal.named_children():
            self.add_module(name, child)
        self._step = (CachedCausalLM(causal, form),)  # in a tuple: its parameters are not registered a second time


class SelfFeedingDecode(_CachedStep):
    """A greedy decode step whose outputs are the inputs of the next one, so that the host need not wait between steps.

    forward: token [1], position [1], history [S], k, v, r as in `CachedCausalLM`
    → float32 logits [1, 1, vocab], their argmax (the lowest id on ties), position + 1, history with that token at index
    `position`, the updated k, v and r. All outputs but the logits update their inputs in place, which the caller
    donates. If the greatest logit is not finite, the token is -1.
    """

    def forward(
        self,
        token: torch.Tensor,
        position: torch.Tensor,
        history: torch.Tensor,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        r: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, ...]:
        logits, *cache = self._step[0](token[None], position, None, k, v, r)
        best = logits.flatten().argmax(0, keepdim=True)
        return (logits, *_fed_back(logits, best, best, token, position, history), *cache)


class ChoosingPrefill(_CachedStep):
    """A piece of a prompt, and the greedy choice of the token after it, so that the host need not read the logits.

    forward: input_ids [1, T], positions [T], last [1], history [S], k, v, r as in `CachedCausalLM`
    → float32 logits [1, 1, vocab] of the token at index `last`; history with their argmax (the lowest id on ties, -1 if
    the greatest logit is not finite) at the index that is this token's position; the updated k, v and r. All outputs
    but the logits update their inputs in place, which the caller donates.
    """

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor,
        history: torch.Tensor,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        r: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, ...]:
        logits, *cache = self._step[0](input_ids, positions, last, k, v, r)
        best = logits.flatten().argmax(0, keepdim=True)
        place = positions.index_select(0, last)
        return (logits, torch.index_copy(history, 0, place, _checked(logits, best, best)), *cache)


class SamplingDecode(SelfFeedingDecode):
    """`SelfFeedingDecode` with a sampled token.

    forward: token, position, history as in `SelfFeedingDecode`, settings [3] (temperature, top_k, top_p, as `drawn`
    takes them), uniforms [S] (random numbers from [0, 1); the step uses the one at index `position`), k, v, r
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
        r: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, ...]:
        logits, *cache = self._step[0](token[None], position, None, k, v, r)
        order = logits.flatten().argsort(descending=True, stable=True)
        place = drawn(logits.flatten().index_select(0, order), settings, uniforms.index_select(0, position))
        chosen = order.index_select(0, place)
        return (logits, *_fed_back(logits, order[:1], chosen, token, position, history), *cache)


def drawn(scores: torch.Tensor, settings: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index [..., 1] of a sampled token in descending logits [..., vocab], by the rule of `sampling.Drawing`.

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


def _checked(logits: torch.Tensor, best: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The chosen token [1], or -1 if the greatest logit, at index `best` [1], is not finite."""
    return torch.where(logits.flatten().index_select(0, best).abs() < torch.inf, chosen, -1)


def _fed_back(
    logits: torch.Tensor,
    best: torch.Tensor,
    chosen: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    history: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The updates of a decode step's inputs: the chosen token, position + 1, and history with the token in it.

    Each is computed as an in-place update of the input.
    """
    token_or_error = _checked(logits, best, chosen)
    only = torch.zeros(1, dtype=torch.long, device=token.device)
    history = torch.index_copy(history, 0, position, token_or_error)
    return torch.index_copy(token, 0, only, token_or_error), torch.index_copy(position, 0, only, position + 1), history


class PagedCausalLM(nn.Module):
    """A Hugging Face causal LM as a function of a batch of tokens and of pools of keys and values.

    forward: tokens, positions, sequences [N], slots [N] (the row of the pools that a token's keys and values are
    written to), tables [S, T] (see `Paging`); outputs [R], indices of the tokens after which a token is to be chosen;
    history [H], tokens that earlier steps have chosen; places [R], where in the history to write the new ones; k and v:
    per layer [rows, KV heads, head dim]; adapters [N], each token's adapter, if the model has adapters (see
    `AdapterRows`)
    → logits [R, vocab] after the tokens at `outputs`, in float32; the history with the chosen tokens, which are the
    argmax (the lowest id on ties), or -1 where that logit is not finite; the updated k and v of each layer in turn.

    A model with recurrent states takes tokens, positions, sequences and slots as [S, T], T tokens of each sequence. It
    also takes lanes [S], the row of each sequence in the states, and r, the states, each [lanes, …]; the updated r are
    its last outputs.

    The token -1 - p stands for the token at index p of the history, so that a step can be launched before the result of
    the previous one is known.

    Args:
        causal: A module whose attention function is `attend_to_pages`, or `attend_to_rows` if its `StateForm` is not
            paged.
        block_size: Rows per block of the pools.
        chosen: Object from which the hooks of `add_adapters` take each row's adapter. None: there are no adapters.
    """

    def __init__(self, causal: Any, form: StateForm, block_size: int, chosen: AdapterRows | None = None) -> None:
        super().__init__()
        for name, child in causal.named_children():
            self.add_module(name, child)
        self._causal = (causal,)  # in a tuple, so that its parameters are not registered a second time
        self._form = form
        self._block_size = block_size
        self._chosen = chosen

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
        adapters: torch.Tensor | None = None,
        lanes: torch.Tensor | None = None,
        r: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, ...]:
        self._choose_adapters(adapters, outputs)
        batch = (tokens, positions, sequences, slots, tables, outputs)
        return self._step(batch, history, places, (k, v), lanes, r, _best_tokens)

    def _choose_adapters(self, adapters: torch.Tensor | None, outputs: torch.Tensor) -> None:
        if self._chosen is not None and adapters is not None:
            self._chosen.rows, self._chosen.outputs = adapters, outputs

    def _step(
        self,
        batch: tuple[torch.Tensor, ...],
        history: torch.Tensor,
        places: torch.Tensor,
        pools: tuple[Sequence[torch.Tensor], ...],
        lanes: torch.Tensor | None,
        r: Sequence[torch.Tensor],
        choose: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """`forward` with `choose`, a function from logits [R, vocab] to tokens [R]."""
        (causal,), form = self._causal, self._form
        tokens, positions, sequences, slots, tables, outputs = batch
        count = 1 if lanes is None else tokens.shape[0]
        states = {} if lanes is None else read_lanes(form.recurrent, r, lanes, positions[:, 0])
        tokens, positions, sequences, slots = (x.flatten() for x in (tokens, positions, sequences, slots))
        earlier = history.index_select(0, (-1 - tokens).clamp(min=0))
        tokens = torch.where(tokens < 0, earlier, tokens).clamp(min=0)
        paging = Paging(positions, sequences, tables, self._block_size)
        if form.is_whole:
            pool = torch.index_copy(pools[0][0], 0, slots, tokens[:, None, None].to(pools[0][0].dtype))
            logits = paged_logits(causal, paging, pool, outputs)
            return logits, torch.index_copy(history, 0, places, choose(logits)), pool
        if form.is_own and lanes is not None:
            logits, new = causal.own_cache.step(causal, tokens[:, None], list(states.values()))
            logits, states = logits.index_select(0, outputs), dict(zip(form.recurrent, new, strict=True))
            history = torch.index_copy(history, 0, places, choose(logits))
            return logits, history, *write_lanes(states, form.recurrent, r, lanes)
        added = pools[0][0].dtype if form.is_additive else None
        blocks = PagePlaces(paging) if form.is_paged else GatheredPlaces(paging, added)
        cache = _Cache(slots, pools, blocks, form.layers, states)
        ids = tokens[None] if lanes is None else tokens.reshape(count, -1)
        own = placed_masks(causal, blocks, form.masks)
        chosen = _chosen_rows(causal.get_output_embeddings(), outputs)
        with own_states(causal, cache.states), own, told_positions(causal, blocks), chosen, Selections():
            logits = causal(input_ids=ids, **placed(causal, cache, form.takes_mask, count)).logits.float()[0]
        history = torch.index_copy(history, 0, places, choose(logits))
        written = [] if lanes is None else write_lanes(cache.states, form.recurrent, r, lanes)
        return (logits, history, *cache.updated(), *written)


class PagedSampling(PagedCausalLM):
    """`PagedCausalLM` with sampled tokens.

    forward: the inputs of `PagedCausalLM`, with two more between `places` and k: settings [R, 3] as `drawn` takes them
    (a row with temperature 0 is greedy), and uniforms [R] (a random number from [0, 1) each) → the same outputs.
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
        adapters: torch.Tensor | None = None,
        lanes: torch.Tensor | None = None,
        r: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, ...]:
        self._choose_adapters(adapters, outputs)
        batch, choose = (tokens, positions, sequences, slots, tables, outputs), _Drawing(settings, uniforms)
        return self._step(batch, history, places, (k, v), lanes, r, choose)


def _best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The argmax of each row, or -1 where that logit is not finite."""
    best = logits.argmax(-1, keepdim=True)
    return torch.where(logits.gather(1, best).abs() < torch.inf, best, -1)[:, 0]


@dataclass(frozen=True)
class _Drawing:
    """Chooses a token for each row by `drawn`, or its argmax if the temperature is 0.

    The token is -1 where no logit is finite.
    """

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
    """A module that copies rows within each pool: row target[i] becomes a copy of row source[i], for P pairs.

    The updated pools are the outputs.
    """

    def forward(self, source: torch.Tensor, target: torch.Tensor, pools: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.index_copy(pool, 0, target, pool.index_select(0, source)) for pool in pools]
