"""The compiler: from the IR of a PyTorch model to a program on disk, with the graph visible after every stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ir_builder import IRBuilder
from torch import nn
from torch_ir import extract_ir

import npu_compiler
from npu_compiler import CompiledProgram, ConstraintError, IRError, ProgramFormatError, print_graph, trace_stages

MODEL = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5))


@pytest.fixture
def ir(tmp_path: Path) -> Path:
    """A file of IR, as `torch_ir` writes it."""
    with torch.no_grad():
        extracted = extract_ir(MODEL.eval().to("meta"), (torch.empty(1, 3, 8, 8, device="meta"),), model_name="small")
    path = tmp_path / "model_ir.json"
    path.write_text(json.dumps(extracted.to_dict(), default=str))
    return path


def test_every_stage_can_be_looked_at(ir: Path) -> None:
    stages = dict(trace_stages(ir))
    assert "aten.batch_norm" in print_graph(stages["read"])
    assert "aten.batch_norm" not in print_graph(stages["fold_batch_norm"])  # it is in the convolution's weights now
    fused = print_graph(stages["fuse"])
    assert "npu.conv2d" in fused and "relu" in fused and "aten.relu" not in fused


def test_a_program_is_a_list_of_kernel_calls_over_planned_memory(ir: Path) -> None:
    program = npu_compiler.compile(ir)
    assert program.name == "small" and program.compute_dtype == "float16"
    assert [call.kernel for call in program.kernels] == ["conv2d_kernel", "matmul_vec_kernel"]
    arena = [buffer for buffer in program.plan.buffers.values() if buffer.kind == "arena"]
    assert all(buffer.offset + buffer.size_bytes <= program.plan.arena_bytes for buffer in arena)
    assert "by kernel: conv2d_kernel 1, matmul_vec_kernel 1" in program.describe()


def test_a_saved_program_is_the_same_program(ir: Path, tmp_path: Path) -> None:
    program = npu_compiler.compile(ir)
    program.save(tmp_path / "model.npubin")
    assert CompiledProgram.load(tmp_path / "model.npubin").describe() == program.describe()


def test_a_changed_file_is_not_loaded(ir: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.npubin"
    npu_compiler.compile(ir).save(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ProgramFormatError, match="corrupted"):
        CompiledProgram.load(path)


def test_all_that_the_device_lacks_is_said_at_once() -> None:
    g = IRBuilder()
    x = g("aten.linalg_inv.default", g.input("x", 4, 4))
    ir = g.output(g("aten.linalg_inv.default", g("aten.relu.default", x))).ir()
    with pytest.raises(ConstraintError) as raised:
        npu_compiler.compile(ir)
    assert len(raised.value.violations) == 2 and "aten.linalg_inv.default" in str(raised.value)


def test_a_malformed_file_names_what_is_wrong(ir: Path) -> None:
    content = json.loads(ir.read_text())
    del content["nodes"][0]["op_type"]
    with pytest.raises(IRError, match="op_type"):
        npu_compiler.compile(content)
