"""`quantize`: quantization of a language model's linear layers, one after the other, into a new folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from npu_compiler.errors import InputError, NPUError, WeightError
from npu_compiler.graph.quantization import NAMED_FORMATS, QuantizedArray, QuantizedFormat
from npu_runtime.pytorch import require_torch
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.graph import dense_model
from npu_sim.llm.loading import checkpoint_path, load_checkpoint
from npu_sim.quantizing.compensation import compensated, matched
from npu_sim.quantizing.compressed_folder import check_output, replaced_folder, write_model
from npu_sim.quantizing.layerwise import Layerwise, computing_device, moments
from npu_sim.quantizing.options import QuantizeOptions
from npu_sim.quantizing.report import LayerReport, Report, layer_report, size_of
from npu_sim.quantizing.rounding import RANGE, SEARCH, nearest
from npu_sim.quantizing.written_text import write_text

if TYPE_CHECKING:
    from npu_sim.quantizing.tuning import Tuned

SAMPLE_LENGTH = 1024
_GROUP_SIZES = (32, 64, 96, 128, 192, 256)
Progress = Callable[[int, int], None]


def quantize(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: QuantizeOptions | None = None,
    progress: Progress | None = None,
) -> Report:
    """Quantize the linear layers of a language model and write it as a Hugging Face folder (compressed-tensors).

    Embeddings, the LM head and norms stay in 16 bits. The folder can be opened by `npu-sim generate`, transformers and
    vLLM.

    Args:
        model: A model folder, a Hugging Face id, a .gguf file or a shorthand, as for `npu-sim generate`. Weights that
            are quantized already are dequantized first, and so rounded a second time.
        output: The folder to write.
        options: Format, method, calibration text and the rest; by default int4, rounded to the nearest.
        progress: Called with (parts done, parts in all); a part is a layer, a step of tuning, or all writing of text.
            None: no progress is reported.

    Returns:
        The errors of all layers before tuning, and the sizes.

    Raises:
        InputError: an option does not fit the model, or cannot be used; nothing is written then.
        WeightError: a weight holds values that are not finite.
        NPUError: tuning has failed, or the GPU has too little memory.
    """
    options = options or QuantizeOptions()
    options.check()
    require_torch("quantizing a model")
    path = Path(output)
    computing_device(options.device)
    check_output(path, options.force)
    stored = load_checkpoint(model)
    checkpoint = load_checkpoint(model, "float32", "none")
    narrow = options.dtype or stored.dtype
    network = Layerwise(checkpoint, options.device)
    format = _chosen_format(checkpoint, network, options, narrow)
    tokens = None if options.calibrate is None else calibration_tokens(checkpoint, options.calibrate)
    arrays, report = _rounded(checkpoint, network, format, tokens, options, progress)
    report = replace(report, requantized=bool(stored.quantization)).keeping_worst(options.keep_worst)
    source = checkpoint_path(model)
    kept = {name: array for name, array in arrays.items() if name not in report.kept}
    changed: dict[str, torch.Tensor] = {}
    if options.tune and tokens is not None:
        tuned = _tuned(checkpoint, kept, tokens, options, progress, len(report.layers) + bool(options.written))
        kept, changed = tuned.arrays, tuned.others
        report = replace(report, tuning_steps=options.tune, divergences=tuned.divergences)
    with replaced_folder(path) as folder:
        size = write_model(folder, checkpoint, source, kept, changed, list(network.shapes), narrow)
    others = size - size_of(report.layers, report.kept)
    return replace(report, bytes_before=others + sum(x.bytes_before for x in report.layers), bytes_after=size)


def _chosen_format(
    checkpoint: Checkpoint, network: Layerwise, options: QuantizeOptions, scales: str
) -> QuantizedFormat:
    """Return the format for all layers that are quantized.

    Args:
        scales: Dtype of the scales.

    Raises:
        InputError: there is no layer to quantize, or a row is not a whole number of groups.
    """
    if not network.shapes:
        kind = checkpoint.config.model_type
        raise InputError(f"{checkpoint.name} (model type '{kind}') has no layers that can be quantized")
    named = NAMED_FORMATS[options.weights]
    group = _fitting_group(network, named.group) if options.group is None else options.group
    format = QuantizedFormat(named.codes, group, scales, "zero_point" if options.zero_points else "none")
    _check_shapes(network, format)
    if options.keep_worst >= len(network.shapes):
        raise InputError(
            f"keeping {options.keep_worst} layers in 16 bits leaves nothing to quantize: there are "
            f"{len(network.shapes)} layers"
        )
    return format


def _rounded(
    checkpoint: Checkpoint,
    network: Layerwise,
    format: QuantizedFormat,
    tokens: list[int] | None,
    options: QuantizeOptions,
    progress: Progress | None,
) -> tuple[dict[str, QuantizedArray], Report]:
    """Return the quantized weights of all layers by name, and a report of their errors.

    Args:
        tokens: Token ids of the calibration text. None: no calibration.
    """
    method = options.method or ("rtn" if tokens is None else "gptq")
    ids = None if tokens is None else calibration_ids(checkpoint, tokens, options.samples)
    before = 1 if options.written else 0
    parts = before + len(network.shapes) + options.tune
    arrays: dict[str, QuantizedArray] = {}
    layers: list[LayerReport] = []
    with _enough_memory("quantizing"):
        if options.written and ids is not None:
            ids = with_written(checkpoint, ids, options.written, options.device)
            if progress is not None:
                progress(before, parts)
        compensate = method == "gptq"
        for array, layer in quantized_layers(network, format, ids, compensate=compensate, search=options.search):
            arrays[layer.name] = array
            layers.append(layer)
            if progress is not None:
                progress(before + len(layers), parts)
    return arrays, Report(
        model=checkpoint.name,
        layers=tuple(layers),
        kept=(),
        method=method,
        calibration_tokens=0 if ids is None else ids.numel(),
        requantized=False,
        group=format.group,
        usual_group=NAMED_FORMATS[options.weights].group if options.group is None else format.group,
    )


def _tuned(
    checkpoint: Checkpoint,
    arrays: Mapping[str, QuantizedArray],
    tokens: list[int],
    options: QuantizeOptions,
    progress: Progress | None,
    done: int,
) -> Tuned:
    """Train the quantized model and return its new weights.

    Args:
        done: Number of parts of the work that were done before, for the progress.
    """
    from npu_sim.quantizing.tuning import MOST_WRITTEN, ROWS, Tuner

    def report(steps: int) -> None:
        if progress is not None:
            progress(done + steps, done + options.tune)

    with _enough_memory("tuning"):
        text = calibration_ids(checkpoint, tokens, max(options.samples, options.tune * ROWS))
        tuner = Tuner(checkpoint, text, min(MOST_WRITTEN, options.tune * ROWS), options.device)
        return tuner.tune(dict(arrays), options.tune, report)


def _fitting_group(network: Layerwise, usual: int) -> int:
    """Return the usual group size or, if it does not divide all rows, the largest smaller one that does.

    If none does, the usual one is returned, which is refused later.
    """
    sizes = sorted((size for size in _GROUP_SIZES if size < usual), reverse=True)
    rows = [k for _, k in network.shapes.values()]
    fitting = (size for size in (usual, *sizes) if usual and all(k % size == 0 for k in rows))
    return next(fitting, usual)


def _check_shapes(network: Layerwise, format: QuantizedFormat) -> None:
    """Raise `InputError` if the group size does not divide all rows; the message lists the sizes that do."""
    shapes = network.shapes
    for name, shape in shapes.items():
        if problem := format.problem(shape):
            fitting = [size for size in _GROUP_SIZES if all(k % size == 0 for _, k in shapes.values())]
            advice = f"; group sizes that fit all layers: {', '.join(map(str, fitting))}, or 0 for whole rows"
            raise InputError(f"'{name}' cannot be quantized: {problem}{advice}")


def calibration_tokens(checkpoint: Checkpoint, text: str) -> list[int]:
    """Return the token ids of a calibration text.

    Raises:
        InputError: there are fewer than two.
    """
    tokens: list[int] = checkpoint.tokenizer.encode(text)
    if len(tokens) < 2:
        raise InputError("the calibration text is empty")
    return tokens


def calibration_ids(checkpoint: Checkpoint, tokens: list[int], samples: int) -> torch.Tensor:
    """Return at most `samples` parts of a text's token ids, spread evenly over the text: [count, length]."""
    length = min(SAMPLE_LENGTH, len(tokens), checkpoint.config.max_position_embeddings)
    count = min(samples, len(tokens) // length)
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return torch.tensor([tokens[start : start + length] for start in starts])


def with_written(checkpoint: Checkpoint, ids: torch.Tensor, count: int, device: str | None = None) -> torch.Tensor:
    """Return calibration text together with parts that the model writes itself.

    Args:
        checkpoint: The model, opened for float32, with weights that are not quantized.
        ids: Token ids of the calibration text, [samples, length].
        count: Number of parts to write.
        device: Device for `computing_device`. None: its default.

    Returns:
        Token ids [samples + count, length].
    """
    chosen = computing_device(device)
    model = dense_model(checkpoint, chosen).requires_grad_(False)
    written = write_text(model, ids.to(chosen), count, ids.shape[1])
    return torch.cat([ids, written.to(ids.device)])


def quantized_layers(
    network: Layerwise,
    format: QuantizedFormat,
    ids: torch.Tensor | None = None,
    *,
    compensate: bool = False,
    search: bool = False,
) -> Iterator[tuple[QuantizedArray, LayerReport]]:
    """Yield the quantized weights of a model's linear layers, one after the other, each with its errors.

    Args:
        network: The model.
        format: The format to quantize to.
        ids: Token ids of the calibration text, [samples, length]. None: no calibration, so no compensation of errors.
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
    """Yield each weight rounded to the nearest, without regard to its inputs."""
    for name in network.shapes:
        weight = network.weight(name)
        with _concerning(name):
            array = nearest(weight, format, fractions)
        yield array, layer_report(name, weight, array, _dequantized(array, weight), None)


def _by_layers(
    network: Layerwise, ids: torch.Tensor, format: QuantizedFormat, fractions: tuple[float, ...], compensate: bool
) -> Iterator[tuple[QuantizedArray, LayerReport]]:
    """Yield the weights in the order of execution, each rounded for the inputs that the quantized layers produce.

    Args:
        ids: Token ids of the calibration text.
        fractions: Fractions of each group's range to try, as for `rounding.fit`.
        compensate: Whether later columns make up for the rounding errors of earlier ones, else each element is rounded
            by itself.
    """
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
    """Return the dequantized weight on the device of the original one."""
    return numpy_to_tensor(array.dequantize()).to(weight.device)


@contextmanager
def _enough_memory(purpose: str) -> Iterator[None]:
    """Turn PyTorch's out-of-memory error within this context into an `NPUError` that suggests the CPU."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        problem = f"the GPU's memory is too small for {purpose} this model; the device cpu may have enough"
        raise NPUError(problem) from error


@contextmanager
def _concerning(name: str) -> Iterator[None]:
    """Turn an `InputError` within this context into a `WeightError` that names the weight."""
    try:
        yield
    except InputError as error:
        raise WeightError(f"'{name}' cannot be quantized: {error}") from error
