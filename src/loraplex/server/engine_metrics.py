"""The engine's figures as Prometheus metrics: ours, and those that gateways know from vLLM.

No labels but those of the most popular adapters and of some loaded ones depend on which adapters there are, and these
are a fixed number.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, islice

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loraplex.core import EngineStats, Histogram
from loraplex.core.figures import NUM_LISTED_ADAPTERS
from loraplex.server.catalog import NamesOf
from loraplex.server.host_figures import HostFigures, LoadFigures
from loraplex.server.waiters import StageFigures

MAX_LISTED_ADAPTERS = 256  # names in one label value: a gateway needs the busy ones, not thousands of waiting ones


class EngineCollector(Collector):
    """Turns one snapshot of the engine, of host memory and of who waits for it into metrics at each scrape."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        host: Callable[[], HostFigures],
        waiting: Callable[[], tuple[StageFigures, ...]],
        names_of: NamesOf,
    ) -> None:
        self._stats = stats
        self._names_of = names_of
        self._host = host
        self._waiting = waiting

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not touch the engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        stats, host, waiting = self._stats(), self._host(), self._waiting()
        yield from _gauges(stats, host)
        yield from _waiting_gauges(stats, waiting)
        yield from _counters(stats)
        yield from _adapter_counters(stats, host)
        yield from _steps(stats)
        yield from _popular(stats)
        yield from _vllm(stats, stats.num_waiting + _num_before(waiting))
        yield from _vllm_adapters(stats, host, self._names_of)


def _gauges(stats: EngineStats, host: HostFigures) -> Iterator[Metric]:
    memory, num_failed = stats.host_memory, len(host.failed_adapters.union(stats.failed_adapters))
    for name, text, value in (
        ("requests_running", "Sequences that are being served.", stats.num_running),
        ("queue_age_seconds", "How long the sequence has waited that waits longest.", stats.queue_age_s),
        ("pages", "Pages of the pool.", stats.num_pages),
        ("pages_free", "Free pages of the pool.", stats.num_free_pages),
        ("pages_idle", "Pages of adapters and cached prefixes that could be evicted now.", stats.num_idle_pages),
        ("pages_adapters", "Pages that hold adapters, idle ones included.", stats.num_adapter_pages),
        ("pages_prefixes", "Pages that hold cached prefixes.", stats.num_cached_pages),
        ("adapters_known", "Adapters that are ready in host memory.", host.num_ready),
        ("adapters_resident", "Adapters in the pool.", len(stats.resident_adapters)),
        ("adapters_loading", "Adapters on their way into the pool.", stats.num_loading_adapters),
        ("adapters_failed", "Adapters whose load failed and is not tried again yet.", num_failed),
        ("adapters_distinct_last_step", "Distinct adapters in the last step.", stats.num_distinct_adapters),
        ("adapters_ranks_last_step", "Sum of their ranks.", stats.sum_ranks),
        ("adapters_max_per_step", "Most distinct adapters a step may have.", stats.max_loras),
        ("host_memory_adapters", "Adapters in host memory, those that leave included.", memory.num_adapters),
        ("host_memory_held_bytes", "Host memory that the system has given for adapters.", memory.held_bytes),
        ("host_memory_leased_bytes", "Of this, what holds adapters.", memory.leased_bytes),
        (
            "host_memory_max_bytes",
            "Most that may be held; +Inf: no bound.",
            math.inf if memory.max_bytes is None else memory.max_bytes,
        ),
        ("packed_adapters_bytes", "Bytes of packed adapters on disk.", stats.packed_bytes),
        ("adapter_host_reload_bytes", "Host memory more that would have spared nine in ten reads.", host.reload_bytes),
        ("adapter_reload_pages", "Pages more that would have spared nine in ten reloads.", stats.reload_pages),
    ):
        yield GaugeMetricFamily(f"loraplex_{name}", text, value=value)


def _num_before(waiting: tuple[StageFigures, ...]) -> int:
    """Sequences that wait for their adapters before they are queued."""
    return sum(one.num_sequences for one in waiting)


def _waiting_gauges(stats: EngineStats, waiting: tuple[StageFigures, ...]) -> Iterator[Metric]:
    """Who waits: in the engine's queue, or before it for an adapter to come into host memory."""
    num_before = _num_before(waiting)
    total = "Sequences that wait, in the queue or for their adapter in host memory."
    yield GaugeMetricFamily("loraplex_requests_waiting", total, value=stats.num_waiting + num_before)
    reasons = GaugeMetricFamily(
        "loraplex_requests_waiting_by_reason", "Sequences that wait, by what for.", labels=("reason",)
    )
    yield _labelled(reasons, (*stats.waiting_by_reason, ("host", num_before)))
    stages = GaugeMetricFamily(
        "loraplex_host_waiting", "Sequences that wait for their adapter in host memory, by stage.", labels=("stage",)
    )
    yield _labelled(stages, ((one.stage, one.num_sequences) for one in waiting))
    ages = GaugeMetricFamily(
        "loraplex_host_waiting_age_seconds", "How long the oldest of these has waited.", labels=("stage",)
    )
    yield _labelled(ages, ((one.stage, one.oldest_s) for one in waiting))


def _counters(stats: EngineStats) -> Iterator[Metric]:
    for name, text, value in (
        ("engine_steps", "Steps of the engine.", stats.num_steps),
        ("prompt_tokens", "Prompt tokens processed.", stats.num_prompt_tokens),
        ("output_tokens", "Tokens generated.", stats.num_output_tokens),
        ("preemptions", "Sequences preempted.", stats.num_preemptions),
        ("prefix_tokens", "Prompt tokens that were looked for in the prefix cache.", stats.num_prefix_tokens),
        ("prefix_hit_tokens", "Of those, found.", stats.num_cached_tokens),
        ("prefix_evictions", "Pages of cached prefixes that were freed.", stats.num_prefix_evictions),
        ("adapter_reloads", "Loads of adapters that were evicted a while before.", stats.num_adapter_reloads),
    ):
        yield CounterMetricFamily(f"loraplex_{name}", text, value=value)


def _adapter_counters(stats: EngineStats, host: HostFigures) -> Iterator[Metric]:
    """Counters with a fixed set of labels."""
    tiers = (
        ("store", host.from_store),
        ("packed", host.from_packed),
        ("host", LoadFigures(stats.num_adapter_loads, stats.adapter_load_s)),
    )
    for name, text, label, values in (
        ("loads", "Adapters that were loaded, by where from.", "tier", tuple((name, one.count) for name, one in tiers)),
        ("load_seconds", "Seconds that loads took.", "tier", tuple((name, one.seconds) for name, one in tiers)),
        (
            "load_failures",
            "Loads that failed, by where from.",
            "tier",
            (("store", host.num_failures), ("host", stats.num_load_failures)),
        ),
        ("evictions", "Adapters evicted from the pool.", "reason", stats.evictions_by_reason),
        ("packed_files", "What became of packed adapters on disk.", "event", stats.packed_files),
        (
            "starts",
            "Sequences that found their adapter in the pool, or did not.",
            "state",
            (("warm", stats.num_warm_starts), ("cold", stats.num_cold_starts)),
        ),
    ):
        yield _labelled(CounterMetricFamily(f"loraplex_adapter_{name}", text, labels=(label,)), values)
    for name, text, value in (
        ("host_evictions", "Adapters that left host memory for others.", host.num_evictions),
        ("host_reloads", "Adapters read again that had left host memory a while before.", host.num_reloads),
    ):
        yield CounterMetricFamily(f"loraplex_adapter_{name}", text, value=value)


def _labelled(
    family: CounterMetricFamily | GaugeMetricFamily, values: Iterable[tuple[str, float]]
) -> CounterMetricFamily | GaugeMetricFamily:
    for label, value in values:
        family.add_metric((label,), value)
    return family


def _steps(stats: EngineStats) -> Iterator[Metric]:
    """What steps were like, by how many distinct adapters they had, and how long requests waited for their first."""
    yield CounterMetricFamily(
        "loraplex_step_adapters", "Distinct adapters, summed over steps.", value=stats.step_adapters
    )
    yield CounterMetricFamily("loraplex_step_ranks", "Ranks of these, summed over steps.", value=stats.step_ranks)
    steps = CounterMetricFamily("loraplex_steps", "Steps, by distinct adapters.", labels=("distinct",))
    yield _labelled(steps, stats.steps_by_distinct)
    tokens = HistogramMetricFamily(
        "loraplex_token_seconds", "From a token of a sequence to its next, by distinct adapters.", labels=("distinct",)
    )
    for distinct, histogram in stats.token_s_by_distinct:
        tokens.add_metric((distinct,), *_histogram(histogram))
    yield tokens
    queue = HistogramMetricFamily("loraplex_queue_seconds", "From a request's arrival to its first step.", labels=())
    if stats.queue_s is not None:
        queue.add_metric((), *_histogram(stats.queue_s))
    yield queue


def _histogram(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets, and the sum."""
    bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(map(float, histogram.counts)), strict=True)), histogram.total


def _popular(stats: EngineStats) -> Iterator[Metric]:
    """The adapters of the pool that are used most: a fixed number of series, whichever adapters these are."""
    popularity = GaugeMetricFamily(
        "loraplex_adapter_popularity", "Starts, with a half-life of a minute.", labels=("digest",)
    )
    yield _labelled(popularity, ((use.digest, use.popularity) for use in stats.popular_adapters))
    running = GaugeMetricFamily("loraplex_adapter_running", "Sequences that run on it.", labels=("digest",))
    yield _labelled(running, ((use.digest, use.num_running) for use in stats.popular_adapters))


def _vllm(stats: EngineStats, num_waiting: int) -> Iterator[Metric]:
    """The metrics that inference gateways know from vLLM, by the names of its engine V1 and, where others, of V0."""
    num_used = max(0, stats.num_pages - stats.num_free_pages - stats.num_idle_pages)
    used = num_used / stats.num_pages if stats.num_pages else 0.0
    hit_rate = stats.num_cached_tokens / stats.num_prefix_tokens if stats.num_prefix_tokens else 0.0
    for name, text, value in (
        ("num_requests_waiting", "Sequences that wait, in the queue or for their adapter.", num_waiting),
        ("num_requests_running", "Sequences that are being served.", stats.num_running),
        ("kv_cache_usage_perc", "Share of the pool in use, 0 to 1.", used),
        ("gpu_cache_usage_perc", "Share of the pool in use, 0 to 1.", used),
        ("gpu_prefix_cache_hit_rate", "Share of prompt tokens found in the prefix cache, 0 to 1.", hit_rate),
    ):
        yield GaugeMetricFamily(f"vllm:{name}", text, value=value)
    for generation in ("", "gpu_"):
        for name, text, value in (
            ("queries", "Prompt tokens that were looked for in the prefix cache.", stats.num_prefix_tokens),
            ("hits", "Of those, found.", stats.num_cached_tokens),
        ):
            yield CounterMetricFamily(f"vllm:{generation}prefix_cache_{name}", text, value=value)
    cache = GaugeMetricFamily("vllm:cache_config_info", "Pool settings.", labels=("block_size", "num_gpu_blocks"))
    cache.add_metric((str(stats.page_tokens), str(stats.num_pages)), 1)
    yield cache
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters at work, at this unix time.", labels=labels)
    info.add_metric(
        (str(stats.max_loras), _name_list(stats.running_adapters), _name_list(stats.waiting_adapters)), time.time()
    )
    yield info


def _vllm_adapters(stats: EngineStats, host: HostFigures, names_of: NamesOf) -> Iterator[Metric]:
    """Where adapters are and what bringing them in took, as gateways that route to loaded adapters ask for it."""
    for name, text, value in (
        ("num_gpu_loaded_lora_adapters", "Adapters in the pool.", len(stats.resident_adapters)),
        ("num_cpu_loaded_lora_adapters", "Adapters in host memory.", host.num_ready),
        ("max_gpu_lora_adapters", "Most distinct adapters a step.", stats.max_loras),
    ):
        yield GaugeMetricFamily(f"vllm:{name}", text, value=value)
    names = names_of({one.digest for one in stats.loaded_adapters})
    named = ((name, one) for one in stats.loaded_adapters for name in names.get(one.digest, ()))
    labels = ("adapter_name", "level", "pinned")
    loaded = GaugeMetricFamily("vllm:lora_adapter_loaded", "1 for adapters that are loaded, and where.", labels=labels)
    for name, one in islice(named, NUM_LISTED_ADAPTERS):
        loaded.add_metric((name, "gpu" if one.in_pool else "cpu", str(one.is_pinned).lower()), 1)
    yield loaded
    text = "Seconds that loads took, into host memory (load) and into the pool (activate)."
    seconds = HistogramMetricFamily("vllm:lora_adapter_load_seconds", text, labels=("transition",))
    for transition, count, total in (
        ("load", host.from_store.count + host.from_packed.count, host.from_store.seconds + host.from_packed.seconds),
        ("activate", stats.num_adapter_loads, stats.adapter_load_s),
    ):
        seconds.add_metric((transition,), [("+Inf", float(count))], total)
    yield seconds


def _name_list(names: tuple[str, ...]) -> str:
    return ",".join(names[:MAX_LISTED_ADAPTERS])
