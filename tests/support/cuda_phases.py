"""Phases of the resident kernel as the op-level calls that they stand for, with random operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from cuda_gpu import prepared
from reference_kernels import reference_launch

from cuda_compiler.resident import twins
from cuda_compiler.resident.kernel import find_runs, resident_call
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.dtypes import dtype_name, numpy_dtype
from npu_compiler.graph.model import TensorSpec
from npu_compiler.graph.quantization import QuantizedFormat, quantize
from npu_compiler.program.elementwise import ELEMENTWISE
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, BufferKind, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides
from npu_runtime import Backend, DeviceBuffer
from npu_runtime.cpu.torch_kernels.products import activated
from npu_runtime.torch_arrays import numpy_to_tensor

Array = np.ndarray[Any, Any]


@dataclass
class Phases:
    """A list of calls, the operands' initial values by buffer, and the buffers' final values by the twins.

    Attributes:
        products: Buffer → the twin of the product or norm that computes it, as a function of the buffers' values.
    """

    dtype: str
    rng: np.random.Generator
    calls: list[KernelCall] = field(default_factory=list)
    data: dict[str, Array] = field(default_factory=dict)
    kinds: dict[str, BufferKind] = field(default_factory=dict)
    expected: dict[str, Array] = field(default_factory=dict)
    products: dict[str, Callable[[Mapping[str, Array]], Array]] = field(default_factory=dict)
    sums: dict[str, Callable[[Mapping[str, Array]], Array]] = field(default_factory=dict)  # of gated products

    def operand(
        self, name: str, *shape: int, kind: BufferKind = "input", values: Any = None, dtype: str | None = None
    ) -> View:
        """A row-major operand in a buffer of its own; standard normal values by default."""
        drawn = self.rng.standard_normal(shape) if values is None else values
        dtype = dtype or self.dtype
        self.data[name] = np.asarray(drawn).astype(numpy_dtype(dtype)).reshape(shape)
        self.kinds[name] = kind
        return View(name, shape, contiguous_strides(shape), 0, dtype)

    def call(self, kernel: str, inputs: Sequence[View], outputs: Sequence[View], **params: Any) -> None:
        self.calls.append(KernelCall(kernel, "", tuple(inputs), tuple(outputs), params, kernel))

    def product(
        self,
        x: View,
        name: str,
        n: int,
        activation: str = "none",
        normed: bool = False,
        gated: bool = False,
        bias: bool = False,
        residual: bool = False,
        format: QuantizedFormat | None = None,
        base: View | None = None,
    ) -> View:
        """Appends a product of x [M, K], with the RMSNorm before it, and returns its result [M, N].

        Args:
            base: What is added to the RMSNorm of x before all this, [M, K]; the sum is an output, f"{name}.whole".
            format: Format of the weight, where it is in few bits.
        """
        m, k = x.shape
        if base is not None:
            added = self._normed(x, f"{name}.added")
            whole = self.operand(f"{name}.whole", m, k, kind="output", values=np.full((m, k), np.nan))
            self.call("add_kernel", [base, added], [whole], scalars=[None, None], alpha=1)
            gain, source = self.data[f"{name}.added.gain"], x
            self._expect(whole, lambda held: twins.add_normed(_of(base, held), _of(source, held), gain, 1e-5, 1.0))
            x = whole
        if normed:
            x = self._normed(x, name)
        rows = 2 * n if gated else n
        drawn = self.rng.standard_normal((rows, k)) / k**0.5
        weight, dense, params = self._weight(f"{name}.weight", drawn, format)
        inputs = [x, *weight]
        options: dict[str, Array] = {}
        if bias:
            inputs.append(self.operand(f"{name}.bias", rows, kind="weight"))
            options["bias"] = self.data[inputs[-1].buffer]
        if residual:
            inputs.append(self.operand(f"{name}.residual", m, n))
            options["residual"] = self.data[inputs[-1].buffer]
        out = self.operand(name, m, n, kind="output", values=np.full((m, n), np.nan))
        params |= {"m": m, "n": n, "k": k, "activation": activation, "has_bias": int(bias)}
        params["has_residual"] = int(residual)
        kernel = "gated_matmul_vec_kernel" if gated else "matmul_vec_kernel" if m == 1 else "matmul_kernel"
        self.call(f"quantized_{kernel}" if format else kernel, inputs, [out], **params)
        twin = twins.gated_product if gated else twins.product
        self._expect(out, lambda held: twin(_of(x, held), dense, _activate(activation), **options))
        if gated:
            self.sums[out.buffer] = lambda held: twins.product(_of(x, held), dense, _activate("none"), **options)
        return out

    def experts(
        self,
        x: View,
        name: str,
        experts: int,
        choices: int,
        inner: int,
        factors_dtype: str | None = None,
        gate: str = "silu_mul",
        interleaved: bool = False,
        biases: bool = False,
        format: QuantizedFormat | None = None,
    ) -> View:
        """Appends a layer's experts for one row x [1, K], with the norm before and the residual x; returns [1, K].

        Args:
            factors_dtype: Dtype of the factors of the choice; None: that of x.
            gate: The element-wise op of both halves of the first product.
            interleaved: Whether the columns of these halves alternate.
            biases: Whether the experts' matrices have biases.
            format: Format of these matrices, where they are in few bits.
        """
        k, d = x.shape[1], self.data
        normal = self._normed(x, name)
        rating = self.operand(f"{name}.rating", experts, k, kind="weight", values=self._matrix(experts, k))
        ratings = self.operand(f"{name}.ratings", 1, experts, kind="arena")
        params = {"has_bias": 0, "has_residual": 0, "activation": "none"}
        self.call("matmul_vec_kernel", [normal, rating], [ratings], m=1, n=experts, k=k, **params)
        self._expect(ratings, lambda held: twins.product(_of(normal, held), d[rating.buffer], _activate("none")))
        chosen = self.operand(f"{name}.chosen", 1, choices, kind="arena", dtype="int32")
        factors = self.operand(f"{name}.factors", 1, choices, kind="arena", dtype=factors_dtype)
        self.call("route", [ratings], [chosen, factors], before=True, after=False, divides=True)
        numbers = replace(chosen, shape=(choices,), strides=(1,))
        shapes = {"up": (2 * inner, k), "down": (k, inner)}
        weights, matrices = [], []
        for part, (rows, width) in shapes.items():
            drawn = self._matrix(experts * rows, width)
            weight, dense, params = self._weight(f"{name}.{part}", drawn, format)
            if format is None:
                weight = [replace(weight[0], shape=(experts, rows, width), strides=(rows * width, width, 1))]
            weights.append((weight, {**params, "e": experts, "k": width, "has_bias": int(biases)}))
            matrices.append(dense.reshape(experts, rows, width))
        bias = [
            [self.operand(f"{name}.{part}.bias", experts, rows, kind="weight", values=self._small(experts, rows))]
            if biases
            else []
            for part, (rows, _) in shapes.items()
        ]
        kernel = "quantized_expert_matmul_kernel" if format else "expert_matmul_kernel"
        both = self.operand(f"{name}.both", choices, 2 * inner, kind="arena")
        gated = self.operand(f"{name}.gated", choices, inner, kind="arena")
        apart = self.operand(f"{name}.apart", choices, k, kind="arena")
        out = self.operand(name, 1, k, kind="output", values=np.full((1, k), np.nan))
        halves = [both.slice(1, 0, inner), both.slice(1, inner, 2 * inner)]
        if interleaved:
            halves = [replace(both, shape=(choices, inner), strides=(2 * inner, 2), offset=first) for first in (0, 1)]
        for (weight, params), own_bias, source, target in zip(
            weights, bias, (normal, gated), (both, apart), strict=True
        ):
            self.call(kernel, [source, *weight, numbers, *own_bias], [target], **params)
            if target is both:
                attrs = ELEMENTWISE[gate].attrs
                self.call(f"{gate}_broadcast_kernel", halves, [gated], scalars=[None, None], **attrs)
        self.call("weighted_sum", [apart, factors, x], [out])

        def twin(held: Mapping[str, Array]) -> Array:
            numbers, weights = twins.choose_experts(_of(ratings, held)[0], choices, True, False, True)
            weights = weights.astype(d[factors.buffer].dtype)
            up, down = matrices
            own_biases = [d[view.buffer] for views in bias for view in views]
            if interleaved:
                up, own_biases[:1] = _apart(up), [_apart(each) for each in own_biases[:1]]
            beside = (own_biases[0], own_biases[1]) if biases else None
            normed, base = _of(normal, held), _of(x, held)
            return twins.expert_sum(normed, up, down, numbers, weights, _GATES[gate], base, beside)

        self._expect(out, twin)
        return out

    def _small(self, *shape: int) -> Array:
        return 0.25 * self.rng.standard_normal(shape)

    def _matrix(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape) / shape[-1] ** 0.5

    def _expect(self, out: View, product: Callable[[Mapping[str, Array]], Array]) -> None:
        self.products[out.buffer] = product
        self.expected[out.buffer] = product({**self.data, **self.expected})

    def _normed(self, x: View, name: str) -> View:
        """Appends the RMSNorm of x [M, K]."""
        m, k = x.shape
        gain = self.operand(f"{name}.gain", k, kind="weight")
        normal = self.operand(f"{name}.normal", m, k, kind="arena")
        self.call("rmsnorm_kernel", [x, gain], [normal], rows=m, width=k, eps=1e-5, weight_offset=1.0, has_weight=1)
        self._expect(normal, lambda held: twins.rms_norm(_of(x, held), self.data[gain.buffer], 1e-5, 1.0))
        return normal

    def _weight(
        self, name: str, drawn: Array, format: QuantizedFormat | None
    ) -> tuple[list[View], Array, dict[str, Any]]:
        """Return a weight [N, K] as operands, its values, and the kernel's parameters for its storage."""
        if format is None:
            weight = self.operand(name, *drawn.shape, kind="weight", values=drawn)
            return [weight], self.data[name], {}
        stored = quantize(drawn.astype(np.float32), format)
        parts = {"codes": stored.codes, "scales": stored.scales, "offsets": stored.offsets}
        views = [
            self.operand(f"{name}.{part}", *value.shape, kind="weight", values=value, dtype=dtype_name(value.dtype))
            for part, value in parts.items()
            if value is not None
        ]
        params = {"codes": format.codes, "offsets": format.offsets, "groups": stored.scales.shape[1]}
        return views, stored.dequantize(), {**params, "has_offset": int(stored.offsets is not None)}

    def attention(
        self,
        heads: int,
        kv_heads: int,
        queries: int,
        keys: int,
        width: int,
        start: int,
        splits: int,
        normed: bool = False,
        soft_cap: float = 0.0,
        sinks: bool = False,
    ) -> View:
        """Appends rotary embedding, cache update and attention up to each query's own key; returns [T, H · D].

        Args:
            start: The first query's own key.
            normed: Appends the RMSNorm of each query and of each new key before that.
            soft_cap: Bound of the scores; 0: none.
            sinks: Whether each head has one more score, which belongs to no key.
        """
        d, tokens = self.data, range(start, start + queries)
        x = self.operand("x", 1, heads + kv_heads, queries, width)
        values = self.operand("values", 1, kv_heads, queries, width)
        cos, sin = (self.operand(name, 1, 1, queries, width) for name in ("cos", "sin"))
        index = self.operand("index", queries, values=tokens, dtype="int32")
        k, v = (self.operand(name, 1, kv_heads, keys, width) for name in "kv")
        reached = np.arange(keys) <= np.array(tokens)[:, None]
        mask = self.operand("mask", 1, 1, queries, keys, values=np.where(reached, 0.0, -np.inf))
        whole = self.operand(
            "attended", queries, heads * width, kind="output", values=np.full((queries, heads * width), np.nan)
        )
        out = View("attended", (1, heads, queries, width), (0, width, heads * width, 1), 0, self.dtype)
        scale = width**-0.5
        if normed:
            parts = {"q": x.slice(1, 0, heads), "new": x.slice(1, heads, heads + kv_heads)}
            q, new_keys = (self._rotated(self._head_norm(part, name), name, cos, sin) for name, part in parts.items())
        else:
            turned = self._rotated(x, "qk", cos, sin)
            q, new_keys = turned.slice(1, 0, heads), turned.slice(1, heads, heads + kv_heads)
        self.call("index_copy_pair_kernel", [index, new_keys, values], [k, v], dim=2, checked=1)
        inputs = [q, k, v, mask.expand((1, heads, queries, keys)), *self._sinks(heads, sinks)]
        params = {"scale": scale, "causal": 0, "soft_cap": soft_cap, "has_mask": 1, "has_sinks": int(sinks)}
        self.call("attention_kernel", inputs, [out], **params)
        by_view = [self.expected[view.buffer] for view in (q, new_keys)]
        rotated = by_view if normed else np.split(by_view[0], [heads], 1)
        new = {"k": rotated[1], "v": d["values"]}
        caches = {name: twins.update_cache(d[name], d["index"], rows) for name, rows in new.items()}
        bias = np.broadcast_to(d["mask"].astype(np.float32), (1, heads, queries, keys))
        beside = d["sinks"] if sinks else None
        result = twins.attend_keys(rotated[0], caches["k"], caches["v"], bias, scale, splits, soft_cap, beside)
        self.expected |= {**caches, "attended": result.swapaxes(1, 2).reshape(whole.shape)}
        return whole

    def paged_attention(
        self,
        heads: int,
        kv_heads: int,
        reached: Sequence[tuple[int, int]],
        width: int,
        splits: int,
        block_size: int = 16,
        normed: bool = False,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: bool = False,
    ) -> View:
        """Appends rotary embedding, update of a pool and attention of tokens of many sequences; returns [T, H · D].

        Args:
            reached: Each token's sequence and position, of which no two are the same.
            normed: Appends the RMSNorm of each query and of each new key before that.
            window: Number of last keys that a token attends to; 0: all.
            soft_cap: Bound of the scores; 0: none.
            sinks: Whether each head has one more score, which belongs to no key.
        """
        d, tokens = self.data, len(reached)
        sequences, positions = (np.array(values) for values in zip(*reached, strict=True))
        table = int(positions.max()) // block_size + 1
        blocks = (int(sequences.max()) + 1) * table + 1
        drawn = self.rng.permutation(blocks)[:-1].reshape(-1, table)
        slots = drawn[sequences, positions // block_size] * block_size + positions % block_size
        x = self.operand("x", 1, heads + kv_heads, tokens, width)
        values = self.operand("values", tokens, kv_heads, width)
        cos, sin = (self.operand(name, 1, 1, tokens, width) for name in ("cos", "sin"))
        k, v = (self.operand(name, blocks * block_size, kv_heads, width) for name in "kv")
        # What no token reaches may be anything.
        free = np.setdiff1d(np.arange(blocks), drawn)[0] * block_size
        for name in "kv":
            d[name][free : free + block_size] = np.nan
        index, tables, sequence, position = (
            self.operand(name, *values.shape, values=values, dtype="int32")
            for name, values in (
                ("index", slots),
                ("tables", drawn),
                ("sequences", sequences),
                ("positions", positions),
            )
        )
        shape = (tokens, heads * width)
        whole = self.operand("attended", *shape, kind="output", values=np.full(shape, np.nan))
        out = View("attended", (tokens, heads, width), (heads * width, width, 1), 0, self.dtype)
        parts = {"q": x.slice(1, 0, heads), "new": x.slice(1, heads, heads + kv_heads)}
        if normed:
            turned = [self._rotated(self._head_norm(part, name), name, cos, sin) for name, part in parts.items()]
            rotated = [self.expected[view.buffer] for view in turned]
        else:
            both = self._rotated(x, "qk", cos, sin)
            turned = [both.slice(1, 0, heads), both.slice(1, heads, heads + kv_heads)]
            rotated = np.split(self.expected[both.buffer], [heads], 1)
        q, new_keys = (view.squeeze(0).transpose(0, 1) for view in turned)
        self.call("index_copy_pair_kernel", [index, new_keys, values], [k, v], dim=0, checked=1)
        scale = width**-0.5
        self.call(
            "paged_attention_kernel",
            [q, k, v, tables, sequence, position, *self._sinks(heads, sinks)],
            [out],
            scale=scale,
            block_size=block_size,
            window=window,
            soft_cap=soft_cap,
            has_sinks=int(sinks),
        )
        queries, keys = (value[0].swapaxes(0, 1) for value in rotated)
        pools = {name: twins.update_pool(d[name], d["index"], rows) for name, rows in (("k", keys), ("v", d["values"]))}
        where = (d["tables"], reached, block_size)
        limits = (window, soft_cap, d["sinks"] if sinks else None)
        result = twins.attend_pool(queries, pools["k"], pools["v"], *where, scale, splits, *limits)
        self.expected |= {**pools, "attended": result.reshape(shape)}
        return whole

    def _sinks(self, heads: int, wanted: bool) -> list[View]:
        """A score of no key for each head, if they are wanted."""
        return [self.operand("sinks", heads, values=self.rng.normal(3.0, 2.0, heads))] if wanted else []

    def _head_norm(self, heads: View, name: str) -> View:
        """Appends the RMSNorm of heads [1, H, T, D] that are row-major in a part of a buffer."""
        width = heads.shape[3]
        rows = heads.numel // width
        gain = self.operand(f"{name}.gain", width, kind="weight")
        normal = self.operand(f"{name}.normal", *heads.shape, kind="arena")
        views = [replace(view, shape=(rows, width), strides=(width, 1)) for view in (heads, normal)]
        self.call(
            "rmsnorm_kernel",
            [views[0], gain],
            views[1:],
            rows=rows,
            width=width,
            eps=1e-5,
            weight_offset=1.0,
            has_weight=1,
        )
        values = self.data[heads.buffer].ravel()[heads.offset : heads.offset + heads.numel].reshape(heads.shape)
        self.expected[normal.buffer] = twins.rms_norm(values, self.data[gain.buffer], 1e-5, 1.0)
        return normal

    def _rotated(self, x: View, name: str, cos: View, sin: View) -> View:
        """Appends the rotary embedding of all that is in a buffer, x [1, H, T, D], by angles [1, 1, T, D]."""
        turned = self.operand(f"{name}.turned", *x.shape, kind="arena")
        self.call("rope_kernel", [x, cos.expand(x.shape), sin.expand(x.shape)], [turned], rotary_dim=x.shape[3])
        values = self.expected.get(x.buffer, self.data[x.buffer])
        self.expected[turned.buffer] = twins.rotate(values, self.data[cos.buffer], self.data[sin.buffer])
        return turned

    @property
    def plan(self) -> ExecutionPlan:
        buffers = {
            name: BufferAllocation(name, self.kinds[name], array.shape, dtype_name(array.dtype))
            for name, array in self.data.items()
        }
        return ExecutionPlan([], self.calls, buffers, [], [], {}, {}, {}, {})

    def check(self, found: Mapping[str, Array], tolerance: float) -> None:
        """Compares what buffers hold after the calls with the twins' results.

        The twin of a product gets what the product has read. The twin's own result of the phase before may differ in
        a last bit of a few values, which thousands of sums make larger. The error of a gated product grows with the
        size of both of its sums, since each is multiplied with the other's error.
        """
        held = {**self.data, **self.expected, **found}
        for name, product in self.products.items():
            if name not in found:
                held[name] = product(held)
        expected = {**self.expected, **{name: product(held) for name, product in self.products.items()}}
        for name, array in found.items():
            wanted = expected[name].astype(np.float32)
            value = array.astype(np.float32).reshape(wanted.shape)
            error, size = np.abs(value - wanted), 1 + np.abs(wanted)
            if name in self.sums:
                gate, up = np.split(np.abs(self.sums[name](held).astype(np.float32)), 2, -1)
                size = (1 + gate) * (1 + up)
            right = (error <= tolerance * size) | np.isnan(value) & np.isnan(wanted)
            assert right.all(), (name, float(np.nanmax(error)))


def _of(view: View, held: Mapping[str, Array]) -> Array:
    """Return what a whole buffer holds."""
    return held[view.buffer].reshape(view.shape)


def _silu_mul(gate: Array, up: Array) -> Array:
    result: Array = _activate("silu")(gate) * up
    return result


def _clamped_silu_mul(gate: Array, up: Array) -> Array:
    gate, up = np.minimum(gate, np.float32(7.0)), np.clip(up, np.float32(-7.0), np.float32(7.0))
    result: Array = (up + 1) * gate / (1 + np.exp(np.float32(-1.702) * gate))
    return result


_GATES = {"silu_mul": _silu_mul, "clamped_silu_mul": _clamped_silu_mul}


def _apart(rows: Array) -> Array:
    """The rows of experts, [E, N] or [E, N, K], with those of even numbers before the others."""
    return np.concatenate([rows[:, ::2], rows[:, 1::2]], 1)


def _activate(name: str) -> Callable[[Array], Array]:
    return lambda x: np.asarray(activated(torch.from_numpy(x), name))


def _route(ratings: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> None:
    values, order = ratings.float().softmax(-1).sort(stable=True, dim=-1, descending=True)
    values = values[:, : factors.shape[1]]
    chosen.copy_(order[:, : factors.shape[1]])
    factors.copy_(values / values.sum(-1, keepdim=True))


def _weighted_sum(x: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(factors.float() @ x.float() + residual.float())


# Kernels that passes of the CUDA target form, so that the CPU device has none.
_OF_PASSES: dict[str, Callable[..., None]] = {"route": _route, "weighted_sum": _weighted_sum}


def run_reference(phases: Phases) -> dict[str, Array]:
    """Run the phases by the CPU device's reference kernels; return the buffers that the twins compute too."""
    data = {name: array.copy() for name, array in phases.data.items()}
    tensors = {name: numpy_to_tensor(array) for name, array in data.items()}

    def window(view: View) -> torch.Tensor:
        return tensors[view.buffer].as_strided(view.shape, view.strides, view.offset)

    for call in phases.calls:
        inputs, outputs = [*map(window, call.inputs)], [*map(window, call.outputs)]
        launch = _OF_PASSES.get(call.kernel)
        launch(*inputs, *outputs) if launch else reference_launch(call, inputs, outputs)()
    return {name: data[name] for name in phases.expected}


def resident(phases: Phases) -> tuple[KernelCall, Specializer]:
    """The calls as one resident kernel."""
    make = Specializer(buffers=phases.plan.buffers)
    (run,) = find_runs(phases.plan)
    return resident_call(run, make), make


def run_resident(phases: Phases, backend: Backend, times: int = 3) -> list[dict[str, Array]]:
    """Run the resident kernel `times` times from the same memory; return the buffers that it writes, for each run."""
    call, make = resident(phases)
    memory = _memory(phases, make, backend)
    (launch,) = prepared(backend, [call], make.sources, memory)
    written = [view.buffer for view in call.outputs if view.buffer in phases.expected]
    results = []
    for _ in range(times):
        for name in written:
            memory[name].write(phases.data[name])
        launch()
        backend.synchronize()
        results.append({name: memory[name].to_numpy() for name in written})
    return results


def run_calls(calls: Sequence[KernelCall], make: Specializer, phases: Phases, backend: Backend) -> dict[str, Array]:
    """Run specialized calls on the operands of `phases`; return the buffers that they write."""
    memory = _memory(phases, make, backend)
    for call in calls:
        (launch,) = prepared(backend, [call], make.sources, memory)
        launch()
    backend.synchronize()
    return {view.buffer: memory[view.buffer].to_numpy() for call in calls for view in call.outputs}


def _memory(phases: Phases, make: Specializer, backend: Backend) -> dict[str, DeviceBuffer]:
    specs = {name: TensorSpec(name, array.shape, dtype_name(array.dtype)) for name, array in phases.data.items()}
    memory = {name: backend.allocate_buffer(array, spec=specs[name]) for name, array in phases.data.items()}
    for name, buffer in make.temporaries.items():
        memory[name] = backend.allocate_zeros(buffer.alloc_shape, buffer.dtype)
    return memory
