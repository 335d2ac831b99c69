"""`TargetConfig`: a target's hardware as plain numbers, for code generation and layout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TargetConfig:
    """Hardware parameters of a target.

    Attributes:
        name: Written into the `.npubin` header; the runtime refuses a program for another target.
        channel_alignment_bytes: 4-D convolution activations have their channel count padded so that
            `channels * itemsize` is a multiple of this (1 switches padding off).
        channel_tile: Channels that one threadgroup of a convolution handles.
        matmul_tile: Edge of the square tile of the tiled matrix product.
        max_threadgroup_1d: Threads of a 1-D threadgroup; the `_2d` and `_3d` values are per edge.
        max_dispatches_per_batch: Dispatches encoded before a command buffer is committed.
        buffer_alignment: Every arena offset is a multiple of this many bytes.
        programs_are_code: Whether a program contains what the device executes, as source text and launches, so that
            only programs that the user trusts are run. Otherwise a program only names kernels that the device has.
        integer_kernels: Whether convolutions and products of quantized tensors are computed in integers.
        weight_codes: Names of the code formats (`CODE_FORMATS`) that the kernels for quantized weights know.
        rounds_activations: Whether products with quantized weights can quantize the rows of their other operand.
        rounds_caches: Whether KV caches can be stored in one byte per element.
    """

    name: str
    channel_alignment_bytes: int = 64
    channel_tile: int = 32
    matmul_tile: int = 16
    max_threadgroup_1d: int = 256
    max_threadgroup_2d: int = 16
    max_threadgroup_3d_xy: int = 8
    max_threadgroup_3d_z: int = 4
    max_dispatches_per_batch: int = 10_000
    buffer_alignment: int = 256
    programs_are_code: bool = False
    integer_kernels: bool = False
    weight_codes: tuple[str, ...] = ()
    rounds_activations: bool = False
    rounds_caches: bool = False


# Codes that the op-level kernels know, in the order of the enums `Codes` in quantized.h and quantized.metal.
KERNEL_CODES = ("int4", "int8", "float8_e4m3", "float4_e2m1", "iq4_nl")
# The kernels of the op table, for any device that has them.
OP_LEVEL = TargetConfig(
    name="op_level", integer_kernels=True, weight_codes=KERNEL_CODES, rounds_activations=True, rounds_caches=True
)
METAL_GPU = TargetConfig(name="metal_gpu", weight_codes=KERNEL_CODES)
CUDA_GPU = TargetConfig(  # layouts are not padded: a kernel is specialized for its shapes anyway
    name="cuda_gpu",
    channel_alignment_bytes=1,
    programs_are_code=True,
    integer_kernels=True,
    weight_codes=KERNEL_CODES,
    rounds_activations=True,
)
