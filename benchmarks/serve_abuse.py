"""Half an hour of clients of every kind against a running server: `python -m benchmarks.serve_abuse URL --minutes 30`.

Good clients, streaming and not; clients that leave in the middle; half-sent requests, slow readers, huge and invalid
bodies; and a crowd of idle connections. Every good request must get an answer or an error; at the end the server must
have no request and no KV block in use, and its memory must not have grown after the first part of the time. Start the
server with short times, such as

    npu-sim serve smollm2 --device cpu --header-timeout 5 --body-timeout 5 --write-timeout 5 --max-connections 12000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

WARM_UP = 0.2  # of the time: memory may grow until then
GROWTH = 1.1
ANSWERED = {200, 400, 429, 503}


@dataclass
class Attack:
    """What is known of the server, and what has come back from it.

    Attributes:
        outcomes: (kind of client, what it got) → how often.
        lost: Good requests that were ended without an answer.
    """

    host: str
    port: int
    model: str
    rng: random.Random
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    lost: int = 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, limit=2**20)

    def chat(self, **options: object) -> bytes:
        words = self.rng.choices(["cat", "dog", "France", "blue", "two", "why"], k=self.rng.randint(1, 60))
        body = {"model": self.model, "messages": [{"role": "user", "content": " ".join(words)}], "max_tokens": 16}
        return _post(json.dumps({**body, **options}).encode())


def _post(body: bytes, length: int | None = None) -> bytes:
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(body) if length is None else length}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


async def good(attack: Attack) -> str:
    """Ask and read to the end; nothing but an answer or an error will do."""
    stream = attack.rng.random() < 0.5
    reader, writer = await attack.connect()
    try:
        writer.write(attack.chat(stream=stream, n=attack.rng.choice([1, 1, 1, 3]), temperature=1))
        data = await asyncio.wait_for(reader.read(), 600)
    finally:
        writer.close()
    status = int(data.split(b" ", 2)[1]) if data else 0
    whole = b"[DONE]" in data or b'"error"' in data if stream else b'"usage"' in data or b'"error"' in data
    if status not in ANSWERED or not whole:
        attack.lost += 1
    return str(status)


async def leaving(attack: Attack) -> str:
    """Ask, and leave after a while, in whatever state the request is."""
    reader, writer = await attack.connect()
    request = attack.chat(stream=attack.rng.random() < 0.5, max_tokens=400)
    writer.write(request[: attack.rng.randint(1, len(request))] if attack.rng.random() < 0.3 else request)
    await writer.drain()
    try:
        await asyncio.wait_for(reader.read(attack.rng.randint(1, 4000)), attack.rng.random() * 3)
    except TimeoutError:
        pass
    if attack.rng.random() < 0.5:
        writer.transport.abort()
    writer.close()
    return "left"


async def half(attack: Attack) -> str:
    """Send half a request, and wait for the server to end it."""
    reader, writer = await attack.connect()
    request = attack.chat()
    writer.write(request[: attack.rng.randint(0, len(request) - 1)])
    data = await asyncio.wait_for(reader.read(), 120)
    writer.close()
    return data.split(b" ", 2)[1].decode() if data else "closed"


async def slow(attack: Attack) -> str:
    """Ask for much, and read nothing of it."""
    _, writer = await attack.connect()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(attack.chat(stream=True, n=8, max_tokens=200, logprobs=True, top_logprobs=20))
    await asyncio.sleep(20)
    writer.transport.abort()
    return "left"


async def invalid(attack: Attack) -> str:
    """Send what is no request."""
    body = attack.rng.choice(
        [
            b"{",
            b"\xff" * 100,
            b"[" * 10_000,
            b'{"model": "' + b"x" * 100_000 + b'"}',
            b"null",
            attack.rng.randbytes(500),
        ]
    )
    sent = attack.rng.choice([_post(body), _post(body, 2**40), attack.rng.randbytes(2000) + b"\r\n\r\n"])
    reader, writer = await attack.connect()
    writer.write(sent)
    data = await asyncio.wait_for(reader.read(), 120)
    writer.close()
    return data.split(b" ", 2)[1].decode() if data else "closed"


KINDS: dict[Callable[[Attack], Awaitable[str]], int] = {good: 24, leaving: 12, half: 8, slow: 4, invalid: 8}


async def repeat(attack: Attack, kind: Callable[[Attack], Awaitable[str]], until: float) -> None:
    """One client after the other, of a kind."""
    while time.monotonic() < until:
        try:
            outcome = await kind(attack)
        except (OSError, TimeoutError, ValueError, IndexError) as error:
            outcome = type(error).__name__
            attack.lost += kind is good
        attack.outcomes[kind.__name__, outcome] += 1


async def crowd(attack: Attack, size: int) -> str:
    """Open many connections, one after the other, without a word; the server answers others meanwhile."""
    writers = []
    try:
        for _ in range(size):
            writers.append((await attack.connect())[1])
        answer = await good(attack)
    except OSError as error:
        answer = type(error).__name__
    for writer in writers:
        writer.close()
    return f"{len(writers)} connections open; a chat meanwhile: {answer}"


def metric(url: str, name: str) -> float:
    text = urlopen(f"{url}/metrics", timeout=60).read().decode()
    return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name} ")), 0.0)


def resident_mb(process: int | None) -> float:
    """A process's resident memory in MB; 0 without one."""
    if process is None:
        return 0.0
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


async def attack_for(attack: Attack, url: str, seconds: float, connections: int, process: int | None) -> list[str]:
    """Run all kinds of clients for some time; what was wrong afterwards."""
    begun = time.monotonic()
    tasks = [
        asyncio.create_task(repeat(attack, kind, begun + seconds))
        for kind, count in KINDS.items()
        for _ in range(count)
    ]
    await asyncio.sleep(seconds * WARM_UP)
    print(await crowd(attack, connections), flush=True)
    early = resident_mb(process)
    while time.monotonic() < begun + seconds:
        await asyncio.sleep(min(30, seconds / 10))
        requests = attack.outcomes.total()
        print(f"{time.monotonic() - begun:6.0f} s, {requests} clients, {resident_mb(process):.0f} MB", flush=True)
    await asyncio.gather(*tasks)
    late = resident_mb(process)
    await asyncio.sleep(10)
    left = {
        name: await asyncio.to_thread(metric, url, name)
        for name in ("npu_sim_requests_active", "npu_sim_requests_running", 'npu_sim_cache_blocks{state="used"}')
    }
    wrong = [f"{name} is {value:g} at the end, not 0" for name, value in left.items() if value]
    if attack.lost:
        wrong.append(f"{attack.lost} good requests got no answer")
    if process is not None and late > GROWTH * early:
        wrong.append(f"memory grew from {early:.0f} to {late:.0f} MB")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("url", help="the server's address, without a path")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--connections", type=int, default=10_000, help="idle connections at once")
    parser.add_argument("--process", type=int, help="the server's process on this machine, to watch its memory")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    parts = urlsplit(args.url)
    model = json.load(urlopen(f"{args.url}/v1/models"))["data"][0]["id"]
    attack = Attack(parts.hostname or "localhost", parts.port or 80, model, random.Random(args.seed))
    wrong = asyncio.run(attack_for(attack, args.url, 60 * args.minutes, args.connections, args.process))
    for (kind, outcome), count in sorted(attack.outcomes.items()):
        print(f"{kind:8} {outcome:20} {count}")
    print("\n".join(wrong) or "nothing was lost, and nothing is left behind")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
