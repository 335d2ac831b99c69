"""Prometheus metrics: what the server counts itself, and what the engine says when it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from npu_sim.llm.engine import stats
from npu_sim.serving.http.interface import EngineLike

_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The server's metrics, in a registry of their own."""

    def __init__(self, engine: EngineLike) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.requests = Counter(
            "npu_sim_requests", "HTTP requests, by path and status.", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "npu_sim_request_seconds",
            "From the arrival of a POST request to the end of its response.",
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self.active = Gauge("npu_sim_requests_active", "POST requests under way.", registry=registry)
        self.connections = Gauge("npu_sim_connections", "Open connections.", registry=registry)
        self.dropped = Counter(
            "npu_sim_connections_dropped",
            "Connections that the server ended, by reason.",
            ["reason"],
            registry=registry,
        )
        registry.register(_EngineCollector(engine))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Asks the engine each time the metrics are read."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        found = self._engine.stats()
        for name, text, value in (
            ("requests_waiting", "Requests without KV blocks: the queue.", found.waiting),
            ("requests_running", "Requests with KV blocks.", found.running),
            ("batch_size", "Sequences of the latest step.", found.batch_size),
            ("cache_rows_empty", "Rows of used KV blocks that hold no token.", found.rows_empty),
        ):
            yield GaugeMetricFamily(f"npu_sim_{name}", text, value)
        blocks = GaugeMetricFamily("npu_sim_cache_blocks", "Blocks of the KV cache, by state.", labels=["state"])
        for state, count in (("free", found.blocks_free), ("used", found.blocks_used), ("cached", found.blocks_cached)):
            blocks.add_metric([state], count)
        yield blocks
        for name, text, value in (
            ("steps", "Steps of the engine.", found.steps),
            ("prompt_tokens", "Tokens of prompts.", found.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that were found in the prefix cache.", found.cached_tokens),
            ("new_tokens", "Tokens generated.", found.new_tokens),
            ("drafted_tokens", "Tokens guessed by speculation.", found.drafted_tokens),
            ("accepted_tokens", "Guessed tokens that were right.", found.accepted_tokens),
            ("preemptions", "Times that a request lost its KV blocks to an earlier one.", found.preemptions),
        ):
            yield CounterMetricFamily(f"npu_sim_{name}", text, value)
        finished = CounterMetricFamily("npu_sim_sequences_finished", "Sequences ended, by reason.", labels=["reason"])
        for reason, count in found.finished.items():
            finished.add_metric([reason], count)
        yield finished
        for name, text, histogram in (
            ("queue_seconds", "From a request's submission to its admission.", found.queue_seconds),
            ("time_to_first_token_seconds", "From submission to the first token.", found.first_token_seconds),
            ("time_between_tokens_seconds", "From each token to the next.", found.between_tokens_seconds),
            ("step_seconds", "Time of a step.", found.step_seconds),
        ):
            yield _histogram(f"npu_sim_{name}", text, histogram)


def _histogram(name: str, text: str, found: stats.Histogram) -> HistogramMetricFamily:
    bounds = [*map(str, found.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(found.counts), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=found.total)
