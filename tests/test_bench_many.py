"""The benchmark of many registered adapters: its registry, its clients and what it computes."""

import asyncio
import dataclasses
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.adapters import AdapterLimits
from loraplex.registry import Registry, RegistryConfig, VersionState

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
llama8b: Any = importlib.import_module("llama8b")
registry_fleet: Any = importlib.import_module("registry_fleet")
http_load: Any = importlib.import_module("http_load")
many: Any = importlib.import_module("bench_many_adapters")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("bench") / "base"
    llama8b.make_base(directory, dataclasses.replace(llama8b.TINY, layers=1))
    return registry_fleet.describe(directory, "tiny")


# ---------------------------------------------------------------------- registry
def test_registry_has_distinct_active_adapters_and_is_made_once(tmp_path: Path, base: Any) -> None:
    spec = registry_fleet.FleetSpec(6, 2, (4, 8))
    assert registry_fleet.make_registry(tmp_path / "data", spec, base)
    keys = registry_fleet.make_keys(tmp_path / "data", spec)
    with Registry(RegistryConfig(tmp_path / "data")) as registry:
        digests = set()
        for place in range(6):
            principal = registry.authenticate(keys[spec.tenant(place)])
            version = registry.resolve(principal, spec.name(place), base)
            assert version is not None
            adapter = registry.load(version, base, AdapterLimits())
            assert adapter.max_rank == spec.rank(place)
            digests.add(adapter.digest)
        assert len(digests) == 6
        info = registry.adapters.version(Registry.local_operator(), "tenant-0", "adapter-0", 1)
        assert info.state is VersionState.SKIPPED
    assert not registry_fleet.make_registry(tmp_path / "data", spec, base)
    assert registry_fleet.make_registry(tmp_path / "data", dataclasses.replace(spec, num_adapters=2), base)


# ---------------------------------------------------------------------- clients
_GAP_S = 0.2


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Two chunks `_GAP_S` apart; "bad" is refused, and "cut" ends too soon."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(line.split(":")[1]) for line in head.splitlines() if line.startswith("Content-Length"))
    model = json.loads(await reader.readexactly(length))["model"]
    assert "Authorization: Bearer key" in head
    if model == "bad":
        writer.write(b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": {"message": "no such model"}}')
    else:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(2):
            writer.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            await writer.drain()
            await asyncio.sleep(_GAP_S)
        if model != "cut":
            writer.write(b"data: [DONE]\n\n")
    writer.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(_answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield SimpleNamespace(port=listening.sockets[0].getsockname()[1], mark_cold=lambda answers: None)
    loop.call_soon_threadsafe(listening.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def ask(model: str, at_s: float = 0.0) -> Any:
    return http_load.Ask(model, "key", (1, 2), 3, at_s)


def test_answers_are_timed_and_what_does_not_end_counts_as_failed(server: Any) -> None:
    load = http_load.run_load(server, [ask("good"), ask("bad"), ask("cut"), ask("good")], num_clients=2)
    assert len(load.answers) == 4
    errors = sorted(answer.error or "" for answer in load.answers)
    assert errors[:2] == ["", ""]
    assert "no such model" in errors[3] and "did not end" in errors[2]
    for answer in load.answers:
        if answer.error is None:
            assert answer.asked_s < answer.first_s < answer.last_s <= load.seconds
            assert answer.tpot_s == pytest.approx((answer.last_s - answer.first_s) / 2)
            assert answer.tpot_s >= _GAP_S / 4, "half of the gap is left to a slow machine"
    assert len(load.failed) == 2


def test_arrivals_are_asked_at_their_times_and_a_gauge_is_watched(server: Any) -> None:
    load = http_load.run_load(server, [ask("good", 0.15), ask("good", 0.0)], num_clients=None, watch=lambda: 7.0)
    first, last = sorted(load.answers, key=lambda answer: answer.asked_s)
    assert (first.asked_s, last.asked_s) == (0.0, 0.15)
    assert 0.15 < last.first_s < load.seconds
    assert load.most == 7.0


def test_cold_requests_are_those_of_the_servers_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [{"event": "request", "request_id": name, "cold": name == "a"} for name in ("a", "b", "other")]
    log.write_text("\n".join(["not JSON", json.dumps({"event": "ready"}), *map(json.dumps, lines)]))
    server = http_load.Served.__new__(http_load.Served)
    server._log = log
    answers = [http_load.Answer(name, 0.0, 1) for name in ("a", "b")]
    server.mark_cold(answers)
    assert [answer.is_cold for answer in answers] == [True, False]


# ---------------------------------------------------------------------- figures
def load_of(tpots: list[float], *, cold: int = 0, failed: int = 0) -> Any:
    answers = [http_load.Answer(f"{i}", 0.0, 2, 0.1, 0.1 + tpot, is_cold=i < cold) for i, tpot in enumerate(tpots)]
    answers += [http_load.Answer(f"f{i}", 0.0, 2, error="x") for i in range(failed)]
    return http_load.Load(answers, 2.0, 50.0)


def test_warm_requests_of_the_small_pool_are_compared_with_all_of_the_whole_one() -> None:
    rounds = [
        {"small": load_of([9.0, 0.3, 0.2], cold=1, failed=1), "whole": load_of([0.2, 0.1, 0.1])},
        {"small": load_of([9.0, 0.2, 0.2], cold=1), "whole": load_of([0.1, 0.1, 0.2])},
    ]
    figures = many._compare_warm(rounds)
    assert figures["tpot_p99_over_whole"]["rounds"] == pytest.approx([1.5, 1.0])
    assert figures["tpot_p99_over_whole"]["median_of_rounds"] == pytest.approx(1.25)
    assert figures["failed"] == 1
    assert figures["cold_share"] == pytest.approx(2 / 7)
    assert figures["tpot_ms"]["small, warm"]["count"] == 4
    assert figures["tpot_ms_cold"]["p50"] == pytest.approx(9000.0)
