"""The two graphs of a language model, prefill and decode, traced from the Hugging Face module without its weights."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from npu_compiler.errors import InputError, NPUError
from npu_sim.cache import cached_program, source_digest
from npu_sim.llm.checkpoint import FAMILIES, Checkpoint

if TYPE_CHECKING:
    from npu_compiler import CodegenTarget, CompiledProgram


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


def meta_model(checkpoint: Checkpoint) -> Any:
    """The checkpoint's Hugging Face module on the meta device. Raises InputError for an unknown kind of model."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                checkpoint.config,
                dtype=getattr(torch, checkpoint.dtype),
                attn_implementation="sdpa",
                trust_remote_code=False,
            )
    except Exception as error:  # transformers raises what it likes for configs that it cannot use
        raise _unsupported(checkpoint, error) from error
    return model.eval()


def kv_shape(config: Any, cache_length: int) -> tuple[int, int, int, int]:
    """[1, KV heads, S, head dim] of one layer's keys, and of its values."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 1, getattr(config, "num_key_value_heads", None) or heads, cache_length, head_dim


def extract_graph(checkpoint: Checkpoint, tokens: int, cache_length: int) -> dict[str, Any]:
    """IR of the graph that takes `tokens` tokens at a time (1: decode) with a cache of `cache_length` rows.

    Raises InputError where the model cannot be traced.
    """
    from torch_ir import extract_ir

    model = CachedCausalLM(meta_model(checkpoint)).eval()
    config, dtype = checkpoint.config, getattr(torch, checkpoint.dtype)
    shape = kv_shape(config, cache_length)
    with torch.device("meta"):
        input_ids = torch.empty(1, tokens, dtype=torch.long)
        positions = torch.empty(tokens, dtype=torch.long)
        last = torch.empty(1, dtype=torch.long) if tokens > 1 else None
        k, v = ([torch.empty(shape, dtype=dtype) for _ in range(config.num_hidden_layers)] for _ in "kv")
    name = "decode" if tokens == 1 else "prefill"
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ir = extract_ir(model, (input_ids, positions, last, k, v), model_name=name)
    except Exception as error:  # torch.export and the model's own code raise errors of any kind
        raise _unsupported(checkpoint, error) from error
    found: dict[str, Any] = ir.to_dict()
    return found


def compile_graph(checkpoint: Checkpoint, tokens: int, cache_length: int, target: "CodegenTarget") -> "CompiledProgram":
    """The compiled prefill or decode program, from the cache of programs where it is there.

    Raises InputError where the model cannot be traced or compiled.
    """
    from importlib.metadata import version

    config = checkpoint.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        config.pop(volatile, None)
    versions = [version(package) for package in ("torch", "transformers", "pytorch-ir")]
    key = [config, checkpoint.dtype, tokens, cache_length, versions, source_digest("npu_sim.llm")]
    name = f"{checkpoint.config.model_type}-{'decode' if tokens == 1 else 'prefill'}"
    try:
        return cached_program(
            name, key, lambda: extract_graph(checkpoint, tokens, cache_length), checkpoint.dtype, target
        )
    except InputError:
        raise
    except NPUError as error:
        raise _unsupported(checkpoint, error) from error


def state_with_buffers(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The checkpoint's tensors and what the programs want besides: the tied LM head and the rotary frequencies."""
    extra: dict[str, torch.Tensor] = {}
    model = meta_model(checkpoint)
    for path, module in model.named_modules():
        if names := module._non_persistent_buffers_set:
            made = type(module)(config=checkpoint.config)
            extra.update({f"{path}.{name}": getattr(made, name) for name in sorted(names)})
    if checkpoint.inv_freq_divisors is not None:
        extra["model.rotary_emb.inv_freq"] = extra["model.rotary_emb.inv_freq"] / checkpoint.inv_freq_divisors
    return _WithExtras(checkpoint.state, extra, _tied_names(model))


def _tied_names(model: Any) -> dict[str, str]:
    """Name → the other name of the same parameter, both ways."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: other for names in groups.values() for name in names for other in names if name != other}


class _WithExtras(Mapping[str, Any]):
    """A checkpoint's tensors, some more, and tied parameters under both of their names; nothing is copied."""

    def __init__(self, state: Mapping[str, Any], extra: Mapping[str, Any], tied: Mapping[str, str]) -> None:
        self._state = state
        self._extra = extra
        self._alias = {name: other for name, other in tied.items() if name not in state and other in state}

    def __getitem__(self, key: str) -> Any:
        return self._extra[key] if key in self._extra else self._state[self._alias.get(key, key)]

    def __iter__(self) -> Iterator[str]:
        yield from self._extra
        yield from (key for key in self._state if key not in self._extra)
        yield from self._alias

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _unsupported(checkpoint: Checkpoint, error: Exception) -> InputError:
    lines = str(error).strip().splitlines()
    kind = checkpoint.config.model_type
    known = "" if kind in FAMILIES else f" (model type '{kind}'; what is supported is {', '.join(FAMILIES)})"
    return InputError(f"{checkpoint.name}{known} cannot be compiled: {lines[0] if lines else type(error).__name__}")
