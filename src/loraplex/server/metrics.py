"""Prometheus metrics: engine gauges read at scrape time, and HTTP counters. No label holds an adapter or a tenant,
so the number of series does not depend on how many there are. `vllm:*` names are those that gateways read."""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loraplex.core import EngineStats

MAX_LISTED_ADAPTERS = 256  # names in one label value: a gateway needs the busy ones, not thousands of waiting ones
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, stats: Callable[[], EngineStats], num_adapters: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats, num_adapters))
        self._http = Counter(
            "loraplex_http_requests", "HTTP requests by route and status.", ("route", "status"), registry=self.registry
        )
        self._ttft_s = self._histogram("time_to_first_token", "From arrival to the first token.", _TTFT_BUCKETS_S)
        self._tpot_s = self._histogram("time_per_output_token", "Per token after the first.", _TPOT_BUCKETS_S)
        self._e2e_s = self._histogram("request", "From arrival to the end of the answer.", _E2E_BUCKETS_S)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"loraplex_{name}_seconds", help_text, registry=self.registry, buckets=buckets)

    def observe_http(self, route: str, status: int) -> None:
        """Count one HTTP request. `route` is the template of the route, not the path."""
        self._http.labels(route, str(status)).inc()

    def observe_generation(self, ttft_s: float, decode_s: float, num_output_tokens: int, e2e_s: float) -> None:
        """Book the latencies of one generation that ended well."""
        self._ttft_s.observe(ttft_s)
        self._e2e_s.observe(e2e_s)
        if num_output_tokens > 1:
            self._tpot_s.observe(decode_s / (num_output_tokens - 1))

    def render(self) -> bytes:
        """The scrape, in Prometheus' text format."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Turns one snapshot of the engine into metrics at each scrape."""

    def __init__(self, stats: Callable[[], EngineStats], num_adapters: Callable[[], int]) -> None:
        self._stats = stats
        self._num_adapters = num_adapters

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not touch the engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from _gauges(stats, self._num_adapters())
        yield from _counters(stats)
        yield from _vllm(stats)


def _gauges(stats: EngineStats, num_adapters: int) -> Iterator[Metric]:
    for name, text, value in (
        ("requests_waiting", "Sequences in the queue.", stats.num_waiting),
        ("requests_running", "Sequences that are being served.", stats.num_running),
        ("pages", "Pages of the pool.", stats.num_pages),
        ("pages_free", "Free pages of the pool.", stats.num_free_pages),
        ("pages_adapters", "Pages that hold adapters, idle ones included.", stats.num_adapter_pages),
        ("adapters_known", "Adapters that are ready in host memory.", num_adapters),
        ("adapters_resident", "Adapters in the pool.", len(stats.resident_adapters)),
        ("adapters_distinct_last_step", "Distinct adapters in the last step.", stats.num_distinct_adapters),
        ("adapters_max_per_step", "Most distinct adapters a step may have.", stats.max_loras),
    ):
        yield GaugeMetricFamily(f"loraplex_{name}", text, value=value)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    for name, text, value in (
        ("engine_steps", "Steps of the engine.", stats.num_steps),
        ("prompt_tokens", "Prompt tokens processed.", stats.num_prompt_tokens),
        ("output_tokens", "Tokens generated.", stats.num_output_tokens),
        ("preemptions", "Sequences preempted.", stats.num_preemptions),
        ("adapter_loads", "Adapters brought into the pool.", stats.num_adapter_loads),
        ("adapter_load_seconds", "Seconds spent on that.", stats.adapter_load_s),
        ("adapter_evictions", "Adapters evicted from the pool.", stats.num_adapter_evictions),
    ):
        yield CounterMetricFamily(f"loraplex_{name}", text, value=value)


def _vllm(stats: EngineStats) -> Iterator[Metric]:
    """The metrics that inference gateways know from vLLM."""
    used = 1.0 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0
    yield GaugeMetricFamily("vllm:num_requests_waiting", "Sequences in the queue.", value=stats.num_waiting)
    yield GaugeMetricFamily("vllm:num_requests_running", "Sequences that are being served.", value=stats.num_running)
    yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the pool in use, 0 to 1.", value=used)
    resident = len(stats.resident_adapters)
    yield GaugeMetricFamily("vllm:num_gpu_loaded_lora_adapters", "Adapters in the pool.", value=resident)
    yield GaugeMetricFamily("vllm:max_gpu_lora_adapters", "Most distinct adapters a step.", value=stats.max_loras)
    cache = GaugeMetricFamily("vllm:cache_config_info", "Pool settings.", labels=("block_size", "num_gpu_blocks"))
    cache.add_metric((str(stats.page_tokens), str(stats.num_pages)), 1)
    yield cache
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters at work, at this unix time.", labels=labels)
    info.add_metric(
        (str(stats.max_loras), _name_list(stats.running_adapters), _name_list(stats.waiting_adapters)), time.time()
    )
    yield info


def _name_list(names: tuple[str, ...]) -> str:
    return ",".join(names[:MAX_LISTED_ADAPTERS])
