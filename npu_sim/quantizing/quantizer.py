"""`quantize`: a language model's linear layers to few bits, one after the other, into a new folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from npu_compiler.errors import InputError, NPUError, WeightError
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.graph.quantization import METHODS, NAMED_FORMATS, QuantizedArray, QuantizedFormat
from npu_runtime.pytorch import require_torch
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.graph import dense_model
from npu_sim.llm.loading import checkpoint_path, load_checkpoint
from npu_sim.quantizing.compensation import compensated, matched
from npu_sim.quantizing.compressed_folder import check_output, replaced_folder, write_model
from npu_sim.quantizing.layerwise import Layerwise, computing_device, moments
from npu_sim.quantizing.report import LayerReport, Report, layer_report, size_of
from npu_sim.quantizing.rounding import RANGE, SEARCH, nearest
from npu_sim.quantizing.written_text import write_text

SAMPLES, SAMPLE_LENGTH = 64, 1024
_GROUP_SIZES = (32, 64, 96, 128, 192, 256)
Progress = Callable[[int, int], None]


def quantize(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    weights: str = "int4",
    group: int | None = None,
    zero_points: bool = False,
    method: str | None = None,
    search: bool = False,
    calibrate: str | None = None,
    samples: int = SAMPLES,
    written: int = 0,
    keep_worst: int = 0,
    tune: int = 0,
    dtype: str | None = None,
    device: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Quantize the linear layers of a language model and write it as a Hugging Face folder (compressed-tensors).

    Embeddings, the LM head and norms stay in 16 bits. The folder can be opened by `npu-sim generate`, transformers and
    vLLM.

    Args:
        model: A model folder, a Hugging Face id, a .gguf file or a shorthand, as for `npu-sim generate`. Weights that
            are in few bits already are dequantized, and so rounded a second time.
        output: The folder to write.
        weights: `int4`, `int8` or `fp8` (float8 e4m3).
        group: Number of consecutive weights of a row that share a scale; 0 means the whole row. Default: 128 for int4,
            or the next smaller size that divides all rows; else the whole row.
        zero_points: Whether each group of integers also has a zero point, for weights that are not around 0.
        method: `rtn` rounds each weight to the nearest; `gptq` also compensates each error by the weights of the row
            that are still to be rounded. Default: `gptq` with a calibration text, else `rtn`.
        search: Whether to clip each group where the squared error of its weights is least; `gptq` always does.
        calibrate: A text of the kinds that the model is going to read: 50,000 tokens, and for `tune` some megabytes.
        samples: Maximum number of parts of the text that rounding uses, of up to 1024 tokens each.
        written: Number of further parts that the model writes itself, so that other texts lose less. Needs a
            calibration text, from whose tokens it begins.
        keep_worst: Number of layers to keep in 16 bits: those with the greatest errors.
        tune: Steps of training that bring the quantized model's predictions near the original's, with as much of the
            calibration text as they can read. For GPUs: on a CPU a step takes minutes. The whole model must fit in
            memory six times, in float32.
        dtype: Of scales and all that is not quantized: `float16`, `bfloat16` or `float32`. Default: the model's own if
            it has 16 bits, bfloat16 for a GGUF file, else float16.
        device: `cpu` or `gpu`: what computes, through PyTorch. Default: a GPU that PyTorch can use, else the CPU.
        force: Replace a folder that is not empty.
        progress: Called with (parts done, parts in all); a part is a layer, a step of tuning, or all writing.

    Returns:
        The errors of all layers before tuning, and the sizes.

    Raises:
        InputError: an argument does not fit the model, or cannot be used; nothing is written then.
        WeightError: a weight holds values that are not finite.
        NPUError: tuning has failed, or the GPU has too little memory.
    """
    require_torch("quantizing a model")
    path = Path(output)
    _check_choices(weights, zero_points, method, calibrate, samples, written, keep_worst, tune, dtype)
    computing_device(device)
    check_output(path, force)
    stored = load_checkpoint(model)
    checkpoint = load_checkpoint(model, "float32", "none")
    narrow = dtype or stored.dtype
    named = NAMED_FORMATS[weights]
    network = Layerwise(checkpoint, device)
    if not network.shapes:
        kind = checkpoint.config.model_type
        raise InputError(f"{checkpoint.name} (model type '{kind}') has no layers that can be quantized")
    wanted = _fitting_group(network, named.group) if group is None else group
    format = QuantizedFormat(named.codes, wanted, narrow, "zero_point" if zero_points else "none")
    _check_shapes(network, format)
    if keep_worst >= len(network.shapes):
        raise InputError(
            f"keeping {keep_worst} layers in 16 bits leaves nothing to quantize: there are {len(network.shapes)} layers"
        )
    chosen = method or ("rtn" if calibrate is None else "gptq")
    tokens = None if calibrate is None else calibration_tokens(checkpoint, calibrate)
    given = ids = None if tokens is None else calibration_ids(checkpoint, tokens, samples)
    before = 1 if written else 0
    parts = before + len(network.shapes) + tune
    arrays: dict[str, QuantizedArray] = {}
    layers = []
    with _enough_memory("quantizing"):
        if written and given is not None:
            ids = with_written(checkpoint, given, written, device)
            if progress is not None:
                progress(before, parts)
        for array, layer in quantized_layers(network, format, ids, compensate=chosen == "gptq", search=search):
            arrays[layer.name] = array
            layers.append(layer)
            if progress is not None:
                progress(before + len(layers), parts)
    report = Report(
        model=checkpoint.name,
        layers=tuple(layers),
        kept=(),
        method=chosen,
        calibration_tokens=0 if ids is None else ids.numel(),
        requantized=bool(stored.quantization),
        group=format.group,
        usual_group=named.group if group is None else format.group,
    ).keeping_worst(keep_worst)
    source = checkpoint_path(model)
    kept = {name: array for name, array in arrays.items() if name not in report.kept}
    changed: dict[str, torch.Tensor] = {}
    if tune and tokens is not None:
        from npu_sim.quantizing.tuning import MOST_WRITTEN, ROWS, Tuner

        def tell(steps: int) -> None:
            if progress is not None:
                progress(parts - tune + steps, parts)

        with _enough_memory("tuning"):
            text = calibration_ids(checkpoint, tokens, max(samples, tune * ROWS))
            tuner = Tuner(checkpoint, text, min(MOST_WRITTEN, tune * ROWS), device)
            tuned = tuner.tune(kept, tune, tell)
        kept, changed = tuned.arrays, tuned.others
        report = replace(report, tuning_steps=tune, divergences=tuned.divergences)
    with replaced_folder(path) as made:
        size = write_model(made, checkpoint, source, kept, changed, list(network.shapes), narrow)
    others = size - size_of(report.layers, report.kept)
    return replace(report, bytes_before=others + sum(x.bytes_before for x in layers), bytes_after=size)


def _check_choices(
    weights: str,
    zero_points: bool,
    method: str | None,
    calibrate: str | None,
    samples: int,
    written: int,
    keep_worst: int,
    tune: int,
    dtype: str | None,
) -> None:
    if weights not in NAMED_FORMATS:
        raise InputError(f"unknown weights '{weights}'; choose one of {', '.join(NAMED_FORMATS)}")
    if method is not None and method not in METHODS:
        raise InputError(f"unknown method '{method}'; choose one of {', '.join(METHODS)}")
    if zero_points and weights == "fp8":
        raise InputError("fp8 weights have no zero points")
    if method == "gptq" and calibrate is None:
        raise InputError("the method gptq needs a calibration text")
    if samples < 1 or keep_worst < 0:
        raise InputError("the number of samples must be at least 1, and that of layers to keep at least 0")
    if written < 0 or written and calibrate is None:
        raise InputError(
            "writing text needs a calibration text to begin from"
            if written > 0
            else "the number of parts to write must be at least 0"
        )
    if tune < 0 or tune and calibrate is None:
        raise InputError(
            "tuning needs a calibration text" if tune > 0 else "the number of steps of tuning must be at least 0"
        )
    if dtype is not None and dtype not in (*HALF_DTYPES, "float32"):
        raise InputError(f"unknown dtype '{dtype}'; choose one of float16, bfloat16, float32")


def _fitting_group(network: Layerwise, usual: int) -> int:
    """The usual group size or, where it does not divide all rows, the largest smaller one that does."""
    sizes = sorted((size for size in _GROUP_SIZES if size < usual), reverse=True)
    rows = [k for _, k in network.shapes.values()]
    fitting = (size for size in (usual, *sizes) if usual and all(k % size == 0 for k in rows))
    return next(fitting, usual)


def _check_shapes(network: Layerwise, format: QuantizedFormat) -> None:
    """Refuse a group size that does not divide all rows, and say which ones do."""
    shapes = network.shapes
    for name, shape in shapes.items():
        if problem := format.problem(shape):
            fitting = [size for size in _GROUP_SIZES if all(k % size == 0 for _, k in shapes.values())]
            advice = f"; group sizes that fit all layers: {', '.join(map(str, fitting))}, or 0 for whole rows"
            raise InputError(f"'{name}' cannot be quantized: {problem}{advice}")


def calibration_tokens(checkpoint: Checkpoint, text: str) -> list[int]:
    """The token ids of a calibration text.

    Raises:
        InputError: there are fewer than two.
    """
    tokens: list[int] = checkpoint.tokenizer.encode(text)
    if len(tokens) < 2:
        raise InputError("the calibration text is empty")
    return tokens


def calibration_ids(checkpoint: Checkpoint, tokens: list[int], samples: int) -> torch.Tensor:
    """[samples, length]: parts of a text's token ids that are spread over it evenly, as many as it has at most."""
    length = min(SAMPLE_LENGTH, len(tokens), checkpoint.config.max_position_embeddings)
    count = min(samples, len(tokens) // length)
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return torch.tensor([tokens[start : start + length] for start in starts])


def with_written(checkpoint: Checkpoint, ids: torch.Tensor, count: int, device: str | None = None) -> torch.Tensor:
    """Calibration text with parts that the model writes itself.

    Args:
        checkpoint: Opened for float32, with weights that are not in few bits.
        ids: Token ids [samples, length].
        count: Number of parts to write.
        device: As for `computing_device`.

    Returns:
        Token ids [samples + count, length].
    """
    chosen = computing_device(device)
    model = dense_model(checkpoint, chosen).requires_grad_(False)
    made = write_text(model, ids.to(chosen), count, ids.shape[1])
    return torch.cat([ids, made.to(ids.device)])


def quantized_layers(
    network: Layerwise,
    format: QuantizedFormat,
    ids: torch.Tensor | None = None,
    *,
    compensate: bool = False,
    search: bool = False,
) -> Iterator[tuple[QuantizedArray, LayerReport]]:
    """The weights of a model's linear layers in a format, one after the other, each with its errors.

    Args:
        ids: Of the calibration text, [samples, length]; only with them can errors be compensated.
        compensate, search: `method == "gptq"` and `search` of `quantize`.

    Raises:
        WeightError: a weight holds values that are not finite.
    """
    fractions = SEARCH if search or compensate else RANGE
    if ids is None:
        return _by_weights(network, format, fractions)
    return _by_layers(network, ids, format, fractions, compensate)


def _by_weights(
    network: Layerwise, format: QuantizedFormat, fractions: tuple[float, ...]
) -> Iterator[tuple[QuantizedArray, LayerReport]]:
    """Each weight by itself, rounded to the nearest."""
    for name in network.shapes:
        weight = network.weight(name)
        with _concerning(name):
            array = nearest(weight, format, fractions)
        yield array, layer_report(name, weight, array, _dequantized(array, weight), None)


def _by_layers(
    network: Layerwise, ids: torch.Tensor, format: QuantizedFormat, fractions: tuple[float, ...], compensate: bool
) -> Iterator[tuple[QuantizedArray, LayerReport]]:
    """The weights in the order of execution; each sees the inputs that the quantized ones before it produce."""
    hidden = exact = network.embedded(ids)
    for layer in network.layers(ids.shape[1]):
        original = layer.copy()
        for names in layer.stages(hidden[0]):
            hessian, shift = moments(layer.inputs(names[0], hidden), original.inputs(names[0], exact))
            for name in names:
                weight = layer.linear(name).weight.data
                with _concerning(name):
                    if compensate:
                        array = compensated(matched(weight, hessian, shift), hessian, format, fractions)
                    else:
                        array = nearest(weight, format, fractions)
                dequantized = _dequantized(array, weight)
                yield array, layer_report(name, weight, array, dequantized, hessian)
                layer.linear(name).weight.data = dequantized
        hidden = [layer(batch) for batch in hidden]
        exact = [original(batch) for batch in exact]


def _dequantized(array: QuantizedArray, weight: torch.Tensor) -> torch.Tensor:
    """On the device of the weight that it was."""
    return numpy_to_tensor(array.dequantize()).to(weight.device)


@contextmanager
def _enough_memory(purpose: str) -> Iterator[None]:
    """Say so where the GPU has too little."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        problem = f"the GPU's memory is too small for {purpose} this model; the device cpu may have enough"
        raise NPUError(problem) from error


@contextmanager
def _concerning(name: str) -> Iterator[None]:
    """Name the weight in an error about it."""
    try:
        yield
    except InputError as error:
        raise WeightError(f"'{name}' cannot be quantized: {error}") from error
