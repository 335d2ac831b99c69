"""Language models on two GPUs: what one finds, by NCCL and by kernels that reach the other GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import cuda_gpu
import numpy as np
import pytest
from tiny_llms import save_tiny

from npu_compiler import DeviceError
from npu_runtime import Device
from npu_sim.llm import Checkpoint, LanguageModel, load_checkpoint
from npu_sim.serving.engine import Engine
from npu_sim.serving.paged_model import PagedModel
from npu_sim.serving.request import Request

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
PROMPT, NEW = [5 + 3 * index % 150 for index in range(40)], 16


def _gpus() -> int:
    if cuda_gpu.PROBLEM:
        return 0
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_gpus() < 2, reason="needs two NVIDIA GPUs")]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = save_tiny(tmp_path_factory.mktemp("llama"), "llama", "bfloat16", head_dim=32, **SIZES)
    return load_checkpoint(folder, "bfloat16")


@pytest.fixture(scope="module")
def alone(llama: Checkpoint) -> LanguageModel:
    return LanguageModel(llama, device="cuda", cache_length=64, chunk=32)


@pytest.fixture(params=["peers", "nccl"])
def exchange(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.setenv("NPU_SIM_PEERS", str(int(request.param == "peers")))
    return str(request.param)


@pytest.fixture
def pair(llama: Checkpoint, exchange: str) -> Iterator[LanguageModel]:
    network = LanguageModel(llama, device="cuda", cache_length=64, chunk=32, tensor_parallel=2)
    yield network
    network.close()


def check_same(alone: LanguageModel, pair: LanguageModel, times: int) -> None:
    """Compares the logits after prompts, and of decode steps behind them."""
    for start in range(times):
        prompt = PROMPT[start:] + PROMPT[:start]
        logits = []
        for network in (alone, pair):
            network.reset()
            logits.append([network.prefill(prompt), *(network.decode(token) for token in prompt[:8])])
        for ours, expected in zip(logits[1], logits[0], strict=True):
            assert np.linalg.norm(ours - expected) < 0.05 * np.linalg.norm(expected)


def test_two_gpus_find_what_one_finds(alone: LanguageModel, pair: LanguageModel, exchange: str) -> None:
    """Time after time, so that every kernel has many turns; then a rank dies, which ends the group with its reason."""
    prefill, decode = (
        [call.kernel for call in program.kernels] for program in (pair.prefill_programs[32], pair.decode_program)
    )
    assert prefill.count("rank_sum") == (4 if exchange == "peers" else 0)
    assert prefill.count("all_reduce") == decode.count("all_reduce") == (0 if exchange == "peers" else 4)
    check_same(alone, pair, times=20)
    pair.reset()
    first = int(pair.prefill(PROMPT).argmax())
    tokens = [first, *pair.generate([*pair.tokens, first], NEW, stop=frozenset())]
    pair.reset()
    pair.prefill(PROMPT)
    for token, following in pairwise(tokens):  # which the GPUs chose themselves
        logits = pair.decode(token)
        assert logits[following] == logits.max()
    assert pair.group is not None
    pair.group._workers[0].kill()
    with pytest.raises(DeviceError, match="rank 1 of 2 has ended"):
        for token in PROMPT:
            pair.decode(token)


@pytest.fixture
def wide(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    sizes = {**SIZES, "hidden_size": 4096, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    folder = save_tiny(tmp_path_factory.mktemp("wide"), "llama", "bfloat16", head_dim=32, **sizes)
    return load_checkpoint(folder, "bfloat16")


def test_large_sums_are_copied_in_part_while_products_run(wide: Checkpoint) -> None:
    """Summands of 16 MiB; time after time, so that every kernel has many turns."""
    alone, pair = (
        LanguageModel(wide, device="cuda", cache_length=2048, chunk=2048, tensor_parallel=ranks) for ranks in (1, 2)
    )
    try:
        kernels = [call.kernel for call in pair.prefill_programs[2048].kernels]
        assert kernels.count("peer_copy") == kernels.count("rank_sum") == 2
        for start in range(12):
            prompt = [5 + (start + 3 * index) % 150 for index in range(2000)]
            logits = []
            for network in (alone, pair):
                network.reset()
                logits.append(network.prefill(prompt))
            assert np.linalg.norm(logits[1] - logits[0]) < 0.02 * np.linalg.norm(logits[0])
    finally:
        pair.close()


def test_an_engine_on_two_gpus_answers_as_on_one(llama: Checkpoint, exchange: str) -> None:
    sizes = {"block_size": 16, "blocks": 64, "context_length": 64, "max_tokens": 32, "max_sequences": 16}
    requests = [Request(tuple(PROMPT[: 10 + index]), NEW, stop_ids=frozenset()) for index in range(16)]
    alone, together = (PagedModel(llama, device=Device("cuda"), tensor_parallel=ranks, **sizes) for ranks in (1, 2))
    try:
        found = []
        for model in (alone, together):
            with Engine(model) as engine:
                found.append([answer.tokens for answer in engine.generate(requests)])
        # Near-ties may fall either way, and what follows one is another text.
        same = [ours[:3] == expected[:3] for ours, expected in zip(found[1], found[0], strict=True)]
        assert sum(same) >= 13
        assert all(len(tokens) == NEW for tokens in found[1])
    finally:
        together.close()
