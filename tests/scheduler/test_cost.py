"""The cost model, its calibration, and the bound on ranks that follows from a target."""

import random

import pytest

from loraplex.core import ConfigError
from loraplex.scheduler import H200_8B, Calibrator, CostModel, SchedulerConfig, StepShape, WaitReason
from loraplex.scheduler.cost import MIN_SAMPLES

from .world import make_request, make_world

CPU = CostModel(fixed_ms=41.0, token_ms=2.4, kv_token_ms=4e-3, rank_ms=0.05)


def shapes(rng: random.Random, count: int) -> list[StepShape]:
    found = []
    for _ in range(count):
        rows = rng.randint(1, 16)
        tokens = rows + (rng.randint(32, 500) if rng.random() < 0.3 else 0)
        found.append(StepShape(tokens, rows * rng.randint(20, 2000), rng.choice((0, 8, 16, 64, 200))))
    return found


@pytest.mark.parametrize(
    ("distinct", "step_ms"), [(0, 4.49), (1, 4.51), (8, 4.65), (32, 5.11), (64, 5.74)], ids=lambda value: str(value)
)
def test_figures_of_the_table_of_an_h200(distinct: int, step_ms: float) -> None:
    """64 sequences of 512 tokens, adapters of rank 16: BENCH.md, section 3.1."""
    assert H200_8B.step_ms(StepShape(64, 64 * 512, 16 * distinct)) == pytest.approx(step_ms, abs=0.01)


def test_arithmetic_bounds_long_steps() -> None:
    assert H200_8B.step_ms(StepShape(2048, 2048, 0)) == pytest.approx(0.019 * 2048 + 3.05e-5 * 2048)


def test_max_ranks_turns_the_model_round() -> None:
    ranks = H200_8B.max_ranks(5.0, 64, 64 * 512)
    assert H200_8B.step_ms(StepShape(64, 64 * 512, ranks)) == pytest.approx(5.0)
    assert CostModel(1, 1, 0, 0).max_ranks(5.0, 2, 0) == float("inf")


@pytest.mark.parametrize("target_ms", [0.1, 3.0, 4.4, 4.5])
def test_a_target_that_the_base_misses_leaves_adapters_a_tenth_of_a_step(target_ms: float) -> None:
    without_ms = H200_8B.step_ms(StepShape(64, 64 * 512, 0.0))
    assert without_ms > 4.4
    ranks = H200_8B.max_ranks(target_ms, 64, 64 * 512)
    assert H200_8B.step_ms(StepShape(64, 64 * 512, ranks)) == pytest.approx(1.1 * without_ms)


def test_target_leaves_tokens_beside_keys_values_and_ranks() -> None:
    tokens = H200_8B.max_tokens(10.0, 64 * 512, 1000.0)
    assert H200_8B.step_ms(StepShape(tokens, 64 * 512, 1000.0)) == pytest.approx(10.0, abs=H200_8B.token_ms)
    free = H200_8B.max_tokens(2.0, 64 * 512, 1000.0)
    assert H200_8B.token_ms * free == pytest.approx(H200_8B.fixed_ms, abs=H200_8B.token_ms)
    assert CostModel(1, 0, 0, 0).max_tokens(5.0, 0, 0.0) > 10**9


@pytest.mark.parametrize("truth", [H200_8B, CPU], ids=["h200", "cpu"])
@pytest.mark.parametrize("outliers", [0.0, 0.03])
def test_calibration_finds_the_device(truth: CostModel, outliers: float) -> None:
    rng, calibrator = random.Random(3), Calibrator()
    for shape in shapes(rng, 1500):
        noise = 20.0 if rng.random() < outliers else rng.uniform(0.97, 1.03)
        calibrator.add(shape, truth.step_ms(shape) * noise)
    for shape in shapes(rng, 100):
        assert calibrator.model.step_ms(shape) == pytest.approx(truth.step_ms(shape), rel=0.12)
    assert calibrator.model.rank_ms == pytest.approx(truth.rank_ms, rel=0.35)


def test_what_was_never_seen_keeps_its_start_value_and_nothing_is_negative() -> None:
    calibrator = Calibrator()
    for tokens in range(1, 200):
        calibrator.add(StepShape(tokens % 16 + 1, 0, 0.0), 10.0)
    model = calibrator.model
    assert model.fixed_ms == pytest.approx(10.0, rel=0.01)
    assert model.rank_ms == pytest.approx(H200_8B.rank_ms)
    falling = Calibrator()
    for ranks in range(200):
        falling.add(StepShape(4, 100, ranks), 30.0 - 0.1 * ranks)
    assert min(falling.model.rank_ms, falling.model.kv_token_ms, falling.model.token_ms) >= 0.0


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_look_alike_do_not_unlearn_what_was_measured(seed: int) -> None:
    """Under a target nearly every step has the same ranks, so noise alone would decide what a rank costs."""
    rng, costs = random.Random(seed), Calibrator(H200_8B, is_measured=True)
    for _ in range(6000):
        shape = StepShape(rng.randint(14, 18), rng.randint(6000, 9000), 256.0 + 64.0 * (rng.random() < 0.1))
        costs.add(shape, H200_8B.step_ms(shape) * rng.gauss(1.0, 0.1))
        assert 0.5 <= costs.model.rank_ms / H200_8B.rank_ms <= 2.0
    shape = StepShape(16, 7500, 256.0)
    assert costs.model.step_ms(shape) == pytest.approx(H200_8B.step_ms(shape), rel=0.03)


def test_a_device_that_became_slower_is_followed_as_far_as_four_times() -> None:
    rng, costs = random.Random(1), Calibrator(H200_8B, is_measured=True)
    for factor in (1.6, 3.0, 9.0):
        for shape in shapes(rng, 3000):
            costs.add(shape, factor * H200_8B.step_ms(shape))
        ratio = costs.model.fixed_ms / H200_8B.fixed_ms
        assert ratio == pytest.approx(min(factor, 4.0), rel=0.05)


def test_what_noise_hid_at_the_start_is_learned() -> None:
    truth = CostModel(100.0, 0.5, 0.002, 0.1)
    seen = CostModel(
        100.0, 0.5, 2.8e-4, 0.009
    )  # a hundredth of a step, though adapters and contexts cost ten times that
    rng, costs = random.Random(2), Calibrator(seen, is_measured=True, least=("kv_token_ms", "rank_ms"))
    for _ in range(3000):
        shape = StepShape(rng.randint(1, 16), rng.randint(100, 4000), 16.0 * rng.randint(0, 16))
        costs.add(shape, truth.step_ms(shape) * rng.gauss(1.0, 0.03))
    assert costs.model.rank_ms == pytest.approx(truth.rank_ms, rel=0.15)
    assert costs.model.kv_token_ms == pytest.approx(truth.kv_token_ms, rel=0.5)


@pytest.mark.parametrize("step_ms", [float("nan"), float("inf"), 0.0, -1.0])
def test_measurements_that_cannot_be_are_left_out(step_ms: float) -> None:
    calibrator = Calibrator()
    calibrator.add(StepShape(1, 1, 0.0), step_ms)
    assert calibrator.num_samples == 0


def test_target_bounds_the_ranks_of_a_step_once_calibrated() -> None:
    world = make_world(num_pages=64, load_steps=0, max_loras=6, tpot_target_ms=5.0, adapter_patience_s=100.0)
    for _ in range(MIN_SAMPLES):
        world.scheduler.costs.add(StepShape(4, 0, 8.0), 4.0 + 0.05 * 8.0)
        world.scheduler.costs.add(StepShape(4, 0, 0.0), 4.0)
    for number in range(5):
        world.add(make_request(4, number, max_tokens=6, ignore_eos=True), adapter_rank=8.0)
    world.step()
    assert len({seq.adapter for seq in world.scheduler.running}) == 2, "two of rank 8 fit into 1 ms at 0.05 ms a rank"
    assert {seq.wait for seq in world.scheduler.waiting} == {WaitReason.RANKS}
    world.drain()
    assert len(world.ended) == 5


def test_an_adapter_beyond_the_target_still_runs_alone() -> None:
    world = make_world(num_pages=64, load_steps=0, tpot_target_ms=1.0)
    for _ in range(MIN_SAMPLES):
        world.scheduler.costs.add(StepShape(4, 0, 8.0), 9.0)
        world.scheduler.costs.add(StepShape(4, 0, 0.0), 4.0)
    for number in range(3):
        world.add(make_request(4, number, max_tokens=2, ignore_eos=True), adapter_rank=64.0)
    while world.scheduler.sequences:
        plan = world.step()
        assert plan is None or len(plan.adapters) <= 1
    assert len(world.ended) == 3


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_target_is_a_time(value: float) -> None:
    with pytest.raises(ConfigError, match="tpot_target_ms"):
        SchedulerConfig(8, tpot_target_ms=value)


@pytest.mark.parametrize("name", ["max_load_pages", "max_waiting_tokens"])
def test_bounds_start_at_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        SchedulerConfig(8, **{name: 0})
