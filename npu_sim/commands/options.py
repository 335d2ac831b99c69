"""The options and arguments that several commands share, each declared once with its help."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def _force_cpu_level(level: str | None) -> str | None:
    """Through the environment: the kernels are compiled and loaded once a process, and its children agree with it."""
    if level is not None:
        os.environ["NPU_SIM_CPU_LEVEL"] = level
    return level


IRFile = Annotated[Path, typer.Argument(metavar="IR", help="IR file (JSON), from `npu-sim extract` or torch_ir.")]
ProgramFile = Annotated[Path, typer.Argument(metavar="PROGRAM", help="Compiled program (.npubin).")]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Run the program's code even if neither you nor anyone you trust made it."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Compute dtype: float16, bfloat16 or float32. Default: depends on the model's weights.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights", "-w", metavar="FILE", help="Weights: .safetensors (or a folder of them), .npz, .pt or .pth."
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "-i",
        metavar="NAME=FILE.npy",
        help="Input array; repeatable. Or one .npz file with all inputs. Default: random inputs.",
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="cpu, metal, metal-emulator, cuda or cuda:N. Default: the best one on this machine.",
    ),
]
CPULevel = Annotated[
    str | None,
    typer.Option(
        "--cpu-level",
        metavar="LEVEL",
        callback=_force_cpu_level,
        help="Instruction set of the CPU kernels, such as x86-64-v3. Default: the best one of this machine.",
    ),
]
Fast = Annotated[bool, typer.Option("--fast", help="Run --device metal-emulator without its memory checks.")]
NoTune = Annotated[
    bool,
    typer.Option(
        "--no-tune", help="On the CPU, use the default kernels instead of those that measurements found the fastest."
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, metavar="INTEGER", help="Random seed. Default: a new one each time.")
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
