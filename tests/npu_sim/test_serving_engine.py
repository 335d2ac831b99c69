"""The engine with its threads: what clients see of their requests, in threads and event loops, to the end."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_llms import save_tiny, save_tokenizer
from toy_batches import VOCAB, ToyModel, alone, row_values
from toy_batches import logits_of as toy_logits

from npu_compiler.errors import DeviceError, InputError
from npu_sim.llm import Checkpoint, StreamDecoder, load_checkpoint
from npu_sim.serving.engine import MOST_FAILURES, Engine, EngineClosedError, QueueFullError
from npu_sim.serving.request import GRAMMAR_FAILED, Request, SamplingSettings, Update
from npu_sim.serving.text import TextOutput

LIMIT = 49


class Gate(ToyModel):
    """A toy whose steps wait until the gate is open."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.open = threading.Event()

    def step(self, batch):  # type: ignore[no-untyped-def]
        assert self.open.wait(30)
        return super().step(batch)


@pytest.fixture(params=[False, True], ids=["in step", "ahead"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(ToyModel(runs_ahead=request.param)) as made:
        yield made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = save_tiny(tmp_path_factory.mktemp("llama"), "llama", "float32")
    save_tokenizer(folder, None)
    return load_checkpoint(folder, "float32")


def some_requests(count: int) -> list[Request]:
    rng = np.random.default_rng(count)
    return [
        Request(
            tuple(rng.integers(0, VOCAB, rng.integers(1, 24)).tolist()),
            int(rng.integers(1, 20)),
            SamplingSettings(float(rng.integers(0, 2)), seed=index),
        )
        for index in range(count)
    ]


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_many_at_once_get_the_answers_that_they_get_alone(engine: Engine) -> None:
    asked = some_requests(64)
    answers = engine.generate(asked)
    assert [answer.tokens for answer in answers] == [alone(request, LIMIT) for request in asked]
    stats = engine.stats()
    assert stats.new_tokens == sum(len(answer.tokens) for answer in answers)
    assert stats.finished == {"length": 64} and (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.first_token_seconds.count == stats.queue_seconds.count == 64
    assert stats.between_tokens_seconds.count == stats.new_tokens - 64
    assert stats.step_seconds.count == stats.steps


def test_an_event_loop_reads_many_streams(engine: Engine) -> None:
    asked = some_requests(32)

    async def read(request: Request) -> list[int]:
        return [token async for update in engine.submit(request) for token in update.tokens]

    async def read_all() -> list[list[int]]:
        return await asyncio.gather(*map(read, asked))

    assert [tuple(tokens) for tokens in asyncio.run(read_all())] == [alone(request, LIMIT) for request in asked]


def test_threads_submit_and_cancel_at_any_time(engine: Engine, seed: int) -> None:
    wrong: list[object] = []

    def client(number: int) -> None:
        rng = np.random.default_rng((seed, number))
        for request in some_requests(4 + number):
            handle = engine.submit(request)
            tokens: tuple[int, ...] = ()
            if rng.integers(0, 3) == 0:
                handle.cancel()
            for update in handle:
                tokens += update.tokens
                if rng.integers(0, 8) == 0:
                    handle.cancel()
            right = alone(request, LIMIT)
            if tokens != (right if update.finish_reason == "length" else right[: len(tokens)]):
                wrong.append((request, tokens, update))
            if update.finish_reason not in ("length", "cancelled") or list(handle):
                wrong.append(update)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert engine.drain(30) and engine.stats().blocks_used == 0


def test_a_cancelled_request_ends_whether_it_waits_or_runs() -> None:
    model = Gate(max_sequences=1)
    with Engine(model) as engine:
        running, waiting = (engine.submit(Request((token,), 40)) for token in (1, 2))
        waiting.cancel()
        running.cancel()
        model.open.set()
        assert running.result().finish_reason == waiting.result().finish_reason == "cancelled"
        running.cancel()
        assert engine.stats().finished == {"cancelled": 2}


def test_a_request_that_takes_too_long_ends_with_an_error() -> None:
    model = Gate(max_sequences=1)
    with Engine(model) as engine:
        slow = [engine.submit(Request((token,), 40, timeout=0.05)) for token in (1, 2)]
        time.sleep(0.1)
        model.open.set()
        assert [(end := handle.result()).finish_reason for handle in slow] == ["error", "error"]
        assert end.error == "the request took longer than its 0.05 seconds"
        assert engine.generate([Request((1,), 2)])[0].finish_reason == "length"


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("when", ["launching", "reading"])
def test_a_device_that_fails_ends_its_requests_with_its_error(when: str, runs_ahead: bool) -> None:
    model = ToyModel(runs_ahead=runs_ahead)
    getattr(model, f"fail_{when}").add(3)
    with Engine(model) as engine:
        (answer,) = engine.generate([Request((1,), 20)])
        assert answer.finish_reason == "error" and str(answer.error).startswith("the toy has failed")
        assert answer.tokens == alone(Request((1,), 20), LIMIT)[: len(answer.tokens)]
        assert engine.generate([Request((1,), 5)])[0].tokens == alone(Request((1,), 5), LIMIT)


def test_an_engine_that_breaks_ends_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    model = Gate()
    engine = Engine(model)
    handle = engine.submit(Request((1,), 20))
    wait_until(lambda: engine.stats().running == 1)
    monkeypatch.setattr(engine._core, "_learn", lambda *_: 1 / 0)
    (sequence,) = engine._core.sequences.values()
    engine._text._stopped(sequence)  # a stop string was found meanwhile
    late = engine.submit(Request((2,), 20))
    model.open.set()
    for end in (late.result(), handle.result()):
        assert end.finish_reason == "error" and "the engine has failed: ZeroDivisionError" in str(end.error)
    assert engine.drain(30)
    assert engine.failed is not None
    with pytest.raises(EngineClosedError, match="ZeroDivisionError"):
        engine.submit(Request((1,)))
    engine.close()


def test_a_device_whose_steps_all_fail_is_lost_and_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    model = ToyModel(max_sequences=1)
    model.fail_launching = set(range(1, 1000))
    engine = Engine(model)
    handles = [engine.submit(Request((1,), 20)) for _ in range(MOST_FAILURES)]
    assert {handle.result().error for handle in handles} == {"the toy has failed at the launch"}
    wait_until(lambda: engine.failed is not None)
    assert f"{MOST_FAILURES} steps have failed one after the other" in str(engine.failed)
    with pytest.raises(EngineClosedError, match="steps have failed"):
        engine.submit(Request((1,)))
    engine.close()


def test_a_device_some_of_whose_steps_fail_goes_on() -> None:
    model = ToyModel(max_sequences=1)
    model.fail_launching = set(range(1, 1000, 2))
    with Engine(model) as engine:
        answers = engine.generate([Request((1,), 1)] * 3 * MOST_FAILURES)
        assert engine.failed is None
    assert sum(answer.error is None for answer in answers) >= MOST_FAILURES


def test_an_engine_whose_model_is_lost_fails_with_the_reason_at_once() -> None:
    model = ToyModel()
    model.fail_launching = set(range(100))

    def check() -> None:
        raise DeviceError("rank 1 of 2 has ended")

    model.check = check  # type: ignore[method-assign]
    with pytest.raises(EngineClosedError, match="rank 1 of 2 has ended"), Engine(model) as engine:
        assert engine.submit(Request((1,), 20)).result().error
        wait_until(lambda: engine.failed is not None)
        engine.submit(Request((1,), 20))


def test_draining_waits_for_the_requests_and_takes_no_more() -> None:
    model = Gate()
    with Engine(model) as engine:
        handle = engine.submit(Request((1,), 5))
        assert not engine.drain(0.02)
        with pytest.raises(EngineClosedError, match="takes no more requests"):
            engine.submit(Request((1,)))
        model.open.set()
        assert engine.drain(30)
        assert handle.result().finish_reason == "length"
    assert engine.drain()


def test_closing_ends_all_requests_and_both_threads() -> None:
    before = threading.active_count()
    model = Gate(max_sequences=1)
    engine = Engine(model)
    handles = [engine.submit(Request((1,), 40)) for _ in range(3)]
    threading.Timer(0.05, model.open.set).start()
    engine.close()
    engine.close()
    assert [handle.result().finish_reason for handle in handles] == ["cancelled"] * 3
    wait_until(lambda: threading.active_count() == before)
    gone = weakref.ref(engine)
    del engine, handles
    gc.collect()
    assert gone() is None


def test_a_full_queue_refuses_requests() -> None:
    model = Gate(max_sequences=1)
    with Engine(model, max_waiting=2) as engine:
        taken = []
        with pytest.raises(QueueFullError, match="more than 2 requests are waiting"):
            for _ in range(9):
                taken.append(engine.submit(Request((1,), 2)))
                time.sleep(0.01)
        model.open.set()
        assert {handle.result().finish_reason for handle in taken} == {"length"} and len(taken) >= 3


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(()), "the prompt is empty"),
        (Request((1,) * 49), "the prompt has 49 tokens, but a request can have 48"),
        (Request((1, VOCAB)), f"token id {VOCAB} is outside the vocabulary, 0 to {VOCAB - 1}"),
        (Request((-1,)), "token id -1 is outside"),
        (Request((1,), -1), "max_new_tokens must be at least 0, not -1"),
        (Request((1,), sampling=SamplingSettings(-1.0)), "temperature must be"),
        (Request((1,), sampling=SamplingSettings(1.0, seed=-1)), "seed must be at least 0, not -1"),
        (Request((1,), logprobs=-1), "logprobs must be from 0"),
        (Request((1,), prompt_logprobs=-1), "prompt_logprobs must be from 0"),
        (Request((1,), prompt_logprobs=VOCAB + 1), f"prompt_logprobs must be from 0 to {VOCAB}, not {VOCAB + 1}"),
        (Request((1,), timeout=0), "timeout must be above 0"),
        (Request((1,), stop=("x",)), "stop strings need a tokenizer"),
    ],
)
def test_a_request_that_is_wrong_is_refused(request_: Request, message: str) -> None:
    with Engine(ToyModel()) as engine, pytest.raises(InputError, match=message):
        engine.submit(request_)


def test_a_prompt_that_the_pool_cannot_hold_is_refused_and_an_answer_ends_where_it_is_full() -> None:
    with Engine(ToyModel(blocks=3)) as engine:
        with pytest.raises(InputError, match="a request can have 12"):
            engine.submit(Request((1,) * 13))
        (answer,) = engine.generate([Request((1, 2))])
        assert answer.tokens == alone(Request((1, 2)), 13) and answer.finish_reason == "length"


class Even:
    """A grammar of even tokens that are never the same twice in a row."""

    def __init__(self) -> None:
        self.last = -1

    def allowed(self) -> NDArray[np.bool_]:
        tokens = np.arange(VOCAB)
        return (tokens % 2 == 0) & (tokens != self.last)

    def advance(self, token: int) -> None:
        assert token % 2 == 0
        self.last = token


def test_a_grammar_restricts_only_its_own_request(engine: Engine) -> None:
    asked = [Request((3, 5), 12, SamplingSettings(1.0, seed=4), token_filter=Even()), *some_requests(10)]
    answers = engine.generate(asked)
    assert all(token % 2 == 0 for token in answers[0].tokens) and len(answers[0].tokens) == 12
    again = engine.generate([Request((3, 5), 12, SamplingSettings(1.0, seed=4), token_filter=Even())])
    assert again[0].tokens == answers[0].tokens
    assert [answer.tokens for answer in answers[1:]] == [alone(request, LIMIT) for request in asked[1:]]


class Broken(Even):
    def advance(self, token: int) -> None:
        raise ValueError("no such state")


def test_a_grammar_that_fails_or_allows_nothing_ends_its_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Even()
    monkeypatch.setattr(nothing, "allowed", lambda: np.zeros(VOCAB, bool))
    answers = engine.generate([Request((1,), 5, token_filter=filter) for filter in (Broken(), nothing)])
    assert [answer.error for answer in answers] == ["no such state", f"{GRAMMAR_FAILED}: it allows no further token"]


def test_log_probabilities_are_those_of_the_model(engine: Engine) -> None:
    asked = Request((3, 1, 4), 6, SamplingSettings(1.0, seed=2), logprobs=3)
    (answer, *_) = engine.generate([asked, *some_requests(6)])
    assert answer.tokens == alone(asked, LIMIT) and len(answer.logprobs) == 6
    tokens = [*asked.prompt, *answer.tokens]
    for index, found in enumerate(answer.logprobs):
        known = tokens[: 3 + index]
        logits = toy_logits(row_values(np.array(known), np.arange(len(known))), known[-1]).astype(np.float64)
        right = logits - np.log(np.exp(logits).sum())
        assert found.token == tokens[3 + index]
        np.testing.assert_allclose(found.logprob, right[found.token], rtol=1e-5)
        best = np.argsort(-right, kind="stable")[:3]
        assert [token for token, _ in found.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in found.top], right[best], rtol=1e-5)


def toy_scores(tokens: tuple[int, ...], window: int) -> NDArray[np.float64]:
    """Return the toy's log probabilities [tokens - 1, VOCAB] of what follows each token but the last."""
    rows = row_values(np.array(tokens), np.arange(len(tokens)))
    ends = range(len(tokens) - 1)
    logits = np.array([toy_logits(rows[: end + 1][-window:], tokens[end]) for end in ends], np.float64)
    logits = logits.reshape(-1, VOCAB)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"runs_ahead": True},
        {"blocks": 12, "runs_ahead": True},  # so few that sequences lose theirs
        {"max_outputs": 3, "max_tokens": 16},
        {"max_outputs": 1, "max_sequences": 1},
        {"read_window": 6, "blocks": 14},
    ],
    ids=str,
)
def test_a_prompts_log_probabilities_are_those_of_the_model_whatever_else_runs(
    sizes: dict[str, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, 20).tolist()  # whose blocks others leave in the cache

    def drawn(index: int) -> Request:
        begin = shared[: rng.integers(0, 21)] if rng.integers(0, 2) else []
        prompt = (*begin, *rng.integers(0, VOCAB, rng.integers(1, 20)).tolist())
        wanted = [None, 0, 1, VOCAB][rng.integers(0, 4)]
        new = int(rng.integers(0, 9))
        return Request(prompt, new, SamplingSettings(float(rng.integers(0, 2)), seed=index), prompt_logprobs=wanted)

    asked = [drawn(index) for index in range(24)]
    window = sizes.get("read_window", 0)
    with Engine(ToyModel(**sizes)) as engine:
        answers = engine.generate(asked)
        assert engine.stats().blocks_used == 0
    for request, answer in zip(asked, answers, strict=True):
        assert answer.finish_reason == "length" and len(answer.tokens) == min(request.max_new_tokens or 0, 9)
        if not window and request.max_new_tokens:
            assert answer.tokens == alone(request, LIMIT)
        if request.prompt_logprobs is None:
            assert answer.prompt_logprobs == ()
            continue
        assert [entry.token for entry in answer.prompt_logprobs] == list(request.prompt[1:])
        for entry, right in zip(answer.prompt_logprobs, toy_scores(request.prompt, window), strict=True):
            np.testing.assert_allclose(entry.logprob, right[entry.token], rtol=1e-5)
            assert entry.rank == 1 + (right > right[entry.token]).sum()
            best = np.argsort(-right, kind="stable")[: request.prompt_logprobs]
            assert [token for token, _ in entry.top] == best.tolist()


def test_a_recurrent_model_scores_prompts_one_token_a_step() -> None:
    prompt = (5, 1, 7, 7, 2)
    with Engine(ToyModel(recurrent=True)) as engine:
        scored, plain = engine.generate([Request(prompt, 3, prompt_logprobs=2), Request(prompt, 3)])
        assert scored.tokens == plain.tokens and len(scored.prompt_logprobs) == 4
        again = [engine.generate([Request(prompt[:end], 1, logprobs=2)])[0] for end in range(1, 5)]
    assert [entry.top for entry in scored.prompt_logprobs] == [answer.logprobs[0].top for answer in again]


def test_logits_of_a_prompt_that_are_not_finite_end_its_request_with_an_error() -> None:
    model = ToyModel()
    model.not_finite = {9}
    with Engine(model) as engine:
        wrong, right = engine.generate([Request((1, 9, 2, 3), 2, prompt_logprobs=0), Request((1, 2), 0)])
    assert wrong.finish_reason == "error" and "not finite" in (wrong.error or "")
    assert (right.finish_reason, right.tokens, right.prompt_logprobs) == ("length", (), ())


def test_a_stop_token_ends_the_answer_and_is_not_returned(engine: Engine) -> None:
    whole = alone(Request((2,), 20), LIMIT)
    (answer,) = engine.generate([Request((2,), 20, stop_ids=frozenset({whole[7]}))])
    assert answer.finish_reason == "stop" and answer.tokens == whole[: whole.index(whole[7])]


class Letters:
    """A tokenizer whose tokens are pieces of a text."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], **_: bool) -> str:
        return b"".join(self.pieces[token] for token in ids).decode("utf-8", "replace")


def pushed(output: TextOutput, count: int) -> list[tuple[tuple[int, ...], str]]:
    return [*(output.push(token) for token in range(count)), output.finish()]


def test_only_whole_characters_are_returned() -> None:
    bench = "é한🎈".encode()
    letters = Letters(*(bench[index : index + 1] for index in range(len(bench))))
    assert [text for _, text in pushed(TextOutput(letters), 9) if text] == ["é", "한", "🎈"]
    cut = pushed(TextOutput(letters), 4)
    assert "".join(text for _, text in cut) == "é\ufffd" and sum((tokens for tokens, _ in cut), ()) == (0, 1, 2, 3)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    output = TextOutput(Letters(b"a b", b"E", b"N", b" E", b"ND", b"more"), ["END"])
    assert pushed(output, 6) == [
        ((0,), "a b"),
        ((), ""),
        ((), ""),
        ((1, 2, 3), "EN "),
        ((), ""),
        ((), ""),
        ((), ""),
    ]
    assert output.stopped


def test_a_token_with_text_before_the_stop_string_is_returned() -> None:
    output = TextOutput(Letters(b"abc<", b"/x"), ["</x"])
    assert pushed(output, 2) == [((0,), "abc"), ((), ""), ((), "")]


def test_held_text_comes_at_the_end_when_nothing_stopped_it() -> None:
    output = TextOutput(Letters(b"one ", b"EN"), ["END"])
    assert pushed(output, 2) == [((0,), "one "), ((), ""), ((1,), "EN")] and not output.stopped


def test_text_stops_before_a_stop_string_whatever_the_engine_has_computed_since(checkpoint: Checkpoint) -> None:
    prompt = tuple(range(4, 10))
    with Engine(ToyModel(), checkpoint) as engine:
        asked = Request(prompt, 30, stop_ids=frozenset())
        (whole,) = engine.generate([asked])
        decoder = StreamDecoder(checkpoint.tokenizer)
        assert whole.text == "".join(map(decoder.push, whole.tokens)) + decoder.flush()
        stop = whole.text[5:8]
        (cut,) = engine.generate([Request(prompt, 30, stop_ids=frozenset(), stop=(stop,))])
        assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]
        assert cut.tokens == whole.tokens[: len(cut.tokens)]
        wait_until(lambda: engine.stats().running == 0)
        assert engine.stats().blocks_used == 0


def test_the_models_end_of_sequence_ids_are_the_default(checkpoint: Checkpoint) -> None:
    with Engine(ToyModel(), checkpoint) as engine:
        (answer,) = engine.generate([Request((1, 2), 40)])
    assert answer.tokens == alone(Request((1, 2), 40), LIMIT, checkpoint.end_ids())


def test_a_slow_reader_gets_what_has_come_as_one_update(engine: Engine) -> None:
    handle = engine.submit(Request((1,), 20))
    wait_until(lambda: handle.usage.new_tokens == 20)
    (update,) = handle
    assert update == Update(alone(Request((1,), 20), LIMIT), finish_reason="length")
    assert list(handle) == []


def test_usage_says_how_much_of_the_prompt_was_cached(engine: Engine) -> None:
    prompt = tuple(index % VOCAB for index in range(13))
    handles = []
    for _ in range(2):
        handles.append(engine.submit(Request(prompt, 3)))
        handles[-1].result()
    assert [
        (handle.usage.prompt_tokens, handle.usage.cached_tokens, handle.usage.new_tokens) for handle in handles
    ] == [
        (13, 0, 3),
        (13, 12, 3),
    ]
