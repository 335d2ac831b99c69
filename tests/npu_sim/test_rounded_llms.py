"""Language models whose activations or KV cache are rounded at run time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawn import drawn
from metal_harness import METAL_DEVICE
from tiny_llms import save_tiny

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import itemsize
from npu_runtime import CPUBackend, Device
from npu_sim.llm import Checkpoint, LanguageModel, load_checkpoint
from npu_sim.llm.graph import kv_shapes

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("shared_programs")

CHUNK, CACHE = 8, 24


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(save_tiny(tmp_path_factory.mktemp("llama32"), "llama", "float32"), "float32")


ROUNDED = [{"kv_cache": "int8"}, {"kv_cache": "fp8"}, {"quantization": "int8+int8"}, {"quantization": "fp8+fp8"}]


@pytest.mark.parametrize("settings", drawn(ROUNDED, 1 / 2))
def test_rounded_activations_and_caches_cost_little(llama: Checkpoint, settings: dict[str, Any]) -> None:
    """Prefill and decode round alike; where the native kernels do, so does NumPy."""
    checkpoint, tokens = replace(llama, **settings), list(range(10, 10 + CHUNK))
    model = LanguageModel(checkpoint, cache_length=CACHE, chunk=CHUNK, device="cpu")
    together = model.prefill(tokens)
    model.reset()
    one_by_one = [model.decode(token) for token in tokens][-1]
    device = Device("cpu")
    device.backend = CPUBackend(native=False, pytorch=False)
    plain = LanguageModel(checkpoint, cache_length=CACHE, chunk=CHUNK, device=device).prefill(tokens)
    dense = LanguageModel(llama, cache_length=CACHE, chunk=CHUNK, device="cpu").prefill(tokens)
    assert 0.9 < np.corrcoef(together, dense)[0, 1] < 1
    for found in (one_by_one, plain):  # a rounding that falls the other way moves what follows by a step
        assert np.corrcoef(found, together)[0, 1] > 0.99


def test_a_cache_in_int8_takes_a_byte_an_element_and_four_a_row(llama: Checkpoint) -> None:
    sizes = {}
    for kv_cache in (None, "int8"):
        model = LanguageModel(replace(llama, kv_cache=kv_cache), cache_length=CACHE, chunk=CHUNK, device="cpu")
        caches = {name: buffer for name, buffer in model.model.state.items() if name != "history"}
        sizes[kv_cache] = sum(buffer.size_bytes for buffer in caches.values())
        stored = [spec for spec in model.decode_program.input_specs if spec.name in caches]
        assert sum(spec.numel * itemsize(spec.storage) for spec in stored) == sizes[kv_cache]
    head_dim = kv_shapes(llama, CACHE)[0][0][-1]
    assert sizes["int8"] * itemsize("float32") * head_dim == sizes[None] * (head_dim + 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache": "int8"}, "the target metal_gpu has no kernels for a KV cache in int8"),
        ({"quantization": "int8+int8"}, "the target metal_gpu does not round activations"),
    ],
)
def test_metal_refuses_to_round_rows(llama: Checkpoint, settings: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LanguageModel(replace(llama, **settings), cache_length=CACHE, chunk=CHUNK, device=METAL_DEVICE)
