"""The peers (other implementations to compare with): PyTorch eager and `torch.compile`, with a static KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def language_model(config: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.nn.Module:
    """Return the Hugging Face module with a checkpoint's weights, cast to `dtype`."""
    from transformers import AutoModelForCausalLM

    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict({key: state[key].to(dtype) for key in model.state_dict() if key in state}, strict=False)
    model.tie_weights()
    evaluated: torch.nn.Module = model.eval()
    return evaluated


def generation_steps(
    model: Any, prompt: Sequence[int], token: int, cache_length: int, compiled: bool
) -> dict[str, Callable[[], Tensor]]:
    """Return functions that prefill a prompt and decode a token after it, with a static KV cache.

    Each returns the last token's logits [1, 1, vocab] and can be called any number of times.
    """
    from transformers import StaticCache

    cache: Any = StaticCache(config=model.config, max_cache_len=cache_length)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = model(
            input_ids=ids,
            position_ids=positions[None],
            cache_position=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits

    def step(tokens: Sequence[int], position: int) -> Callable[[], Tensor]:
        ids, positions = torch.tensor([tokens]), torch.arange(position, position + len(tokens))
        call = torch.compile(forward, dynamic=False) if compiled else forward

        @torch.no_grad()
        def run() -> Tensor:
            for layer in cache.layers:
                layer.cumulative_length.fill_(position)
            return call(ids, positions)

        return run

    with torch.no_grad():
        forward(torch.tensor([prompt]), torch.arange(len(prompt)))  # allocates the cache, which must happen eagerly
    return {"decode": step([token], len(prompt)), "prefill": step(prompt, 0)}


Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attend_grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def attend_expanded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attend_prompt(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute causal attention of T queries over the first T rows of the cache; valid at position 0 only."""
    rows = q.shape[2]
    return F.scaled_dot_product_attention(q, k[:, :, :rows], v[:, :, :rows], is_causal=True, enable_gqa=True)


# Ways to call SDPA with grouped queries and a cache; which one is fastest depends on the shape and PyTorch's version.
ATTENTION: dict[str, Attend] = {"grouped": attend_grouped, "expanded": attend_expanded, "prompt": attend_prompt}


# The tensors of a layer; some are None.
_LAYER = ("qkv", "qkv_bias", "q_norm", "k_norm", "out", "router", "gate_up", "down", "norm_in", "norm_mid", "k", "v")


class StaticLanguageModel(nn.Module):
    """A Llama-like model written for `torch.compile`: fused QKV and gate+up projections, SDPA, a static KV cache.

    Layers with experts multiply by PyTorch's grouped products.

    forward: ids [B, T], positions [T] → float32 logits [vocab] of the last token, or [B, vocab]; the cache, which
    `prepare` makes, is updated in place. All sequences of a batch are at the same positions.

    Args:
        config: The transformers config.
        state: Hugging Face parameter name → tensor, and `model.rotary_emb.inv_freq`; the dtype is that of the weights.
    """

    embedding: Tensor
    lm_head: Tensor
    norm: Tensor
    inv_freq: Tensor

    def __init__(self, config: Any, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        table = state["model.embed_tokens.weight"]
        self.attend: Attend = attend_expanded
        self.eps: float = config.rms_norm_eps
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.choices: int = getattr(config, "num_experts_per_tok", 1)
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.register_buffer("embedding", table)
        self.register_buffer("lm_head", table if config.tie_word_embeddings else state["lm_head.weight"])
        self.register_buffer("norm", state["model.norm.weight"])
        self.register_buffer("inv_freq", state["model.rotary_emb.inv_freq"].to(table.device, torch.float32))
        self.layers: Any = nn.ModuleList(_layer(state, f"model.layers.{i}.") for i in range(config.num_hidden_layers))

    def prepare(self, cache_length: int, attend: Attend, batch: int = 1) -> None:
        """Allocate a new cache and set the attention function.

        Args:
            cache_length: S, in tokens.
            attend: q [B, heads, T, D], k and v [B, KV heads, S, D], mask [1, 1, T, S] → [B, heads, T, D].
            batch: B, the number of sequences.
        """
        self.attend = attend
        for layer in self.layers:
            for name in "kv":
                shape = (batch, self.kv_heads, cache_length, self.head_dim)
                layer.register_buffer(name, self.embedding.new_zeros(shape))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(ids, self.embedding)
        angles = positions[:, None].float() * self.inv_freq
        rotation = torch.cat([angles, angles], -1).cos().to(x.dtype), torch.cat([angles, angles], -1).sin().to(x.dtype)
        rows = torch.arange(self.layers[0].k.shape[2], device=positions.device)
        mask = (rows <= positions[:, None])[None, None]
        for layer in self.layers:
            x = self.block({name: getattr(layer, name) for name in _LAYER}, x, positions, rotation, mask)
        return F.linear(self._normed(x[:, -1], self.norm), self.lm_head).float().squeeze(0)

    def block(
        self, layer: Mapping[str, Any], x: Tensor, positions: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """Apply a layer, given by its tensors, to x [B, T, hidden]."""
        x = x + self._attention(layer, self._normed(x, layer["norm_in"]), positions, rotation, mask)
        inner = self._normed(x, layer["norm_mid"])
        if layer["router"] is not None:
            return x + self._experts(layer, inner.flatten(0, 1)).view(x.shape)
        gate, up = F.linear(inner, layer["gate_up"]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer["down"])

    def _experts(self, layer: Mapping[str, Any], rows: Tensor) -> Tensor:
        """Route rows [M, hidden] to experts, sorted by their numbers, and sum the results by their weights."""
        weights, chosen = F.linear(rows, layer["router"]).float().softmax(-1).topk(self.choices, -1)
        order = chosen.flatten().argsort(stable=True)
        numbers = torch.arange(len(layer["router"]), device=rows.device)
        ends = (chosen.flatten()[:, None] <= numbers).sum(0, dtype=torch.int32)
        gate, up = _grouped(rows[order // self.choices], layer["gate_up"], ends).chunk(2, -1)
        outer = _grouped(F.silu(gate) * up, layer["down"], ends)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=rows.device))
        weighted = outer[places].view(*chosen.shape, -1) * (weights / weights.sum(-1, keepdim=True))[..., None]
        return weighted.sum(1).to(rows.dtype)

    def _attention(
        self, layer: Mapping[str, Any], x: Tensor, positions: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        heads = [self.heads, self.kv_heads, self.kv_heads]
        qkv = F.linear(x, layer["qkv"], layer["qkv_bias"])
        q, k, v = qkv.view(*x.shape[:2], sum(heads), self.head_dim).transpose(1, 2).split(heads, dim=1)
        if layer["q_norm"] is not None:
            q, k = self._normed(q, layer["q_norm"]), self._normed(k, layer["k_norm"])
        q, k = _rotated(q, *rotation), _rotated(k, *rotation)
        layer["k"].index_copy_(2, positions, k)
        layer["v"].index_copy_(2, positions, v)
        attended = self.attend(q, layer["k"], layer["v"], mask)
        return F.linear(attended.transpose(1, 2).flatten(2), layer["out"])

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def quantized_by_torchao(model: StaticLanguageModel, weights: str, head: str) -> StaticLanguageModel:
    """Quantize the weights of a model's products by torchao, in torchao's own layouts; return the changed model.

    Args:
        weights, head: The formats of the layers' products and of the LM head: `int4`, `int8` or `fp8`.
    """
    from torchao.quantization import Float8WeightOnlyConfig, Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    configs = {
        "int4": Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"),
        "int8": Int8WeightOnlyConfig(),
        "fp8": Float8WeightOnlyConfig(),
    }

    def quantized(weight: Tensor, format: str) -> nn.Parameter:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        quantize_(linear, configs[format])
        return linear.weight

    for layer in model.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            setattr(layer, name, quantized(getattr(layer, name), weights))
    setattr(model, "lm_head", quantized(model.lm_head, head))  # noqa: B010 - a parameter takes the place of a buffer
    return model


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [M, K] by weight [E, N, K]; the rows of expert e end before row `ends[e]`."""
    result: Tensor = torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    return result


def _layer(state: Mapping[str, Tensor], prefix: str) -> nn.Module:
    parts = [f"{prefix}self_attn.{letter}_proj" for letter in "qkv"]
    layer = nn.Module()
    layer.register_buffer("qkv", torch.cat([state[f"{part}.weight"] for part in parts]))
    biased = f"{parts[0]}.bias" in state
    layer.register_buffer("qkv_bias", torch.cat([state[f"{part}.bias"] for part in parts]) if biased else None)
    for name in ("q_norm", "k_norm"):
        layer.register_buffer(name, state.get(f"{prefix}self_attn.{name}.weight"))
    layer.register_buffer("out", state[f"{prefix}self_attn.o_proj.weight"])
    router = state.get(f"{prefix}mlp.gate.weight")
    layer.register_buffer("router", router)
    if router is not None:
        for name in ("gate_up", "down"):
            joined = state[f"{prefix}mlp.experts.{name}_proj"]
            layer.register_buffer(name, joined.view(len(router), -1, joined.shape[-1]))
    else:
        factors = [state[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        layer.register_buffer("gate_up", torch.cat(factors))
        layer.register_buffer("down", state[f"{prefix}mlp.down_proj.weight"])
    layer.register_buffer("norm_in", state[f"{prefix}input_layernorm.weight"])
    layer.register_buffer("norm_mid", state[f"{prefix}post_attention_layernorm.weight"])
    return layer


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@torch.no_grad()
def compiled(
    module: nn.Module, inputs: Sequence[Tensor], mode: str, freezing: bool = False, descent: bool = True
) -> Callable[..., Tensor]:
    """Return the module compiled by `torch.compile`, tuned for static shapes; it has been called once.

    Args:
        mode: Mode of `torch.compile`.
        freezing: Treat the weights as constants, which folds BatchNorms into convolutions and keeps a copy of them.
        descent: Tune the sizes of its kernels' blocks by coordinate descent, which takes most of the time.
    """
    function: Callable[..., Tensor] = torch.compile(module, mode=mode, dynamic=False)
    with torch._inductor.config.patch(coordinate_descent_tuning=descent, freezing=freezing):
        function(*inputs)
    return function


@torch.no_grad()
def compiled_by_layer(model: StaticLanguageModel, inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Compile a model's layers as one function, for models that take too long to compile as a whole.

    Returns:
        A function that replays a CUDA graph of the model on the inputs.
    """
    setattr(model, "block", torch.compile(model.block, fullgraph=True, dynamic=False))  # noqa: B010 - it is a method
    with torch._inductor.config.patch(coordinate_descent_tuning=True):
        model(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result: Tensor = model(*inputs)

    def run() -> Tensor:
        graph.replay()
        return result

    return run
