"""The scrape: it parses, it tells the truth, and its size does not depend on who calls."""

import time

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from loraplex.core import EngineStats
from loraplex.server.metrics import MAX_LISTED_ADAPTERS, Metrics

from .helpers import BASE, completion

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
    text = Metrics(lambda: stats, lambda: 3).render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["vllm:kv_cache_usage_perc"].samples[0].value == pytest.approx(0.6)
    labels = families["vllm:lora_requests_info"].samples[0].labels
    assert labels["running_lora_adapters"] == "x,y"
    assert labels["waiting_lora_adapters"].count(",") == MAX_LISTED_ADAPTERS - 1


def test_empty_pool_is_no_division_by_zero() -> None:
    assert b"vllm:kv_cache_usage_perc 0.0" in Metrics(EngineStats, lambda: 0).render()
