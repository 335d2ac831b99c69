"""`QuantizeOptions`: options for the quantization of a language model. This module imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import COMPUTE_DTYPES
from npu_compiler.graph.quantization import METHODS, NAMED_FORMATS
from npu_sim.checkpoints.bits import COMPRESSED_CODES

SAMPLES = 64


@dataclass(frozen=True)
class QuantizeOptions:
    """Options of `quantize` for rounding the weights of a language model.

    Attributes:
        weights: `int4`, `int8` or `fp8` (float8 e4m3).
        group: Number of consecutive weights of a row that share a scale; 0 means the whole row. Default: 128 for int4,
            or the next smaller size that divides all rows; else the whole row.
        zero_points: Whether each group of integers also has a zero point, for weights that are not centred on 0.
        method: `rtn` rounds each weight to the nearest; `gptq` also compensates each error by the weights of the row
            that are still to be rounded. Default: `gptq` with a calibration text, else `rtn`.
        search: Whether to clip each group's range so that the squared error of its weights is least; `gptq` always
            does.
        calibrate: A text of the kinds that the model is going to read: 50,000 tokens, and for `tune` some megabytes.
            None: no calibration.
        samples: Maximum number of parts of the text, of up to 1024 tokens each, that rounding uses.
        written: Number of further parts that the model writes itself, so that other texts lose less. Needs a
            calibration text, from whose tokens they begin.
        keep_worst: Number of layers to keep in 16 bits: those with the greatest errors.
        tune: Number of training steps that bring the quantized model's predictions near the original's, on as much of
            the calibration text as these steps can read. For GPUs: on a CPU a step takes minutes. Memory must hold the
            whole model six times in float32.
        dtype: Dtype of scales and of everything that is not quantized: `float16`, `bfloat16` or `float32`. Default: the
            model's own if it has 16 bits, bfloat16 for a GGUF file, else float16.
        device: `cpu` or `gpu`, on which PyTorch computes. Default: a GPU that PyTorch can use, else the CPU.
        force: Replace a folder that is not empty.
    """

    weights: str = "int4"
    group: int | None = None
    zero_points: bool = False
    method: str | None = None
    search: bool = False
    calibrate: str | None = None
    samples: int = SAMPLES
    written: int = 0
    keep_worst: int = 0
    tune: int = 0
    dtype: str | None = None
    device: str | None = None
    force: bool = False

    def check(self) -> None:
        """Raise `InputError` if options are unknown, out of range, or contradict each other."""
        for what, name, names in (
            ("weights", self.weights, NAMED_FORMATS),
            ("method", self.method, METHODS),
            ("dtype", self.dtype, COMPUTE_DTYPES),
        ):
            if name is not None and name not in names:
                raise InputError(f"unknown {what} '{name}'; choose one of {', '.join(names)}")
        format = NAMED_FORMATS[self.weights]
        if format.codes not in COMPRESSED_CODES:
            usable = ", ".join(name for name, row in NAMED_FORMATS.items() if row.codes in COMPRESSED_CODES)
            raise InputError(f"a model folder cannot hold weights in {self.weights}; choose one of {usable}")
        if self.zero_points and format.code_format.is_float:
            raise InputError(f"{self.weights} weights have no zero points")
        if self.samples < 1 or self.keep_worst < 0:
            raise InputError("the number of samples must be at least 1, and that of layers to keep at least 0")
        if self.written < 0 or self.tune < 0:
            what = "parts to write" if self.written < 0 else "steps of tuning"
            raise InputError(f"the number of {what} must be at least 0")
        if self.calibrate is None:
            if self.method == "gptq":
                raise InputError("the method gptq needs a calibration text")
            if self.written:
                raise InputError("writing text needs a calibration text to begin from")
            if self.tune:
                raise InputError("tuning needs a calibration text")
