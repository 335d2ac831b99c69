"""IR of the measured operators.

Weights are inputs, so that they come from DRAM in each run, as in the measurements.
"""

from __future__ import annotations

from typing import Any

IR = dict[str, Any]


class Graph:
    """A builder of IR graphs that numbers tensors in the order in which they are added."""

    def __init__(self) -> None:
        self.inputs: list[IR] = []
        self.weights: list[IR] = []
        self.nodes: list[IR] = []

    def input(self, *shape: int, dtype: str = "float32") -> IR:
        """Add an input to the graph and return it."""
        tensor = {"name": f"x{len(self.inputs)}", "shape": [*shape], "dtype": dtype}
        self.inputs.append(tensor)
        return {**tensor, "producer_node": tensor["name"], "producer_output_idx": 0}

    def weight(self, *shape: int, dtype: str = "float32") -> IR:
        """Add a weight to the graph and return it."""
        self.weights.append({"name": f"w{len(self.weights)}", "shape": [*shape], "dtype": dtype})
        return self.weights[-1]

    def op(self, name: str, shape: tuple[int, ...], *operands: IR, dtype: str = "float32", **attrs: Any) -> IR:
        """Add an op to the graph and return its result, of the given shape and dtype."""
        node = f"{name.split('.')[-2]}_{len(self.nodes)}"
        result = {"name": node, "shape": [*shape], "dtype": dtype}
        self.nodes.append({"name": node, "op_type": name, "inputs": [*operands], "outputs": [result], "attrs": attrs})
        return {**result, "producer_node": node, "producer_output_idx": 0}

    def ir(self, *outputs: IR) -> IR:
        """Return the IR with these outputs."""
        return {
            "model_name": "measured",
            "graph_inputs": self.inputs,
            "graph_outputs": [*outputs],
            "weights": self.weights,
            "weight_name_mapping": {each["name"]: each["name"] for each in self.weights},
            "constants": {},
            "nodes": self.nodes,
        }


def gemm(m: int, n: int, k: int) -> IR:
    """Return IR for the product of [m, k] with a weight [n, k]."""
    g = Graph()
    return g.ir(g.op("aten.linear.default", (m, n), g.input(m, k), g.input(n, k)))


def gated_ffn(tokens: int, hidden: int, inner: int) -> IR:
    """Return IR for a gated feed-forward block: one product for gate and up, silu(gate) · up, and the product down."""
    g = Graph()
    both = g.op("aten.linear.default", (tokens, 2 * inner), g.input(tokens, hidden), g.input(2 * inner, hidden))
    gate, up = (
        g.op("aten.slice.Tensor", (tokens, inner), both, dim=1, start=start, end=start + inner) for start in (0, inner)
    )
    gated = g.op("aten.mul.Tensor", (tokens, inner), g.op("aten.silu.default", (tokens, inner), gate), up)
    return g.ir(g.op("aten.linear.default", (tokens, hidden), gated, g.input(hidden, inner)))


def erf_ffn(tokens: int, hidden: int, inner: int) -> IR:
    """Return IR for a feed-forward block: two products with biases, and a GELU with the error function in between."""
    g = Graph()
    first = g.op(
        "aten.linear.default", (tokens, inner), g.input(tokens, hidden), g.input(inner, hidden), g.input(inner)
    )
    active = g.op("aten.gelu.default", (tokens, inner), first)
    return g.ir(g.op("aten.linear.default", (tokens, hidden), active, g.input(hidden, inner), g.input(hidden)))


def attention(heads: int, shared: int, queries: int, keys: int, width: int, causal: bool) -> IR:
    """Return IR for attention in which several query heads share a head of keys and values."""
    g = Graph()
    operands = [g.input(1, count, size, width) for count, size in ((heads, queries), (shared, keys), (shared, keys))]
    attrs: dict[str, Any] = {"is_causal": causal, "enable_gqa": heads != shared}
    name = "aten.scaled_dot_product_attention.default"
    return g.ir(g.op(name, (1, heads, queries, width), *operands, **attrs))


def materialised_attention(heads: int, queries: int, keys: int, width: int) -> IR:
    """Return IR for attention as a product, a softmax and a product, with all scores in memory in between.

    Operands are bfloat16, scores float32 and weights bfloat16 again, as JAX's `dot_product_attention` has them.
    """
    g, half = Graph(), "bfloat16"
    q, k, v = (g.input(heads, size, width, dtype=half) for size in (queries, keys, keys))
    turned = g.op("aten.transpose.int", (heads, width, keys), k, dim0=1, dim1=2, dtype=half)
    scores = g.op("aten.bmm.dtype", (heads, queries, keys), q, turned, out_dtype="float32")
    weights = g.op("aten.softmax.int", (heads, queries, keys), scores, dim=2, dtype=half)
    g.nodes[-1]["attrs"]["dtype"] = half
    return g.ir(g.op("aten.bmm.default", (heads, queries, width), weights, v, dtype=half))


_CODES = {"scale": 0.05, "zero_point": 0, "quant_min": -128, "quant_max": 127, "dtype": "int8"}


def _rounded(g: Graph, x: IR) -> IR:
    """Quantize a tensor to int8 and dequantize it, which the compiler turns into a tensor of int8."""
    shape = tuple(x["shape"])
    codes = g.op("quantized_decomposed.quantize_per_tensor.default", shape, x, dtype="int8")
    g.nodes[-1]["attrs"] = dict(_CODES)
    return _values(g, codes)


def _values(g: Graph, codes: IR) -> IR:
    values = g.op("quantized_decomposed.dequantize_per_tensor.default", tuple(codes["shape"]), codes)
    g.nodes[-1]["attrs"] = dict(_CODES)
    return values


def integer_convolution(
    image: tuple[int, int, int], filters: int, kernel: int, stride: int, padding: int, residual: bool, relu: bool
) -> IR:
    """Return IR for a convolution between images of int8, with optional ReLU and addition of another image."""
    g = Graph()
    channels, height, width = image
    result = (1, filters, *((size + 2 * padding - kernel) // stride + 1 for size in (height, width)))
    window: dict[str, Any] = {"stride": [stride] * 2, "padding": [padding] * 2, "dilation": [1, 1], "groups": 1}
    weight = _values(g, g.weight(filters, channels, kernel, kernel, dtype="int8"))
    x = _rounded(g, g.input(1, channels, height, width))
    y = g.op("aten.conv2d.default", result, x, weight, g.weight(filters), **window)
    if residual:
        y = g.op("aten.add.Tensor", result, y, _rounded(g, g.input(*result)))
    if relu:
        y = g.op("aten.relu.default", result, y)
    return g.ir(_rounded(g, y))


def integer_pooling(image: tuple[int, int, int], kernel: int) -> IR:
    """Return IR for max pooling of an image of int8."""
    g = Graph()
    x = _rounded(g, g.input(1, *image))
    window: dict[str, Any] = {"kernel_size": [kernel] * 2, "stride": [1, 1], "padding": [kernel // 2] * 2}
    return g.ir(_rounded(g, g.op("aten.max_pool2d.default", (1, *image), x, **window)))


def concatenation(image: tuple[int, int, int], count: int) -> IR:
    """Return IR for the concatenation of images of int8 along the channels."""
    g = Graph()
    channels, height, width = image
    images = [_rounded(g, g.input(1, *image)) for _ in range(count)]
    sizes: dict[str, Any] = {"dim": 1, "_tensor_list_sizes": [count]}
    return g.ir(_rounded(g, g.op("aten.cat.default", (1, count * channels, height, width), *images, **sizes)))
