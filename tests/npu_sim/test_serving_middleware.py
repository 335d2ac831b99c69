"""The server's limits by key, size, number and time; and clients that misbehave, in every state of a request."""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import CONTEXT, FakeEngine, Script, Served, served, text_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from npu_compiler.errors import InputError
from npu_compiler.installing import install_command
from npu_sim.cli import app
from npu_sim.commands import serve
from npu_sim.llm import Checkpoint
from npu_sim.serving.engine_setup import prepare_steps
from npu_sim.serving.http.body import parse_json
from npu_sim.serving.http.chat import ChatWriter
from npu_sim.serving.http.errors import APIError
from npu_sim.serving.http.keys import VARIABLE, read_keys
from npu_sim.serving.http.limits import Admission, Limits
from npu_sim.serving.http.logs import JSONLines
from npu_sim.serving.http.schemas import ChatRequest, CompletionRequest, parse
from npu_sim.serving.http.server import allow_connections
from npu_sim.serving.http.text import ModelText
from npu_sim.serving.request import GRAMMAR_FAILED

CHAT = "/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
ENDLESS = Script("the cat sat on the mat. ", endless=True, delay=0.002)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return text_checkpoint(folder)


@pytest.fixture(scope="module")
def server(checkpoint: Checkpoint) -> Iterator[Served]:
    with served(checkpoint, body_bytes=100_000) as running:
        yield running


def connect(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def head(length: int, path: str = CHAT, *lines: str, kind: str = "application/json") -> bytes:
    common = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}", f"Content-Length: {length}"]
    return "\r\n".join([*common, *lines, "", ""]).encode()


def post(body: Any, *lines: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(len(data), CHAT, *lines) + data


def receive(connection: socket.socket) -> tuple[int, dict[str, str], Any]:
    """(status, headers, body) of a response that has a length, or ends with the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        assert piece, f"the connection ended after {data!r}"
        data += piece
    top, _, body = data.partition(b"\r\n\r\n")
    first, *rest = top.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
    length = int(headers.get("content-length", 0))
    while len(body) < length:
        body += connection.recv(65536)
    body = body[:length] if length else body  # of two requests at once, the other's answer may have come too
    status = int(first.split()[1])
    return status, headers, json.loads(body) if headers.get("content-type") == "application/json" else body


def ask(server: Served, request: bytes) -> tuple[int, dict[str, str], Any]:
    with closing(connect(server)) as connection:
        connection.sendall(request)
        return receive(connection)


def get(server: Served, path: str, *lines: str, host: str = "localhost") -> tuple[int, dict[str, str], Any]:
    return ask(server, "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode())


def is_closed(connection: socket.socket, seconds: float = 5.0) -> bool:
    """Whether the server ends the connection; what it still sends is read."""
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


# ---- bodies


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        (post(b""), 400, "the body is not JSON"),
        (post(b"{"), 400, "the body is not JSON: Expecting property name"),
        (post(b'{"model": "\xff"}'), 400, "the body is not UTF-8: byte 11 is 0xff"),
        (post(b"[1]"), 400, "the body must be a JSON object, not an array"),
        (post(b"null"), 400, "the body must be a JSON object, not null"),
        (post(b'{"temperature": NaN}'), 400, "NaN is no JSON number"),
        (post(b'{"n": ' + b"9" * 5000 + b"}"), 400, "the body is not JSON: Exceeds the limit"),
        (post(b"[" * 50_000), 400, "nested more than 64 deep"),
        (post(b'{"a":' * 100 + b"1" + b"}" * 100), 400, "nested more than 64 deep"),
        (post({str(key): key for key in range(1001)}), 400, "an object in the body has more than 1000 keys"),
        (post(rb'{"model": "\ud800"}'), 400, "half of a surrogate pair"),
        (head(10**12), 413, "the body is larger than 100000 bytes"),
        (head(2, kind="text/plain") + b"{}", 415, "the content type is 'text/plain'; send application/json"),
        (head(2, "/v1/nothing") + b"{}", 404, "there is nothing at /v1/nothing"),
        (b"PUT /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 405, "/v1/models has no method PUT"),
        (b"nonsense\r\n\r\n", 400, "invalid http request received"),
        (head(-5) + b"{}", 400, "invalid http request received"),
    ],
)
def test_a_body_that_is_no_request_is_refused(server: Served, request_: bytes, status: int, message: str) -> None:
    found, headers, body = ask(server, request_)
    assert found == status and message in body["error"]["message"]
    assert headers["content-type"] == "application/json"
    assert server.engine.active == set()


def test_a_body_that_nobody_reads_ends_the_connection_after_one_answer(server: Served) -> None:
    with closing(connect(server)) as connection:
        connection.sendall(head(50_000, "/v1/nothing") + b" " * 1000)
        status, headers, _ = receive(connection)
        assert (status, headers["connection"]) == (404, "close")
        assert connection.recv(1000) == b""


def test_a_body_in_chunks_is_measured_as_it_comes(server: Served) -> None:
    start = head(0, CHAT, "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
    with closing(connect(server)) as connection:
        connection.sendall(start + b"186a1\r\n" + b" " * 100_001 + b"\r\n")
        status, headers, body = receive(connection)
        assert status == 413 and headers["connection"] == "close"
        assert is_closed(connection)


@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_an_error(body: bytes) -> None:
    try:
        value = parse_json(body)
    except APIError as error:
        assert error.status == 400
    else:
        assert json.loads(body) == value


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {"prompt": [True] * 200_000}, "prompt.0"),
        (CompletionRequest, {"prompt": [[1, None]] * 200_000}, "prompt.0"),
        (ChatRequest, {"messages": [0] * 200_000}, "messages.0"),
        (ChatRequest, {"messages": [{"role": "user", "content": [0] * 200_000}]}, "messages.0.content.0"),
    ],
)
def test_an_array_that_is_wrong_everywhere_is_refused_at_once(kind: Any, body: dict[str, Any], param: str) -> None:
    begun = time.process_time()
    with pytest.raises(APIError) as caught:
        parse(kind, {"model": "tiny", **body})
    assert str(caught.value.param).startswith(param) and time.process_time() - begun < 1


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelText, "longest_token", 10)
    with served(checkpoint) as running:
        monkeypatch.setattr(ModelText, "encode", lambda *_: pytest.fail("tokenized"))
        monkeypatch.setattr(ModelText, "encode_chat", lambda *_: pytest.fail("tokenized"))
        text = "x" * (10 * CONTEXT + 1)
        completion = json.dumps({"model": "tiny", "prompt": text}).encode()
        for request in (
            post({"model": "tiny", "messages": [{"role": "user", "content": text}]}),
            head(len(completion), "/v1/completions") + completion,
        ):
            status, _, body = ask(running, request)
            assert status == 400 and body["error"]["code"] == "context_length_exceeded"
            assert "characters, but the context of 2048 tokens holds 20480" in body["error"]["message"]


# ---- keys


def test_a_key_is_needed_where_keys_are_used(checkpoint: Checkpoint) -> None:
    keys = {"alice": "a" * 20, "bob": "é" * 20}
    with served(checkpoint, keys=keys) as running:
        for wrong in ((), ("Authorization: Bearer " + "c" * 20,), ("Authorization: Basic " + "a" * 20,)):
            status, headers, body = ask(running, post(HELLO, *wrong))
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert body["error"]["code"] == "invalid_api_key"
        assert get(running, "/v1/models")[0] == get(running, "/metrics")[0] == 401
        assert get(running, "/health")[0] == get(running, "/")[0] == 200
        for name, key in keys.items():
            assert ask(running, post(HELLO, f"authorization: bearer {key}"))[0] == 200
            assert running.engine.requests[-1].tenant == name  # prefixes are shared within a key only
        assert "a" * 20 not in repr(vars(running.application.guard._keys))


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\nalice  0123456789abcdef\n")
    monkeypatch.setenv(VARIABLE, "fedcba9876543210\n")
    keys = read_keys(path)
    assert keys.name_of("Bearer 0123456789abcdef") == "alice"
    assert keys.name_of("Bearer fedcba9876543210") == "default"
    assert keys.name_of("Bearer x") is keys.name_of(None) is None
    monkeypatch.delenv(VARIABLE)
    assert not read_keys(None) and read_keys(None).name_of(None) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "holds no API keys"),
        (b"only-a-name\n", "line 1: write a name, a space and a key"),
        (b"a 0123456789abcdef\na 0123456789abcdeg\n", "line 2: there is another key named 'a'"),
        (b"a short\n", "has fewer than 16 characters"),
        (b"\xff", "is not UTF-8 text"),
    ],
)
def test_a_wrong_key_file_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "keys").write_bytes(text)
    with pytest.raises(InputError, match=message):
        read_keys(tmp_path / "keys")


def test_without_keys_only_names_of_this_machine_are_answered(server: Served) -> None:
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:80"):
        assert get(server, "/health", host=host)[0] == 200
    for host in (
        "evil.example",
        "localhost.evil.example",
        "",
        "[::2]",
        "[::1].evil.example",
        "[::1",
        "localhost:80:80",
    ):
        assert get(server, "/health", host=host)[0] == 403


# ---- numbers


def test_requests_at_once_are_limited_in_all_and_per_key() -> None:
    admission = Admission(Limits(requests=3, requests_per_key=2))
    admission.enter("a")
    admission.enter("a")
    with pytest.raises(APIError, match="2 requests with this key"):
        admission.enter("a")
    admission.enter("b")
    with pytest.raises(APIError, match="the server is handling 3 requests, its maximum"):
        admission.enter("c")
    admission.leave("a")
    admission.enter("a")
    assert admission.active == 3


@given(st.lists(st.floats(0, 30), max_size=60))
def test_no_minute_has_more_requests_than_two_buckets(waits: list[float]) -> None:
    """A bucket that was full at the start of a minute gives its content, and what flows in meanwhile."""
    now, entered = 0.0, []
    admission = Admission(Limits(requests_per_minute=5), clock=lambda: now)
    for wait in waits:
        now += wait
        try:
            admission.enter("a")
        except APIError as error:
            assert error.status == 429
            until, now = now, now + int(error.headers["Retry-After"])
            admission.enter("a")  # the advice holds
            admission.leave("a")
            entered.append(now)
            assert now > until
        else:
            admission.leave("a")
            entered.append(now)
    assert all(sum(start <= time < start + 60 for time in entered) <= 10 for start in entered)


def test_too_many_requests_are_told_when_to_come_back(checkpoint: Checkpoint) -> None:
    with served(checkpoint, requests_per_minute=2) as running:
        assert [ask(running, post(HELLO))[0] for _ in range(3)] == [200, 200, 429]
        status, headers, _ = ask(running, post(HELLO))
        assert status == 429 and 1 <= int(headers["retry-after"]) <= 30
    with served(checkpoint, capacity=0) as running:
        status, headers, body = ask(running, post(HELLO))
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "queue_full", "1")


def test_the_limit_on_open_files_is_raised_for_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 10_000 if before[1] == resource.RLIM_INFINITY else before[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most // 4, before[1]))
        assert allow_connections(most // 2) == most // 2
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > most // 2
        assert before[1] == resource.RLIM_INFINITY or allow_connections(2 * most) < most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_connections_are_limited(checkpoint: Checkpoint) -> None:
    with served(checkpoint, connections=3) as running:
        open_ones = [connect(running) for _ in range(3)]
        running.wait_until(lambda: running.metric("npu_sim_connections") == 3)
        with closing(connect(running)) as refused:
            assert receive(refused)[0] == 503
            assert is_closed(refused)
        for connection in open_ones:
            connection.close()
        running.wait_until(lambda: running.metric("npu_sim_connections") == 0)
        assert get(running, "/health")[0] == 200


def test_metrics_do_not_grow_with_what_clients_make_up(checkpoint: Checkpoint) -> None:
    with served(checkpoint, keys={"alice": "a" * 20}) as running:
        for number in range(3):
            assert get(running, f"/v1/{number}")[0] == 401
            assert get(running, f"/{number}")[0] == 404
        text = running.application.metrics.text().decode()
        paths = {line.partition('path="')[2].partition('"')[0] for line in text.splitlines() if 'path="' in line}
        assert paths == {"other"}


def test_prompts_and_replies_are_limited(checkpoint: Checkpoint) -> None:
    with served(checkpoint, prompt_tokens=30, new_tokens=5) as running:
        assert ask(running, post(HELLO))[0] == 200
        assert running.engine.requests[-1].max_new_tokens == 5
        assert ask(running, post({**HELLO, "max_tokens": 3}))[0] == 200
        assert running.engine.requests[-1].max_new_tokens == 3
        status, _, body = ask(running, post({**HELLO, "max_tokens": 6}))
        assert status == 400 and "at most 5 tokens, not 6" in body["error"]["message"]
        long = {**HELLO, "messages": [{"role": "user", "content": "xyz" * 30}]}
        assert "but this server takes 30" in ask(running, post(long))[2]["error"]["message"]
        completion = json.dumps({"model": "tiny", "prompt": "Hi"}).encode()
        assert ask(running, head(len(completion), "/v1/completions") + completion)[0] == 200
        assert running.engine.requests[-1].max_new_tokens == 5  # less than the 16 of the API


def test_more_replies_than_the_server_ever_handles_are_no_matter_of_waiting(checkpoint: Checkpoint) -> None:
    with served(checkpoint, requests=3) as running:
        assert ask(running, post({**HELLO, "n": 3}))[0] == 200
        status, _, body = ask(running, post({**HELLO, "n": 4}))
        assert status == 400 and "asks for 4 replies, but the server handles 3" in body["error"]["message"]


# ---- time, and clients that misbehave


def test_half_a_request_is_not_waited_for(checkpoint: Checkpoint) -> None:
    with served(checkpoint, header_seconds=0.2, body_seconds=0.2) as running:
        for start in (b"", b"POST", head(10)[:-2], b"GET /health HTTP/1.1\r\nHost: local"):
            with closing(connect(running)) as connection:
                connection.sendall(start)
                assert is_closed(connection)
        assert running.metric('npu_sim_connections_dropped_total{reason="slow_head"}') == 4
        with closing(connect(running)) as connection:
            connection.sendall(head(10) + b"{")
            status, _, body = receive(connection)
            assert status == 408 and "did not arrive within 0.2 s" in body["error"]["message"]
            assert is_closed(connection)


def test_a_byte_now_and_then_does_not_keep_a_connection(checkpoint: Checkpoint) -> None:
    with served(checkpoint, header_seconds=0.3) as running, closing(connect(running)) as connection:
        sent = 0
        with pytest.raises(OSError):
            for byte in head(10, CHAT, "X: " + "y" * 1000):
                connection.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.02)
        assert sent < 250, "it went on for 5 seconds"


def test_an_endless_head_is_refused(server: Served) -> None:
    with closing(connect(server)) as connection:
        try:
            for _ in range(100):
                connection.sendall(b"GET / HTTP/1.1\r\n" if _ == 0 else b"X: " + b"y" * 4000 + b"\r\n")
            assert receive(connection)[0] == 431
        except ConnectionError:
            pass  # the answer was lost, as the connection ended while more was under way
        assert is_closed(connection)
    server.wait_until(lambda: server.metric('npu_sim_connections_dropped_total{reason="large_head"}') >= 1)


@pytest.mark.parametrize("line", [b"X: " + b"y" * 100_000, b"x:y\r\n" * 20_000], ids=["one line", "many lines"])
def test_a_long_head_that_comes_at_once_is_refused(checkpoint: Checkpoint, line: bytes) -> None:
    with served(checkpoint) as running:
        for start in (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b""):
            with closing(connect(running)) as connection:
                send(connection, (start or b"\r\n" * 30_000) + line + b"\r\n\r\n")
                assert answer_or_end(connection) in (431, None)
        running.wait_until(lambda: running.metric('npu_sim_connections_dropped_total{reason="large_head"}') == 2)


CHUNKED = head(0, CHAT, "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")


def test_endless_trailers_are_refused(checkpoint: Checkpoint) -> None:
    body = json.dumps(HELLO).encode()
    with served(checkpoint, body_seconds=60) as running, closing(connect(running)) as connection:
        connection.sendall(CHUNKED + b"%x\r\n%s\r\n0\r\n" % (len(body), body))
        assert sent_until_refused(connection, b"X-Trailer: " + b"y" * 4000 + b"\r\n", 2**24) < 2**23
        running.wait_until(lambda: running.metric('npu_sim_connections_dropped_total{reason="large_head"}') == 1)
        running.wait_until(lambda: running.application.guard.active == 0)


@pytest.mark.parametrize("more", [post(HELLO), b"X: y\r\n", b"\r\n"], ids=["requests", "a head", "empty lines"])
def test_what_comes_during_a_request_is_not_kept_without_end(checkpoint: Checkpoint, more: bytes) -> None:
    """A head is refused when it is too long; of whole requests, what is beyond the next is left in the socket."""
    before = resource_mb()
    with served(checkpoint, ENDLESS) as running, closing(connect(running)) as connection:
        connection.sendall(post(HELLO) + (b"GET /health HTTP/1.1\r\n" if more == b"X: y\r\n" else b""))
        running.wait_until(lambda: bool(running.engine.active))
        assert sent_until_refused(connection, more * (65536 // len(more)), 2**26) < 2**25
        assert resource_mb() - before < 40
        connection.close()
        running.stop()


def resource_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def send(connection: socket.socket, data: bytes) -> None:
    with suppress(ConnectionError):  # refused before all of it was read
        connection.sendall(data)


def sent_until_refused(connection: socket.socket, piece: bytes, most: int) -> int:
    """Count the bytes that the server reads before it takes no more for a second, or ends the connection."""
    connection.settimeout(1)
    sent = 0
    try:
        while sent < most:
            sent += connection.send(piece)
    except (TimeoutError, ConnectionError):
        pass
    return sent


def answer_or_end(connection: socket.socket) -> int | None:
    try:
        return receive(connection)[0]
    except (ConnectionError, AssertionError):
        return None


def test_requests_that_came_together_are_answered_in_order(checkpoint: Checkpoint) -> None:
    """Requests include bodies longer than a piece, and requests that arrive in the middle of another."""
    long = {**HELLO, "user": "x" * 10_000}
    requests = [
        post({**HELLO, "max_tokens": 1}),
        post(long),
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        post(b"{"),
    ]
    requests = requests * 5
    with served(checkpoint) as running, closing(connect(running)) as connection:
        sender = threading.Thread(target=connection.sendall, args=(b"".join(requests),))
        sender.start()
        data = b""
        while data.count(b"HTTP/1.1 ") < len(requests):
            piece = connection.recv(65536)
            assert piece, data
            data += piece
        sender.join()
        statuses = [int(part.split(b" ", 1)[0]) for part in data.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 200, 200, 400] * 5


def test_a_trailer_replaces_no_header(checkpoint: Checkpoint) -> None:
    body = json.dumps(HELLO).encode()
    keys = {"alice": "a" * 20, "bob": "b" * 20}
    with served(checkpoint, keys=keys) as running:
        for key, status in (("c" * 20, 401), ("a" * 20, 200)):
            start = CHUNKED[:-2] + b"Authorization: Bearer %s\r\n\r\n" % key.encode()
            chunks = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
            assert ask(running, start + chunks + b"Authorization: Bearer " + b"b" * 20 + b"\r\n\r\n")[0] == status
        assert [request.tenant for request in running.engine.requests] == ["alice"]


@pytest.mark.parametrize("field", ["model", "x" * 100_000])
def test_long_texts_of_clients_are_neither_logged_nor_sent_back(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    caplog.set_level("INFO", logger="npu_sim.serving.http")
    with served(checkpoint) as running:
        status, _, body = ask(running, post({**HELLO, field: "m" * 1_000_000}))
        assert status in (400, 404) and len(json.dumps(body)) < 5000
        running.wait_until(lambda: bool(caplog.records))
        assert all(len(JSONLines().format(record)) < 5000 for record in caplog.records)


def schema(text: str) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": json.loads(text)}}}


@pytest.mark.parametrize(
    "text",
    [
        '{"$ref": "#"}',
        '{"allOf": [{"$ref": "#"}]}',
        '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
        '{"type": "array", "minItems": 1e9}',
        '{"type": "string", "minLength": 1e300}',
    ],
)
def test_a_schema_that_nothing_or_too_much_fits_is_the_clients_fault(server: Served, text: str) -> None:
    status, _, body = ask(server, post({**HELLO, **schema(text)}))
    assert status == 400 and "the JSON schema cannot be used: " in body["error"]["message"]


def test_a_schema_that_is_too_large_on_the_way_is_the_clients_fault(server: Served) -> None:
    again = ", ".join(f'"p{number}": {{"$ref": "#"}}' for number in range(900))
    status, _, body = ask(server, post({**HELLO, **schema(f'{{"type": "object", "properties": {{{again}}}}}')}))
    assert (status, body["error"]["code"]) == (400, "grammar_failed")


def test_a_grammar_that_fails_on_the_way_is_the_clients_fault(checkpoint: Checkpoint) -> None:
    with served(checkpoint, Script("the cat", error=f"{GRAMMAR_FAILED}: too many items")) as running:
        status, _, body = ask(running, post(HELLO))
        assert (status, body["error"]["code"]) == (400, "grammar_failed")


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.2])
def test_clients_that_leave_take_their_requests_along(checkpoint: Checkpoint, seconds: float) -> None:
    with served(checkpoint, ENDLESS) as running:
        for number in range(5):
            connections = []
            for stream, choices in itertools.product((False, True), (1, 3)):
                connections.append(connect(running))
                connections[-1].sendall(post({**HELLO, "stream": stream, "n": choices}))
            time.sleep(seconds * (1 + number))
            for connection in connections:
                connection.close()
        running.wait_until(lambda: running.metric("npu_sim_connections") == 0)
        running.wait_until(lambda: not running.engine.active and running.application.guard.active == 0)


def test_a_reader_that_does_not_read_is_dropped(checkpoint: Checkpoint) -> None:
    flood = Script("the cat sat on the mat. " * 50, endless=True, delay=0.0)
    with served(checkpoint, flood, write_seconds=0.5) as running, closing(connect(running)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(post({**HELLO, "stream": True, "n": 16, "logprobs": True, "top_logprobs": 20}))
        running.wait_until(
            lambda: running.metric('npu_sim_connections_dropped_total{reason="slow_reader"}') >= 1, seconds=60
        )
        running.wait_until(lambda: not running.engine.active and running.application.guard.active == 0)


def test_one_connection_serves_requests_one_after_the_other(server: Served) -> None:
    with closing(connect(server)) as connection:
        for _ in range(3):
            connection.sendall(post(HELLO))
            assert receive(connection)[0] == 200
        connection.sendall(post(HELLO) + post(HELLO))  # pipelined
        assert receive(connection)[0] == 200


def test_many_connections_at_once_leave_nothing_behind(checkpoint: Checkpoint) -> None:
    """Requests of every kind from 32 threads; the server answers afterwards as before."""
    kinds = [
        post(HELLO),
        post({**HELLO, "stream": True}),
        post({**HELLO, "n": 2, "stream": True}),
        post(b"{"),
        head(100)[:30],
        head(100) + b"{",
        b"\x00\xff" * 50,
        post({**HELLO, "max_tokens": 10**6}),
    ]
    with served(checkpoint, Script("the cat", delay=0.001), header_seconds=0.5, body_seconds=0.5) as running:

        def misbehave(number: int) -> None:
            with closing(connect(running)) as connection:
                connection.sendall(kinds[number % len(kinds)])
                if number % 3:
                    connection.settimeout(0.05)
                    with suppress(OSError):
                        connection.recv(100)

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(misbehave, range(400)))
        running.wait_until(lambda: running.metric("npu_sim_connections") == 0)
        running.wait_until(lambda: not running.engine.active and running.application.guard.active == 0)
        assert ask(running, post(HELLO))[0] == 200


# ---- the end


def test_health_tells_that_the_engine_has_failed_and_why(checkpoint: Checkpoint) -> None:
    with served(checkpoint) as running:
        assert get(running, "/health")[0] == get(running, "/health/live")[0] == 200
        running.engine.failed = "the engine has failed: DeviceError('lost')"
        for path in ("/health", "/health/ready", "/health/live"):
            status, body = get(running, path)[::2]
            assert (status, body["status"], body["reason"]) == (503, "failed", running.engine.failed)
        status, headers, body = ask(running, post(HELLO))
        assert (status, body["error"]["code"]) == (503, "engine_unavailable") and "retry-after" in headers
        assert body["error"]["message"] == running.engine.failed


def test_a_fault_of_the_server_is_an_error_without_details(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FakeEngine, request: Any) -> Any:
        raise KeyError("secret")

    with served(checkpoint) as running:
        monkeypatch.setattr(FakeEngine, "submit", fail)
        status, _, body = ask(running, post(HELLO))
        assert status == 500 and body["error"]["message"] == "the server failed: KeyError"
        monkeypatch.undo()
        assert ask(running, post(HELLO))[0] == 200


def test_a_reply_that_the_server_breaks_off_is_its_failure_and_not_the_clients(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ChatWriter, choice: int, update: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(ChatWriter, "chunks", fail)
    with served(checkpoint) as running:
        with closing(connect(running)) as connection:
            connection.sendall(post({**HELLO, "stream": True}))
            assert is_closed(connection)
        failed = f'npu_sim_requests_total{{path="{CHAT}",status="500"}}'
        running.wait_until(lambda: running.metric(failed) == 1)
        assert running.engine.active == set() and running.application.guard.active == 0


def test_a_request_that_takes_too_long_is_a_timeout(checkpoint: Checkpoint) -> None:
    late = Script("the cat", delay=0.1, error="the request took longer than its 0.05 seconds")
    with served(checkpoint, late, request_seconds=0.05) as running:
        status, _, body = ask(running, post(HELLO))
        assert (status, body["error"]["code"]) == (504, "timeout")
        assert running.engine.requests[0].timeout == 0.05


def test_serving_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "llguidance" else object())
    done = CliRunner().invoke(app, ["serve", str(tmp_path), "--device", "cpu"])
    assert done.exit_code == 2
    assert f"serving needs llguidance, which is not installed: {install_command('serve')}" in done.stderr


def test_programs_for_steps_of_every_size_are_prepared() -> None:
    prepared: list[Any] = []
    network: Any = SimpleNamespace(
        max_tokens=36,
        max_outputs=20,
        shares_prefixes=True,
        prepare=lambda tokens, outputs, sampling=False: prepared.append((tokens, outputs, sampling)),
        prepare_copies=lambda: prepared.append("copies"),
        warm_up=lambda: prepared.append("warm"),
    )
    try:
        prepare_steps(network, lambda done, total: None)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    assert prepared.pop() == "warm" and prepared.pop() == "copies"
    assert all(tokens <= 36 and outputs <= 20 for tokens, outputs, _ in prepared)
    for sampling in (False, True):
        largest = {tokens for tokens, outputs, drawn in prepared if drawn == sampling and outputs == min(tokens, 20)}
        assert largest == {1, 2, 4, 8, 16, 32, 36}


def test_a_drain_lets_requests_end_and_takes_no_new_ones(checkpoint: Checkpoint) -> None:
    with served(checkpoint, Script("the cat sat on the mat", delay=0.05)) as running, ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(ask, running, post(HELLO))
        running.wait_until(lambda: bool(running.engine.active))
        running.stop()
        running.wait_until(lambda: running.application.guard.draining)
        status, headers, body = ask(running, post(HELLO))
        assert (status, body["error"]["code"]) == (503, "draining") and "retry-after" in headers
        assert get(running, "/health")[0] == 503 and get(running, "/health/live")[0] == 200
        status, _, body = under_way.result(10)
        assert status == 200 and body["choices"][0]["message"]["content"] == "the cat sat on the mat"


def test_a_drain_that_takes_too_long_ends_requests_with_an_error(checkpoint: Checkpoint) -> None:
    with served(checkpoint, ENDLESS, drain_seconds=0.2) as running, closing(connect(running)) as connection:
        connection.sendall(post({**HELLO, "stream": True}))
        receive(connection)
        running.stop()
        text = b""
        while piece := connection.recv(65536):
            text += piece
        assert b"the server ended this request because it is stopping" in text and b"[DONE]" not in text


def test_a_slow_reader_does_not_prolong_a_drain(checkpoint: Checkpoint) -> None:
    flood = Script("the cat sat on the mat. " * 50, endless=True, delay=0.0)
    with served(checkpoint, flood, drain_seconds=1.0) as running, closing(connect(running)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(post({**HELLO, "stream": True, "n": 16, "logprobs": True, "top_logprobs": 20}))
        running.wait_until(lambda: bool(running.engine.active))
        time.sleep(0.5)
        running.engine.active.clear()  # the engine has ended; its output is not read
        begun = time.monotonic()
        running.stop()
        running.wait_until(lambda: running.engine.closed, seconds=5)
        assert time.monotonic() - begun < 4


SIGNALLED = """
import sys
from pathlib import Path
from fake_engine import NAME, FakeEngine, Script, open_checkpoint
from npu_sim.serving.http import APIKeys, Limits, ModelText, ServedModel, listen, make_application, run_server
from npu_sim.serving.http.logs import start_logging

checkpoint = open_checkpoint(Path(sys.argv[1]))
engine = FakeEngine(checkpoint.tokenizer, Script("the cat sat. ", endless=sys.argv[2] == "endless", delay=0.05))
application = make_application(ServedModel(NAME, ModelText(checkpoint), 512), engine, APIKeys({}), Limits())
start_logging("info")
run_server(application, Limits(), listen("127.0.0.1", 0), drain_seconds=20, ready=lambda url: print(url, flush=True))
print("ended", len(engine.active), flush=True)
"""


@pytest.mark.parametrize(("reply", "signals"), [("short", 1), ("endless", 2)])
def test_signals_end_the_server(folder: Path, checkpoint: Checkpoint, reply: str, signals: int) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
    process = subprocess.Popen(
        [sys.executable, "-c", SIGNALLED, str(folder), reply], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stderr is not None
        url = next(line for line in process.stdout if line.startswith("http://"))
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(post({**HELLO, "stream": True}))
            received = [connection.recv(1000)]
            while b"the" not in b"".join(received):
                received.append(connection.recv(1000))
                assert received[-1], received
            reader = threading.Thread(target=lambda: received.extend(iter(lambda: connection.recv(65536), b"")))
            reader.start()
            process.send_signal(signal.SIGTERM)
            logged = []
            while not (logged and '"draining"' in logged[-1]):
                logged.append(process.stderr.readline())
                assert logged[-1], logged
            if signals == 2:
                process.send_signal(signal.SIGTERM)
            logged += process.stderr.readlines()
            assert process.wait(timeout=60) == 0 and process.stdout.read() == "ended 0\n"
            reader.join(60)
        assert (b"[DONE]" in b"".join(received)) == (reply == "short")
        logs = [json.loads(line) for line in logged]
        (request,) = [entry for entry in logs if entry["event"] == "request"]
        assert request["path"] == CHAT and request["new_tokens"] > 0
        assert not any("the cat" in line or '"Hi"' in line for line in logged)
    finally:
        process.kill()
