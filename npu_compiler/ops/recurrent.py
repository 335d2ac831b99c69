"""Recurrent layers: LSTM, GRU and the plain ones, a kernel call for all steps and both directions of a layer.

A call reads a layer's input x [T, N, I], states [D, N, H] and, for each direction, the input's weight [G·H, I], the
hidden state's weight [G·H, H], and a bias of each. It writes the hidden states of all steps [T, N, D·H] and the last
states [D, N, H]. The gates G are in PyTorch's order. A hidden state is rounded to the result's dtype before the next
step reads it; an LSTM's cell state is float32 between steps.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from npu_compiler.errors import IRError
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import register_op
from npu_compiler.program.kernels import Family, Grid, declare_kernel

LARGEST_HIDDEN = 4096  # elements of a hidden state
GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
_FORWARD = "weight:f[g,.i] hidden_weight:f[g,.h] bias?:f[.g] hidden_bias?:f[.g]"
_BACKWARD = "back_weight?:f[g,.i] back_hidden_weight?:f[g,.h] back_bias?:f[.g] back_hidden_bias?:f[.g]"


def _is_layer(call: SimpleNamespace, gates: int) -> bool:
    """Whether a call's sizes are those of one layer, and its optional operands are all there or all absent."""
    backward, biased = bool(call.has_back_weight), bool(call.has_bias)
    fits: bool = call.g == gates * call.h and call.d == 1 + backward and call.o == call.d * call.h
    paired = call.has_hidden_bias == biased and call.has_back_hidden_weight == backward
    both = call.has_back_bias == call.has_back_hidden_bias == (backward and biased)
    alike = not backward or call.back_hidden_weight.dtype == call.hidden_weight.dtype
    return fits and paired and both and alike and bool(0 < call.h <= LARGEST_HIDDEN) and bool(call.t)


declare_kernel(
    "lstm_kernel",
    Family.MATMUL,
    f"x:f[t,n,i] h0:f[d,n,h] c0:f[d,n,h] {_FORWARD} {_BACKWARD} -> out:f[t,n,o] hn:f[d,n,h] cn:f[d,n,h]",
    source="recurrent.metal",
    grid=Grid.SEQUENCES,
    where=lambda call: _is_layer(call, GATES["lstm"]),
)
declare_kernel(
    "rnn_kernel",
    Family.MATMUL,
    f"x:f[t,n,i] h0:f[d,n,h] {_FORWARD} {_BACKWARD} -> out:f[t,n,o] hn:f[d,n,h]",
    source="recurrent.metal",
    grid=Grid.SEQUENCES,
    where=lambda call: _is_layer(call, GATES[call.cell]),
    cell="s gru tanh relu",
)


def present(*, biased: bool, backward: bool) -> dict[str, Any]:
    """The parameters that tell which optional operands a call has, for a layer with or without biases and reverse."""
    flags = {
        "bias": biased,
        "hidden_bias": biased,
        "back_weight": backward,
        "back_hidden_weight": backward,
        "back_bias": backward and biased,
        "back_hidden_bias": backward and biased,
    }
    return {f"has_{name}": int(flag) for name, flag in flags.items()}


def _states(node: OpNode) -> int:
    """Number of states that a layer keeps: an LSTM's hidden and cell state, or the hidden state alone."""
    return 2 if node.base == "aten.lstm" else 1


def _unsupported(node: OpNode, graph: IRGraph) -> str | None:
    hidden, last = (graph.tensors[name].shape for name in (node.inputs[1], node.inputs[_states(node)]))
    if 0 in graph.tensors[node.inputs[0]].shape[:2]:
        return "sequences without steps, or none at all"
    if hidden != last:
        return "an LSTM with projections"
    if hidden[-1] > LARGEST_HIDDEN:
        return f"a hidden state of {hidden[-1]} elements; at most {LARGEST_HIDDEN} are supported"
    if node.attrs.get("train") and node.attrs.get("dropout") and node.attrs["num_layers"] > 1:
        return "dropout between layers in training"
    return None


@register_op(
    "aten.lstm.input aten.gru.input aten.rnn_tanh.input aten.rnn_relu.input",
    tensors=("input", "*hx_and_params"),
    unsupported=_unsupported,
    one_dtype=True,
)
def lower_recurrent(ctx: Lowering, node: OpNode) -> None:
    """Lower the layers one after the other; each reads the hidden states of the one before."""
    kept = _states(node)
    x, *views = (ctx.view(name) for name in node.inputs)
    states, weights = views[:kept], views[kept:]
    attrs, outputs = node.attrs, [ctx.output(index) for index in range(1 + kept)]
    layers, first = attrs["num_layers"], bool(attrs.get("batch_first"))
    directions, each = 2 if attrs["bidirectional"] else 1, 4 if attrs["has_biases"] else 2
    if len(weights) != layers * directions * each:
        raise IRError(f"{len(weights)} weights of {layers} layers in {directions} directions")
    out, *last = outputs
    last = [view.squeeze(1) if view.rank == 4 else view for view in last]  # so PyTorch 2.9 to 2.11 export an LSTM's
    x, out = (view.transpose(0, 1) if first else view for view in (x, out))
    cell = node.base.removeprefix("aten.").removeprefix("rnn_")
    params = present(biased=bool(attrs["has_biases"]), backward=directions == 2)
    if cell != "lstm":
        params["cell"] = cell
    steps, rows, _ = x.shape
    for layer in range(layers):
        own = weights[layer * directions * each : (layer + 1) * directions * each]
        result = out if layer == layers - 1 else ctx.temp(out.shape, out.dtype)
        window = [view.slice(0, layer * directions, (layer + 1) * directions) for view in (*states, *last)]
        inputs = [ctx.inner_contiguous(x), *window[:kept], *(ctx.inner_contiguous(view) for view in own)]
        flops = 2 * steps * rows * sum(view.numel for view in own if view.rank == 2)
        kernel = "lstm_kernel" if cell == "lstm" else "rnn_kernel"
        ctx.emit(kernel, inputs, [result, *window[kept:]], params, flops=flops)
        x = result
