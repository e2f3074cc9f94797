"""What steps cost, measured before anything is served."""

import random
import time
from types import SimpleNamespace

import pytest
import torch

from loraplex.engine import Engine, EngineConfig, calibration, load_base
from loraplex.engine.calibration import BUDGET_S, Timed, fit
from loraplex.scheduler import CostModel, StepShape

from ..conftest import MakeBase

CPU = CostModel(fixed_ms=41.0, token_ms=2.4, kv_token_ms=4e-3, rank_ms=0.05)
SHAPES = (
    StepShape(1, 1, 0.0),
    StepShape(8, 8, 0.0),
    StepShape(8, 8 * 512, 0.0),
    StepShape(8, 8, 128.0),
    StepShape(64, 64, 0.0),
)


@pytest.mark.parametrize("rounds", [1, 8])
def test_timed_steps_give_the_coefficients(rounds: int) -> None:
    costs = fit(*(Timed(shape, (CPU.step_ms(shape),) * rounds) for shape in SHAPES))
    assert costs.is_ready
    for name in ("fixed_ms", "token_ms", "kv_token_ms", "rank_ms"):
        assert getattr(costs.model, name) == pytest.approx(getattr(CPU, name), rel=0.02), name


def test_what_noise_hides_is_small_and_not_nothing() -> None:
    times = (10.0, 10.0, 9.0, 9.0, 40.0)
    costs = fit(*(Timed(shape, (ms,)) for shape, ms in zip(SHAPES, times, strict=True)))
    assert 0.0 < costs.model.kv_token_ms * 8 * 512 <= 0.11
    assert 0.0 < costs.model.rank_ms * 128 <= 0.11


def test_an_effect_that_one_slow_step_hid_is_learned_while_serving() -> None:
    truth, rng = CostModel(fixed_ms=100.0, token_ms=0.5, kv_token_ms=2e-3, rank_ms=0.1), random.Random(3)
    times = [truth.step_ms(shape) + (13.0 if place == 1 else 0.0) for place, shape in enumerate(SHAPES)]
    costs = fit(*(Timed(shape, (ms,)) for shape, ms in zip(SHAPES, times, strict=True)))
    assert costs.model.rank_ms < 0.1 * truth.rank_ms
    for _ in range(3000):
        shape = StepShape(rng.randint(1, 16), rng.randint(100, 4000), 16.0 * rng.randint(0, 16))
        costs.add(shape, truth.step_ms(shape) * rng.gauss(1.0, 0.03))
    assert costs.model.rank_ms == pytest.approx(truth.rank_ms, rel=0.1)
    assert costs.model.max_ranks(115.0, 8, 800) == pytest.approx(truth.max_ranks(115.0, 8, 800), rel=0.1)


class Device:
    """A clock, and a runner on it: launching takes the host 3 s, a step the device 10 s after those before it."""

    def __init__(self, *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.now_s = self.free_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def launch(self, step: object) -> SimpleNamespace:
        self.now_s += 3.0
        self.free_s = ended_s = max(self.now_s, self.free_s) + 10.0
        return SimpleNamespace(wait=lambda: setattr(self, "now_s", max(self.now_s, ended_s)))


@pytest.mark.parametrize(("overlaps", "expected_ms"), [(True, 10_000.0), (False, 13_000.0)])
def test_launching_counts_only_where_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, *, overlaps: bool, expected_ms: float
) -> None:
    device = Device(overlaps=overlaps)
    monkeypatch.setattr(calibration, "time", device)
    for _ in range(3):
        assert calibration._time_ms(device, object()) == expected_ms  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"kv_pages": 3}, {"max_num_seqs": 1, "max_loras": 1}], ids=str)
def test_an_engine_measures_itself_and_leaves_nothing_behind(tiny_base: MakeBase, settings: dict[str, int]) -> None:
    engine = Engine(load_base(tiny_base("llama"), EngineConfig(num_threads=1, **settings)))
    began_s = time.monotonic()
    engine.calibrate()
    assert time.monotonic() - began_s < BUDGET_S + 2.0
    model = engine.scheduler.costs.model
    assert engine.scheduler.costs.is_ready
    assert min(model.fixed_ms, model.token_ms, model.kv_token_ms, model.rank_ms) >= 0.0
    assert 0.0 < model.fixed_ms < 1000.0
    assert engine.scheduler.cache.page_s == pytest.approx(16 * model.token_ms / 1e3)
    assert not torch.any(engine._buffer.flat)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    assert not engine.has_work
