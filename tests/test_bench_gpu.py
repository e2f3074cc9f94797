"""The parts of the GPU benchmarks that need no GPU."""

import argparse
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.adapters import digest_modules
from loraplex.engine import Engine, EngineConfig, load_base

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
llama8b: Any = importlib.import_module("llama8b")
engine_runs: Any = importlib.import_module("engine_runs")
float_reference: Any = importlib.import_module("float_reference")
mixed_ranks: Any = importlib.import_module("bench_mixed_ranks")
decode_tax: Any = importlib.import_module("bench_decode_tax")
resident: Any = importlib.import_module("section_resident")
rel_err: Any = importlib.import_module("section_rel_err")
summary: Any = importlib.import_module("make_h200_summary")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "base"
    llama8b.make_base(directory, llama8b.TINY)
    return directory


@pytest.fixture
def engine(base: Path) -> Engine:
    config = EngineConfig(dtype="bfloat16", device="cpu", num_threads=1, memory_bytes=64 * 2**20, max_loras=8)
    return Engine(load_base(base, config))


def options(**extra: Any) -> argparse.Namespace:
    known = {"tiny": True, "batch": 8, "prompt_len": 4, "output_len": 6, "repeats": 1, "rank": 4}
    return argparse.Namespace(**known | extra)


# ---------------------------------------------------------------------- byte model
def test_byte_model_reproduces_the_table_of_bench_md() -> None:
    model = llama8b.ByteModel.of(llama8b.LLAMA8B, tb_s=4.3)
    assert round(model.weight_bytes / 1e9, 2) == 15.01
    assert model.kv_token_bytes == 128 * 1024
    assert round(16 * model.rank_unit_bytes / 1e6, 1) == 83.9
    table = {0: (19.30, 4.49), 1: (19.39, 4.51), 8: (19.98, 4.65), 32: (21.99, 5.11), 64: (24.67, 5.74)}
    for distinct, (step_gb, step_ms) in table.items():
        assert model.step_bytes(64, 512, 16 * distinct) / 1e9 == pytest.approx(step_gb, abs=0.011)
        assert model.step_ms(64, 512, 16 * distinct) == pytest.approx(step_ms, abs=0.006)


def test_byte_model_at_short_context_reproduces_the_ratios_of_design_md() -> None:
    model = llama8b.ByteModel.of(llama8b.LLAMA8B)
    ratios = [model.step_ms(64, 128, 16 * d) / model.step_ms(64, 128) for d in (1, 8, 32, 64)]
    assert ratios == pytest.approx([1.01, 1.04, 1.17, 1.33], abs=0.005)


# ---------------------------------------------------------------------- bases and adapters
def test_tiny_base_loads_and_answers(engine: Engine) -> None:
    timing = engine_runs.run_batch(engine, engine_runs.make_requests([None] * 3, 5, 6, llama8b.TINY.vocab))
    assert len(timing.step_ms) == 5
    assert timing.tpot_ms == pytest.approx(sum(timing.step_ms) / 5)


def test_base_is_written_once_and_again_when_a_file_is_cut(tmp_path: Path) -> None:
    assert llama8b.make_base(tmp_path, llama8b.TINY) > 0
    assert llama8b.make_base(tmp_path, llama8b.TINY) == 0
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    before = shard.read_bytes()
    shard.write_bytes(before[:-2])
    assert llama8b.make_base(tmp_path, llama8b.TINY) > 0
    assert shard.read_bytes() == before
    assert llama8b.make_base(tmp_path, replace(llama8b.TINY, layers=2)) > 0


def test_adapter_has_a_pair_for_every_site_of_its_rank() -> None:
    sites = llama8b.TINY.sites
    adapter = llama8b.make_adapter(sites, 16, seed=1)
    assert [module.site for module in adapter.modules] == list(sites)
    for module in adapter.modules:
        assert module.a.shape == (16, module.site.d_in)
        assert module.b.shape == (module.site.d_out, 16)
        assert module.a.data.nbytes == 2 * 16 * module.site.d_in
    assert adapter.num_bytes == 16 * llama8b.ByteModel.of(llama8b.TINY).rank_unit_bytes


def test_adapter_may_leave_modules_out() -> None:
    adapter = llama8b.make_adapter(llama8b.TINY.sites, {"q_proj": 4, "down_proj": 8}, seed=1)
    assert adapter.targets == ("down_proj", "q_proj")
    assert adapter.max_rank == 8
    assert len(adapter.modules) == 2 * llama8b.TINY.layers


def test_adapters_are_distinct_repeatable_and_of_the_size_asked_for() -> None:
    sites = llama8b.TINY.sites
    one, two, again = (llama8b.make_adapter(sites, 8, seed) for seed in (1, 2, 1))
    assert one.digest == again.digest != two.digest
    assert digest_modules(one.modules) == digest_modules(again.modules) != digest_modules(two.modules)
    module = one.modules[0]
    x = torch.randn(256, module.site.d_in, generator=torch.Generator().manual_seed(0))
    a, b = (llama8b.as_tensor(view).float() for view in (module.a, module.b))
    added = module.scale * (x @ a.T) @ b.T
    base_std = llama8b.WEIGHT_STD * module.site.d_in**0.5
    assert 0.5 < added.std().item() / (llama8b.DELTA_SHARE * base_std) < 2


# ---------------------------------------------------------------------- runs
def test_adapters_beyond_the_packed_ones_share_images_and_have_their_own_pages(engine: Engine) -> None:
    refs = engine_runs.Adapters(engine).take(4, 4)
    images = [engine.shelf.packed[ref.digest].image[0].data_ptr() for ref in refs]
    assert images[2:] == images[:2]
    assert len({ref.digest for ref in refs}) == 4
    engine_runs.run_batch(engine, engine_runs.make_requests(refs, 4, 6, llama8b.TINY.vocab))
    pages = [page for ref in refs for page in engine.scheduler.residency.pages(ref.digest)]
    assert len(set(pages)) == len(pages)


def test_timed_rounds_refuse_loads(engine: Engine) -> None:
    adapters = engine_runs.Adapters(engine)
    counts = iter(range(1, 5))

    def run() -> Any:
        return engine_runs.run_batch(engine, engine_runs.make_requests(adapters.take(4, next(counts)), 4, 6, 512))

    with pytest.raises(AssertionError, match="loaded in a timed run"):
        engine_runs.interleave(1, {"grows": run})


def test_decode_tax_reports_every_number_of_adapters(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    section = decode_tax.measure_decode_tax(engine, engine_runs.Adapters(engine), options())
    assert list(section["tpot_ms"]) == ["0", "1", "8"]
    assert section["over_base"]["0"] == 1.0
    decode_tax.show_decode_tax(section)
    assert "efficiency" in capsys.readouterr().out


def test_resident_adapters_fill_the_pool_and_leave_it_empty(engine: Engine) -> None:
    section = resident.measure_resident(engine, engine_runs.Adapters(engine), options())
    assert section["resident_adapters"] == sum(section["by_rank"].values()) > section["padded_slots"]
    assert section["wasted_share"] < 0.05
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    engine.scheduler.check_invariants()


def test_relative_error_is_that_of_the_dtype_and_shows_a_wrong_adapter(
    base: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama8b, "DELTA_SHARE", 2.0)  # three layers add little to the residual
    adapters = engine_runs.Adapters(engine)
    refs = adapters.take(8, 2)
    made = {ref.digest: llama8b.make_adapter(engine.base.sites, 8, 8000 + i) for i, ref in enumerate(refs)}
    right = rel_err.compare(engine, base, llama8b.TINY, refs, made)
    assert right["max"] < 1.5 * right["max_torch_bfloat16"] < 0.03
    assert right["mix_changes"] > 3
    swapped = dict(zip(made, reversed(made.values()), strict=True))
    wrong = rel_err.compare(engine, base, llama8b.TINY, refs, swapped)
    assert wrong["max_base_rows"] < 0.03
    assert wrong["max_by_rank"]["8"] > 5 * right["max"]


# ---------------------------------------------------------------------- figures
def test_fit_finds_a_line_and_says_how_well_it_fits() -> None:
    exact = mixed_ranks.fit_line([0, 100, 200], [5.0, 5.2, 5.4])
    assert (exact.slope, exact.intercept, exact.r2) == pytest.approx((0.002, 5.0, 1.0))
    assert mixed_ranks.fit_line([0, 1, 2, 3], [1.0, 2.0, 1.0, 2.0]).r2 == pytest.approx(0.2)


@pytest.mark.parametrize("count", [1, 10, 64, 100])
def test_production_ranks_have_the_shares_of_the_mix(count: int) -> None:
    ranks = mixed_ranks.production_ranks(count)
    assert len(ranks) == count
    for rank, share in resident.MIX.items():
        assert abs(ranks.count(rank) - count * share / 100) < 1


def test_mixes_fit_the_batch_and_cover_it() -> None:
    mixes = mixed_ranks.make_mixes(64)
    assert mixes["none"] == []
    assert len(mixes["uniform"]) == len(mixes["production"]) == 64
    assert all(len(ranks) <= 64 for ranks in mixes.values())
    assert len({sum(ranks) for ranks in mixes.values()}) > 8


def write_results(folder: Path) -> None:
    """Results with made-up figures, an older one beside them."""

    def spread(value: float) -> dict[str, Any]:
        return {"median": value, "range": 0.1, "values": [value]}

    origin = {"device": "GPU", "date": "2030-01-02", "commit": "abc", "command": "python x", "versions": {"torch": "9"}}
    decode = {
        "decode_tax": {"tpot_ms": {"0": spread(5.0), "64": spread(7.0)}, "over_base": {"0": 1.0, "64": 1.4}},
        "startup": {"seconds": 30.0, "import_s": 4.0},
        "resident": {"resident_adapters": 900},
        "rel_err": {"max": 0.009, "max_torch_bfloat16": 0.01},
        "prefill": {"error": "RuntimeError: x"},
    }
    kernels = {
        "lora_kernels_ms": {"1": 0.5, "64": 2.0},
        "over_base": {"a": {"1": 1.2, "64": 1.5}, "b": {"1": 1.1, "64": 1.4}},
    }
    mixes = {"mixes": {"rank_unit_us": 1.5, "rank_fit_r2": 0.99}, "pair": {}}
    difference = {"count": 40, "p50_ms": 1.5, "p99_ms": 4.0, "mean_ms": 1.6, "paired_p50_ms": 1.4}
    loads = {
        "arrivals_zipf_1": {
            "runs": {"ahead": {"hit_rate": 0.8}},
            "over_resident": {"ahead": {"cold": difference, "latency_over_resident": 1.01}},
        },
        "probes": {"beside": {"0": difference}},
        "decode": {"error": "RuntimeError: x"},
    }
    case = {"setting": "S1", "mode": "rate", "adapters": 5, "req_s": 9.9, "first_token_ms": {"mean": 40.0}}
    table = {"S1, 5 adapters, rate": case | {"attainment": {"6 s": 1.0}}, "over_fewest": {}}
    results = {"decode_tax": decode, "lora_kernels": kernels, "mixed_ranks": mixes, "cold_loads": loads, "slora": table}
    for name, content in results.items():
        (folder / f"h200_{name}_2030-01-02.json").write_text(json.dumps(origin | content))
    (folder / "h200_decode_tax_2029-12-31.json").write_text(json.dumps(origin | {"date": "2029-12-31"}))


def test_summary_joins_the_newest_results_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_h200_summary.py", "--results", str(tmp_path)])
    summary.main()
    made = json.loads((tmp_path / "h200_summary.json").read_text())
    assert made["decode_tpot_ms"] == {"0": 5.0, "64": 7.0}
    assert made["lora_kernels_ms"] == {"1": 0.5, "64": 2.0}
    assert made["overlapped_over_base"] == {"1": 1.1, "64": 1.4}
    assert made["overlapped_arrangement"] == "best of 2 measured: b"
    assert (made["rank_unit_us"], made["rank_fit_r2"], made["resident_adapters"]) == (1.5, 0.99, 900)
    assert (made["rel_err"], made["startup_s"]) == (0.009, 30.0)
    assert "prefill_over_base" in made["missing"] and "offline_output_tok_s" in made["missing"]
    assert made["cold_ttft_ms"] == {"p50_ms": 1.5, "p99_ms": 4.0, "mean_ms": 1.6} == made["cold_ttft_ms_beside"]["0"]
    assert made["latency_over_resident"] == {"ahead": 1.01} and made["hit_rate"] == 0.8
    assert made["slora_rps"] == {"S1, 5 adapters, rate": 9.9}
    assert "tpot_under_loads" in made["missing"] and "cold_ttft_ms_synchronous" in made["missing"]
    assert made["sources"]["decode_tax"] == "h200_decode_tax_2030-01-02.json"
    assert made["commit"] == "abc" and made["versions"] == {"torch": "9"}
    assert "rank_unit_us" in capsys.readouterr().out


def test_report_keeps_other_sections_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_COMMIT", "abc123")
    report = engine_runs.Report(options(out=tmp_path), "trial")

    def fails() -> None:
        raise RuntimeError("no")

    report.add("bad", fails)
    report.add("good", lambda: {"x": 1})
    with pytest.raises(SystemExit, match="bad"):
        report.finish()
    (path,) = tmp_path.glob("tiny_trial_*.json")
    written = json.loads(path.read_text())
    assert written["bad"] == {"error": "RuntimeError: no"}
    assert written["good"] == {"x": 1}
    assert written["commit"] == "abc123"
    assert written["versions"]["torch"] == torch.__version__


def test_plot_of_the_same_figures_has_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = importlib.import_module("decode_plot").plot_decode_tax
    section = {
        "tpot_ms": {"0": {"median": 5.0, "values": [4.9, 5.1]}, "64": {"median": 7.0, "values": [6.9, 7.2]}},
        "floor_ms": {"0": 3.7, "64": 4.9},
        "floor_over_base": {"0": 1.0, "64": 1.33},
        "read_tb_s": 4.38,
    }
    paths = [tmp_path / name for name in ("a.svg", "b.svg")]
    for path in paths:
        plot(section, "title", path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
