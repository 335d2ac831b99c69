"""Reading of ONNX files, with checks of opsets, cycles and external data."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from npu_compiler.errors import MALFORMED, IRError, reason_of

OLDEST_OPSET, NEWEST_OPSET = 13, 28
DEFAULT_DOMAINS = ("", "ai.onnx")


def read_model(path: str | Path) -> ir.Model:
    """Read and check an ONNX file; external data is opened only when a tensor is read.

    Raises:
        IRError: there is no such file, it is not ONNX, it imports an opset that is too old or too new, or its graph has
            a cycle or reads a value that nothing produces.
    """
    path = Path(path)
    if not path.is_file():
        raise IRError(f"cannot read '{path}': there is no such file")
    try:
        data = path.read_bytes()
        model = parse_model(data, str(path))
    except OSError as error:
        raise IRError(f"cannot read '{path}': {error.strerror or error}") from error
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def parse_model(data: bytes, name: str) -> ir.Model:
    """Parse the content of an ONNX file. Errors as in `read_model`."""
    import onnx

    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
        model = ir.serde.deserialize_model(proto)
    except (DecodeError, *MALFORMED) as error:
        reason = "it is cut off or damaged" if isinstance(error, DecodeError) else reason_of(error)
        raise IRError(f"'{name}' is not an ONNX file: {reason}") from error
    except Exception as error:  # onnx_ir wraps what it finds in errors of its own
        raise IRError(f"'{name}' is not an ONNX file: {reason_of(error)}") from error
    if not proto.HasField("graph") or not proto.opset_import:
        raise IRError(f"'{name}' is not an ONNX file: it has no graph, or no opset")
    _check_opsets(model, name)
    _sort(model, name)
    return model


def _check_opsets(model: ir.Model, name: str) -> None:
    versions = [version for domain, version in model.opset_imports.items() if domain in DEFAULT_DOMAINS]
    if not versions:
        return
    if versions[0] < OLDEST_OPSET:
        raise IRError(
            f"'{name}' imports opset {versions[0]}; the oldest that is read is {OLDEST_OPSET}: convert it with "
            "onnx.version_converter, or export it again"
        )
    if versions[0] > NEWEST_OPSET:
        raise IRError(
            f"'{name}' imports opset {versions[0]}; the newest that is read is {NEWEST_OPSET}: export it with that"
        )


def _sort(model: ir.Model, name: str) -> None:
    """Sort the nodes of each graph topologically. Raises `IRError` if a graph has a cycle."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        try:
            graph.sort()
        except ValueError as error:
            raise IRError(f"'{name}' has a graph with a cycle") from error


def check_inside(folder: str | os.PathLike[str], location: str | os.PathLike[str]) -> None:
    """Raise `ValueError` if the path of external data leads out of the folder of the model."""
    place = os.path.normpath(location)
    if not folder or os.path.isabs(place) or place.split(os.sep)[0] == os.pardir:
        raise ValueError("external data has to be in the folder of the model")


def checked(reader: Callable[[], object], what: str) -> object:
    """Return the result of a function that reads a file; any exception that damage causes becomes an `IRError`.

    Args:
        what: The data that is read, for the message.
    """
    try:
        return reader()
    except OSError as error:
        raise IRError(f"cannot read the data of {what}: {error.strerror or error}") from error
    except Exception as error:  # sizes, offsets and dtypes that contradict each other
        raise IRError(f"cannot read the data of {what}: {reason_of(error)}") from error
