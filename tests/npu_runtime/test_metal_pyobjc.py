"""Requirements of pyobjc and Metal beyond the calls that the emulator checks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import metal_emulator
from metal_emulator import device as emulated
from metal_emulator.library import MTLCompileOptions
from npu_compiler.errors import DeviceError
from npu_compiler.target_config import METAL_GPU
from npu_runtime import MetalBackend
from npu_runtime.metal.device import CommandEncoder, MetalAPI, MetalDevice, load_api


@pytest.fixture
def api() -> Any:
    return metal_emulator.api()


def test_pyobjc_learns_that_a_function_constant_is_given_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pyobjc's metadata lacks this method, and an undescribed `void *` would be passed as an address."""
    described: dict[tuple[bytes, bytes], Any] = {}

    def register(cls: bytes, selector: bytes, metadata: Any) -> None:
        described[cls, selector] = metadata

    pool = object()
    objc = SimpleNamespace(registerMetaDataForSelector=register, autorelease_pool=pool)
    for name in ("Foundation", "Metal", "MetalPerformanceShaders"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "objc", objc)
    assert load_api().autorelease_pool is pool
    (value,) = described[b"NSObject", b"setConstantValue:type:withName:"]["arguments"].values()
    assert value == {"type": b"^v", "type_modifier": b"n", "c_array_of_variable_length": True}


def test_a_run_has_its_own_autorelease_pool(api: Any) -> None:
    events: list[str] = []

    @contextmanager
    def pool() -> Iterator[None]:
        events.append("pool")
        yield
        events.append("drained")

    def encode(encoder: CommandEncoder) -> None:
        encoder.compute()
        events.append("encoded")

    device = MetalDevice(MetalAPI(api.Metal, api.MPS, api.Foundation, pool), METAL_GPU)
    for _ in range(2):
        device.run([encode], 1)
    assert events == ["pool", "encoded", "drained"] * 2


def test_macros_are_text_of_the_source(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Macros are lines of the source, since values with spaces might be split in compiler flags."""
    monkeypatch.delattr(MTLCompileOptions, "setPreprocessorMacros_")
    device = MetalDevice(MetalAPI(api.Metal, api.MPS, api.Foundation), METAL_GPU)
    row = "ELEMENTWISE(twice_kernel, const float by = params.attrs[0];, (a + by * a), (a + a))"
    constants = {
        "a_type": 1,
        "b_type": 0,
        "c_type": 0,
        "out_type": 1,
        "has_a": 1,
        "has_b": 0,
        "has_c": 0,
        "vectorized": 1,
        "integer": 0,
    }
    pipeline = device.pipeline("elementwise.metal", "twice_kernel", None, constants, {"ELEMENTWISE_OPS": row})
    assert pipeline.label() == "twice_kernel"


def test_pipelines_are_made_for_the_threads_they_are_dispatched_with(api: Any) -> None:
    device = MetalDevice(MetalAPI(api.Metal, api.MPS, api.Foundation), METAL_GPU)
    constants = {"x_type": 1, "out_type": 1, "contiguous": 1}
    pipeline = device.pipeline("tensor_ops.metal", "fill_kernel", "float32", constants, {})
    assert pipeline.maxTotalThreadsPerThreadgroup() == METAL_GPU.max_threadgroup_1d


def test_a_gpu_without_simdgroup_matrices_is_refused(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "FAMILIES", frozenset({api.Metal.MTLGPUFamilyMac2}))
    with pytest.raises(DeviceError, match="Apple M1 or later"):
        MetalBackend(api)
