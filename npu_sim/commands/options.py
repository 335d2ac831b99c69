"""The options and arguments that several commands share, each declared once with its help text."""

from __future__ import annotations

import math
import os
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer

from npu_compiler.errors import InputError
from npu_sim.commands import checks
from npu_sim.commands.completion import (
    beginning,
    cpu_levels,
    devices,
    fusions,
    ir_files,
    language_models,
    programs,
    programs_and_modules,
)


def _ir_file(path: Path) -> Path:
    return checks.check_file(path, "IR file")


def _program_file(path: Path) -> Path:
    return checks.check_file(path, "program")


def _force_cpu_level(level: str | None) -> str | None:
    """Set the environment variable that forces the CPU's instruction set, and return the level; None changes nothing.

    A process loads its kernels only once, and child processes inherit the variable.
    """
    if level is not None:
        from npu_runtime.cpu.levels import VARIABLE, forced_on, this_cpu

        forced_on(this_cpu(), level)
        os.environ[VARIABLE] = level
    return level


def _top_p(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise InputError(f"--top-p must be above 0 and at most 1, not {value}")
    return value


def _temperature(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"--temperature must be a finite number of at least 0, not {value}")
    return value


def _repetition_penalty(value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise InputError(f"--repetition-penalty must be a finite number above 0, not {value}")
    return value


def count_option(text: str, most: int | None = None) -> Any:
    """Return a Typer option for a positive integer.

    Args:
        text: The help text.
        most: The greatest value allowed. None: no limit.
    """
    return typer.Option(min=1, max=most, metavar="INTEGER", help=text)


def name_option(*flags: str, what: str, names: str, metavar: str, text: str) -> Any:
    """Return a Typer option whose value must be one of a list of names, which Tab completes.

    Args:
        flags: The option's own names. Default: that of the parameter.
        what: The kind of thing that is named, for the error message.
        names: Location of the list, as `module:CONSTANT`; the module is imported when the list is needed.
        metavar: Placeholder of the value in the help.
        text: The help text.
    """

    def check(name: str | None) -> str | None:
        allowed = resolve_name(names)
        if name is not None and name not in allowed:
            raise InputError(f"unknown {what} '{name}'; choose one of {', '.join(allowed)}")
        return name

    def complete(incomplete: str) -> list[str]:
        return beginning(incomplete, resolve_name(names))

    return typer.Option(*flags, metavar=metavar, callback=check, autocompletion=complete, help=text)


IRFile = Annotated[
    Path,
    typer.Argument(
        metavar="IR",
        callback=_ir_file,
        autocompletion=ir_files,
        help="IR file (JSON), from `npu-sim extract` or torch_ir; or an ONNX file.",
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME=SIZE",
        help="For ONNX: size of a dynamic dimension, such as batch=4, or shape of an input, such as x=1x3x224x224; "
        "repeatable.",
    ),
]
ProgramFile = Annotated[
    Path,
    typer.Argument(
        metavar="PROGRAM", callback=_program_file, autocompletion=programs, help="Compiled program (.npubin)."
    ),
]
RunnableFile = Annotated[
    Path,
    typer.Argument(
        metavar="PROGRAM",
        callback=_program_file,
        autocompletion=programs_and_modules,
        help="Compiled program (.npubin), saved module (.npumod) or ONNX file.",
    ),
]
LanguageModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", autocompletion=language_models, help="Hugging Face id, model folder, .gguf file, or smollm2."
    ),
]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Run the program's code even if neither you nor anyone you trust made it."),
]
Dtype = Annotated[
    str | None,
    name_option(
        what="compute dtype",
        names="npu_compiler.graph.dtypes:COMPUTE_DTYPES",
        metavar="DTYPE",
        text="Compute dtype: float16, bfloat16 or float32. Default: depends on the model's weights.",
    ),
]
SimulatedDtype = Annotated[
    str | None,
    name_option(
        what="dtype",
        names="npu_sim.commands.int8:DTYPES",
        metavar="DTYPE",
        text="Compute dtype: float16, bfloat16 or float32; or int8, for the time of the quantized network, which needs "
        "no calibration. Default: depends on the model's weights.",
    ),
]
Quantization = Annotated[
    str,
    name_option(
        what="quantization",
        names="npu_sim.llm.loading:QUANTIZATIONS",
        metavar="FORMAT",
        text="How weights are stored: checkpoint (as the file stores them), none (widened to the compute dtype), or "
        "int4, int8 or fp8 (rounded when loaded).",
    ),
]
Activations = Annotated[
    str,
    name_option(
        what="format of activations",
        names="npu_sim.llm.loading:ACTIVATIONS",
        metavar="FORMAT",
        text="What inputs of layers with quantized weights are rounded to, by row: int8, fp8, none, or checkpoint (as "
        "its config says). CPU and CUDA.",
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel",
        min=1,
        metavar="INTEGER",
        help="Divide the model among this many devices of a kind, from --device on, a process each.",
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]DIR",
        help="PEFT's LoRA adapter, added to the weights. serve: with names, several, for requests to choose.",
    ),
]
KVCache = Annotated[
    str,
    name_option(
        what="format of a KV cache",
        names="npu_sim.llm.loading:KV_CACHES",
        metavar="FORMAT",
        text="Store the KV cache as int8 or fp8, with a scale for each token and head, or none: in the compute dtype. "
        "CPU and npu:CHIP only.",
    ),
]
ActivationFormat = Annotated[
    str | None,
    name_option(
        what="format of activations",
        names="npu_compiler.graph.quantization:NAMED_ROW_FORMATS",
        metavar="FORMAT",
        text="With --quantization: round the inputs of these layers to int8 or fp8, by row. CPU and CUDA.",
    ),
]
WeightFormat = Annotated[
    str | None,
    name_option(
        what="quantization",
        names="npu_compiler.graph.quantization:NAMED_FORMATS",
        metavar="FORMAT",
        text="Store the weights of linear layers as int4, int8 or fp8. Default: in the compute dtype.",
    ),
]
DisabledFusions = Annotated[
    list[str] | None,
    typer.Option("--disable-fusion", metavar="NAME", autocompletion=fusions, help="Disable a fusion; repeatable."),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        "-w",
        metavar="FILE",
        callback=checks.check_weights,
        help="Weights: .safetensors (or a folder of them), .npz, .pt, .pth or .onnx.",
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "-i",
        metavar="NAME=FILE.npy",
        callback=checks.check_inputs,
        help="Input array; repeatable. Or one .npz file with all inputs. Default: random inputs.",
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        callback=checks.check_device,
        autocompletion=devices,
        help="cpu, metal, metal-emulator (or, without its memory checks, metal-emulator-fast), cuda, cuda:N or "
        "npu:CHIP. Default: the best one on this machine.",
    ),
]
CPULevel = Annotated[
    str | None,
    typer.Option(
        "--cpu-level",
        metavar="LEVEL",
        callback=_force_cpu_level,
        autocompletion=cpu_levels,
        help="Instruction set of the CPU kernels, such as x86-64-v3. Default: the best one of this machine.",
    ),
]
NoTune = Annotated[
    bool,
    typer.Option(
        "--no-tune", help="On the CPU, use the default kernels instead of those that measurements found the fastest."
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        "-t",
        metavar="FLOAT",
        callback=_temperature,
        help="Sampling temperature; 0 means greedy decoding.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="FLOAT",
        callback=_top_p,
        help="Nucleus sampling: smallest set of tokens with this total probability.",
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        metavar="FLOAT",
        callback=_repetition_penalty,
        help="Divides the positive logits of tokens that have occurred, and multiplies the negative ones; "
        "1: leaves them. Default: the checkpoint's.",
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, metavar="INTEGER", help="Random seed. Default: a new one each time.")
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        callback=checks.check_output,
        help="Also write a trace (JSON), which ui.perfetto.dev shows.",
    ),
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
