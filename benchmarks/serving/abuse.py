r"""Clients of every kind against a running server: `python -m benchmarks.serving.abuse URL --minutes 30`.

Good clients, streaming and not, some with extreme settings, some with several requests in a row; clients that leave in
the middle; requests that are sent half or byte by byte; readers that are slow or do not read; huge and invalid bodies;
trailers, heads and requests without end; JSON schemas that nothing fits; and, five times, a crowd of idle connections.
Every good request must get its whole reply, or be told to come back; a prompt that one key has asked must not be in the
cache for another. At the end the server must have no request and no KV block in use, and its memory must not have grown
after the first part of the time. Start the server with two keys, and times that are short but let idle connections stay
until all are there, such as

    npu-sim serve smollm2 --device cpu --header-timeout 60 --body-timeout 10 --write-timeout 10 \
        --max-connections 12000 --api-key-file keys
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

WARM_UP = 0.2  # of the time: memory may grow until then
GROWTH = 1.1
CROWDS = 5
ANSWERED = {200, 429, 503}
EXTREME: tuple[dict[str, object], ...] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 1e-300},
    {"top_p": 1e-300},
    {"top_k": 10**300},
    {"seed": -(2**63), "stop": ["e", "the" * 1000]},
    {"logprobs": True, "top_logprobs": 20},
    {"response_format": {"type": "json_object"}},
)


@dataclass
class Attack:
    """A server under attack, and the outcomes of requests so far.

    Attributes:
        host: The server's address.
        port: The server's port.
        model: The model's name.
        keys: API keys; empty if the server uses none.
        rng: Source of random numbers.
        outcomes: (kind of client, its response) → number of times.
        wrong: Event that must not happen → number of times.
    """

    host: str
    port: int
    model: str
    keys: list[str]
    rng: random.Random
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, limit=2**20)

    def chat(self, **options: object) -> bytes:
        words = self.rng.choices(["cat", "dog", "France", "blue", "two", "why"], k=self.rng.randint(1, 60))
        body = {"model": self.model, "messages": [{"role": "user", "content": " ".join(words)}], "max_tokens": 16}
        return self.post(json.dumps({**body, **options}).encode())

    def post(
        self, body: bytes, length: int | str | None = None, *, key: str | None = None, connection: str = "close"
    ) -> bytes:
        """Return an HTTP request; without a given key, it has a random one if there are any.

        Args:
            length: The `Content-Length`, or `chunked`. None: the body's length.
            key: The API key. None: a random one.
        """
        key = self.rng.choice(self.keys) if self.keys and key is None else key
        head = [
            "POST /v1/chat/completions HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Connection: {connection}",
            *([] if key is None else [f"Authorization: Bearer {key}"]),
            "Transfer-Encoding: chunked" if length == "chunked" else f"Content-Length: {length or len(body)}",
        ]
        return "\r\n".join([*head, "", ""]).encode() + body

    async def ask(self, request: bytes) -> bytes:
        """Send a request and return everything received until the server ends the connection."""
        reader, writer = await self.connect()
        try:
            writer.write(request)
            return await asyncio.wait_for(reader.read(), 600)
        finally:
            writer.close()


async def good(attack: Attack) -> str:
    """Send a request and read to the end; only a whole reply, or status 429 or 503, is right."""
    stream, settings = attack.rng.random() < 0.5, attack.rng.choice(EXTREME)
    data = await attack.ask(attack.chat(stream=stream, n=attack.rng.choice([1, 1, 1, 3]), **settings))
    status = int(data.split(b" ", 2)[1]) if data else 0
    whole = status != 200 or (b"data: [DONE]" in data if stream else b'"usage"' in data)
    if status not in ANSWERED or not whole:
        attack.wrong[f"a good request got {status} {data[-300:]!r}"] += 1
    return str(status)


async def several(attack: Attack) -> str:
    """Send several requests on one connection, including wrong ones; each must get its own answer, in order."""
    reader, writer = await attack.connect()
    got = []
    try:
        for _ in range(4):
            body = {"model": attack.model, "prompt": "One two three", "max_tokens": 4, "bad": 1}
            request = attack.post(json.dumps(body).encode(), connection="keep-alive")
            count = attack.rng.randint(1, 3)
            writer.write(request * count)
            for _ in range(count):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 600)
                length = int(head.lower().split(b"content-length:")[1].split()[0])
                await reader.readexactly(length)
                got.append(int(head.split(b" ", 2)[1]))
    except asyncio.IncompleteReadError:
        attack.wrong["a connection with several requests ended early"] += 1
    finally:
        writer.close()
    if set(got) - {400, 429}:
        attack.wrong[f"wrong requests in a row got {got}"] += 1
    return str(got[-1])


async def apart(attack: Attack) -> str:
    """Send the same long prompt with two keys: its KV cache must be reused only for the key that sent it first."""
    if len(attack.keys) < 2:
        await asyncio.sleep(5)
        return "no keys"
    first, second = attack.rng.sample(attack.keys, 2)
    text = secrets.token_hex(120)  # not of the seed: a run before may have asked the same of this server
    body = json.dumps(
        {"model": attack.model, "messages": [{"role": "system", "content": text}, {"role": "user", "content": "Hi"}],
         "max_tokens": 2}
    ).encode()  # fmt: skip
    cached = []
    for key in (first, first, second):
        data = await attack.ask(attack.post(body, key=key))
        if data.split(b" ", 2)[1] != b"200":
            return data.split(b" ", 2)[1].decode()
        usage = json.loads(data.partition(b"\r\n\r\n")[2])["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    if cached[0] or cached[2]:
        attack.wrong[f"of a new prompt {cached} tokens were cached: for its key, then again, then for another key"] += 1
    return "cached for its own key" if cached[1] else "not cached"


async def leaving(attack: Attack) -> str:
    """Send a request, or a part of one, and leave after a random time, whatever state the request is in."""
    reader, writer = await attack.connect()
    request = attack.chat(stream=attack.rng.random() < 0.5, max_tokens=400)
    writer.write(request[: attack.rng.randint(1, len(request))] if attack.rng.random() < 0.3 else request)
    await writer.drain()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader.read(attack.rng.randint(1, 4000)), attack.rng.random() * 3)
    if attack.rng.random() < 0.5:
        writer.transport.abort()
    writer.close()
    return "left"


async def half(attack: Attack) -> str:
    """Send a part of a request, and wait for the server to close the connection."""
    reader, writer = await attack.connect()
    request = attack.chat()
    writer.write(request[: attack.rng.randint(0, len(request) - 1)])
    data = await asyncio.wait_for(reader.read(), 120)
    writer.close()
    return data.split(b" ", 2)[1].decode() if data else "closed"


async def trickle(attack: Attack) -> str:
    """Send a request byte by byte, and wait for the server to close the connection."""
    reader, writer = await attack.connect()
    try:
        for byte in attack.chat():
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.2)
    except OSError:
        return "closed"
    data = await asyncio.wait_for(reader.read(), 120)
    writer.close()
    return data.split(b" ", 2)[1].decode() if data else "closed"


async def sip(attack: Attack) -> str:
    """Request a long reply, and read it slowly."""
    reader, writer = await attack.connect()
    writer.write(attack.chat(stream=True, n=2, max_tokens=100, logprobs=True, top_logprobs=20))
    for _ in range(20):
        if not await reader.read(2000):
            break
        await asyncio.sleep(1)
    writer.transport.abort()
    return "left"


async def slow(attack: Attack) -> str:
    """Request long replies, and read nothing."""
    _, writer = await attack.connect()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(attack.chat(stream=True, n=8, max_tokens=200, logprobs=True, top_logprobs=20))
    await asyncio.sleep(20)
    writer.transport.abort()
    return "left"


async def invalid(attack: Attack) -> str:
    """Send a body that is not a valid request."""
    body = attack.rng.choice(
        [
            b"{",
            b"\xff" * 100,
            b"[" * 10_000,
            b'{"model": "' + b"x" * 100_000 + b'"}',
            b"null",
            b'{"model": "\\ud800"}',
            json.dumps({"model": attack.model, "messages": [{"role": "user", "content": "\xff"}]}).encode("latin-1"),
            attack.rng.randbytes(500),
        ]
    )
    sent = [attack.post(body), attack.post(body, 2**40), attack.rng.randbytes(2000) + b"\r\n\r\n"]
    data = await attack.ask(attack.rng.choice(sent))
    return data.split(b" ", 2)[1].decode(errors="replace") if data else "closed"


async def huge(attack: Attack) -> str:
    """Send megabytes: a text that does not fit, arrays and objects that are wrong everywhere, or too many bytes."""
    content = json.dumps("the cat " * 500_000)
    body = attack.rng.choice(
        [
            f'{{"model": "{attack.model}", "messages": [{{"role": "user", "content": {content}}}]}}',
            f'{{"model": "{attack.model}", "messages": [{",".join(["0"] * 2_000_000)}]}}',
            f'{{"model": "{attack.model}", {",".join(f""" "a{number}": 0""" for number in range(300_000))}}}',
            " " * 6_000_000,
        ]
    ).encode()
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    sent = attack.rng.choice([attack.post(body), attack.post(chunk, "chunked")])
    data = await attack.ask(sent)
    await asyncio.sleep(2)
    return data.split(b" ", 2)[1].decode() if data else "closed"


async def flood(attack: Attack, start: bytes, more: bytes, most: int = 2**26) -> str:
    """Send a beginning, then the same bytes again and again until the server stops reading or `most` are sent."""
    reader, writer = await attack.connect()
    sent, piece = 0, more * (65536 // len(more) + 1)
    try:
        writer.write(start)
        while sent < most:
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 20)
            sent += len(piece)
        return "taken"
    except TimeoutError:
        return "not read"
    except OSError:
        return "refused"
    finally:
        writer.transport.abort()


async def trailers(attack: Attack) -> str:
    """Send a whole request in chunks, followed by endless trailers."""
    body = attack.chat().partition(b"\r\n\r\n")[2]
    start = attack.post(b"%x\r\n%s\r\n0\r\n" % (len(body), body), "chunked")
    long = b"X" * 3000 + b": " + b"y" * 3000 + b"\r\n"
    outcome = await flood(attack, start, attack.rng.choice([b"X: y\r\n", long, b"X"]))
    if outcome == "taken":
        attack.wrong["64 MB of trailers were taken"] += 1
    return outcome


async def pipelined(attack: Attack) -> str:
    """Send an endless head, or endless requests, while a request runs; each whole request may be answered."""
    start = attack.chat(stream=True, max_tokens=200).replace(b"Connection: close", b"Connection: keep-alive")
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    invalid = attack.post(b"x" * 30_000, connection="keep-alive")
    begun, more = attack.rng.choice([(b"", head + b"\r\n"), (b"", invalid), (head, b"X: y\r\n"), (b"", b"\r\n")])
    return await flood(attack, start + begun, more)


def nested(depth: int) -> dict[str, object]:
    return {"type": "array", "items": nested(depth - 1), "minItems": 100} if depth else {"type": "integer"}


SCHEMAS: tuple[dict[str, object], ...] = (
    {"$ref": "#"},
    {"allOf": [{"$ref": "#"}]},
    {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
    {"$ref": "https://example.com/schema"},
    {"type": "array", "minItems": 1_000_000_000},
    {"type": "array", "minItems": 1e9},
    {"type": "string", "minLength": 10**30},
    {"type": "string", "pattern": "(a{1000}){1000}"},
    {"type": "string", "pattern": "(((a*)*)*)*b"},
    {"type": "integer", "minimum": 0, "maximum": 10**300},
    {"enum": ["x" * 100] * 5_000},
    {"type": "object", "properties": {f"p{number}": {"$ref": "#"} for number in range(900)}},
    nested(25),
)


async def schemas(attack: Attack) -> str:
    """Request JSON of a schema that nothing fits, or that is very large; the status must be an answer or 400."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": attack.rng.choice(SCHEMAS)}}
    data = await attack.ask(attack.chat(response_format=form))
    status = int(data.split(b" ", 2)[1]) if data else 0
    if status not in {*ANSWERED, 400}:
        attack.wrong[f"a schema got {status} {data[-300:]!r}"] += 1
    return str(status)


KINDS: dict[Callable[[Attack], Awaitable[str]], int] = {
    good: 24, several: 4, apart: 2, leaving: 12, half: 8, trickle: 4, sip: 4, slow: 4, invalid: 8, huge: 2,
    trailers: 4, pipelined: 4, schemas: 4
}  # fmt: skip
MUST_BE_ANSWERED = {good, several, apart}


async def repeat(attack: Attack, kind: Callable[[Attack], Awaitable[str]], until: float) -> None:
    """Run clients of one kind, one after the other, until a time."""
    while time.monotonic() < until:
        try:
            outcome = await kind(attack)
        except (OSError, TimeoutError, ValueError, IndexError) as error:
            outcome = type(error).__name__
            if kind in MUST_BE_ANSWERED:
                attack.wrong[f"a request of kind {kind.__name__} ended with {error!r}"] += 1
        attack.outcomes[kind.__name__, outcome] += 1


async def crowd(attack: Attack, url: str, size: int) -> str:
    """Open many connections without sending anything; the server must answer other clients meanwhile."""
    writers: list[asyncio.StreamWriter] = []
    try:
        while len(writers) < size:
            opened = await asyncio.gather(*(attack.connect() for _ in range(min(500, size - len(writers)))))
            writers += [writer for _, writer in opened]
        held = (await asyncio.to_thread(metrics, url, attack.keys)).get("npu_sim_connections", 0)
        answer = await good(attack)
    except OSError as error:
        held, answer = 0, repr(error)
        attack.wrong[f"a crowd of {size} connections ended with {error!r}"] += 1
    for writer in writers:
        writer.close()
    return f"{len(writers)} idle connections, {held:.0f} held by the server; a chat meanwhile: {answer}"


def get(url: str, keys: list[str]) -> str:
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    return str(urlopen(Request(url, headers=headers), timeout=60).read().decode())


def metrics(url: str, keys: list[str]) -> dict[str, float]:
    """Return the server's metrics by name and labels."""
    lines = (line.rpartition(" ") for line in get(f"{url}/metrics", keys).splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def resident_mb(process: int | None) -> float:
    """Return a process's resident memory in MB; 0 if the process is None."""
    if process is None:
        return 0.0
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


async def attack_for(attack: Attack, url: str, seconds: float, connections: int, process: int | None) -> list[str]:
    """Run all kinds of clients for some time; return a list of what went wrong."""
    begun, state = time.monotonic(), 'npu_sim_cache_blocks{{state="{}"}}'.format
    before = await asyncio.to_thread(metrics, url, attack.keys)
    tasks = [
        asyncio.create_task(repeat(attack, kind, begun + seconds))
        for kind, count in KINDS.items()
        for _ in range(count)
    ]
    early, crowds = 0.0, 0
    while (now := time.monotonic() - begun) < seconds:
        if now >= seconds * (WARM_UP + crowds * (1 - WARM_UP) / CROWDS):
            print(await crowd(attack, url, connections), flush=True)
            crowds += 1
            early = early or resident_mb(process)
        await asyncio.sleep(min(30, seconds / 20))
        print(f"{now:6.0f} s, {attack.outcomes.total()} clients, {resident_mb(process):.0f} MB", flush=True)
    await asyncio.gather(*tasks)
    late = resident_mb(process)
    await asyncio.sleep(10)
    after = await asyncio.to_thread(metrics, url, attack.keys)
    names = ("npu_sim_requests_active", "npu_sim_requests_running", "npu_sim_requests_waiting", state("used"))
    wrong = [f"{name} is {after[name]:g} at the end, not 0" for name in names if after[name]]
    blocks = [sum(snapshot[state(kind)] for kind in ("free", "used", "cached")) for snapshot in (before, after)]
    if blocks[0] != blocks[1]:
        wrong.append(f"the pool had {blocks[0]:g} blocks and has {blocks[1]:g}")
    wrong += [f"{count} times: {what}" for what, count in attack.wrong.items()]
    if process is not None and late > GROWTH * early:
        wrong.append(f"memory grew from {early:.0f} to {late:.0f} MB")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("url", help="the server's address, without a path")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--connections", type=int, default=10_000, help="idle connections at once")
    parser.add_argument("--process", type=int, help="the server's process on this machine, to watch its memory")
    parser.add_argument("--keys", nargs="*", default=[], help="API keys of the server; two, to see that they are apart")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    parts = urlsplit(args.url)
    model = json.loads(get(f"{args.url}/v1/models", args.keys))["data"][0]["id"]
    attack = Attack(parts.hostname or "localhost", parts.port or 80, model, args.keys, random.Random(args.seed))
    wrong = asyncio.run(attack_for(attack, args.url, 60 * args.minutes, args.connections, args.process))
    for (kind, outcome), count in sorted(attack.outcomes.items()):
        print(f"{kind:8} {outcome:20} {count}")
    print("\n".join(wrong) or "nothing was lost, and nothing is left behind")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
