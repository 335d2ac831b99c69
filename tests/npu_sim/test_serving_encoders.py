"""`/v1/embeddings`, `/v1/rerank` and `/v1/score`, asked over HTTP of tiny random models, and by OpenAI's own client."""

from __future__ import annotations

import base64
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from fake_engine import running, served, text_checkpoint
from tiny_encoders import TEXTS, VOCABULARY, expected_embedding, expected_logits, save_cross_encoder, save_embedder
from typer.testing import CliRunner

from npu_compiler import InputError
from npu_sim.commands.application import app
from npu_sim.encoders import EncodedText, TextEncoder, read_encoder
from npu_sim.serving.encoder_engine import EncoderEngine
from npu_sim.serving.engine import EngineClosedError
from npu_sim.serving.http import APIKeys, Limits, ServedEncoder, make_encoder_application

LAST = "pooling_mode_lasttoken"


@dataclass(frozen=True)
class Asked:
    """A server of an encoder, and the folder that it serves."""

    url: str
    folder: Path
    engine: EncoderEngine

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """The status and the JSON of a reply."""
        kinds = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), kinds)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def refused(self, path: str, body: Any) -> str:
        """The message of a reply with status 400."""
        status, reply = self.post(path, body)
        assert status == 400 and reply["error"]["type"] == "invalid_request_error", reply
        return str(reply["error"]["message"])


@contextmanager
def serving(folder: Path, keys: dict[str, str] | None = None, **limits: Any) -> Iterator[Asked]:
    read = read_encoder(folder)
    assert read is not None
    encoder = TextEncoder(read, device="cpu")
    engine, bounds = EncoderEngine(encoder), Limits(**limits)
    application = make_encoder_application(ServedEncoder("tiny", encoder), engine, APIKeys(keys or {}), bounds)
    with running(application, bounds) as (url, _):
        yield Asked(url, folder, engine)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    settings = {"prompts": {"query": "what is ", "document": ""}, "default_prompt_name": None}
    folder = save_embedder(tmp_path_factory.mktemp("qwen3"), "qwen3", [LAST], settings=settings)
    with serving(folder) as server:
        yield server


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    with serving(save_cross_encoder(tmp_path_factory.mktemp("ranker"))) as server:
        yield server


def vectors(reply: Any) -> torch.Tensor:
    return torch.tensor([item["embedding"] for item in sorted(reply["data"], key=lambda item: item["index"])])


def test_openais_client_gets_the_embedding_of_each_text(embedder: Asked) -> None:
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0, timeout=30)
    reply = client.embeddings.create(model="tiny", input=TEXTS)  # in base64, by the client's own choice
    ids = [len(text.split()) + 1 for text in TEXTS]
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens, reply.model) == (sum(ids), sum(ids), "tiny")
    for item, text in zip(reply.data, TEXTS, strict=True):
        theirs = expected_embedding(embedder.folder, text, LAST)
        assert torch.cosine_similarity(torch.tensor(item.embedding), theirs, dim=0) >= 0.9999


def test_texts_token_ids_and_encodings_are_of_one_embedding(embedder: Asked) -> None:
    ids = [VOCABULARY.index("the"), VOCABULARY.index("cat"), VOCABULARY.index("[SEP]")]
    bodies = [{"input": "the cat"}, {"input": ["the cat"]}, {"input": ids}, {"input": [ids]}]
    replies = [embedder.post("/v1/embeddings", {"model": "tiny", **body}) for body in bodies]
    assert [status for status, _ in replies] == [200] * 4
    theirs = expected_embedding(embedder.folder, "the cat", LAST)
    for _, reply in replies:
        torch.testing.assert_close(vectors(reply)[0], theirs, rtol=1e-3, atol=1e-4)
    _, reply = embedder.post("/v1/embeddings", {"model": "tiny", "input": "the cat", "encoding_format": "base64"})
    found = np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(found, vectors(replies[0][1])[0].numpy())


def test_dimensions_prompts_and_truncation_are_the_requests(embedder: Asked) -> None:
    def embedded(**body: Any) -> torch.Tensor:
        status, reply = embedder.post("/v1/embeddings", {"model": "tiny", **body})
        assert status == 200, reply
        return vectors(reply)

    whole, short = embedded(input=TEXTS), embedded(input=TEXTS, dimensions=5)
    torch.testing.assert_close(short, torch.nn.functional.normalize(whole[:, :5], dim=1), rtol=1e-4, atol=1e-5)
    prompted = embedded(input="paris", prompt_name="query")
    torch.testing.assert_close(prompted, embedded(input="what is paris"))
    long = "cat " * 200
    torch.testing.assert_close(embedded(input=long, truncate_prompt_tokens=-1), embedded(input="cat " * 63))
    torch.testing.assert_close(embedded(input=long, truncate_prompt_tokens=4), embedded(input="cat cat cat"))


BAD_EMBEDDINGS: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "'input' is empty; give at least one character or token"),
    ({"input": []}, "'input' has 0 texts; give 1 to 2048"),
    ({"input": ["cat"] * 2049}, "'input' has 2049 texts; give 1 to 2048"),
    ({"input": ["cat", ""]}, "'input.1' is empty"),
    ({"input": [[]]}, "'input.0' is empty"),
    ({"input": ["cat", 5]}, "invalid 'input.1'"),
    ({"input": {"a": 1}}, "invalid 'input'"),
    ({"input": [len(VOCABULARY)]}, f"the model has no token {len(VOCABULARY)}; ids are 0 to {len(VOCABULARY) - 1}"),
    ({"input": [-1]}, "the model has no token -1"),
    ({"input": "cat " * 64}, "'input' has 65 tokens, but tiny takes at most 64; shorten it, or cut it with"),
    ({"input": ["a", "cat " * 64]}, "'input.1' has 65 tokens, but tiny takes at most 64"),
    ({"input": [[4] * 65]}, "'input.0' has 65 tokens, but tiny takes at most 64"),
    ({"encoding_format": "int8"}, "invalid 'encoding_format': input should be 'float' or 'base64'"),
    ({"dimensions": 0}, "invalid 'dimensions': input should be greater than or equal to 1"),
    ({"dimensions": 33}, "tiny has embeddings of 32 dimensions, not 33"),
    ({"prompt_name": "task"}, "tiny has no prompt 'task'; its prompts are query, document"),
    ({"input": [4], "prompt_name": "query"}, "'prompt_name' is for texts; token ids are taken as they are"),
    ({"truncate_prompt_tokens": 0}, "'truncate_prompt_tokens' must be above 0, or -1"),
    ({"stream": True}, "unknown parameter 'stream'"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD_EMBEDDINGS, ids=[str(wrong)[:40] for wrong, _ in BAD_EMBEDDINGS])
def test_a_wrong_request_for_embeddings_is_refused_by_name(embedder: Asked, wrong: Any, message: str) -> None:
    assert message in embedder.refused("/v1/embeddings", {"model": "tiny", "input": "the cat", **wrong})


def test_models_and_health_tell_of_the_encoder(embedder: Asked) -> None:
    status, reply = embedder.post("/v1/embeddings", {"model": "huge", "input": "cat"})
    assert (status, reply["error"]["message"]) == (404, "there is no model 'huge' here; this is tiny")
    with urllib.request.urlopen(f"{embedder.url}/v1/models") as response:
        (model,) = json.load(response)["data"]
    assert (model["id"], model["context_length"]) == ("tiny", 64)
    with urllib.request.urlopen(f"{embedder.url}/health") as response:
        assert json.load(response)["status"] == "ready"
    with urllib.request.urlopen(f"{embedder.url}/metrics") as response:
        assert b"npu_sim_prompt_tokens_total" in response.read()


QUERY = "what is the capital of france"


def test_documents_are_ranked_by_transformers_scores(ranker: Asked) -> None:
    theirs = torch.sigmoid(torch.tensor(expected_logits(ranker.folder, QUERY, TEXTS)))
    best = theirs.argsort(descending=True).tolist()
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        status, reply = ranker.post(path, {"model": "tiny", "query": QUERY, "documents": TEXTS})
        assert status == 200 and [item["index"] for item in reply["results"]] == best
        scores = torch.tensor([item["relevance_score"] for item in reply["results"]])
        torch.testing.assert_close(scores, theirs[best], rtol=1e-3, atol=1e-4)
        assert [item["document"]["text"] for item in reply["results"]] == [TEXTS[index] for index in best]
    documents = [{"text": text} for text in TEXTS]
    body = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": False}
    _, reply = ranker.post("/v1/rerank", body)
    assert [item["index"] for item in reply["results"]] == best[:2] and "document" not in reply["results"][0]
    assert reply["usage"]["total_tokens"] > 0 and reply["model"] == "tiny"


def test_pairs_are_scored_one_to_many_and_one_to_one(ranker: Asked) -> None:
    theirs = torch.sigmoid(torch.tensor(expected_logits(ranker.folder, QUERY, TEXTS)))
    for first in (QUERY, [QUERY], [QUERY] * len(TEXTS)):
        status, reply = ranker.post("/score", {"model": "tiny", "text_1": first, "text_2": TEXTS})
        assert status == 200
        scores = torch.tensor([item["score"] for item in reply["data"]])
        torch.testing.assert_close(scores, theirs, rtol=1e-3, atol=1e-4)


def test_a_wrong_request_for_scores_is_refused_by_name(ranker: Asked) -> None:
    for path, body, message in (
        ("/v1/rerank", {"query": QUERY, "documents": []}, "'documents' has 0 texts; give 1 to 2048"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "invalid 'query'"),
        ("/v1/rerank", {"documents": ["a"]}, "invalid 'query': field required"),
        ("/v1/rerank", {"query": "a", "documents": [1]}, "invalid 'documents.0"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "invalid 'top_n'"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "cat " * 70]}, "'documents.1' has 74 tokens, but tiny takes"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "'text_1' has 2 texts and 'text_2' 3: give one, or as"),
        ("/score", {"text_1": "a", "text_2": []}, "'text_2' has 0 texts"),
    ):
        assert message in ranker.refused(path, body)
    long = {"query": "a", "documents": ["cat " * 70], "truncate_prompt_tokens": -1}
    assert ranker.post("/v1/rerank", long)[0] == 200


def test_each_kind_of_model_says_what_it_answers(embedder: Asked, ranker: Asked, tmp_path: Path) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    only = "tiny is an embedding model, which answers /v1/embeddings only"
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/rerank", "/score"):
        assert embedder.refused(path, chat) == only
    only = "tiny is a cross-encoder, which answers /v1/rerank and /v1/score only"
    for path in ("/v1/chat/completions", "/v1/embeddings"):
        assert ranker.refused(path, chat) == only
    with served(text_checkpoint(tmp_path)) as server:
        asked = Asked(server.url, tmp_path, None)  # type: ignore[arg-type]
        for path in ("/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score", "/score"):
            assert asked.refused(path, {"model": "tiny", "input": "Hi"}) == (
                "tiny generates text, and has neither embeddings nor scores; serve an embedding model or a "
                "cross-encoder for those"
            )


def test_a_key_is_asked_for_outside_v1_too(tmp_path: Path) -> None:
    with served(text_checkpoint(tmp_path), keys={"me": "k" * 20}) as server:
        asked = Asked(server.url, tmp_path, None)  # type: ignore[arg-type]
        assert [asked.post(path, {"prompt": "Hi"})[0] for path in ("/tokenize", "/rerank", "/score")] == [401] * 3
        assert asked.post("/tokenize", {"prompt": "Hi"}, Authorization=f"Bearer {'k' * 20}")[0] == 200


def test_many_clients_at_once_share_runs_and_get_their_own(embedder: Asked) -> None:
    before = embedder.engine.stats()
    texts = [f"{'cat ' * (number % 7 + 1)}paris" for number in range(48)]

    def ask(text: str) -> torch.Tensor:
        return vectors(embedder.post("/v1/embeddings", {"model": "tiny", "input": [text, "a dog"]})[1])

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, texts))
    alone = {text: ask(text) for text in set(texts)}
    for text, both in zip(texts, found, strict=True):
        torch.testing.assert_close(both, alone[text], rtol=1e-4, atol=1e-5)
    after = embedder.engine.stats()
    assert after.waiting == 0 and after.finished["stop"] - before.finished["stop"] == 48 + len(alone)
    assert after.steps - before.steps < 2 * (48 + len(alone))


class FakeEncoder:
    """An encoder whose result for a text is its number of tokens; it stops or fails as a test wants."""

    def __init__(self) -> None:
        self.go, self.broken = threading.Event(), False
        self.runs: list[int] = []

    def length_of(self, text: EncodedText) -> int:
        return 16 if len(text.ids) <= 16 else 32

    def most_rows(self, length: int) -> int:
        return 4

    def run(self, texts: list[EncodedText]) -> Any:
        assert self.go.wait(10)
        self.runs.append(len(texts))
        if self.broken:
            raise ValueError("lost")
        return np.array([[len(text.ids)] for text in texts], np.float32)


def tokens(count: int) -> EncodedText:
    return EncodedText((1,) * count)


def test_the_engine_joins_texts_of_like_lengths_and_skips_cancelled_ones() -> None:
    fake = FakeEncoder()
    engine = EncoderEngine(fake)  # type: ignore[arg-type]
    first = engine.submit([tokens(3)])
    while engine._queues.get(16):
        pass  # it runs now, and the others wait
    several = [engine.submit([tokens(4), tokens(20), tokens(5)]) for _ in range(3)]
    assert several[1].cancel()
    fake.go.set()
    assert first.result(10).tolist() == [[3]]
    assert [several[index].result(10).tolist() for index in (0, 2)] == [[[4], [20], [5]]] * 2
    assert fake.runs == [1, 4, 2]
    assert engine.drain(5)
    with pytest.raises(EngineClosedError, match="takes no more requests"):
        engine.submit([tokens(1)])
    engine.close()


def test_a_failed_run_fails_its_requests_and_many_end_the_engine() -> None:
    fake = FakeEncoder()
    engine = EncoderEngine(fake)  # type: ignore[arg-type]
    fake.go.set()
    fake.broken = True
    for _ in range(3):
        with pytest.raises(ValueError, match="lost"):
            engine.submit([tokens(1), tokens(20)]).result(10)
    fake.broken = False
    assert engine.submit([tokens(2)]).result(10).tolist() == [[2]]
    fake.broken = True
    for _ in range(8):
        with pytest.raises(ValueError, match="lost"):
            engine.submit([tokens(1)]).result(10)
    engine._thread.join(10)
    assert engine.failed == "the engine has failed: 8 runs have failed one after the other"
    with pytest.raises(EngineClosedError, match="8 runs have failed"):
        engine.submit([tokens(1)])


def test_options_of_text_generation_are_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "embedder")
    (folder / "model.safetensors").unlink()
    for option, value in (("--speculate", None), ("--max-new-tokens", "5"), ("--tensor-parallel", "2")):
        result = CliRunner().invoke(app, ["serve", str(folder), option, *([value] if value else [])])
        assert isinstance(result.exception, SystemExit | InputError) and result.exit_code != 0
        assert f"{option} is for models that generate text; embedder is an embedding model" in result.output
