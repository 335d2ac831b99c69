"""Prometheus metrics: counts of the HTTP server, and those of the engine, which are read at each collection."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from npu_sim.llm.engine.stats import Histogram as EngineHistogram
from npu_sim.serving.http.interface import RunningEngine

_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The server's metrics, in a Prometheus registry of their own."""

    def __init__(self, engine: RunningEngine) -> None:
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
    """A Prometheus collector that asks the engine for its counts each time the metrics are read."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, text, value in (
            ("requests_waiting", "Requests without KV blocks: the queue.", stats.waiting),
            ("requests_running", "Requests with KV blocks.", stats.running),
            ("batch_size", "Sequences of the latest step.", stats.batch_size),
            ("cache_rows_empty", "Rows of used KV blocks that hold no token.", stats.rows_empty),
        ):
            yield GaugeMetricFamily(f"npu_sim_{name}", text, value)
        blocks = GaugeMetricFamily("npu_sim_cache_blocks", "Blocks of the KV cache, by state.", labels=["state"])
        for state, count in (("free", stats.blocks_free), ("used", stats.blocks_used), ("cached", stats.blocks_cached)):
            blocks.add_metric([state], count)
        yield blocks
        for name, text, value in (
            ("steps", "Steps of the engine.", stats.steps),
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that were found in the prefix cache.", stats.cached_tokens),
            ("new_tokens", "Tokens generated.", stats.new_tokens),
            ("drafted_tokens", "Tokens guessed by speculation.", stats.drafted_tokens),
            ("accepted_tokens", "Guessed tokens that were right.", stats.accepted_tokens),
            ("preemptions", "Times that a request lost its KV blocks to an earlier one.", stats.preemptions),
        ):
            yield CounterMetricFamily(f"npu_sim_{name}", text, value)
        finished = CounterMetricFamily("npu_sim_sequences_finished", "Sequences ended, by reason.", labels=["reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
        for name, text, histogram in (
            ("queue_seconds", "From a request's submission to its admission.", stats.queue_seconds),
            ("time_to_first_token_seconds", "From submission to the first token.", stats.first_token_seconds),
            ("time_between_tokens_seconds", "From each token to the next.", stats.between_tokens_seconds),
            ("step_seconds", "Time of a step.", stats.step_seconds),
        ):
            yield _histogram(f"npu_sim_{name}", text, histogram)


def _histogram(name: str, text: str, histogram: EngineHistogram) -> HistogramMetricFamily:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total)
