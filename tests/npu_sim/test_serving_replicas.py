"""Parts of `serve --ray` without a cluster: its options, the messages, and the sums of replicas' counts."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
from fake_engine import FakeEngine, Script

from npu_compiler import InputError
from npu_compiler.installing import install_command
from npu_sim.commands.serve_ray import RaySettings
from npu_sim.llm.engine.stats import SECONDS, EngineStats, Histogram, merged
from npu_sim.serving.request import Request

pytest.importorskip("ray", exc_type=ImportError)

from npu_sim.serving.cluster.messages import RemoteRequest

NOTHING = RaySettings(True, None, None, None, None, None)


def stats(value: int) -> EngineStats:
    """Every count is `value`, and every histogram has so many observations of 1 ms."""
    place = SECONDS.index(1e-3)
    times = Histogram(SECONDS, tuple(value * (index == place) for index in range(len(SECONDS) + 1)), value * 1e-3)
    whole = FakeEngine(None, Script()).stats()
    values: dict[str, Any] = {field.name: value for field in fields(whole) if field.type in (int, "int")}
    names = ("queue_seconds", "first_token_seconds", "between_tokens_seconds", "step_seconds")
    return replace(whole, **values, **dict.fromkeys(names, times), finished={"stop": value, "error": 1})


def test_a_missing_ray_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_sim.commands.serve_ray.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=re.escape(f"--ray needs ray, which is not installed: {install_command('ray')}")
    ):
        NOTHING.check()
    replace(NOTHING, ray=False).check()


@pytest.mark.parametrize(
    ("options", "least", "most", "described"),
    [
        ({}, 1, 1, "1 replica"),
        ({"replicas": 3}, 3, 3, "3 replicas"),
        ({"max_replicas": 4}, 1, 4, "1 to 4 replicas"),
        ({"min_replicas": 2}, 2, 2, "2 replicas"),
        ({"min_replicas": 2, "max_replicas": 5}, 2, 5, "2 to 5 replicas"),
    ],
)
def test_options_say_how_many_replicas_there_are(options: Any, least: int, most: int, described: str) -> None:
    found = replace(NOTHING, **options)
    assert (found.least, found.most, found.described) == (least, most, described)


def test_a_numbered_gpu_is_refused_as_each_replica_has_its_own() -> None:
    with pytest.raises(
        InputError, match="--device cuda:1: with --ray, each replica gets a device of its own; write cuda"
    ):
        NOTHING.check("cuda:1")
    for device in (None, "cpu", "cuda", "npu:chip.toml", "npu:edge"):
        NOTHING.check(device)


def test_cancelling_a_stream_that_is_lost_forgets_it() -> None:
    from ray.serve.exceptions import DeploymentUnavailableError

    from npu_sim.serving.cluster.engine import RemoteHandle

    class Lost:
        def cancel(self) -> None:
            raise DeploymentUnavailableError(None)

    forgotten: list[RemoteHandle] = []
    handle = RemoteHandle(Request((1,)), Lost(), forgotten.append)
    handle.cancel()
    assert forgotten == [handle]


def test_servers_with_other_limits_share_replicas_which_have_the_cpu_level_that_was_asked_for() -> None:
    from npu_sim.serving.cluster.application import Scale, model_application, replicas_key
    from npu_sim.serving.engine_setup import EngineSettings, ReplicaSettings

    asked = ReplicaSettings("model", engine=EngineSettings(max_waiting=3), cpu_level="x86-64-v3")
    key = replicas_key(asked, Scale(drain_seconds=1))
    assert key == replicas_key(replace(asked, engine=EngineSettings(max_waiting=9)), Scale(drain_seconds=2))
    assert key != replicas_key(replace(asked, cpu_level=None), Scale()) != replicas_key(asked, Scale(most=2))
    options = model_application(asked, Scale(cpus=2))._bound_deployment.ray_actor_options
    assert options["runtime_env"]["env_vars"] == {"NPU_SIM_THREADS": "2", "NPU_SIM_CPU_LEVEL": "x86-64-v3"}


def test_stats_of_replicas_add_up_and_those_of_former_ones_keep_their_counts() -> None:
    both = merged([stats(3), stats(4)], [stats(10)])
    assert both.running == both.blocks_used == 7  # the state of those that are there
    assert both.new_tokens == both.steps == both.preemptions == 17
    assert both.step_seconds.count == 17 and both.step_seconds.total == pytest.approx(17e-3)
    assert both.finished == {"stop": 17, "error": 3}
    nothing = merged([], [])
    assert nothing.steps == nothing.queue_seconds.count == 0
    assert merged([stats(2)], [nothing]) == stats(2)


def test_beginnings_of_prompts_are_named_as_the_prefix_cache_names_them() -> None:
    def digests(prompt: list[int], tenant: str = "") -> tuple[bytes, ...]:
        return RemoteRequest.of(Request(tuple(prompt), tenant=tenant)).digests

    tokens = list(range(40))
    assert len(digests(tokens)) == 2 and len(digests(tokens[:15])) == 0
    assert digests(tokens[:33]) == digests(tokens)
    assert digests([*tokens[:20], 0, *tokens[21:]])[0] == digests(tokens)[0]
    assert digests([*tokens[:20], 0, *tokens[21:]])[1] != digests(tokens)[1]
    assert not set(digests(tokens, "a")) & set(digests(tokens, "b"))


def test_a_filter_that_is_no_grammar_stays_here() -> None:
    class Odd:
        def allowed(self) -> Any: ...

        def advance(self, token: int) -> None: ...

    with pytest.raises(InputError, match="a Odd cannot be sent to a replica; a grammar can"):
        RemoteRequest.of(Request((1,), token_filter=Odd()))


class TestRouting:
    """`PrefixRouter` by itself, with replicas that are only named."""

    @staticmethod
    def router(lengths: dict[str, int], **options: int) -> Any:
        from types import SimpleNamespace

        from npu_sim.serving.cluster.routing import PrefixRouter

        router = object.__new__(PrefixRouter)
        router._replica_queue_len_cache = SimpleNamespace(get=lengths.get)
        router.initialize_state(**options)
        return router

    @staticmethod
    def choose(router: Any, lengths: dict[str, int], prompt: range, tenant: str = "") -> tuple[list[str], Any]:
        """The names of the replicas to be tried first, and the pending request."""
        import asyncio
        from types import SimpleNamespace

        pending = SimpleNamespace(args=[RemoteRequest.of(Request(tuple(prompt), tenant=tenant))])
        candidates = [SimpleNamespace(replica_id=name) for name in lengths]
        ranks = asyncio.run(router.choose_replicas(candidates, pending))
        assert {replica.replica_id for replica in ranks[-1]} == set(lengths)  # any may be the last resort
        return [replica.replica_id for replica in ranks[0]], pending

    def test_a_prompt_goes_where_its_longest_beginning_went(self) -> None:
        lengths = {"a": 0, "b": 0}
        router = self.router(lengths)
        first, pending = self.choose(router, lengths, range(32))
        assert first == ["a", "b"]
        router.on_request_routed(pending, "b", None)
        _, shorter = self.choose(router, lengths, range(16))
        router.on_request_routed(shorter, "a", None)
        assert self.choose(router, lengths, range(50))[0] == ["b"]
        assert self.choose(router, lengths, range(20))[0] == ["a"]
        assert self.choose(router, lengths, range(50), tenant="other")[0] == ["a", "b"]

    def test_a_busy_or_lost_replica_is_not_preferred(self) -> None:
        lengths = {"a": 0, "b": 8}
        router = self.router(lengths)
        _, pending = self.choose(router, lengths, range(32))
        router.on_request_routed(pending, "b", None)
        assert self.choose(router, lengths, range(32))[0] == ["b"]
        lengths["b"] = 9
        assert self.choose(router, lengths, range(32))[0] == ["a", "b"]
        del lengths["b"]
        assert self.choose(router, lengths, range(32))[0] == ["a"]

    def test_only_the_latest_blocks_are_remembered(self) -> None:
        lengths = {"a": 0, "b": 0}
        router = self.router(lengths, remembered=2)
        for start in (0, 100, 200):
            _, pending = self.choose(router, lengths, range(start, start + 16))
            router.on_request_routed(pending, "b", None)
        assert self.choose(router, lengths, range(16))[0] == ["a", "b"]
        assert self.choose(router, lengths, range(100, 116))[0] == ["b"]
