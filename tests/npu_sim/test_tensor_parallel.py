"""Language models on several processes: the same tokens as on one, and no process that is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_llms import save_tiny

from npu_compiler import DeviceError, InputError
from npu_sim.llm import Checkpoint, LanguageModel, load_checkpoint
from npu_sim.llm.compiled_model import CompiledModel
from npu_sim.llm.contiguous_model import DECODE, ContiguousModel
from npu_sim.llm.ranks import RankedModel
from npu_sim.parallel import group as groups
from npu_sim.parallel.worker import Rank
from npu_sim.serving.engine import Engine
from npu_sim.serving.paged_model import COPY, PagedModel
from npu_sim.serving.request import Request

PROMPT, NEW = [5, 7, 9, 11, 3, 20, 33], 12


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(save_tiny(tmp_path_factory.mktemp("llama"), "llama", "float32"), "float32")


def model(checkpoint: Checkpoint, ranks: int) -> LanguageModel:
    return LanguageModel(checkpoint, device="cpu", cache_length=32, chunk=4, tensor_parallel=ranks)


def state_bytes(network: CompiledModel) -> int:
    return sum(buffer.size_bytes for name, buffer in network.state.items() if name != "history")


def workers(network: LanguageModel) -> list[Any]:
    assert network.group is not None
    return [worker.process for worker in network.group._workers]


@pytest.fixture
def pair(llama: Checkpoint) -> Iterator[LanguageModel]:
    network = model(llama, 2)
    yield network
    network.close()
    assert all(process.poll() is not None for process in workers(network))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_together_find_the_tokens_that_one_finds(llama: Checkpoint, ranks: int) -> None:
    """The model is in float32, the prompt takes several runs, and four ranks share two KV heads."""
    alone, together = model(llama, 1), model(llama, ranks)
    try:
        assert [list(network.generate(PROMPT, NEW, stop=frozenset())) for network in (alone, together)] == [
            found := list(alone.generate(PROMPT, NEW, stop=frozenset())),
            found,
        ]
        for network in (alone, together):
            network.reset()
        logits = [network.prefill(PROMPT) for network in (alone, together)]
        np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-4)
        sizes = [state_bytes(network.model) for network in (alone, together)]
        assert sizes[0] == min(ranks, 2) * sizes[1]
    finally:
        together.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families_are_divided_too(tmp_path: Path, family: str) -> None:
    """The families have biases and a tied LM head, and norms of heads."""
    checkpoint = load_checkpoint(save_tiny(tmp_path, family, "float32"), "float32")
    alone, together = model(checkpoint, 1), model(checkpoint, 2)
    try:
        expected = list(alone.generate(PROMPT, NEW, stop=frozenset()))
        assert list(together.generate(PROMPT, NEW, stop=frozenset())) == expected
    finally:
        together.close()


def test_a_dead_rank_ends_the_group_with_its_reason(pair: LanguageModel) -> None:
    tokens = pair.generate(PROMPT, stop=frozenset())
    next(tokens)
    (process,) = workers(pair)
    process.kill()
    start = time.monotonic()
    with pytest.raises(DeviceError, match=r"rank 1 of 2 has ended \(signal 9\)"):
        list(tokens)
    assert time.monotonic() - start < groups.PATIENCE
    with pytest.raises(DeviceError, match="rank 1 of 2 has ended"):
        pair.prefill(PROMPT)


def test_a_stuck_rank_ends_the_group(pair: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "PATIENCE", 2.0)
    (process,) = workers(pair)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(DeviceError, match="rank 1 of 2 has not answered for"):
        list(pair.generate(PROMPT, stop=frozenset()))


def test_one_stuck_rank_among_others_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped rank is detected although the others keep sending signs of life."""
    ended: list[bool] = []
    group = groups.RankGroup(4, "builtins:repr", {}, lambda: ended.append(True))
    try:
        group.wait()
        monkeypatch.setattr(groups, "PATIENCE", 2.5)
        group._workers[1].process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 15
        while group.failure is None and time.monotonic() < until:
            time.sleep(0.05)
        with pytest.raises(DeviceError, match="rank 2 of 4 has not answered for"):
            group.check()
        assert ended == [True]
    finally:
        group.close()


def test_ctrl_c_within_a_step_comes_after_it(pair: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is delayed until all ranks have made the same steps, so the model can go on."""
    expected = list(pair.generate(PROMPT, NEW, stop=frozenset()))
    program = pair.model.program(DECODE)
    run = program._launch

    def pressed() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        run()

    monkeypatch.setattr(program, "_launch", pressed)
    tokens = pair.generate(PROMPT, NEW, stop=frozenset())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            list(tokens)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert list(pair.generate(PROMPT, NEW, stop=frozenset())) == expected


@pytest.mark.slow
def test_a_closed_model_says_so(llama: Checkpoint) -> None:
    network = model(llama, 2)
    network.close()
    with pytest.raises(InputError, match="processes have been ended"):
        network.prefill(PROMPT)


def test_a_rank_that_cannot_begin_is_reported(llama: Checkpoint, tmp_path: Path) -> None:
    gone = replace(llama, opened_by=("npu_sim.llm.loading:load_checkpoint", (str(tmp_path / "gone"),)))
    with pytest.raises(InputError, match="rank 1 of 2: "):
        model(gone, 2)


def test_a_rank_whose_device_takes_other_programs_is_refused(llama: Checkpoint) -> None:
    """Ranks with different programs never run together, as on a GPU that cannot reach the others' memory."""
    assert llama.opened_by is not None
    name = f"{ContiguousModel.__module__}:{ContiguousModel.__qualname__}"
    ranked = RankedModel(Rank(1, 2, tuple), llama.opened_by, ["cpu", "cpu"], name, {"cache_length": 32, "chunk": 4})
    with pytest.raises(DeviceError, match="but rank 0 has them for 'another'"):
        ranked.build("another")


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (0, "among 1 or more devices, not 0"),
        (3, "has 4 attention heads and 2 KV heads, which 3 devices cannot share evenly; choose 1, 2, 4"),
    ],
)
def test_ranks_that_cannot_share_the_heads_are_refused(llama: Checkpoint, ranks: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        model(llama, ranks)


def test_a_checkpoint_that_no_other_process_can_open_is_refused(llama: Checkpoint) -> None:
    with pytest.raises(InputError, match="other processes cannot open it"):
        model(replace(llama, opened_by=None), 2)


@pytest.mark.slow
def test_an_engine_on_two_processes_answers_as_on_one(llama: Checkpoint) -> None:
    """Prompts share a block, one of which is copied, so that every kind of step runs on both engines."""
    sizes = {"block_size": 4, "blocks": 40, "context_length": 48, "max_tokens": 8, "max_sequences": 4}
    alone, together = (PagedModel(llama, device="cpu", tensor_parallel=ranks, **sizes) for ranks in (1, 2))
    try:
        requests = [Request(tuple(PROMPT[: 4 + index % 4]), NEW, stop_ids=frozenset()) for index in range(6)]
        found = []
        for model in (alone, together):
            with Engine(model) as engine:
                first = engine.generate(requests)
                found.append([answer.tokens for answer in (*first, *engine.generate(requests))])
                assert engine.stats().cached_tokens > 0 and COPY in model.loaded_programs()
        assert found[0] == found[1]
        pools = [state_bytes(model) for model in (alone, together)]
        assert pools[0] == 2 * pools[1]
    finally:
        together.close()


def test_an_engine_that_lost_a_rank_says_why(llama: Checkpoint) -> None:
    model = PagedModel(llama, device="cpu", context_length=48, max_tokens=8, max_sequences=4, tensor_parallel=2)
    try:
        model.check()
        with Engine(model) as engine:
            handle = engine.submit(Request(tuple(PROMPT), stop_ids=frozenset()))
            next(iter(handle))
            assert model.group is not None
            (worker,) = model.group._workers
            worker.kill()
            answer = handle.result()
            assert answer.finish_reason == "error" and "rank 1 of 2 has ended" in str(answer.error)
        with pytest.raises(DeviceError, match="rank 1 of 2 has ended"):
            model.check()
    finally:
        model.close()
