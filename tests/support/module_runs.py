"""Runs a module as a program on a backend."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import npu_compiler
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Executor, load_weights
from npu_runtime.backend import Backend
from npu_sim.extract import extract_ir


def run_module(
    backend: Backend, module: nn.Module, example: Tensor, dtype: str
) -> tuple[CompiledProgram, list[Tensor]]:
    """The program of a module of one input, and its results in float32.

    Args:
        dtype: The dtype to compute in.
    """
    options = npu_compiler.CompileOptions(compute_dtype=dtype)
    program = npu_compiler.compile(extract_ir(module, (example,)), target=backend.target, options=options)
    state = {**dict(module.named_buffers()), **module.state_dict()}
    weights = load_weights(state, program, backend, strict=False)
    found = Executor(program, backend).run({program.input_specs[0].name: example.numpy()}, weights)
    return program, [torch.from_numpy(buffer.to_numpy()).float() for buffer in found.values()]
