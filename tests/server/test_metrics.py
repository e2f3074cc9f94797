"""The scrape: it parses, it tells the truth, and its size does not depend on who calls."""

import io
import time
from collections.abc import Mapping

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, AdapterRef, EngineStats, Histogram, LoadedAdapter
from loraplex.core.figures import DISTINCT_BUCKETS, NUM_LISTED_ADAPTERS, NUM_POPULAR_ADAPTERS, HostMemory
from loraplex.server import ServerConfig, create_app
from loraplex.server.engine_metrics import MAX_LISTED_ADAPTERS, EngineCollector
from loraplex.server.host_figures import HostFigures
from loraplex.server.metrics import Metrics
from loraplex.server.waiters import Stage, StageFigures
from loraplex.testing import FakeEngine

from .helpers import BASE, Entry, FakeCatalog, completion

pytestmark = pytest.mark.anyio


async def scrape(client: httpx.AsyncClient) -> dict[str, Metric]:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def num_series(families: dict[str, Metric]) -> int:
    return sum(len(family.samples) for family in families.values())


async def test_scrape_holds_our_names_and_those_of_gateways(client: httpx.AsyncClient) -> None:
    families = await scrape(client)
    assert {
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "vllm:lora_requests_info",
        "loraplex_requests_running",
        "loraplex_engine_steps",
        "loraplex_adapter_loads",
        "loraplex_time_to_first_token_seconds",
    } <= families.keys()
    assert families["vllm:cache_config_info"].samples[0].labels == {"block_size": "16", "num_gpu_blocks": "100"}
    (info,) = families["vllm:lora_requests_info"].samples
    assert set(info.labels) == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    assert abs(info.value - time.time()) < 60


async def test_generations_are_counted_once(client: httpx.AsyncClient) -> None:
    for stream in (False, True):
        await client.post("/v1/completions", json=completion(stream=stream, n=2))
    await client.post("/v1/completions", json=completion(model="nope"))
    families = await scrape(client)
    counts = {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for sample in families["loraplex_http_requests"].samples
        if sample.name.endswith("_total")
    }
    assert counts == {("/v1/completions", "200"): 2, ("/v1/completions", "404"): 1}
    errors = [s for s in families["loraplex_errors"].samples if s.name.endswith("_total")]
    assert [(s.labels, s.value) for s in errors] == [({"code": "model_not_found", "reason": ""}, 1)]
    for name in ("time_to_first_token", "time_per_output_token", "request"):
        family = families[f"loraplex_{name}_seconds"]
        assert [sample.value for sample in family.samples if sample.name.endswith("_count")] == [2]
    assert families["loraplex_output_tokens"].samples[0].value == 64


async def test_series_stay_bounded_whoever_calls(client: httpx.AsyncClient) -> None:
    for model in (BASE, "beta", "nope"):
        await client.post("/v1/completions", json=completion(model=model))
    await client.get("/nowhere")
    await client.get("/v1/models/none")
    await scrape(client)
    before = num_series(await scrape(client))
    for idx in range(20):
        await client.post("/v1/completions", json=completion(model="acme/alpha", prompt=f"p{idx}"))
        await client.post("/v1/completions", json=completion(model=f"unknown-{idx}"))
        await client.get(f"/nowhere-{idx}")
        await client.get(f"/v1/models/none-{idx}")
    assert num_series(await scrape(client)) == before


def test_pool_usage_and_long_name_lists() -> None:
    names = tuple(f"a{idx}" for idx in range(1000))
    stats = EngineStats(
        num_pages=10, num_free_pages=4, max_loras=8, waiting_adapters=names, running_adapters=("x", "y")
    )
    families = rendered(stats)
    assert families["vllm:kv_cache_usage_perc"].samples[0].value == pytest.approx(0.6)
    labels = families["vllm:lora_requests_info"].samples[0].labels
    assert labels["running_lora_adapters"] == "x,y"
    assert labels["waiting_lora_adapters"].count(",") == MAX_LISTED_ADAPTERS - 1


def test_what_could_be_evicted_now_is_no_use_of_the_pool() -> None:
    families = rendered(EngineStats(num_pages=10, num_free_pages=1, num_idle_pages=7))
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
        assert families[name].samples[0].value == pytest.approx(0.2)
    assert families["loraplex_pages_idle"].samples[0].value == 7
    torn = rendered(EngineStats(num_pages=10, num_free_pages=4, num_idle_pages=7))  # read while pages were evicted
    assert torn["vllm:kv_cache_usage_perc"].samples[0].value == 0.0


def test_host_memory_is_told_in_bytes_and_adapters() -> None:
    families = rendered(EngineStats(host_memory=HostMemory(3, 4096, 1024, 8192)))
    for name, value in (("adapters", 3), ("held_bytes", 4096), ("leased_bytes", 1024), ("max_bytes", 8192)):
        assert families[f"loraplex_host_memory_{name}"].samples[0].value == value
    assert rendered(EngineStats())["loraplex_host_memory_max_bytes"].samples[0].value == float("inf")


def test_who_waits_for_host_memory_is_told_by_stage_and_counted_among_all_who_wait() -> None:
    waiting = (StageFigures(Stage.PLACE, 5, 1.5), StageFigures(Stage.READ, 2, 0.25))
    families = rendered(EngineStats(num_waiting=8, waiting_by_reason=(("slot", 8),)), waiting=waiting)
    assert by_label(families["loraplex_host_waiting"], "stage") == {"place": 5, "read": 2}
    assert by_label(families["loraplex_host_waiting_age_seconds"], "stage") == {"place": 1.5, "read": 0.25}
    assert by_label(families["loraplex_requests_waiting_by_reason"], "reason") == {"slot": 8, "host": 7}
    for name in ("vllm:num_requests_waiting", "loraplex_requests_waiting"):
        assert families[name].samples[0].value == 15


def test_empty_pool_is_no_division_by_zero() -> None:
    assert (
        b"vllm:kv_cache_usage_perc 0.0"
        in Metrics(EngineCollector(EngineStats, lambda: HostFigures(0), tuple, lambda digests: {})).render()
    )


# ---------------------------------------------------------------------- adapters, steps, queues
def rendered(
    stats: EngineStats,
    host: HostFigures | None = None,
    waiting: tuple[StageFigures, ...] = (),
    names: Mapping[AdapterDigest, tuple[str, ...]] | None = None,
) -> dict[str, Metric]:
    metrics = Metrics(
        EngineCollector(lambda: stats, lambda: host or HostFigures(3), lambda: waiting, lambda digests: names or {})
    )
    text = metrics.render().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def by_label(family: Metric, label: str) -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in family.samples}


def test_packed_files_are_told_by_event() -> None:
    families = rendered(EngineStats(packed_files=(("hit", 3), ("dropped", 1)), packed_bytes=4096))
    assert by_label(families["loraplex_adapter_packed_files"], "event") == {"hit": 3, "dropped": 1}
    assert families["loraplex_packed_adapters_bytes"].samples[0].value == 4096


def test_adapters_are_told_by_tier_reason_and_state() -> None:
    host = HostFigures(11, num_failures=1, num_evictions=1, num_reloads=8, reload_bytes=4096)
    for seconds, was_packed in ((0.5, False), (1.5, False), (0.125, True)):
        host = host.loaded(seconds, was_packed=was_packed)
    stats = EngineStats(
        num_adapter_loads=7,
        adapter_load_s=0.25,
        num_load_failures=3,
        num_warm_starts=9,
        num_cold_starts=4,
        num_adapter_reloads=2,
        reload_pages=40,
        evictions_by_reason=(("load", 5), ("growth", 1)),
        waiting_by_reason=(("slot", 6), ("pages", 2)),
    )
    families = rendered(stats, host)
    assert by_label(families["loraplex_adapter_loads"], "tier") == {"store": 2, "packed": 1, "host": 7}
    assert by_label(families["loraplex_adapter_load_seconds"], "tier") == {"store": 2.0, "packed": 0.125, "host": 0.25}
    assert by_label(families["loraplex_adapter_load_failures"], "tier") == {"store": 1, "host": 3}
    assert by_label(families["loraplex_adapter_starts"], "state") == {"warm": 9, "cold": 4}
    assert by_label(families["loraplex_adapter_evictions"], "reason") == {"load": 5, "growth": 1}
    assert by_label(families["loraplex_requests_waiting_by_reason"], "reason") == {"slot": 6, "pages": 2, "host": 0}
    for name, value in (
        ("host_evictions", 1),
        ("host_reloads", 8),
        ("host_reload_bytes", 4096),
        ("reloads", 2),
        ("reload_pages", 40),
    ):
        assert families[f"loraplex_adapter_{name}"].samples[0].value == value
    assert families["loraplex_adapters_known"].samples[0].value == 11


def test_an_adapter_that_failed_in_both_tiers_is_one() -> None:
    a, b, c = (AdapterDigest(letter * 64) for letter in "abc")
    families = rendered(EngineStats(failed_adapters=(a, b)), HostFigures(3, failed_adapters=frozenset({b, c})))
    assert families["loraplex_adapters_failed"].samples[0].value == 3


def test_histograms_of_the_engine_are_cumulative() -> None:
    histogram = Histogram((0.1, 1.0), (3, 0, 2), 9.5)
    tokens = tuple(
        (bucket, histogram if bucket == "9-32" else Histogram((0.1, 1.0), (0, 0, 0), 0.0))
        for bucket in DISTINCT_BUCKETS
    )
    stats = EngineStats(queue_s=histogram, token_s_by_distinct=tokens, queue_age_s=1.5, step_ranks=96.0)
    families = rendered(stats)
    queue = {
        (sample.name, sample.labels.get("le")): sample.value for sample in families["loraplex_queue_seconds"].samples
    }
    name = "loraplex_queue_seconds"
    assert [queue[f"{name}_bucket", le] for le in ("0.1", "1.0", "+Inf")] == [3, 3, 5]
    assert (queue[f"{name}_count", None], queue[f"{name}_sum", None]) == (5, 9.5)
    token_counts = {
        sample.labels["distinct"]: sample.value
        for sample in families["loraplex_token_seconds"].samples
        if sample.name.endswith("_count")
    }
    assert token_counts == {bucket: 5 if bucket == "9-32" else 0 for bucket in DISTINCT_BUCKETS}
    assert families["loraplex_queue_age_seconds"].samples[0].value == 1.5


def test_gateways_of_both_generations_read_the_same() -> None:
    families = rendered(EngineStats(num_pages=10, num_free_pages=4, num_prefix_tokens=80, num_cached_tokens=20))
    for new, old in (
        ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        ("prefix_cache_queries", "gpu_prefix_cache_queries"),
        ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    ):
        values = [families[f"vllm:{name}"].samples[0].value for name in (new, old)]
        assert values[0] == values[1] > 0
    assert families["vllm:gpu_prefix_cache_hit_rate"].samples[0].value == 0.25


def test_loaded_adapters_are_told_to_gateways_by_name_level_and_pin() -> None:
    a, b, c, d = (AdapterDigest(letter * 64) for letter in "abcd")
    loaded = (LoadedAdapter(a, True, True), LoadedAdapter(b, True), LoadedAdapter(c, False), LoadedAdapter(d, False))
    names = {a: ("sql",), b: ("chat", "talk"), c: ("law",)}
    host = HostFigures(3).loaded(0.5, was_packed=False).loaded(0.25, was_packed=True)
    stats = EngineStats(loaded_adapters=loaded, resident_adapters=(a, b), num_adapter_loads=4, adapter_load_s=0.125)
    families = rendered(stats, host, names=names)
    found = {tuple(sample.labels.values()): sample.value for sample in families["vllm:lora_adapter_loaded"].samples}
    assert found == {
        ("sql", "gpu", "true"): 1,
        ("chat", "gpu", "false"): 1,
        ("talk", "gpu", "false"): 1,
        ("law", "cpu", "false"): 1,
    }
    assert families["vllm:num_gpu_loaded_lora_adapters"].samples[0].value == 2
    assert families["vllm:num_cpu_loaded_lora_adapters"].samples[0].value == 3
    seconds = families["vllm:lora_adapter_load_seconds"].samples
    told = {(s.name.rpartition("_")[2], s.labels["transition"]): s.value for s in seconds}
    assert told == {
        ("bucket", "load"): 2,
        ("count", "load"): 2,
        ("sum", "load"): 0.75,
        ("bucket", "activate"): 4,
        ("count", "activate"): 4,
        ("sum", "activate"): 0.125,
    }


class TwoNamesEach(FakeCatalog):
    """Names for all that the engine holds."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__()
        self.engine = engine

    def list(self) -> tuple[Entry, ...]:
        held = enumerate(self.engine.held)
        return tuple(
            Entry(AdapterRef(f"{word}-{idx}", 1, digest)) for idx, digest in held for word in ("name", "alias")
        )


async def test_ten_thousand_named_adapters_make_no_more_series_than_the_most_popular(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(engine, TwoNamesEach(engine), ServerConfig(), io.StringIO()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.post("/v1/completions", json=completion())
        await scrape(client)
        before = num_series(await scrape(client))
        for idx in range(10_000):
            digest = AdapterDigest(f"{idx:064x}")
            engine.held[digest] = Adapter(digest, (), 1, 0, (), None)
        families = await scrape(client)
    assert num_series(families) == before + 2 * NUM_POPULAR_ADAPTERS + NUM_LISTED_ADAPTERS
    assert num_series(families) < 400 + NUM_LISTED_ADAPTERS
    assert len(families["loraplex_adapter_popularity"].samples) == NUM_POPULAR_ADAPTERS
    names = {sample.labels["adapter_name"] for sample in families["vllm:lora_adapter_loaded"].samples}
    assert len(names) == NUM_LISTED_ADAPTERS
