"""ONNX's own backend node tests, run by `npu_sim.compile` on the CPU device.

`python tests/support/onnx_suite.py` runs all of them and writes `docs/onnx.json`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import numpy_helper

import npu_sim
from npu_compiler.errors import NPUError
from npu_sim.onnx.dtypes import TORCH_DTYPES
from npu_sim.onnx.files import NEWEST_OPSET, OLDEST_OPSET
from npu_sim.onnx.steps import NeedsValue

SUMMARY = Path(__file__).parents[2] / "docs" / "onnx.json"
RIGHT, REFUSED, WRONG, RAW = "right", "refused", "wrong", "raw"
CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
# Relative and absolute tolerances: the tests' own, but at least those of the dtype that is computed in.
_TOLERANCES = {torch.float16: (4e-3, 4e-4), torch.bfloat16: (2e-2, 4e-3)}
_PLAIN_TOLERANCE = (1e-3, 1e-5)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a test.

    Attributes:
        reason: Why it is out of scope; empty if it is not.
        bound: Inputs that were given as constants, because they decide shapes.
        on_device: Whether all nodes ran on the device.
    """

    name: str
    kind: str
    message: str = ""
    reason: str = ""
    bound: tuple[str, ...] = ()
    on_device: bool = False


@cache
def cases() -> list[Any]:
    """All node tests of the installed `onnx`."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(collect_testcases(None))


def out_of_scope(model: onnx.ModelProto) -> str:
    """Return the reason why a model is out of scope, by its types, domains and operators alone; empty if it is not."""
    opset = max((x.version for x in model.opset_import if x.domain in ("", "ai.onnx")), default=0)
    domains = {node.domain for node in model.graph.node} - {"", "ai.onnx"}
    if domains:
        return f"domain {min(domains)}"
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        return f"opset below {OLDEST_OPSET}"
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    if any(x.type.WhichOneof("value") not in ("tensor_type", None) for x in values):
        return "sequences and optional values"
    if any(x.type.tensor_type.elem_type == onnx.TensorProto.STRING for x in values):
        return "strings"
    kinds = {x.type.tensor_type.elem_type for x in values} | {x.data_type for x in model.graph.initializer}
    kinds |= {a.i for node in model.graph.node for a in node.attribute if a.name in ("to", "dtype", "output_dtype")}
    if kinds - {int(kind) for kind in TORCH_DTYPES} - {0}:
        return (
            "dtypes that IR does not have (uint16, uint32, uint64, floats of 8 bits or fewer, integers of 4 or fewer)"
        )
    ops = {node.op_type for node in model.graph.node}
    if ops & CONTROL_FLOW:
        return "control flow"
    if any(
        op.startswith(("Sequence", "Optional")) or op.endswith("Sequence") and op != "ReverseSequence" for op in ops
    ):
        return "sequences and optional values"
    return "random numbers" if ops & RANDOM else "images in files" if "ImageDecoder" in ops else ""


def tensor_of(value: Any) -> torch.Tensor:
    """A value of a test as a tensor."""
    array = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def run(case: Any, folder: Path, device: str = "cpu") -> Outcome:
    """Run a test: with all its inputs or, where some of them decide shapes, with these as constants."""
    inputs, expected = case.data_sets[0]
    reason, bound = out_of_scope(case.model), frozenset[str]()
    while True:
        try:
            return _run(case, inputs, expected, folder, device, bound, reason)
        except NeedsValue as error:
            if not error.sources or error.sources <= bound:
                return Outcome(case.name, REFUSED, str(error), reason, tuple(sorted(bound)))
            bound |= error.sources
        except NPUError as error:
            return Outcome(case.name, REFUSED, str(error), reason, tuple(sorted(bound)))
        except Exception as error:  # whatever is no refusal
            return Outcome(case.name, RAW, f"{type(error).__name__}: {error}"[:300], reason, tuple(sorted(bound)))


def _run(
    case: Any,
    inputs: Sequence[Any],
    expected: Sequence[Any],
    folder: Path,
    device: str,
    bound: frozenset[str],
    reason: str,
) -> Outcome:
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    given = {x.name: value for x, value in zip(model.graph.input, inputs, strict=False)}
    kept = [x for x in model.graph.input if x.name not in bound]
    for name in bound:
        value = given[name]
        tensor = value if isinstance(value, onnx.TensorProto) else numpy_helper.from_array(np.asarray(value))
        model.graph.initializer.append(tensor)
        model.graph.initializer[-1].name = name
    del model.graph.input[:]
    model.graph.input.extend(kept)
    path = folder / "case.onnx"
    path.write_bytes(model.SerializeToString())
    compiled = npu_sim.compile(path, device=device)
    results = compiled(*(tensor_of(given[x.name]) for x in kept))
    results = results if isinstance(results, tuple) else (results,)
    difference = next(filter(None, map(_difference, results, map(tensor_of, expected), [case] * len(results))), "")
    report = compiled.report()
    on_device = all(not program.off_device for program in report.programs)
    kind = RIGHT if not difference and len(results) == len(expected) else WRONG
    return Outcome(case.name, kind, difference, reason, tuple(sorted(bound)), on_device)


def _difference(result: torch.Tensor, expected: torch.Tensor, case: Any) -> str:
    """Return the way in which a result differs from what is expected; empty if it does not."""
    if result.dtype != expected.dtype or result.shape != expected.shape:
        return f"{result.dtype}{list(result.shape)} instead of {expected.dtype}{list(expected.shape)}"
    relative, absolute = _TOLERANCES.get(expected.dtype, _PLAIN_TOLERANCE)
    rtol, atol = max(case.rtol, relative), max(case.atol, absolute)
    wide, wanted = result.double(), expected.double()
    if torch.allclose(wide, wanted, rtol=rtol, atol=atol, equal_nan=True):
        return ""
    return f"differs by {(wide - wanted).abs().nan_to_num().max():.3g} of {wanted.abs().nan_to_num().max():.3g}"


def outcomes(chosen: Sequence[Any], device: str = "cpu") -> Iterator[Outcome]:
    """Run tests one after the other."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in chosen:
            logging.disable(logging.CRITICAL)
            try:
                outcome = run(case, Path(folder), device)
            finally:
                logging.disable(logging.NOTSET)
            yield outcome


def summary(results: Sequence[Outcome]) -> dict[str, Any]:
    """The content of `docs/onnx.json`."""
    inside = [x for x in results if not x.reason]
    right = [x for x in inside if x.kind == RIGHT]
    return {
        "onnx": onnx.__version__,
        "tests": len(results),
        "outside": dict(Counter(x.reason for x in results if x.reason).most_common()),
        "outside_right": sum(x.kind == RIGHT for x in results if x.reason),
        "inside": dict(Counter(x.kind for x in inside)),
        "with_constants": sum(bool(x.bound) for x in right),
        "on_device": sum(x.on_device for x in right),
        "refused": {x.name: x.message for x in inside if x.kind == REFUSED},
        "faults": {x.name: f"{x.kind}: {x.message}" for x in results if x.kind in (WRONG, RAW)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="Run tests whose name contains this, and write nothing.")
    options = parser.parse_args()
    results = []
    for outcome in outcomes([case for case in cases() if options.only in case.name]):
        results.append(outcome)
        if outcome.kind in (WRONG, RAW) or options.only:
            print(outcome.kind, outcome.name, outcome.message, flush=True)
    facts = summary(results)
    print(json.dumps({key: value for key, value in facts.items() if key != "refused"}, indent=1))
    if not options.only:
        SUMMARY.write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(bool(facts["faults"]))


if __name__ == "__main__":
    main()
