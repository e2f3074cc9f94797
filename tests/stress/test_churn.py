"""Churn, version switches, disconnects and broken adapters through the whole stack; only the model is another one.

`-s` shows what happened in a run. A run is not the same twice, as threads and sockets have their own time.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.core import AdapterDigest

from ..conftest import MakeBase
from .churn import Churn
from .site import Site, SiteConfig
from .traffic import CUTS, Mix, Traffic

OpenSite = Callable[[SiteConfig], Site]

_WARM_REQUESTS = 100
_QUIET_S = 5.0
_CHANGES = ("activate", "rollback", "publish", "delete", "delete version", "pin 200", "preload")


@pytest.fixture
def open_site(tiny_base: MakeBase, tmp_path: Path) -> Iterator[OpenSite]:
    """Makes a site, which is closed at the end."""
    sites: list[Site] = []

    def make(config: SiteConfig) -> Site:
        sites.append(Site(tmp_path, tiny_base("llama", num_hidden_layers=1), config))
        return sites[-1]

    yield make
    for site in sites:
        site.close()


async def drive(site: Site, mix: Mix, every: int) -> Traffic:
    """Run a mix while two operators each make a change after so many requests."""
    traffic = Traffic(site, mix, random.Random(f"{site.config.seed}/{mix.num_requests}"))
    async with asyncio.TaskGroup() as group:
        group.create_task(traffic.run())
        for operator in range(2):
            group.create_task(Churn(traffic, random.Random(f"{site.config.seed}/{operator}"), every).run())
    return traffic


def settle(site: Site) -> dict[str, object]:
    """What is left once the server rests; waits until that is nothing, for a few seconds at most."""
    until = time.monotonic() + _QUIET_S
    while True:
        time.sleep(0.1)
        if not site.engine.has_work and not (left := site.leaks()):
            return left
        if time.monotonic() > until:
            assert not site.engine.has_work, "the engine does not come to rest"
            return left


def stress(site: Site, mix: Mix, every: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Warm up, run a mix, let the server rest; nothing may be wrong or left. Figures of what happened, and counts."""
    asyncio.run(drive(site, Mix(_WARM_REQUESTS), 40))
    assert not settle(site)
    before, begin_s = site.held(), time.monotonic()
    traffic = asyncio.run(drive(site, mix, every))
    seconds = time.monotonic() - begin_s
    left, after = settle(site), site.held()
    stats, host = site.engine.stats(), site.service.catalog.host_figures()
    figures = {
        "seed": site.config.seed,
        "seconds": round(seconds, 1),
        "steps": stats.num_steps,
        "preemptions": stats.num_preemptions,
        "pool loads": stats.num_adapter_loads,
        "pool evictions": stats.num_adapter_evictions,
        "pool reloads": stats.num_adapter_reloads,
        "failed loads": stats.num_load_failures,
        "host evictions": host.num_evictions,
        "host failures": host.num_failures,
        "cached tokens": stats.num_cached_tokens,
        **{f"packed {what}": count for what, count in stats.packed_files},
        **{f"cancelled in {stage}": count for stage, count in site.stages.items()},
    }
    print(json.dumps(figures | dict(sorted(traffic.counts.items())), indent=1))
    print(site.log.getvalue()[:4000])
    assert site.client.failure is None
    assert not traffic.violations + site.runner.violations, site.config.seed
    assert not left, site.config.seed
    assert not site.log.getvalue()
    assert after["tasks"] == before["tasks"]
    assert after["threads"] == before["threads"]
    for kind in after["files"].keys() - {"database"}:
        assert after["files"][kind] <= before["files"].get(kind, 0), (kind, site.config.seed)
    assert traffic.counts["requests"] == mix.num_requests
    return figures, dict(traffic.counts)


def assert_all_happened(found: dict[str, Any], names: list[str], least: int = 1) -> None:
    """A run in which something never happened has shown nothing about it."""
    assert not {name: found.get(name, 0) for name in names if found.get(name, 0) < least}


CHURNED = ["pool evictions", "pool reloads", "failed loads", "host evictions", "host failures", "cached tokens"]
CHURNED += ["packed hit", "packed evicted", "cancelled in queue", "cancelled in decode"]
STAGES = [f"cancelled in {stage}" for stage in ("load", "queue", "prefill", "decode", "host name", "host read")]
SHORT_STAGES = ["cancelled in host place", "cancelled in host pack"]  # few are there at a time


@pytest.mark.parametrize("overlaps", [True, False], ids=["a step ahead", "step by step"])
def test_short_churn_gives_no_wrong_token_and_leaves_nothing(open_site: OpenSite, overlaps: bool) -> None:
    small = SiteConfig(num_adapters=20, names_per_tenant=5, num_tenants=3, host_bytes=2**17, packed_bytes=3 * 2**15)
    site = open_site(replace(small, seed=7 + overlaps, overlaps=overlaps))
    figures, counts = stress(site, Mix(600 if overlaps else 500, num_clients=24, cut_share=0.2), every=24)
    assert_all_happened(figures, CHURNED)
    assert counts["whole answers"] > 0.4 * counts["requests"]
    assert_all_happened(counts, [f"cut {cut}" for cut in CUTS] + ["status 429", "status 503", "status 404"])


def test_wrong_books_of_host_memory_are_leaks(open_site: OpenSite) -> None:
    site = open_site(SiteConfig(num_adapters=6, num_tenants=1, names_per_tenant=1, broken_per_tenant=0))
    assert not site.leaks()
    host = site.service.catalog._host
    host._room.add(1)
    assert site.leaks() == {"host room unlike its entries": (1, 1)}
    host._room.remove(1)
    host._unused[AdapterDigest("a" * 64)] = None
    assert site.leaks().keys() == {"idle host entries unlike the unused"}


@pytest.mark.slow
def test_churn_of_100000_requests_gives_no_wrong_token_and_leaves_nothing(open_site: OpenSite) -> None:
    site = open_site(SiteConfig(seed=1))
    figures, counts = stress(site, Mix(100_000), every=200)
    assert_all_happened(figures, [*CHURNED, "preemptions", *STAGES], 10)
    assert_all_happened(figures, SHORT_STAGES)
    assert_all_happened(counts, [f"cut {cut}" for cut in CUTS] + [f"change {change}" for change in _CHANGES], 10)
    assert_all_happened(counts, ["status 404", "error deadline_exceeded DEADLINE", "error store_unavailable"], 10)
    assert counts["whole answers"] > 0.5 * counts["requests"]


@pytest.mark.slow
def test_1000_changes_of_versions_under_50000_requests_give_no_stale_answer(open_site: OpenSite) -> None:
    site = open_site(SiteConfig(seed=2, overlaps=False, flaky=False, broken_per_tenant=0))
    _, counts = stress(site, Mix(50_000, cut_share=0.02), every=35)
    changes = sum(counts.get(f"change {kind}", 0) for kind in ("activate", "rollback", "publish", "delete"))
    assert changes >= 1_000
    assert counts["whole answers"] > 0.6 * counts["requests"]


@pytest.mark.slow
def test_20000_disconnects_at_every_stage_leave_nothing(open_site: OpenSite) -> None:
    site = open_site(SiteConfig(seed=3, overlaps=False, host_bytes=3 * 2**15))
    figures, counts = stress(site, Mix(25_000, cut_share=0.82), every=400)
    assert sum(counts[f"cut {cut}"] for cut in CUTS) >= 20_000
    assert_all_happened(counts, [f"cut {cut}" for cut in CUTS], 1_000)
    assert_all_happened(figures, STAGES, 10)
    assert_all_happened(figures, SHORT_STAGES)
    assert counts["whole answers"] > 0.1 * counts["requests"]


@pytest.mark.slow
def test_40_broken_adapters_in_a_fifth_of_20000_requests_harm_no_other(open_site: OpenSite) -> None:
    site = open_site(SiteConfig(seed=4, broken_per_tenant=10, flaky=False))
    _, counts = stress(site, Mix(20_000, broken_share=0.2), every=200)
    wrong = [f"error {code}" for code in ("artifact_corrupt", "artifact_missing", "non_finite_output")]
    assert_all_happened(counts, [*wrong, "error overloaded ADAPTER_LOAD"], 10)
    assert counts["whole answers"] > 0.4 * counts["requests"]
