"""Models with recurrent states: tokens and log probabilities of transformers, whatever else runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import decoders
import numpy as np
import pytest
import torch

from npu_compiler.errors import InputError
from npu_sim.llm import Checkpoint, LanguageModel, load_checkpoint
from npu_sim.llm.engine.batch import Batch
from npu_sim.llm.graph import layer_states, state_form
from npu_sim.llm.recurrent import own_states
from npu_sim.llm.state import StateName, lane_bytes, row_bytes
from npu_sim.serving.engine import Engine
from npu_sim.serving.paged_model import PagedModel
from npu_sim.serving.recurrent_runs import check_lanes, divide_step
from npu_sim.serving.request import Request

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("shared_programs")
NEW = 10


def saved(folder: Path, model_type: str, **changes: Any) -> Any:
    """Save a tiny random model, and return it."""
    config = decoders.tiny_config(model_type, changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    decoders.randomize(model)
    model.generation_config = transformers.GenerationConfig(eos_token_id=None)
    model.save_pretrained(folder)
    return model


def opened(folder: Path) -> Checkpoint:
    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda ids, **_: "")
    return replace(load_checkpoint(folder, "float32"), load_tokenizer=lambda: tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LFM2 with a short convolution and a layer of attention."""
    place: Path = tmp_path_factory.mktemp("lfm2")
    saved(place, "lfm2", layer_types=["conv", "full_attention"])
    return place


def expected(model: Any, prompt: Sequence[int], count: int = NEW) -> tuple[list[int], list[float]]:
    """The greedy tokens of eager transformers and their log probabilities, computed without a cache."""
    ids, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            scores = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return ids[len(prompt) :], logprobs


def test_a_probe_finds_short_convolutions_beside_attention(folder: Path) -> None:
    checkpoint = opened(folder)
    form, states = state_form(checkpoint), layer_states(checkpoint)
    assert (form.layers, form.recurrent, form.takes_pieces) == ((1,), (StateName("conv", 0, 0),), True)
    assert [state.kind.tensors for state in states] == [("k", "v"), ("r",)]
    assert (row_bytes(states, "float32"), lane_bytes(states, "float32")) == (2 * 2 * 16 * 4, 64 * 3 * 4)


@pytest.mark.parametrize(
    ("model_type", "state", "takes_pieces", "takes_sequences"),
    [
        ("zaya", StateName("recurrent", 0, 0), True, True),  # one token's value for the next, which nothing sums up
        ("recurrent_gemma", StateName("model.layers.0.temporal_block.conv1d_state", 0, 0), False, True),
        ("inkling_text", StateName("conv", 0, 0), True, False),  # its biases take the positions of one sequence
    ],
)
def test_a_probe_finds_states_wherever_layers_keep_them(
    tmp_path: Path, model_type: str, state: StateName, takes_pieces: bool, takes_sequences: bool
) -> None:
    decoders.save_tiny(model_type, tmp_path)
    form = state_form(opened(tmp_path))
    assert state in form.recurrent
    assert (form.takes_pieces, form.takes_sequences) == (takes_pieces, takes_sequences)


def test_modules_find_states_in_attributes_and_leave_new_ones_there() -> None:
    class Adds(torch.nn.Module):
        total = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total = self.total + x
            return self.total

    model = torch.nn.Sequential(Adds(), Adds())
    states = {StateName(f"{place}.total", 0, 0): torch.tensor([place + 1.0]) for place in (0, 1)}
    others = {StateName("conv", 0, 0): torch.zeros(1)}
    held = {**states, **others}
    with own_states(model, held):
        assert model(torch.tensor([3.0])).tolist() == [6.0]
    assert [x.tolist() for x in held.values()] == [[4.0], [6.0], [0.0]]
    assert model[0].total is None


def test_sequences_of_different_lengths_and_preempted_ones_get_the_tokens_of_transformers(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    drawn = np.random.default_rng(3)
    prompts = [drawn.integers(3, decoders.VOCAB, size).tolist() for size in (75, 1, 9, 20)]
    paged = PagedModel(
        opened(folder), device="cpu", block_size=4, blocks=24, context_length=92, max_tokens=70, max_sequences=3
    )
    with Engine(paged, paged.checkpoint) as engine:
        updates = engine.generate([Request(tuple(prompt), NEW, logprobs=0) for prompt in prompts])
        assert engine.stats().preemptions > 0
        assert engine.stats().cached_tokens == 0
    for prompt, update in zip(prompts, updates, strict=True):
        tokens, logprobs = expected(model, prompt)
        assert list(update.tokens) == tokens
        assert [entry.logprob for entry in update.logprobs] == pytest.approx(logprobs, abs=1e-4)


def test_a_conversation_goes_on_from_the_state_and_another_begins_anew(folder: Path) -> None:
    """A recurrent state cannot be taken back: other prompts than continuations are computed anew."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = LanguageModel(opened(folder), cache_length=64, chunk=8, device="cpu")
    prompt = [5, 9, 77, 31, 2, 8, 9, 9, 60, 31, 17]
    first = ours.generate(prompt, NEW)
    assert list(first) == expected(model, prompt)[0]
    longer = [*ours.tokens, 44, 6, 3]
    second = ours.generate(longer, NEW)
    assert list(second) == expected(model, longer)[0]
    assert second.stats.reused_tokens == len(longer) - 3
    third = ours.generate([*prompt[:6], 50], NEW)
    assert list(third) == expected(model, [*prompt[:6], 50])[0]
    assert third.stats.reused_tokens == 0


def test_a_model_with_recurrent_states_is_not_divided_among_devices(folder: Path) -> None:
    with pytest.raises(InputError, match="2 devices: its layers have recurrent states, which devices cannot share"):
        PagedModel(opened(folder), device="cpu", tensor_parallel=2)


def batch(counts: Sequence[int], outputs: Sequence[int], lanes: Sequence[int] | None) -> Batch:
    """A step with so many tokens of each sequence, numbered in their order."""
    tokens = np.arange(sum(counts), dtype=np.int32)
    positions = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    sequences = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    tables, zeros = np.zeros((len(counts), 9), np.int32), np.zeros(len(outputs), np.float32)
    settings = np.array(len(outputs) * [(0, np.inf, 1)], np.float32).reshape(-1, 3)
    held = None if lanes is None else np.array(lanes, np.int32)
    return Batch(tokens, positions, sequences, tables, np.array(outputs, np.int32), settings, zeros, held)


@pytest.mark.parametrize("seed", range(5))
def test_runs_take_each_token_once_and_in_order_and_the_last_has_the_outputs(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(1, 30, random.integers(1, 6)).tolist()
    ends = np.cumsum(counts) - 1
    step = batch(counts, ends.tolist(), random.permutation(len(counts)).tolist())
    *earlier, last = divide_step(step, (8, 3))
    assert last.tokens[last.outputs, 0].tolist() == ends.tolist()
    assert all(len(run.outputs) == 0 for run in earlier)
    taken: dict[int, list[int]] = {lane: [] for lane in step.lanes}
    for run in (*earlier, last):
        assert run.tokens.shape[1] in ((1,) if len(run.tokens) > 1 else (1, 3, 8))
        for lane, tokens in zip(run.lanes, run.tokens, strict=True):
            taken[lane] += tokens.tolist()
    for sequence, lane in enumerate(step.lanes):
        assert taken[lane] == step.tokens[step.sequences == sequence].tolist()


@pytest.mark.parametrize(
    ("outputs", "lanes", "message"),
    [
        ([2], None, "must have a lane for each sequence"),
        ([2], [0, 0], r"must be different numbers from 0 to 3, not \[0, 0\]"),
        ([2], [0, 4], r"from 0 to 3, not \[0, 4\]"),
        ([0], [0, 1], "an output after its last token only"),
    ],
)
def test_batches_that_recurrent_states_cannot_take_are_refused(
    outputs: list[int], lanes: list[int] | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_lanes(batch([3, 2], outputs, lanes), 4)
