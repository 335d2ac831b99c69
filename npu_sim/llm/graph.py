"""The graphs of a language model (prefill, decode, paged): traced from its Hugging Face module, and compiled."""

import contextlib
import copy
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.errors import ConstraintError, FixedSizeError, InputError, IRError, NPUError
from npu_runtime.cache_folder import source_digest
from npu_runtime.packing import to_numpy
from npu_runtime.pytorch import require_torch
from npu_sim.cache import cached_facts, cached_program, has_program, program_key
from npu_sim.llm.adapter_weights import Merged, Stacked
from npu_sim.llm.adapters import Linear, adapter_ranks, check_adapter
from npu_sim.llm.checkpoint import Checkpoint, StoredConfig
from npu_sim.llm.expert_weights import ExpertParts, Joined
from npu_sim.llm.families import SENSES
from npu_sim.llm.state import FULL_ATTENTION, RECURRENT, TOKENS, LayerState, StateForm, StateName, is_recurrent
from npu_sim.llm.stored_names import Stored, find_names, first_name, parameters

if TYPE_CHECKING:
    import torch
    from torch import nn

    from npu_compiler import CodegenTarget, CompiledProgram, CompileOptions
    from npu_compiler.graph.mesh import Mesh
    from npu_compiler.passes.quantize import Quantization

INV_FREQ = "model.rotary_emb.inv_freq"
_BY_NUMBERS = "its module chooses shapes or branches by numbers that it computes, as no program can"
_TRACING = ("torch", "transformers", "pytorch-ir")  # packages of which another version may trace another graph


def meta_model(checkpoint: Checkpoint, attention: "Callable[..., Any] | None" = None) -> Any:
    """The checkpoint's Hugging Face module on the meta device.

    Args:
        attention: An attention function that replaces the module's. None: the module keeps its own.

    Raises:
        InputError: transformers cannot build a causal language model from the config.
    """
    require_torch("tracing a model")
    from transformers import AttentionInterface, AttentionMaskInterface

    from npu_sim.llm.experts import join_experts

    if attention is not None:
        from npu_sim.llm.attention import visible

        AttentionInterface.register(attention.__name__, attention)
        AttentionMaskInterface.register(attention.__name__, visible)
        _register_classes(checkpoint.config.model_type, attention.__name__)
    model = _built(checkpoint, "meta", checkpoint.dtype, "eager" if attention is None else attention.__name__)
    join_experts(model)
    return model


def _built(checkpoint: Checkpoint, device: str, dtype: str, attention: str) -> Any:
    """The checkpoint's Hugging Face module on a PyTorch device, with random weights unless that is "meta".

    Args:
        attention: The name of its attention function for transformers.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        config = copy.deepcopy(_whole(checkpoint.config))  # transformers writes the dtype into it
        config.return_dict, config.output_hidden_states = True, False
        if hasattr(config, "rescale_every"):  # it would change its weights, to keep float16 from overflowing
            config.rescale_every = 0
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=attention, trust_remote_code=False
            )
    except Exception as error:  # transformers raises errors of many types for configs that it cannot use
        raise _unsupported(checkpoint, error) from error
    _keep_frequencies(model)
    return model.eval()


def _keep_frequencies(model: Any) -> None:
    """Let "dynamic" and "longrope" rotary embeddings keep their first frequencies; see `longest_context`.

    transformers chooses them anew in each step by the greatest position, which cannot be traced, in a function around
    the module's own.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if {"dynamic", "longrope"} & set(kinds.values() if isinstance(kinds, Mapping) else [kinds]):
            module.forward = MethodType(inspect.unwrap(type(module).forward), module)


def _placed_model(checkpoint: Checkpoint, *, paged: bool = False) -> Any:
    """The module that is traced, with the attention function over a cache that fits the form of its state."""
    from npu_sim.llm.attention import attend_to_pages, attend_to_rows
    from npu_sim.llm.own_caches import OwnCache

    form = state_form(checkpoint)
    if form.is_whole:
        return meta_model(checkpoint)
    if form.is_own:
        causal = meta_model(checkpoint)
        causal.own_cache = OwnCache(causal)
        return causal
    return meta_model(checkpoint, attend_to_pages if paged and form.is_paged else attend_to_rows)


def _register_classes(model_type: str, attention: str) -> None:
    """Let a model type that chooses classes by the name of its attention function accept the name `attention`.

    The class for it is that with an attention of its own ("eager").
    """
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    name = model_type_to_module_name(model_type)
    with contextlib.suppress(ImportError):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for classes in (value for key, value in vars(module).items() if key.endswith("_ATTENTION_CLASSES")):
            classes.setdefault(attention, classes["eager"])


def dense_model(checkpoint: Checkpoint, device: str) -> Any:
    """The Hugging Face module in float32 on a PyTorch device, with the checkpoint's weights dequantized."""
    from npu_runtime.torch_arrays import numpy_to_tensor

    model = meta_model(checkpoint).to_empty(device=device)
    state = state_with_buffers(checkpoint)
    tensors = {name: numpy_to_tensor(to_numpy(state[name])).float().to(device) for name in state}
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    model.model.rotary_emb.inv_freq = tensors[INV_FREQ]
    return model.eval()


def layer_states(checkpoint: Checkpoint) -> list[LayerState]:
    """The state of each layer that keeps some, such as keys and values.

    Raises InputError if a layer keeps something that no `StateKind` describes.
    """
    facts = _facts(checkpoint)["state"]
    rows, windows = facts["rows"], facts["windows"]
    kind = TOKENS if facts["is_whole"] else FULL_ATTENTION
    keyed = [
        LayerState(kind, tuple(tuple(row) for row in layer), window)
        for layer, window in zip(rows, windows, strict=True)
    ]
    return keyed + [LayerState(RECURRENT, (tuple(row),), dtype=dtype) for _, row, dtype in facts["recurrent"]]


def kv_shapes(checkpoint: Checkpoint, cache_length: int) -> list[list[tuple[int, int, int, int]]]:
    """The shapes of each layer's keys and values: [1, KV heads, cache length, head dim]."""
    states = (state for state in layer_states(checkpoint) if not state.kind.is_recurrent)
    return [[(1, row[0], cache_length, row[1]) for row in state.rows] for state in states]


def state_form(checkpoint: Checkpoint) -> StateForm:
    """The form in which the checkpoint's module keeps and reads its state, found by `probe_state`."""
    whole = _facts(checkpoint)
    facts = whole["state"]
    return StateForm(
        tuple(facts["layers"]),
        facts["is_additive"],
        facts["is_paged"],
        facts["takes_mask"],
        tuple(StateName(*name) for name, *_ in facts["recurrent"]),
        facts["takes_pieces"],
        facts["takes_sequences"],
        tuple(whole["masks"].items()),
        facts["is_whole"],
        facts["is_own"],
    )


def extract_graph(checkpoint: Checkpoint, tokens: int, cache_length: int) -> dict[str, Any]:
    """The IR of `CachedCausalLM` for `tokens` tokens per run: decode for 1 token, else prefill.

    Args:
        cache_length: The length of the KV cache, in tokens.

    Raises:
        InputError: the model cannot be traced.
    """
    require_torch("tracing a model")
    from npu_sim.llm.modules import CachedCausalLM

    model = CachedCausalLM(_placed_model(checkpoint), state_form(checkpoint))
    input_ids, positions, last = _piece_inputs(tokens)
    inputs = (input_ids, positions, last if tokens > 1 else None, *_empty_caches(checkpoint, cache_length))
    return _trace(checkpoint, model, inputs, "decode" if tokens == 1 else "prefill")


def _piece_inputs(tokens: int) -> "list[torch.Tensor]":
    """The inputs that a piece of a prompt begins with: input_ids [1, T], positions [T] and last [1]."""
    import torch

    return [torch.empty(size, dtype=torch.long, device="meta") for size in ((1, tokens), (tokens,), (1,))]


def extract_prompt(checkpoint: Checkpoint, tokens: int, cache_length: int) -> dict[str, Any]:
    """The IR of `ChoosingPrefill` for `tokens` tokens per run, at least two.

    Raises InputError if the model cannot be traced.
    """
    require_torch("tracing a model")
    import torch

    from npu_sim.llm.modules import ChoosingPrefill

    model = ChoosingPrefill(_placed_model(checkpoint), state_form(checkpoint))
    history = torch.empty(cache_length, dtype=torch.long, device="meta")
    inputs = (*_piece_inputs(tokens), history, *_empty_caches(checkpoint, cache_length))
    return _trace(checkpoint, model, inputs, "prompt")


def extract_decode_loop(checkpoint: Checkpoint, cache_length: int, *, sampling: bool = False) -> dict[str, Any]:
    """The IR of `SelfFeedingDecode` or, with `sampling`, `SamplingDecode`.

    Raises InputError if the model cannot be traced.
    """
    require_torch("tracing a model")
    import torch

    from npu_sim.llm.modules import SamplingDecode, SelfFeedingDecode

    model = (SamplingDecode if sampling else SelfFeedingDecode)(_placed_model(checkpoint), state_form(checkpoint))
    token, position, history = (torch.empty(size, dtype=torch.long, device="meta") for size in (1, 1, cache_length))
    drawing = [torch.empty(size, dtype=torch.float32, device="meta") for size in (3, cache_length) if sampling]
    inputs = (token, position, history, *drawing, *_empty_caches(checkpoint, cache_length))
    return _trace(checkpoint, model, inputs, "sampling" if sampling else "decode")


@dataclass(frozen=True)
class PagedShape:
    """The sizes for which a program with a paged KV pool is compiled.

    Attributes:
        tokens, outputs: Number of tokens of a step, and of those after which a new token is chosen.
        sequences: Number of sequences of a step.
        blocks_per_sequence: Maximum number of blocks of a sequence.
        blocks, block_size: Blocks in the pool, and tokens per block.
        history: Number of chosen tokens that are kept on the device.
        lanes: Number of sequences for whose recurrent states there is memory. 0: the model has no recurrent states.
    """

    tokens: int
    outputs: int
    sequences: int
    blocks_per_sequence: int
    blocks: int
    block_size: int
    history: int
    lanes: int = 0


@dataclass(frozen=True)
class ContiguousShape:
    """Sizes of a program with a contiguous cache for each sequence; all sequences stand at the same positions.

    Attributes:
        sequences, tokens: Number of sequences of a step, and of tokens of each.
        rows: Length of each sequence's cache.
    """

    sequences: int
    tokens: int
    rows: int


def symbolic_contiguous(checkpoint: Checkpoint) -> dict[str, Any]:
    """The IR of `CachedCausalLM` with symbols for sizes; traced once and cached as in `extract_paged`.

    Raises:
        InputError: the model cannot be traced.
    """
    if is_recurrent(layer_states(checkpoint)) or state_form(checkpoint).is_whole:
        reason = "layers with other state than keys and values are not simulated; choose a model of attention alone"
        raise _unsupported(checkpoint, InputError(reason))
    name = f"{checkpoint.config.model_type}-contiguous-ir"
    key = ["contiguous", _model_key(checkpoint)]
    ir: dict[str, Any] = cached_facts(name, key, lambda: _symbolic_contiguous(checkpoint), _TRACING)
    if not ir:
        raise _unsupported(checkpoint, InputError("PyTorch fixes the sizes of its graph"))
    return ir


def contiguous_sizes(ir: dict[str, Any], shape: ContiguousShape) -> dict[str, int]:
    """Symbol → its value for a shape, for the symbols in the IR of `symbolic_contiguous`."""
    cache = f"{FULL_ATTENTION.tensors[0]}_0"
    return _sizes(ir, {"input_ids": [shape.sequences, shape.tokens], cache: [shape.rows]})


def contiguous_options(checkpoint: Checkpoint) -> "CompileOptions":
    """The options with which to compile the IR of `symbolic_contiguous`."""
    return _options(checkpoint, None)


def _symbolic_contiguous(checkpoint: Checkpoint) -> dict[str, Any]:
    """The IR, as JSON data, of `CachedCausalLM` with symbols for the numbers of sequences, tokens and rows.

    It is empty if the module cannot be traced so.
    """
    require_torch("tracing a model")
    import torch
    from torch.export import Dim

    from npu_sim.llm.modules import CachedCausalLM
    from npu_sim.llm.repeated_layers import trace_few

    sequences, tokens, rows = 3, 6, 40  # any sizes will do, if each is another
    form = state_form(checkpoint)

    def build(layers: int | None = None) -> "tuple[nn.Module, list[Any]]":
        causal = _placed_model(checkpoint)
        if layers is not None:
            parts = causal.get_submodule(path)
            causal.set_submodule(path, type(parts)(list(parts)[:layers]))
        inputs = [torch.empty(size, dtype=torch.long, device="meta") for size in ([sequences, tokens], [tokens], [1])]
        caches = _empty_caches(checkpoint, rows, sequences)
        own = replace(form, layers=form.layers[:layers])
        return CachedCausalLM(causal, own), [*inputs, *(x[:layers] for x in caches)]

    def traced(model: "nn.Module", inputs: Sequence[Any]) -> dict[str, Any]:
        symbols = [Dim(name, min=2) for name in ("sequences", "tokens", "rows")]
        dynamic: list[Any] = [{0: symbols[0], 1: symbols[1]}, {0: symbols[1]}, None]
        dynamic += [[{0: symbols[0], 2: symbols[2]}] * len(layers) for layers in inputs[3:]]
        return _trace_symbolic(checkpoint, model, tuple(inputs), dynamic, "contiguous")

    path, count = _layers_path(checkpoint), len(form.layers)
    ir = None if path is None else trace_few(path, count, build, traced)
    return traced(*build()) if ir is None else ir


def _layers_path(checkpoint: Checkpoint) -> str | None:
    """The path in the module to the list of its layers, if there are many, and all have keys and values only."""
    from torch import nn

    from npu_sim.llm.repeated_layers import SAMPLE

    form = state_form(checkpoint)
    count = len(form.layers)
    if count <= SAMPLE or form.layers != tuple(range(count)) or form.recurrent or form.masks:
        return None
    modules = _placed_model(checkpoint).named_modules()
    paths = [path for path, part in modules if type(part) is nn.ModuleList and len(part) == count]
    return paths[0] if len(paths) == 1 else None


def extract_paged(checkpoint: Checkpoint, shape: PagedShape, *, sampling: bool = False) -> dict[str, Any]:
    """The IR of `PagedCausalLM` or, with `sampling`, `PagedSampling`; with the checkpoint's adapters, if it has some.

    The module is traced once, with symbolic sizes; the symbolic IR is then kept in the cache on disk.

    Raises:
        InputError: the model cannot be traced.
    """
    from npu_compiler.graph.symbolic import specialize

    each = shape.tokens // shape.sequences if shape.lanes else 0
    form = state_form(checkpoint)
    key = ["paged", sampling, shape.block_size, each, _model_key(checkpoint), *_adapters_key(checkpoint)]
    name = f"{checkpoint.config.model_type}-paged-ir"
    ir = cached_facts(name, key, lambda: _symbolic_paged(checkpoint, shape, sampling, each), _TRACING)
    if not ir:  # its module asks for numbers
        return _traced_paged(checkpoint, shape, sampling, each)
    sequences = [] if each > 1 or not form.takes_sequences else [shape.sequences]
    given = {
        "tokens": sequences if each else [shape.tokens],
        "tables": [*sequences, shape.blocks_per_sequence],
        "outputs": [shape.outputs],
        "history": [shape.history],
        f"{FULL_ATTENTION.tensors[0]}_0": [shape.blocks * shape.block_size],
        f"{RECURRENT.tensors[0]}_0": [shape.lanes],
    }
    specialized: dict[str, Any] = specialize(ir, _sizes(ir, given))
    return specialized


def _sizes(ir: dict[str, Any], given: Mapping[str, list[int]]) -> dict[str, int]:
    """Symbol → its value, for the symbols in an IR's input shapes.

    Args:
        given: Input → values of the last symbols of its shape. Inputs that the graph lacks are ignored.
    """
    from npu_compiler.graph.symbolic import KEY

    symbols = {x["name"]: [size[KEY] for size in x["shape"] if isinstance(size, dict)] for x in ir["graph_inputs"]}
    return {
        symbol: size
        for x, values in given.items()
        if x in symbols
        for symbol, size in zip(symbols[x][-len(values) :], values, strict=True)
    }


def _symbolic_paged(checkpoint: Checkpoint, shape: PagedShape, sampling: bool, each: int) -> dict[str, Any]:
    """The IR, as JSON data, of a paged module whose sizes are symbols; empty if the module cannot be traced so.

    Args:
        shape: Sizes, of which only the number of rows of a block matters.
        each: Number of tokens of each sequence, for a model with recurrent states; above 1, or for a model that takes
            one sequence only, there is one sequence. 0: the model has no recurrent states.
    """
    require_torch("tracing a model")
    from torch.export import Dim

    form = state_form(checkpoint)
    if form.is_whole:
        return {}
    # Any sizes will do, if each is another.
    sizes = {"tokens": 6, "outputs": 3, "sequences": 4, "blocks": 5, "history": 16, "rows": 7 * shape.block_size}
    sizes["lanes"] = 9
    symbols: dict[str, Any] = {name: Dim(name, min=2) for name in sizes} | {"each": None}
    if each > 1 or not form.takes_sequences:
        sizes["sequences"], symbols["sequences"] = 1, None
    model, inputs, dynamic = _paged_module(checkpoint, {**sizes, "each": each}, symbols, shape.block_size, sampling)
    return _trace_symbolic(checkpoint, model, inputs, dynamic, "paged")


def _traced_paged(checkpoint: Checkpoint, shape: PagedShape, sampling: bool, each: int) -> dict[str, Any]:
    """The IR of a paged module for these sizes alone; arguments as in `_symbolic_paged`."""
    sizes = {name: getattr(shape, name) for name in ("tokens", "outputs", "sequences", "history", "lanes")}
    sizes |= {"blocks": shape.blocks_per_sequence, "rows": shape.blocks * shape.block_size, "each": each}
    if not state_form(checkpoint).takes_sequences:
        sizes["sequences"] = 1
    model, inputs, _ = _paged_module(checkpoint, sizes, dict.fromkeys(sizes), shape.block_size, sampling)
    return _trace(checkpoint, model, inputs, "paged")


def _paged_module(
    checkpoint: Checkpoint, sizes: Mapping[str, int], symbols: Mapping[str, Any], block_size: int, sampling: bool
) -> "tuple[nn.Module, tuple[Any, ...], list[Any]]":
    """A paged module, its inputs on the meta device, and the dynamic dimensions of each as `torch.export` takes them.

    Args:
        sizes: The fields of `PagedShape`, with `blocks` for those of a sequence, `rows` of the pool, and `each`.
        symbols: Size → its symbol, None for a fixed size.
    """
    import torch

    from npu_sim.llm.adapter_rows import add_adapters
    from npu_sim.llm.modules import PagedCausalLM, PagedSampling

    causal, each = _placed_model(checkpoint, paged=True), sizes["each"]
    batch = ["sequences", "each"] if each else ["tokens"]
    names = [*[batch] * 4, ["sequences", "blocks"], ["outputs"], ["history"], ["outputs"]]

    def integers(dims: list[str]) -> Any:
        return torch.empty([sizes[x] for x in dims], dtype=torch.long, device="meta")

    inputs = [integers(dims) for dims in names]
    if sampling:
        inputs += [torch.empty(sizes["outputs"], *more, device="meta") for more in ([3], [])]
        names += [["outputs"]] * 2
    pools = _empty_pools(checkpoint, sizes["rows"])
    dynamic: list[Any] = [{dim: symbols[x] for dim, x in enumerate(dims)} for dims in names]
    dynamic += [[{0: symbols["rows"]}] * len(layers) for layers in pools]
    inputs += pools
    chosen = None
    if checkpoint.adapters:
        chosen = add_adapters(causal, adapter_ranks(checkpoint.adapters.values()), len(checkpoint.adapters))
        inputs.append(integers(["tokens"]))
        dynamic.append({0: symbols["tokens"]})
    if each:
        states = _empty_recurrent(checkpoint, sizes["lanes"])
        inputs += [None, integers(["sequences"]), states]
        dynamic += [None, {0: symbols["sequences"]}, [{0: symbols["lanes"]}] * len(states)]
    model = (PagedSampling if sampling else PagedCausalLM)(causal, state_form(checkpoint), block_size, chosen)
    return model, tuple(inputs), dynamic


def _trace_symbolic(
    checkpoint: Checkpoint, model: "nn.Module", inputs: tuple[Any, ...], dynamic: list[Any], name: str
) -> dict[str, Any]:
    """Trace a module with symbols for sizes; the IR as JSON data, empty if PyTorch makes a number of one of them.

    Args:
        dynamic: For each input, its dynamic dimensions as `torch.export` takes them.
    """
    from torch.utils._pytree import tree_leaves

    from npu_compiler.graph.symbolic import KEY
    from npu_sim.module.trace import export, plain_ir, trace

    try:
        traced = trace(export(model.eval(), inputs, dynamic_shapes=tuple(dynamic)), name)
    except FixedSizeError:
        return {}
    except IRError as error:
        raise _unsupported(checkpoint, error) from error
    ir = plain_ir(replace(traced, ranges={}))  # who specializes it gives the sizes
    given = {size for size in tree_leaves(dynamic) if size is not None}
    kept = {size[KEY] for x in ir["graph_inputs"] for size in x["shape"] if isinstance(size, dict)}
    if len(kept) < len(given):  # decompositions can fix a size without a word
        return {}
    constants = {x: {**value, "data": value["data"].tolist()} for x, value in ir.get("constants", {}).items()}
    return {**ir, "constants": constants} if constants else ir


def extract_copy_rows(checkpoint: Checkpoint, rows: int, pool_rows: int, division: int = 1) -> dict[str, Any]:
    """The IR of `CopyRows`, which copies `rows` rows within each KV pool of `pool_rows` rows.

    Args:
        division: Number of devices among which the pools are divided; the program is for one of them.
    """
    require_torch("tracing a model")
    import torch

    from npu_sim.llm.modules import CopyRows

    pools = [pool for layers in _empty_pools(checkpoint, pool_rows, division) for pool in layers]
    places = (torch.empty(rows, dtype=torch.long, device="meta") for _ in range(2))
    return _trace(checkpoint, CopyRows(), (*places, pools), "copy")


def _empty_pools(checkpoint: Checkpoint, rows: int, division: int = 1) -> list[list["torch.Tensor"]]:
    """Tensors of `rows` rows for a paged pool: for each kind (keys, values), a list with one tensor for each layer.

    Args:
        division: Number of devices among which each row is divided.
    """

    def shape(state: LayerState, row: tuple[int, ...]) -> tuple[int, ...]:
        axis = state.kind.sharded_axis
        return rows, *(max(1, size // division) if place == axis else size for place, size in enumerate(row))

    return _empty_state(checkpoint, shape)


def _empty_caches(checkpoint: Checkpoint, cache_length: int, sequences: int = 1) -> list[list["torch.Tensor"]]:
    """Tensors for contiguous caches: for each kind (keys, values), one for each layer.

    Each has the shape [sequences, KV heads, cache length, head dim].
    """

    def shape(state: LayerState, row: tuple[int, ...]) -> tuple[int, ...]:
        heads, *width = row
        return sequences, heads, cache_length, *width

    states = _empty_recurrent(checkpoint, sequences)
    return [*_empty_state(checkpoint, shape), *([states] if states else [])]


def _empty_recurrent(checkpoint: Checkpoint, lanes: int) -> list["torch.Tensor"]:
    """Tensors for the recurrent states of `lanes` sequences, one for each state of the model."""
    states = [state for state in layer_states(checkpoint) if state.kind.is_recurrent]
    return [_empty(checkpoint, state, (lanes, *row)) for state in states for row in state.rows]


def _empty_state(
    checkpoint: Checkpoint, shape: Callable[[LayerState, tuple[int, ...]], tuple[int, ...]]
) -> list[list["torch.Tensor"]]:
    layers: dict[str, list[torch.Tensor]] = {tensor: [] for tensor in FULL_ATTENTION.tensors}
    for state in layer_states(checkpoint):
        for tensor, row in zip(state.kind.tensors, state.rows, strict=True) if not state.kind.is_recurrent else ():
            layers[tensor].append(_empty(checkpoint, state, shape(state, row)))
    return list(layers.values())


def _empty(checkpoint: Checkpoint, state: LayerState, shape: tuple[int, ...]) -> "torch.Tensor":
    import torch

    dtype = getattr(torch, state.dtype or state.kind.dtype or checkpoint.dtype)
    return torch.empty(shape, dtype=dtype, device="meta")


def _trace(checkpoint: Checkpoint, model: "nn.Module", inputs: tuple[Any, ...], name: str) -> dict[str, Any]:
    from npu_sim.module.trace import export, plain_ir, trace

    try:
        return plain_ir(trace(export(model.eval(), inputs), name))
    except IRError as error:
        raise _unsupported(checkpoint, error) from error


def compile_prefill(
    checkpoint: Checkpoint, tokens: int, cache_length: int, target: "CodegenTarget", mesh: "Mesh | None" = None
) -> "CompiledProgram":
    """The compiled prefill program for `tokens` tokens per run (see `extract_graph`), from the cache if it is there.

    Args:
        mesh: The devices among which the graph is divided (see `npu_compiler.compile`). None: a single device.

    Raises:
        InputError: the model cannot be traced, compiled or divided among these devices.
    """
    sizes = [tokens, cache_length]
    return _compiled(
        checkpoint, "prefill", lambda: extract_graph(checkpoint, tokens, cache_length), sizes, target, mesh
    )


def compile_prompt(
    checkpoint: Checkpoint, tokens: int, cache_length: int, target: "CodegenTarget", mesh: "Mesh | None" = None
) -> "CompiledProgram":
    """The compiled program of `extract_prompt`; caching and errors as in `compile_prefill`."""
    sizes = [tokens, cache_length]
    return _compiled(
        checkpoint, "prompt", lambda: extract_prompt(checkpoint, tokens, cache_length), sizes, target, mesh
    )


def has_prompt(
    checkpoint: Checkpoint, tokens: int, cache_length: int, target: "CodegenTarget", mesh: "Mesh | None" = None
) -> bool:
    """Whether the cache holds what `compile_prompt` returns for these arguments."""
    key = ["prompt", [tokens, cache_length], _model_key(checkpoint)]
    name = f"{checkpoint.config.model_type}-prompt"
    return has_program(name, key, target, _options(checkpoint, mesh), _TRACING)


def compile_decode_loop(
    checkpoint: Checkpoint,
    cache_length: int,
    target: "CodegenTarget",
    mesh: "Mesh | None" = None,
    *,
    sampling: bool = False,
) -> "CompiledProgram":
    """The compiled program of `extract_decode_loop`; caching and errors as in `compile_prefill`."""
    kind, sizes = "sampling" if sampling else "decode", [cache_length]
    return _compiled(
        checkpoint, kind, lambda: extract_decode_loop(checkpoint, cache_length, sampling=sampling), sizes, target, mesh
    )


def compile_paged(
    checkpoint: Checkpoint,
    shape: PagedShape,
    target: "CodegenTarget",
    mesh: "Mesh | None" = None,
    *,
    sampling: bool = False,
) -> "CompiledProgram":
    """The compiled program of `extract_paged`; caching and errors as in `compile_prefill`."""
    kind, sizes = "paged-sampling" if sampling else "paged", [*astuple(shape), *_adapters_key(checkpoint)]
    return _compiled(checkpoint, kind, lambda: extract_paged(checkpoint, shape, sampling=sampling), sizes, target, mesh)


def contiguous_key(checkpoint: Checkpoint, target: "CodegenTarget") -> list[Any]:
    """A cache key that changes whenever the programs of `symbolic_contiguous` might be others."""
    from importlib.metadata import version

    versions = [version(package) for package in _TRACING]
    return [_model_key(checkpoint), versions, program_key(target, contiguous_options(checkpoint))]


def compile_copy_rows(
    checkpoint: Checkpoint, rows: int, pool_rows: int, target: "CodegenTarget", division: int = 1
) -> "CompiledProgram":
    """The compiled program of `extract_copy_rows`; caching and errors as in `compile_prefill`."""
    sizes = [rows, pool_rows, division]
    return _compiled(
        checkpoint, "copy", lambda: extract_copy_rows(checkpoint, rows, pool_rows, division), sizes, target
    )


def _compiled(
    checkpoint: Checkpoint,
    kind: str,
    make_ir: Callable[[], dict[str, Any]],
    sizes: list[int],
    target: "CodegenTarget",
    mesh: "Mesh | None" = None,
) -> "CompiledProgram":
    key = [kind, sizes, _model_key(checkpoint)]
    name = f"{checkpoint.config.model_type}-{kind}"
    with compiling(checkpoint):
        return cached_program(name, key, make_ir, target, _options(checkpoint, mesh), _TRACING)


@contextlib.contextmanager
def compiling(checkpoint: Checkpoint) -> Iterator[None]:
    """A context for compiling a checkpoint's programs: whatever is refused becomes an InputError that names it."""
    try:
        yield
    except InputError:
        raise
    except NPUError as error:
        raise _unsupported(checkpoint, error) from error


def _options(checkpoint: Checkpoint, mesh: "Mesh | None") -> "CompileOptions":
    from npu_compiler import CompileOptions

    return CompileOptions(checkpoint.dtype, program_formats(checkpoint), checkpoint.kv_cache, mesh)


def _model_key(checkpoint: Checkpoint) -> list[Any]:
    """The part of a cache key that a checkpoint's module decides: its config, its dtype and our own source.

    Versions of packages (`_TRACING`), adapters (`_adapters_key`) and formats of weights are not in it.
    """
    config = checkpoint.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        config.pop(volatile, None)
    return [config, checkpoint.dtype, source_digest("npu_sim.llm", "npu_sim.module")]


def _adapters_key(checkpoint: Checkpoint) -> list[Any]:
    """A cache key that changes with the number and ranks of the checkpoint's adapters; empty without adapters."""
    adapters = checkpoint.adapters
    return [len(adapters), adapter_ranks(adapters.values())] if adapters else []


def program_formats(checkpoint: Checkpoint) -> "Quantization | None":
    """Storage formats of the checkpoint's weights by the module's parameter names; None: all in the compute dtype.

    A tied parameter is there under both of its names. A weight into which an adapter is merged is in the compute dtype.
    """
    formats = checkpoint.quantization
    if not isinstance(formats, Mapping):
        return formats
    tied = _facts(checkpoint)["tied"]
    names = {name: first_name(stored) for name, stored in _stored_names(checkpoint).items()}
    dense = {f"{layer}.weight" for layer in checkpoint.merged.layers} if checkpoint.merged else set()
    named = {name: formats[stored] for name, stored in names.items() if stored in formats and name not in dense}
    return {**named, **{name: named[other] for name, other in tied.items() if other in named}}


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    name = f"{checkpoint.config.model_type}-module"
    facts: dict[str, Any] = cached_facts(name, _model_key(checkpoint), lambda: _module_facts(checkpoint), _TRACING)
    return facts


def state_with_buffers(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """All tensors that the programs take as weights, by the module's parameter names.

    Beside the checkpoint's tensors these are tied parameters, rotary frequencies and stacked adapters. A merged adapter
    is added to the tensors.

    Raises:
        InputError: the files lack a tensor of the module, or hold a tensor that the module lacks or that has another
            shape; or an adapter does not fit the model.
    """
    facts = _facts(checkpoint)
    extra = {name: np.array(values, np.float32) for name, values in facts["buffers"].items()}
    if checkpoint.inv_freq_divisors is not None:
        extra[INV_FREQ] = extra[INV_FREQ] / checkpoint.inv_freq_divisors
    joined = {name: Joined(tuple(shape), transposed) for name, (shape, transposed) in facts["joined"].items()}
    names, shapes = _stored_names(checkpoint), facts["shapes"]
    tensors: Mapping[str, Any] = _WithExtras(checkpoint.state, names, extra, facts["tied"], joined, shapes)
    linears = {path: Linear(*sizes) for path, sizes in facts["linears"].items()}
    for adapter in (*([checkpoint.merged] if checkpoint.merged else []), *checkpoint.adapters.values()):
        check_adapter(adapter, linears, checkpoint.name)
    if checkpoint.merged:
        tensors = Merged(tensors, checkpoint.merged, linears)
    return Stacked(tensors, list(checkpoint.adapters.values())) if checkpoint.adapters else tensors


# Masks of attention, which old files include.
_MASKS = (r"\.masked_bias$",)


def _stored_names(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Module parameter → the tensors in the files, whose names may be older or lack the module's prefix."""
    facts, state = _facts(checkpoint), checkpoint.state
    shapes, key = facts["shapes"], [_model_key(checkpoint), sorted(state)]
    name = f"{checkpoint.config.model_type}-names"
    found = cached_facts(name, key, lambda: find_names(meta_model(checkpoint), state), _TRACING)
    for name, operation in found["unsupported"].items():
        raise InputError(f"the files of {checkpoint.name} hold '{name}', of which {operation} is not supported")
    stored = parameters(found)
    names = {name: value for name, value in stored.items() if name in shapes}
    unread = [first_name(value) for name, value in stored.items() if name not in shapes]
    unknown = [name for name in unread if not any(re.search(x, name) for x in (*facts["ignored"], *_MASKS))]
    missing = [name for name in shapes if name not in names and facts["tied"].get(name) not in names]
    if missing:
        raise InputError(f"the files of {checkpoint.name} lack '{missing[0]}'{_and_others(missing)}")
    if unknown:
        model = f"a model of type '{checkpoint.config.model_type}'"
        others = _and_others(unknown)
        raise InputError(f"the files of {checkpoint.name} hold '{unknown[0]:.120}'{others}, which {model} lacks")
    _check_shapes(checkpoint, names, shapes)
    return names


def _check_shapes(checkpoint: Checkpoint, names: Mapping[str, Stored], shapes: Mapping[str, list[int]]) -> None:
    """Raise InputError if a file's tensor has another shape than its config says.

    A state that cannot tell shapes without reading tensors is not checked.
    """
    shape_of: Any = getattr(checkpoint.state, "shape", None)
    for name, stored in names.items():
        if isinstance(stored, ExpertParts):
            stored.names(shapes[name][0])
    for name, stored in names.items() if shape_of is not None else ():
        if isinstance(stored, str) and list(shape := shape_of(stored)) != shapes[name]:
            raise InputError(
                f"'{stored}' of {checkpoint.name} has the shape {list(shape)}, but its config says {shapes[name]}"
            )


def _and_others(names: list[str]) -> str:
    return f" and {len(names) - 1} more tensors" if len(names) > 1 else ""


def _module_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Facts of a module that are cached on disk: its buffers, tied parameters, shapes, linear layers and state.

    The buffers are the non-persistent ones, as lists, except masks, which are windows as in `StateForm`. Each tied
    parameter is mapped to the parameter it is tied to, in both directions.
    """
    from npu_sim.llm.experts import joined_parameters

    model = meta_model(checkpoint)
    joined = joined_parameters(model)
    try:
        buffers, masks = _buffers(model)
    except Exception as error:  # whatever a module's own initialization raises
        raise _unsupported(checkpoint, error) from error
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    tied = {name: other for names in groups.values() for name in names for other in names if name != other}
    return {
        "buffers": buffers,
        "masks": masks,
        "tied": tied,
        "shapes": {
            name: list(joined[name].shape if name in joined else value.shape)
            for name, value in model.state_dict().items()
        },
        "joined": {name: [list(matrices.shape), matrices.transposed] for name, matrices in joined.items()},
        "linears": _linears(model, tied),
        "ignored": list(model._keys_to_ignore_on_load_unexpected or ()),
        "state": _state_facts(checkpoint),
    }


def _linears(model: Any, tied: Mapping[str, str]) -> dict[str, list[Any]]:
    """Path of each linear layer of a module → the arguments of `Linear` that describe it."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head, linears = model.get_output_embeddings(), {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            transposed = isinstance(module, Conv1D)
            inputs, outputs = module.weight.shape if transposed else module.weight.shape[::-1]
            linears[path] = [inputs, outputs, transposed, module is head, f"{path}.weight" in tied]
    return linears


def _state_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `probe_state` finds about a module, `own_state`, or `whole_state` if no step can continue another.

    Raises InputError if none of them does.
    """
    from npu_sim.llm.probe import own_state, probe_state, whole_state
    from npu_sim.llm.whole import MOST_PARAMETERS

    try:
        return probe_state(lambda attention: meta_model(checkpoint, attention))
    except InputError as error:
        refusal = error
    except Exception as error:  # whatever a module's own code raises
        reason = "its module does not run over a cache that others hold"
        if any(word in str(error) for word in ("nonzero", "meta tensor", "data-dependent")):
            reason = _BY_NUMBERS
        if "ambiguous" in str(error):  # of a tensor with a number for each token, where a module expects one
            reason = "its module decides by the number of tokens in its cache, which is another for each sequence"
        refusal = InputError(reason)
        refusal.__cause__ = error
    causal = meta_model(checkpoint)
    with contextlib.suppress(Exception):  # whatever a module's own code raises
        return own_state(causal)
    if sum(x.numel() for x in causal.parameters()) > MOST_PARAMETERS:
        raise _unsupported(checkpoint, refusal) from refusal
    try:
        return whole_state(_built(checkpoint, "cpu", "float32", "eager"))
    except InputError as error:
        raise _unsupported(checkpoint, error) from refusal
    except Exception:  # as above
        raise _unsupported(checkpoint, refusal) from refusal


def _buffers(model: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Compute the non-persistent buffers of a module on the meta device as transformers does after loading.

    Returns:
        The buffers as lists, and the windows of those that are square masks.

    Raises:
        InputError: transformers leaves one as it is, or a mask is neither causal nor one of a window.
    """
    import torch

    from npu_sim.llm.attention import mask_window
    from npu_sim.llm.modules import mask_names

    buffers: dict[str, Any] = {}
    masks, squares = {}, mask_names(model)
    owners = {path: module for path, module in model.named_modules() if hasattr(module, "_init_weights")}
    for path, module in model.named_modules():
        if any(part.startswith(SENSES) for part in path.split(".")):
            continue  # no text passes through it
        names = sorted(module._non_persistent_buffers_set)
        for name in names:
            meta = module._buffers[name]
            module._buffers[name] = torch.full(meta.shape, torch.nan, dtype=torch.float32)
        if names:
            parts = path.split(".")
            inside = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
            enclosing = [owners[name] for name in inside if name in owners]
            enclosing[0]._init_weights(module)
            for owner in enclosing:  # some fill buffers of their parts
                if any(module._buffers[name].isnan().any() for name in names):
                    owner._init_weights(owner)
        for name in names:
            value = module._buffers[name]
            if value.isnan().any():
                raise InputError(f"nothing says how its buffer '{path}.{name}' is computed")
            full = f"{path}.{name}"
            if full not in squares:
                buffers[full] = value.tolist()
            elif (window := mask_window(value)) is not None:
                masks[full] = window
            else:
                raise InputError(f"its own attention has a mask ('{full}') of other than the last positions")
    return buffers, masks


def _whole(config: Any) -> Any:
    """The transformers config itself, read from disk if `config` is a `StoredConfig`."""
    return config.whole if isinstance(config, StoredConfig) else config


class _WithExtras(Mapping[str, Any]):
    """A checkpoint's tensors by the module's parameter names, with additional ones; nothing is copied.

    A tied parameter is there under both of its names, and the experts of a layer have one matrix.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        names: Mapping[str, Stored],
        extra: Mapping[str, Any],
        tied: Mapping[str, str],
        joined: Mapping[str, Joined],
        shapes: Mapping[str, list[int]],
    ) -> None:
        self._state, self._shapes = state, shapes
        self._extra = extra
        self._joined = joined
        alias = {name: names[other] for name, other in tied.items() if name not in names and other in names}
        self._names = {**names, **alias}

    def __getitem__(self, key: str) -> Any:
        if key in self._extra:
            return self._extra[key]
        stored, joined = self._names[key], self._joined.get(key)
        if isinstance(stored, ExpertParts):
            return stored.parameter(self._state, self._shapes[key], joined)
        value = self._state[stored] if isinstance(stored, str) else stored.read(self._state)
        return value if joined is None else joined.join(value)

    def __contains__(self, key: object) -> bool:
        return key in self._extra or key in self._names

    def __iter__(self) -> Iterator[str]:
        yield from self._extra
        yield from (key for key in self._names if key not in self._extra)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _unsupported(checkpoint: Checkpoint, error: BaseException) -> InputError:
    if isinstance(error.__cause__, InputError):  # what an attention function has refused while it was traced
        error = error.__cause__
    lines = str(error).strip().splitlines()
    if isinstance(error, IRError) and "data-dependent" in str(error):
        lines = [_BY_NUMBERS]
    if isinstance(error, KeyError):
        lines = [f"transformers knows no {error}"]
    if isinstance(error, ConstraintError):  # the first of what the device lacks
        lines = [" ".join(line.strip(" -") for line in lines[:2])]
    kind, reason = checkpoint.config.model_type, lines[0] if lines else type(error).__name__
    return InputError(f"cannot compile {checkpoint.name} (model type '{kind}'): {reason:.300}")
