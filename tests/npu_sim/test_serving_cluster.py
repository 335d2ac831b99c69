"""Replicas on a Ray cluster: the same answers, and errors that clients see where a replica is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore
from typing import Any

import openai
import pytest
from fake_engine import HERMES, NAME, served
from tiny_llms import save_tiny, save_tokenizer

from npu_sim.llm import LanguageModel, StreamDecoder, TextStream, chat_prompt, load_checkpoint
from npu_sim.serving.engine_setup import EngineSettings, ReplicaSettings

pytest.importorskip("ray", exc_type=ImportError)

from npu_sim.serving.cluster import Deployment, RemoteEngine, Scale, cluster

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_programs")]

STREAMS, TOKENS, MAX_BATCH = 100, 60, 4
MANY_TOKENS = 300  # so that a stream is far from its end when its first text arrives; a step takes half a millisecond
SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMA = {"type": "object", "properties": {"n": SMALL}, "required": ["n"], "additionalProperties": False}


@dataclass(frozen=True)
class Reply:
    text: str
    error: str | None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny(tmp_path_factory.mktemp("tiny"), "llama", "float32", vocab_size=304, max_position_embeddings=512)
    save_tokenizer(path, HERMES)
    return path


def settings(folder: Path, **changes: Any) -> ReplicaSettings:
    sizes = {"context_length": 384, "max_batch": MAX_BATCH, "prefill_tokens": 12, **changes}
    return ReplicaSettings(str(folder), "float32", device="cpu", tune=False, engine=EngineSettings(**sizes))


@contextmanager
def replicas(folder: Path, scale: Scale, **changes: Any) -> Iterator[RemoteEngine]:
    with cluster(None, cpus=3 * scale.most):  # room for two ranks, and for an update
        engine = RemoteEngine(Deployment("tiny", settings(folder, **changes), scale).handle, 1000)
        try:
            yield engine
        finally:
            engine.close()


def message(index: int) -> str:
    return f"the cat {index % 6} sat on the mat"


def reply_alone(model: LanguageModel, index: int, tokens: int = TOKENS) -> str:
    """Return what a model says to `message(index)` in so many tokens, whether or not an end is among them."""
    generation = model.generate(chat_prompt(model, message(index)), tokens, stop=frozenset())
    return "".join(TextStream(generation, StreamDecoder(model.checkpoint.tokenizer)))


def stream(client: openai.OpenAI, index: int, tokens: int = TOKENS, begun: Semaphore | None = None) -> Reply:
    """Return a client's reply from a stream read to its end; a connection that is cut fails the test.

    Releases `begun` once, when the first text arrives.
    """
    text = ""
    try:
        chunks = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": message(index)}],
            temperature=0,
            max_tokens=tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for chunk in chunks:
            if begun is not None and not text and chunk.choices[0].delta.content:
                begun.release()
            text += chunk.choices[0].delta.content or ""
    except openai.APIConnectionError:
        raise
    except openai.APIError as error:
        return Reply(text, str(error))
    return Reply(text, None)


def wait_until(condition: Any, seconds: float, engine: RemoteEngine) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, engine.replicas()
        time.sleep(0.1)
        engine.refresh()


def test_a_replica_that_is_killed_fails_its_streams_only_and_is_replaced(folder: Path) -> None:
    checkpoint = load_checkpoint(folder, "float32")
    single = LanguageModel(checkpoint, device="cpu", cache_length=384)
    right = [reply_alone(single, index, MANY_TOKENS) for index in range(6)]
    begun = Semaphore(0)
    with replicas(folder, Scale(2, 2)) as engine, served(checkpoint, engine=engine) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
        wait_until(lambda: len(engine.replicas()) == 2, 300, engine)
        killed = engine.replicas()[0]
        with ThreadPoolExecutor(STREAMS) as pool:
            asked = [pool.submit(stream, client, index, MANY_TOKENS, begun) for index in range(STREAMS)]
            for _ in range(MAX_BATCH + 1):  # more than one replica runs at a time, so both have begun
                assert begun.acquire(timeout=300)
            os.kill(killed.pid, signal.SIGKILL)
            replies = [reply.result(600) for reply in asked]
        lost = [reply for reply in replies if reply.error is not None]
        assert 1 <= len(lost) < STREAMS
        assert all("is lost" in str(reply.error) for reply in lost)
        for index, reply in enumerate(replies):
            whole = right[index % 6]
            assert whole.startswith(reply.text) if reply.error else reply.text == whole
        wait_until(
            lambda: len(engine.replicas()) == 2 and killed.replica not in {one.replica for one in engine.replicas()},
            900,
            engine,
        )
        assert stream(client, 0, MANY_TOKENS) == Reply(right[0], None)
        wait_until(lambda: engine.stats().blocks_used == 0 and engine.stats().running == 0, 300, engine)


def test_two_ranks_in_two_bundles_answer_as_one_and_an_update_keeps_streams(folder: Path) -> None:
    import ray

    checkpoint = load_checkpoint(folder, "float32")
    single = LanguageModel(checkpoint, device="cpu", cache_length=384)
    right = [reply_alone(single, index) for index in range(6)]
    with (
        replicas(folder, Scale(1, 1), tensor_parallel=2) as engine,
        served(checkpoint, engine=engine) as server,
        ThreadPoolExecutor(12) as pool,
    ):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
        groups = ray.util.placement_group_table().values()
        assert [len(group["bundles"]) for group in groups if group["state"] == "CREATED"] == [2]
        asked = [pool.submit(stream, client, index) for index in range(12)]
        wait_until(lambda: engine.stats().new_tokens > 20, 300, engine)
        (before,) = engine.replicas()
        after = Deployment("tiny", settings(folder, context_length=320), Scale(1, 1))
        assert after.facts.context_length == 320
        assert [reply.result(600) for reply in asked] == [Reply(right[index % 6], None) for index in range(12)]
        wait_until(lambda: before.replica not in {one.replica for one in engine.replicas()}, 300, engine)
        assert stream(client, 1) == Reply(right[1], None)
        # Grammars go to the replica as text.
        form = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}
        hello: Any = [{"role": "user", "content": "Hi"}]
        reply: Any = client.chat.completions.create(model=NAME, messages=hello, response_format=form)  # type: ignore
        assert 0 <= json.loads(reply.choices[0].message.content)["n"] <= 9
        wait_until(lambda: engine.stats().blocks_used == 0, 300, engine)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def test_a_cluster_that_starts_too_slowly_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil
    import ray

    get_node = ray._private.services.get_node
    tried = []

    def slow(*arguments: Any) -> Any:
        tried.append({child.pid for child in psutil.Process().children() if child.name() == "raylet"})
        if len(tried) == 1:
            raise TimeoutError("the current node timed out during startup")
        return get_node(*arguments)

    monkeypatch.setattr(ray._private.services, "get_node", slow)
    with cluster(None, cpus=1):
        (started,) = (child for child in psutil.Process().children() if child.name() == "raylet")
        assert started.pid not in tried[0]
        assert ray.cluster_resources()["CPU"] == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_command_ends_with_all_processes_of_its_cluster(folder: Path) -> None:
    options = ["--ray", "--port", "0", "--device", "cpu", "--no-tune", "--dtype", "float32", "--name", NAME]
    options += ["--context-length", "384", "--max-batch", str(MAX_BATCH), "--prefill-tokens", "12"]
    process = subprocess.Popen(
        [sys.executable, "-m", "npu_sim.cli", "serve", str(folder), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        line = next((line for line in process.stderr if "is served at" in line), "")
        assert "in 1 replica is served" in line
        url = line.partition("is served at ")[2].partition(";")[0]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        single = LanguageModel(load_checkpoint(folder, "float32"), device="cpu", cache_length=384)
        assert stream(client, 0) == Reply(reply_alone(single, 0), None)
        started = descendants(process.pid)
        assert len(started) > 3
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all processes of the group
        assert process.wait(300) == 0
        until = time.monotonic() + 120
        while left := [pid for pid in started if is_running(pid)]:
            assert time.monotonic() < until, left
            time.sleep(0.1)
    finally:
        process.kill()


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
