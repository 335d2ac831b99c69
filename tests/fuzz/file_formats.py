"""The files that are fuzzed, as plain data and back. Back means: with right checksums, lengths and counts."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import tomllib
from typing import Any

import msgpack
import numpy as np

MAGIC = b"NPUBIN"


def open_program(data: bytes) -> dict[str, Any]:
    """A `.npubin`."""
    version, _, body, authentication = msgpack.unpackb(data[len(MAGIC) :])
    return {"version": version, "body": msgpack.unpackb(body), "authentication": authentication}


def seal_program(content: Any) -> bytes:
    body = msgpack.packb(content["body"], unicode_errors="surrogatepass")
    envelope = [content["version"], hashlib.sha256(body).digest(), body, content["authentication"]]
    return MAGIC + bytes(msgpack.packb(envelope, unicode_errors="surrogatepass"))


def open_module(data: bytes) -> dict[str, Any]:
    """A `.npumod`: version, what it says of the module, its IR, and its tensors."""
    from npu_sim.module.saved_file import _HEADER, _start

    _, version, described, *_ = _HEADER.unpack(data[: _HEADER.size])
    description = msgpack.unpackb(data[_HEADER.size : _HEADER.size + described])
    ir = open_json(description.pop("ir"))
    return {"version": version, "description": description, "ir": ir, "tensors": data[_start(described) :]}


def seal_module(content: Any) -> bytes:
    from npu_sim.module.saved_file import _HEADER, _checksum, _start

    described = {**content["description"], "ir": seal_json(content["ir"])}
    description, tensors = msgpack.packb(described, unicode_errors="surrogatepass"), content["tensors"]
    sums = [_checksum(np.frombuffer(part, np.uint8)) for part in (description, tensors)]
    header = _HEADER.pack(b"NPUMOD", content["version"], len(description), len(tensors), *sums)
    return (header + description).ljust(_start(len(description)), b"\0") + bytes(tensors)


def open_whole_module(data: bytes) -> dict[str, Any]:
    """A `.npumod` with what is inside it opened too: its programs, its graph and its tensors."""
    content = open_module(data)
    programs = content["description"].pop("programs")
    return {
        **content,
        "ir": open_graph(seal_json(content["ir"])),
        "tensors": open_safetensors(content["tensors"]),
        "programs": [{**program, "content": open_program(program["content"])} for program in programs],
    }


def seal_whole_module(content: Any) -> bytes:
    programs = [{**program, "content": seal_program(program["content"])} for program in content["programs"]]
    ir = json.loads(seal_graph(content["ir"]))
    description = {**content["description"], "programs": programs}
    return seal_module(
        {**content, "description": description, "ir": ir, "tensors": seal_safetensors(content["tensors"])}
    )


def open_json(data: bytes) -> Any:
    return json.loads(data)


def seal_json(content: Any) -> bytes:
    return json.dumps(content, default=repr).encode()


def open_graph(data: bytes) -> Any:
    """IR whose nodes name what they read instead of describing it, so that a changed shape stays consistent."""
    ir = json.loads(data)
    for node in ir["nodes"]:
        node["inputs"] = [_reference(meta) for meta in node["inputs"]]
    ir["graph_outputs"] = [_reference(meta) for meta in ir["graph_outputs"]]
    return ir


def seal_graph(ir: Any) -> bytes:
    known = {
        (node["name"], index): meta | {"producer_node": node["name"], "producer_output_idx": index}
        for node in ir["nodes"]
        for index, meta in enumerate(node["outputs"])
    }
    for meta in ir["graph_inputs"]:
        known[meta["name"], 0] = meta | {"producer_node": meta["name"], "producer_output_idx": 0}
        known[meta["name"], None] = meta
    weights = {meta["name"]: meta for meta in ir["weights"]}
    known |= {(name, None): weights[key] | {"name": name} for name, key in ir["weight_name_mapping"].items()}
    for node in ir["nodes"]:
        node["inputs"] = [known[name, index] for name, index in node["inputs"]]
    ir["graph_outputs"] = [known[name, index] for name, index in ir["graph_outputs"]]
    return seal_json(ir)


def _reference(meta: Any) -> list[Any]:
    producer = meta.get("producer_node")
    return [meta["name"], None] if producer is None else [producer, meta.get("producer_output_idx")]


def open_onnx(data: bytes) -> Any:
    import onnx
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(onnx.ModelProto.FromString(data), preserving_proto_field_name=True)


def seal_onnx(content: Any) -> bytes:
    import onnx
    from google.protobuf.json_format import ParseDict

    return bytes(ParseDict(content, onnx.ModelProto()).SerializeToString())


def open_safetensors(data: bytes) -> dict[str, Any]:
    """The header, how much longer it claims to be than it is, and the data."""
    end = 8 + int.from_bytes(data[:8], "little")
    return {"header": json.loads(data[8:end]), "excess": 0, "data": data[end:]}


def seal_safetensors(content: Any) -> bytes:
    header = seal_json(content["header"])
    length = (len(header) + int(content["excess"])) % 2**64
    data: bytes = content["data"]
    return length.to_bytes(8, "little") + header + data


# GGUF's types of values: the format characters of `struct`; 8 is a string and 9 an array.
_GGUF_TYPES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_ALIGNMENT = 32


def open_gguf(data: bytes) -> dict[str, Any]:
    """Version, how many more entries it claims to have than it has, metadata, tensor descriptions and data."""
    reader = _GGUFReader(data)
    magic, version, tensors, fields = reader.take("<4sIQQ")
    metadata = []
    for _ in range(fields):
        key, (kind,) = reader.string(), reader.take("<I")
        metadata.append([key, kind, reader.value(kind)])
    infos = []
    for _ in range(tensors):
        name, (dims,) = reader.string(), reader.take("<I")
        infos.append([name, list(reader.take(f"<{dims}Q")), *reader.take("<IQ")])
    start = math.ceil(reader.at / _GGUF_ALIGNMENT) * _GGUF_ALIGNMENT
    excess = {"tensors": 0, "metadata": 0}
    return {"version": version, "excess": excess, "metadata": metadata, "tensors": infos, "data": data[start:]}


def seal_gguf(content: Any) -> bytes:
    metadata, tensors, excess = content["metadata"], content["tensors"], content["excess"]
    counts = (len(tensors) + excess["tensors"], len(metadata) + excess["metadata"])
    parts = [b"GGUF", _packed("I", content["version"]), *(_packed("Q", count) for count in counts)]
    for key, kind, value in metadata:
        parts += [_gguf_string(key), _packed("I", kind), _gguf_value(kind, value)]
    for name, dims, kind, offset in tensors:
        parts += [_gguf_string(name), _packed("I", len(dims)), *(_packed("Q", size) for size in dims)]
        parts += [_packed("I", kind), _packed("Q", offset)]
    whole = b"".join(parts)
    data: bytes = content["data"]
    return whole + b"\0" * (-len(whole) % _GGUF_ALIGNMENT) + data


class _GGUFReader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def string(self) -> str:
        (length,) = self.take("<Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _GGUF_STRING:
            return self.string()
        if kind == _GGUF_ARRAY:
            item, length = self.take("<IQ")
            return [item, [self.value(item) for _ in range(length)]]
        return self.take(f"<{_GGUF_TYPES[kind]}")[0]


def _gguf_string(text: Any) -> bytes:
    encoded = str(text).encode(errors="surrogatepass")
    return _packed("Q", len(encoded)) + encoded


def _gguf_value(kind: int, value: Any) -> bytes:
    if kind == _GGUF_ARRAY and isinstance(value, list) and len(value) == 2 and isinstance(value[1], list):
        return (
            _packed("I", value[0]) + _packed("Q", len(value[1])) + b"".join(_gguf_value(value[0], x) for x in value[1])
        )
    if kind in _GGUF_TYPES:
        return _packed(_GGUF_TYPES[kind], value)
    return _gguf_string(value)


def _packed(form: str, value: Any) -> bytes:
    """A number in as many bytes as the format has, whatever was put in its place."""
    if form in "fd":
        return (
            struct.pack(f"<{form}", value)
            if isinstance(value, float) and abs(value) < 1e38
            else bytes(struct.calcsize(form))
        )
    size = struct.calcsize(f"<{form}")
    number = int(value) if isinstance(value, (int, str)) and str(value).lstrip("-").isdigit() else 0
    return (number % 256**size).to_bytes(size, "little")


def open_chip(data: bytes) -> Any:
    """A chip's TOML."""
    return tomllib.loads(data.decode())


def seal_chip(content: Any) -> bytes:
    lines: list[str] = []
    _write_table(content, [], lines)
    return "\n".join(lines).encode(errors="surrogatepass")


def _write_table(table: dict[Any, Any], path: list[str], lines: list[str]) -> None:
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines += [f"{_toml(str(key))} = {_toml(value)}" for key, value in table.items() if key not in tables]
    for key, value in tables.items():
        inner = [*path, _toml(str(key))]
        lines.append(f"[{'.'.join(inner)}]")
        _write_table(value, inner, lines)


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=True)
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            return "{" + ", ".join(f"{_toml(str(key))} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return _toml(repr(value))


def open_sweep(data: bytes) -> Any:
    """A sweep's ranges: name and two values of each."""
    parts = (part.partition("=") for part in data.decode().split(","))
    return [[name, *values.split("..")] for name, _, values in parts]


def seal_sweep(content: Any) -> bytes:
    parts = (part if isinstance(part, list) and part else [part] for part in content)
    return ",".join(f"{part[0]}={'..'.join(map(str, part[1:]))}" for part in parts).encode(errors="surrogatepass")


def open_trace(data: bytes) -> Any:
    """The cells of a trace of requests."""
    return [[_plain_cell(cell) for cell in line.split(",")] for line in data.decode().splitlines()]


def _plain_cell(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def seal_trace(content: Any) -> bytes:
    return "\n".join(",".join(str(cell) for cell in line) for line in content).encode("utf-8", "surrogatepass")
