"""Small quantized graphs, as PyTorch's PT2E quantization makes them, and their results on the CPU device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from ir_builder import IRBuilder, Tensor

from npu_compiler import CompileOptions, compile, trace_stages
from npu_runtime import CPUBackend, Executor, load_weights

BACKENDS = {
    "native": CPUBackend(native=True, tune=False),
    "torch": CPUBackend(native=False, tune=False),
    "numpy": CPUBackend(native=False, pytorch=False),
}
QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"
DEQUANTIZE_CHANNELS = "quantized_decomposed.dequantize_per_channel.default"
LIMITS = {"int8": (-128, 127), "uint8": (0, 255)}


@dataclass
class Network:
    """Builder of a quantized graph and its weights."""

    g: IRBuilder = field(default_factory=IRBuilder)
    state: dict[str, np.ndarray] = field(default_factory=dict)

    def rounded(self, x: Tensor, scale: float, zero: int, dtype: str = "uint8") -> Tensor:
        """x quantized and dequantized."""
        shape, (low, high) = self.g.shape(x), LIMITS[dtype]
        attrs = {"scale": scale, "zero_point": zero, "quant_min": low, "quant_max": high, "dtype": dtype}
        codes = self.g(QUANTIZE, x, **attrs, out=(shape, dtype))
        found: Tensor = self.g(DEQUANTIZE, codes, **attrs, out=(shape, "float32"))
        return found

    def weight(self, key: str, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None) -> Tensor:
        self.state |= {key: codes, f"{key}.scales": scales.astype(np.float32)}
        parts = [self.g.weight(key, *codes.shape, dtype="int8"), self.g.weight(f"{key}.scales", len(codes))]
        if zeros is not None:
            self.state[f"{key}.zeros"] = zeros
            parts.append(self.g.weight(f"{key}.zeros", len(codes), dtype="int64"))
        attrs = {"axis": 0, "quant_min": -128, "quant_max": 127, "dtype": "int8"}
        found: Tensor = self.g(DEQUANTIZE_CHANNELS, *parts, **attrs, out=(codes.shape, "float32"))
        return found

    def run(
        self, inputs: dict[str, np.ndarray], compute_dtype: str = "float32", only: str = ""
    ) -> dict[str, np.ndarray]:
        """Backend's name → the output."""
        program = compile(self.g.ir(), options=CompileOptions(compute_dtype=compute_dtype))
        (spec,) = program.output_specs
        found = {}
        for name, backend in BACKENDS.items():
            if only not in ("", name):
                continue
            weights = load_weights(self.state, program, backend)
            found[name] = Executor(program, backend).run(inputs, weights)[spec.name].to_numpy(spec).copy()
        return found

    @property
    def ops(self) -> list[str]:
        """Op types of the graph that kernels are generated from."""
        *_, (_, graph) = trace_stages(self.g.ir(), options=CompileOptions(compute_dtype="float32"))
        return [node.op_type for node in graph]


def byte_network() -> IRBuilder:
    """A linear layer whose input is rounded to uint8 and whose weight is stored in int8."""
    network = Network()
    x = network.rounded(network.g.input("x", 4, 8), 0.1, 128)
    weight = network.weight("w", np.ones((6, 8), np.int8), np.ones(6))
    return network.g.output(network.g("aten.linear.default", x, weight))
