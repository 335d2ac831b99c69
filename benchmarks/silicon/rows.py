"""The measurements (rows), each with the program that was measured."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.silicon.graphs import (
    IR,
    attention,
    erf_ffn,
    gated_ffn,
    gemm,
    integer_convolution,
    integer_pooling,
    materialised_attention,
)
from benchmarks.silicon.models import LANGUAGE_MODELS, prefill, resnet50
from npu_compiler.graph.model import IRGraph


@dataclass(frozen=True)
class Row:
    """A measurement.

    Attributes:
        group: Name of the set that it belongs to.
        chip: Name of the chip.
        name: Name of the measurement.
        graph: Returns the IR.
        dtype: Compute dtype.
        us: Measured time in microseconds.
        rate: Multiply-accumulates per element and cycle if the measurement's setting changes them; 0 if not.
        unfused: Names of the compiler's fusions that the measured program lacks.
        kernels: Beginning of the names of the kernels that were measured, in a program that needs others too.
        launch_us: Cost of a launch. None: that of the chip's file.
        is_compute_only: Whether operands were moved before and after the measured time.
    """

    group: str
    chip: str
    name: str
    graph: Callable[[], IR | IRGraph]
    dtype: str
    us: float
    rate: float = 0.0
    unfused: tuple[str, ...] = ()
    kernels: str = ""
    launch_us: float | None = None
    is_compute_only: bool = False


_PAGED_LAUNCH_US = 6.5  # of a kernel from a library, by its own set; see `fit`


def read(folder: Path) -> list[Row]:
    """Return the measurements of all files, in order."""
    rows: list[Row] = []
    for reader in (_v6e_gemm, _v6e_blocks, _v4_gemm, _tenstorrent, _rk3588, _whole_models):
        rows += reader(folder)
    return rows


def _whole_models(folder: Path) -> Iterator[Row]:
    for line in _table(folder / "end_to_end_models.csv"):
        chip, model, batch = line["chip"], line["model"], int(line["batch"] or 0)
        if model in LANGUAGE_MODELS and chip in ("tpu-v4", "tpu-v6e") and batch == 1:
            tokens, us = int(line["input"].rpartition(" ")[2]), 1e3 * float(line["value"])
            name = f"{chip} {model} {tokens} tokens"
            yield Row("Whole models", chip, name, partial(prefill, model, tokens), "bfloat16", us)
        elif model == "resnet50-v2-7" and chip == "rk3588-npu-1core":
            yield Row("Whole models", "rk3588", "rk3588 resnet50", resnet50, "float16", 1e6 / float(line["value"]))


def _table(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _sizes(line: dict[str, str]) -> tuple[int, int, int]:
    return int(line["m"]), int(line["n"]), int(line["k"])


def _v6e_gemm(folder: Path) -> Iterator[Row]:
    for line in _table(folder / "tpu_v6e_gemm.csv"):
        m, n, k = _sizes(line)
        is_span = "HBM" not in line["scope"]
        group = "v6e GEMM, fusion span" if is_span else "v6e GEMM"
        make, us = partial(gemm, m, n, k), float(line["value"])
        yield Row(group, "tpu-v6e", f"{m}x{k}x{n}", make, "bfloat16", us, is_compute_only=is_span)


def _v6e_blocks(folder: Path) -> Iterator[Row]:
    for line in _table(folder / "tpu_v6e_ffn_attention.csv"):
        us = float(line["value"])
        if line["op"].startswith("ffn"):
            sizes = tuple(int(line[name]) for name in ("tokens", "hidden", "intermediate"))
            make = gated_ffn if line["op"] == "ffn_gated" else erf_ffn
            name = f"{line['op']} {'x'.join(map(str, sizes))}"
            yield Row("v6e FFN", "tpu-v6e", name, partial(make, *sizes), "bfloat16", us)
        else:
            keys = ("q_heads_x_seqs", "kv_heads_x_seqs", "q_len", "kv_len", "head_dim")
            heads, shared, queries, kept, width = (int(line[name]) for name in keys)
            name = f"{line['op']} {'x'.join(line[name] for name in keys)}"
            if line["op"] == "attn_encoder":
                make = partial(materialised_attention, heads, queries, kept, width)
                yield Row("v6e attention", "tpu-v6e", name, make, "bfloat16", us, unfused=("attention",))
            else:
                make = partial(attention, heads, shared, queries, kept, width, queries > 1)
                yield Row("v6e paged attention", "tpu-v6e", name, make, "bfloat16", us, launch_us=_PAGED_LAUNCH_US)


def _v4_gemm(folder: Path) -> Iterator[Row]:
    for line in _table(folder / "tpu_v4_gemm_fp16.csv"):
        m, n, k = _sizes(line)
        yield Row("v4 GEMM", "tpu-v4", f"{m}x{k}x{n}", partial(gemm, m, n, k), "float16", float(line["value"]))


_FIDELITY = {"LoFi": 8.0, "HiFi2": 4.0, "HiFi4": 2.0}  # multiply-accumulates of an element of 16 × 16 per cycle


def _tenstorrent(folder: Path) -> Iterator[Row]:
    for line in _table(folder / "tenstorrent_gemm.csv"):
        if line["dtype"] != "bfloat16":
            continue  # block floats have no kernels here
        m, n, k = _sizes(line)
        chip = line["chip"].removeprefix("tenstorrent-")
        clock = {"wormhole-n150": 1.0, "blackhole-p150": 1.35}[chip]
        group = f"Tenstorrent GEMM, {line['config']}"
        name = f"{chip} {m}x{k}x{n} {line['math_fidelity']}"
        us = float(line["derived_device_cycles"]) / (1e3 * clock)
        yield Row(group, chip, name, partial(gemm, m, n, k), "bfloat16", us, _FIDELITY[line["math_fidelity"]])


def _rk3588(folder: Path) -> Iterator[Row]:
    for line in _table(folder / "rk3588_yolov5s_layers.csv"):
        image = int(line["c_in"]), int(line["h_in"]), int(line["w_in"])
        kernel, stride = (int(line[name] or 1) for name in ("r", "stride"))
        if line["op"] == "MaxPool":
            make = partial(integer_pooling, image, kernel)
        elif line["op"].startswith("Conv") and line["op"] != "ConvTranspose":
            padding = max(0, ((int(line["h_out"]) - 1) * stride + kernel - image[1] + 1) // 2)
            is_added, has_relu = line["op"].endswith("Add"), "Relu" in line["op"]
            make = partial(integer_convolution, image, int(line["c_out"]), kernel, stride, padding, is_added, has_relu)
        else:
            continue  # concatenations and transposed convolutions have no kernel of int8
        name = f"{line['layer']} {line['op']} {'x'.join(map(str, image))}-{line['c_out']} {kernel}/{stride}"
        yield Row("RK3588 layers", "rk3588", name, make, "float16", float(line["value"]), kernels="integer_")
