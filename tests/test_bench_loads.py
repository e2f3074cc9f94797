"""The benchmarks of cold loads and of S-LoRA's workload, on a tiny base: what they run and what they compute."""

import argparse
import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.engine import Engine, EngineConfig, load_base

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
llama8b: Any = importlib.import_module("llama8b")
open_loop: Any = importlib.import_module("open_loop")
logical_adapters: Any = importlib.import_module("logical_adapters")
synchronous_loads: Any = importlib.import_module("synchronous_loads")
cold_loads: Any = importlib.import_module("bench_cold_loads")
beside_loads: Any = importlib.import_module("section_beside_loads")
slora: Any = importlib.import_module("bench_slora")

SHAPE = dataclasses.replace(llama8b.TINY, layers=1)
OPTIONS: dict[str, Any] = (
    {"seed": 0, "batch": 8, "running": 2, "probes": 3, "probe_prompt": 8, "probe_gap": 0.02}
    | {"loads_rate": 40.0, "loads_seconds": 0.3, "stretches": 1, "window": 2}
    | {"rate": 40.0, "seconds": 0.4, "prompts": (4, 12), "outputs": (2, 5), "history": 40}
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "base"
    llama8b.make_base(directory, SHAPE)
    return directory


@pytest.fixture
def engine(base: Path) -> Engine:
    config = EngineConfig(dtype="bfloat16", device="cpu", num_threads=1, kv_pages=2600, max_loras=8, max_num_seqs=8)
    return Engine(load_base(base, config))


@pytest.fixture
def fleet(engine: Engine) -> Any:
    return logical_adapters.make_fleet(engine, 60, 2, 0.3, seed=0)


def options(**extra: Any) -> argparse.Namespace:
    return argparse.Namespace(**OPTIONS | extra)


# ---------------------------------------------------------------------- requests in real time
def test_requests_are_offered_at_their_times_and_timed_from_then(engine: Engine) -> None:
    arrivals = [open_loop.Arrival(0.05 * i, open_loop.make_request([1, 2, 3], 3, None)) for i in (2, 0, 1)]
    run = open_loop.drive(engine, arrivals)
    records = list(run.records.values())
    assert [record.at_s for record in records] == [0.0, 0.05, 0.1]
    for record in records:
        assert record.is_done
        assert len(record.token_s) == 3
        assert record.at_s < record.token_s[0] < record.token_s[1] < record.token_s[2] <= run.seconds
        assert record.latency_s == pytest.approx(record.ttft_s + 2 * record.tpot_s)
    assert not engine.has_work


def test_what_runs_at_the_end_of_a_run_is_cancelled(engine: Engine) -> None:
    running = [open_loop.make_request([1, 2, 3], 3000, None)]
    engine.add_request(running[0], time.monotonic())
    late = open_loop.Arrival(5.0, open_loop.make_request([1], 1, None))
    run = open_loop.drive(engine, [late], running=running, end_s=0.2)
    (record,) = run.records.values()
    assert not record.is_done and len(record.token_s) > 3
    assert run.seconds == 0.2
    assert not engine.has_work and engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages


def test_cut_pool_evicts_and_its_requests_are_cold_in_their_records(engine: Engine, fleet: Any) -> None:
    with logical_adapters.full_pool(fleet):
        cold = fleet.cold(3)
        asked = [cold[0], cold[1], cold[0], cold[2]]
        arrivals = [open_loop.Arrival(0.02 * i, open_loop.make_request([1, 2], 2, ref)) for i, ref in enumerate(asked)]
        run = open_loop.drive(engine, arrivals)
    assert [record.is_cold for record in run.records.values()] == [True, True, False, True]
    assert run.num_loads == 3
    assert run.num_evictions > 0
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    engine.scheduler.check_invariants()


def tokens_of(engine: Engine, requests: list[Any]) -> list[list[int]]:
    """What each request draws."""
    drawn: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request, time.monotonic())
    while engine.has_work:
        for result in engine.step(time.monotonic()):
            drawn[result.request_id] += [token for delta in result.deltas for token in delta.token_ids]  # type: ignore[union-attr]
    return list(drawn.values())


def test_synchronous_loads_fill_the_pages_before_the_step_that_reads_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama8b, "DELTA_SHARE", 3.0)
    fleet = logical_adapters.make_fleet(engine, 60, 2, 0.3, seed=0)
    asked = [ref for ref in fleet.refs if fleet.rank(ref) == 16][:4]

    def run() -> list[list[int]]:
        open_loop.evict_all(engine)
        engine._buffer.flat.zero_()
        return tokens_of(engine, [open_loop.make_request([7, 8, 9], 6, ref) for ref in asked])

    ahead = run()
    with synchronous_loads.SynchronousLoads(engine) as loads:
        assert run() == ahead
        assert loads.num_loads == len(asked)
    assert run() == ahead
    assert loads.num_loads == len(asked)
    assert tokens_of(engine, [open_loop.make_request([7, 8, 9], 6, None)])[0] not in ahead


def test_adapters_have_pages_of_their_own_and_few_images(engine: Engine, fleet: Any) -> None:
    assert len({ref.digest for ref in fleet.refs}) == 60
    images = {id(engine.shelf.packed[ref.digest].image) for ref in fleet.refs}
    assert 6 < len(images) <= 2 * 6  # of six ranks
    few = fleet.of_ranks([4, 4, 8])
    assert [fleet.rank(ref) for ref in few] == [4, 4, 8] and len(set(few)) == 3
    with logical_adapters.pinned(fleet, few):
        pages = [page for ref in few for page in engine.scheduler.residency.pages(ref.digest)]
        assert len(set(pages)) == len(pages) == sum(fleet.adapters.num_pages(ref) for ref in few)
        assert not set(few) & set(fleet.cold(5))


# ---------------------------------------------------------------------- cold loads
def record(at_s: float, ttft_s: float, *, cold: bool = False, running: int = 0) -> Any:
    return open_loop.Record(at_s, 5, num_running=running, is_cold=cold, token_s=[at_s + ttft_s, at_s + ttft_s + 1])


def test_same_requests_are_compared_by_percentiles_and_in_pairs() -> None:
    ideal = open_loop.Run({f"{i}": record(i, 0.010 + 0.001 * i) for i in range(10)})
    mine = open_loop.Run({f"{i}": record(i, 0.010 + 0.001 * i + 0.002 * (i % 2), cold=i % 2 == 1) for i in range(10)})
    over = cold_loads.compare_all(mine, ideal, [16] * 8 + [128] * 2, most_running=8)
    assert over["cold"]["count"] == 4 and over["warm"]["count"] == 4
    assert over["cold_of_every_rank"]["count"] == 5
    assert over["cold"]["p50_ms"] == pytest.approx(2.0)
    assert over["cold"]["paired_p99_ms"] == pytest.approx(2.0)
    assert over["warm"]["p99_ms"] == pytest.approx(0.0)
    assert over["cold_beside_others"] == {"count": 0}
    assert over["latency_over_resident"] > 1


def test_arrivals_are_the_same_each_time_and_by_popularity(fleet: Any) -> None:
    once, again = (cold_loads.make_arrivals(fleet, 1.2, options(seconds=20.0)) for _ in range(2))
    assert [(a.at_s, a.request.adapter, a.request.prompt_token_ids) for a in once] == [
        (a.at_s, a.request.adapter, a.request.prompt_token_ids) for a in again
    ]
    counts = [sum(a.request.adapter == ref for a in once) for ref in fleet.refs]
    assert counts[0] > counts[5] > 0 and counts[0] > 0.2 * len(once)
    assert len(once) / once[-1].at_s == pytest.approx(40.0, rel=0.15)


def test_every_run_of_arrivals_serves_the_same_requests(fleet: Any, capsys: pytest.CaptureFixture[str]) -> None:
    section = cold_loads.measure_arrivals(fleet, 1.0, options())
    assert {name: run["requests"] for name, run in section["runs"].items()} == dict.fromkeys(cold_loads.RUNS, 16)
    assert section["runs"]["resident"]["hit_rate"] == 1.0
    for name in ("ahead", "synchronous"):
        assert section["runs"][name]["loads"] > 0
        assert section["runs"][name]["hit_rate"] < 1.0
    cold_loads.show_arrivals(section)
    assert "ahead: whole requests take" in capsys.readouterr().out
    assert fleet.engine.scheduler.config.load_ahead


def test_probes_are_cold_and_warm_in_turn(fleet: Any, capsys: pytest.CaptureFixture[str]) -> None:
    section = beside_loads.measure_probes(fleet, options())
    for one in section["beside"].values():
        assert one["cold_ms"]["count"] == one["warm_ms"]["count"] == 3
        assert one["asked"] == 6
    beside_loads.show_probes(section)
    assert "cold less warm" in capsys.readouterr().out


def test_decoding_is_timed_with_loads_and_without(fleet: Any, capsys: pytest.CaptureFixture[str]) -> None:
    section = beside_loads.measure_decode(fleet, options())
    beside = section["beside"]
    assert beside["nothing"]["loads_s"] == beside["warm"]["loads_s"] == 0
    assert beside["cold"]["loads_s"] > 0 and beside["loads"]["loads_s"] > 0
    over = beside["cold"]["tpot_ms"]["p99"] / beside["warm"]["tpot_ms"]["p99"]
    assert section["tpot_p99_over"]["cold over warm short requests"] == pytest.approx(over)
    beside_loads.show_decode(section)
    assert "TPOT p99" in capsys.readouterr().out


# ---------------------------------------------------------------------- S-LoRA's workload
def test_workload_is_drawn_in_the_order_of_the_papers_generator() -> None:
    drawn = slora.draw_requests(2000, 10.0, 120.0, (8, 512), alpha=1.0, cv=1.0, seed=42)
    np.random.seed(42)
    adapters = np.random.power(1.0, 1200)
    prompts = np.random.randint(8, 512, 1200)
    outputs = np.random.randint(8, 512, 1200)
    gaps = np.random.gamma(1.0, 0.1, 1200)
    assert [one.adapter for one in drawn] == [int(share * 2000) for share in adapters]
    assert [one.prompt_len for one in drawn] == prompts.tolist()
    assert [one.output_len for one in drawn] == outputs.tolist()
    assert drawn[-1].at_s == pytest.approx(gaps.sum())
    assert drawn[0].at_s == pytest.approx(gaps[0])


def test_lengths_do_not_depend_on_the_number_of_adapters() -> None:
    few, many = (slora.draw_requests(n, 5.0, 10.0, (8, 512), alpha=1.0, cv=1.0, seed=42) for n in (5, 2000))
    assert [dataclasses.replace(one, adapter=0) for one in few] == [dataclasses.replace(one, adapter=0) for one in many]


def test_window_counts_what_ended_in_it_and_says_whether_requests_always_waited() -> None:
    def ended(at_s: float, done: bool = True) -> Any:
        return open_loop.Record(0.0, 10, is_done=done, token_s=[at_s - 1, at_s])

    run = open_loop.Run({"a": ended(1.5), "b": ended(2.5), "c": ended(4.5), "d": ended(4.6, done=False)}, seconds=5.0)
    run.queue = [(1.0, 0), (2.5, 4), (4.0, 2)]
    drawn = [slora.Drawn(0.0, 0, 10, 2)] * 4
    figures = slora._of_window(run, drawn, argparse.Namespace(window_from=2.0))
    assert figures["req_s"] == pytest.approx(2 / 3)
    assert figures["output_tok_s"] == pytest.approx(5 / 3)  # b's last, and both of c and d
    assert figures["tok_s"] == pytest.approx((20 + 5) / 3)
    assert figures["is_saturated"] and figures["shortest_queue"] == 2


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_cases_run_and_a_cap_holds_down_what_adapters_take(base: Path, engine: Engine, share: float) -> None:
    args = argparse.Namespace(adapters=[2, 20], settings=["S2"], images=1, rate=40.0, saturation_rate=400.0)
    vars(args).update(seconds=0.5, lengths=(2, 6), alpha=1.0, cv=1.0, seed=42, window_from=0.1)
    bench = slora.Bench(engine, args)
    rate = bench.run(slora.Case("S2", 20, "rate", share))
    assert rate["requests"] == 20 and rate["attainment"]["6 s"] == 1.0
    assert (rate["evictions"] > 0) == (share < 1)
    full = bench.run(slora.Case("S2", 20, "saturation", share))
    assert full["req_s"] > 0 and full["requests"] <= 200
    assert not engine.has_work
    ratio = slora.ratios({"a": rate, "b": rate | {"adapters": 2, "req_s": rate["req_s"] / 0.9}})
    assert [one["req_s"] for one in ratio.values()] == [pytest.approx(0.9)]


# ---------------------------------------------------------------------- whole scripts
@pytest.mark.slow
@pytest.mark.parametrize(("script", "key"), [(cold_loads, "decode"), (slora, "over_fewest")])
def test_tiny_mode_runs(script: Any, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["x", "--tiny", "--base", str(tmp_path / "base"), "--out", str(out)])
    script.main()
    result = json.loads(out.read_text())
    assert result[key]
    assert not [name for name, section in result.items() if isinstance(section, dict) and "error" in section]
