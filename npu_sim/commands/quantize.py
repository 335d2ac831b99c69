"""The commands `quantize`, for language models, and `quantize-network`, for vision models."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from npu_sim.commands.checks import check_file
from npu_sim.commands.completion import vision_models
from npu_sim.commands.console import note, print_json, progress, step
from npu_sim.commands.options import AsJSON, LanguageModelName, name_option
from npu_sim.quantizing.options import QuantizeOptions

if TYPE_CHECKING:
    from npu_sim.quantizing import LayerReport, Report

_SHOWN = 8


def _calibration_file(path: Path | None) -> Path | None:
    return None if path is None else check_file(path, "calibration text")


_OPTIONS = {
    "weights": name_option(
        "--weights",
        "-w",
        what="quantization",
        names="npu_compiler.graph.quantization:NAMED_FORMATS",
        metavar="FORMAT",
        text="Format of the weights: int4, int8 or fp8.",
    ),
    "group": typer.Option(
        min=0,
        metavar="INTEGER",
        help="Number of consecutive weights of a row that share a scale; 0 means the whole row. "
        "Default: 128 for int4, or what divides all rows; else 0.",
    ),
    "zero_points": typer.Option("--zero-points/--symmetric", help="Store a zero point with each scale."),
    "method": name_option(
        what="method",
        names="npu_compiler.graph.quantization:METHODS",
        metavar="NAME",
        text="rtn (round to nearest) or gptq (also compensate rounding errors; needs --calibrate). "
        "Default: gptq with --calibrate, else rtn.",
    ),
    "search": typer.Option("--search", help="Choose each scale by the least squared error, as gptq always does."),
    "samples": typer.Option(
        min=1, metavar="INTEGER", help="Maximum number of parts of the text, of 1024 tokens, for rounding."
    ),
    "written": typer.Option(
        min=0,
        metavar="INTEGER",
        help="Number of further parts that the model writes itself, so that other texts lose less. Needs "
        "--calibrate; on a CPU it takes minutes.",
    ),
    "keep_worst": typer.Option(
        min=0, metavar="INTEGER", help="Number of layers with the largest errors to keep in 16 bits."
    ),
    "tune": typer.Option(
        min=0,
        metavar="INTEGER",
        help="Number of training steps that bring the quantized model's predictions near the original's, such "
        "as 1000. Needs --calibrate and, to be done in minutes, a GPU that PyTorch can use.",
    ),
    "dtype": name_option(
        what="compute dtype",
        names="npu_compiler.graph.dtypes:COMPUTE_DTYPES",
        metavar="DTYPE",
        text="Dtype of scales and of all that is not quantized. Default: the model's own.",
    ),
    "device": name_option(
        what="device",
        names="npu_compiler.graph.quantization:COMPUTING_DEVICES",
        metavar="NAME",
        text="What computes, through PyTorch: cpu or gpu. Default: gpu if PyTorch can use one.",
    ),
    "force": typer.Option("--force", help="Replace the output folder if it is not empty."),
}


def quantize(
    model: LanguageModelName,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Hugging Face model folder to write.")
    ],
    options: Annotated[QuantizeOptions, _OPTIONS],
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=_calibration_file,
            help="Calibration text (UTF-8), of the kinds that the model is going to read; for --tune, some megabytes.",
        ),
    ] = None,
    json: AsJSON = False,
) -> None:
    """Quantize a language model to 8 or 4 bits, as a Hugging Face folder in the compressed-tensors format."""
    from npu_sim.llm.loading import find_checkpoint

    find_checkpoint(model)
    options = replace(options, calibrate=None if calibrate is None else _read_text(calibrate))
    options.check()
    from npu_sim.quantizing import quantize as quantize_model

    with progress(f"quantizing {model}") as show:
        report = quantize_model(model, output, options, show)
    if json:
        print_json({"output": str(output), **report.to_dict()})
        return
    if report.requantized:
        note(f"warning: the weights of {report.model} were in few bits already, and have been rounded a second time")
    if report.group != report.usual_group:
        note(f"{report.group} weights share a scale, since {report.usual_group} do not divide all rows; see --group")
    _show(report)
    if report.divergences is not None:
        before, after = report.divergences
        typer.echo(f"divergence from the original: {before:.4f} nats, after {report.tuning_steps} steps {after:.4f}")
    typer.echo(f"{output}: {_megabytes(report.bytes_after)}, in 16 bits {_megabytes(report.bytes_before)}")


def quantize_network(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", autocompletion=vision_models, help="efficientnet-lite0, resnet18 or resnet50."),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Folder to write, for npu-sim classify --weights."),
    ],
    calibrate: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of photographs, or one, for calibration.")],
    keep_worst: Annotated[int, _OPTIONS["keep_worst"]] = 0,
    force: Annotated[bool, _OPTIONS["force"]] = False,
    json: AsJSON = False,
) -> None:
    """Quantize a vision model's weights and activations to int8."""
    from npu_compiler.errors import InputError
    from npu_sim.quantizing.networks.quantize_model import find_images, quantize_model

    find_images(calibrate)
    if output.exists() and (not output.is_dir() or any(output.iterdir())) and not force:
        raise InputError(f"'{output}' exists and is not empty; --force replaces what is in it")
    with step(f"quantizing {model}"):
        report = quantize_model(model, calibrate, output, keep_worst=keep_worst).report
    if json:
        print_json({"output": str(output), "layers": [asdict(line) for line in report]})
        return
    for line in report[:_SHOWN]:
        kept = " (kept)" if line.kept else ""
        typer.echo(f"{line.signal_to_noise:6.1f} dB  {line.layer.removesuffix('.weight')}{kept}")
    saved = sum(line.saved_bytes for line in report if not line.kept)
    typer.echo(f"{output}: {len(report)} layers, {_megabytes(saved)} less than in 32 bits")


def _read_text(path: Path) -> str:
    from npu_compiler.errors import InputError

    data = path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from None


def _show(report: Report) -> None:
    """Print a table of the layers with the largest quantization errors, with a last row for all layers together."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Layers with the largest errors, of {len(report.layers)}", title_justify="left")
    table.add_column("layer")
    for column in ("weight error", "output error", "stored"):
        table.add_column(column, justify="right")
    for layer in report.worst(max(_SHOWN, len(report.kept))):
        table.add_row(*_row(layer, layer.name in report.kept))
    errors = [layer.weight_error for layer in report.layers]
    outputs = [layer.output_error for layer in report.layers if layer.output_error is not None]
    table.add_section()
    table.add_row(
        "all: mean errors, size",
        f"{sum(errors) / len(errors):.2%}",
        f"{sum(outputs) / len(outputs):.2%}" if outputs else "",
        _megabytes(sum(_stored_bytes(layer, layer.name in report.kept) for layer in report.layers)),
    )
    Console().print(table)


def _row(layer: LayerReport, kept: bool) -> list[str]:
    return [
        layer.name.removeprefix("model.layers.").removesuffix(".weight") + (" (kept)" if kept else ""),
        f"{layer.weight_error:.2%}",
        "" if layer.output_error is None else f"{layer.output_error:.2%}",
        _megabytes(_stored_bytes(layer, kept)),
    ]


def _stored_bytes(layer: LayerReport, kept: bool) -> int:
    return layer.bytes_before if kept else layer.bytes_after


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
