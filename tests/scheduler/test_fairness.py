"""Shares of tenants, priorities, ages and deadlines."""

import random
from collections import Counter
from itertools import islice

import pytest

from loraplex.core import FinishReason, InvalidRequest, Overloaded, OverloadReason
from loraplex.scheduler import FairShares
from loraplex.scheduler.fairness import INPUT_WEIGHT, MAX_IDLE_TENANTS, OUTPUT_WEIGHT, in_turn
from loraplex.scheduler.limits import MAX_RETRY_S, MIN_RETRY_S, StartRate

from .world import World, make_request, make_world


def tenants_in_turn(world: World, count: int) -> list[str | None]:
    scheduler = world.scheduler
    order = in_turn(scheduler.waiting, scheduler.shares, world.now, scheduler.config.aging_s)
    return [seq.tenant for seq in islice(order, count)]


# ---------------------------------------------------------------------- counters
def run_dry(shares: FairShares, tenant: str) -> None:
    """A tenant's only sequence starts and ends."""
    shares.start(tenant)
    shares.leave(tenant, is_waiting=False)


def test_returning_tenant_is_lifted_to_the_least_of_those_that_wait() -> None:
    shares = FairShares()
    for tenant in ("a", "b"):
        shares.arrive(tenant)
    shares.charge("a", 100.0)
    shares.charge("b", 40.0)
    shares.arrive("c")
    assert shares.served("c") == 40.0
    for tenant in ("a", "c"):
        run_dry(shares, tenant)
    shares.charge("b", 500.0)
    shares.arrive("a")
    assert shares.served("a") == 540.0, "idling earns nothing"


def test_tenant_that_only_runs_earns_nothing_by_asking_little() -> None:
    """Its sequence runs on while others queue: what it did not ask for meanwhile is not made up later."""
    shares = FairShares()
    for tenant in ("a", "b"):
        shares.arrive(tenant)
    shares.start("a")
    shares.charge("b", 300.0)
    shares.arrive("a")
    assert shares.served("a") == 300.0


def test_debt_stays_over_a_pause() -> None:
    shares = FairShares()
    shares.arrive("a")
    shares.charge("a", 100.0)
    shares.arrive("b")
    run_dry(shares, "a")
    shares.arrive("a")
    assert shares.served("a") == 100.0


def test_newcomer_to_an_empty_queue_starts_where_the_last_one_stood() -> None:
    shares = FairShares()
    shares.arrive("a")
    shares.charge("a", 70.0)
    shares.leave("a", is_waiting=True)
    shares.arrive("b")
    assert shares.served("b") == 70.0


def test_weight_divides_what_is_charged() -> None:
    shares = FairShares()
    shares.set_weight("a", 4.0)
    shares.arrive("a")
    shares.charge("a", 100.0)
    assert shares.served("a") == 25.0


def test_counters_of_idle_tenants_are_bounded() -> None:
    shares = FairShares()
    for number in range(3 * MAX_IDLE_TENANTS):
        shares.arrive(f"t{number}")
        shares.charge(f"t{number}", 1.0)
        run_dry(shares, f"t{number}")
    assert len(shares._shares) <= 2 * MAX_IDLE_TENANTS
    assert shares.served(f"t{3 * MAX_IDLE_TENANTS - 1}") == 3.0 * MAX_IDLE_TENANTS, "those served most are kept"


# ---------------------------------------------------------------------- the order
def test_one_tenant_goes_first_come_first_served() -> None:
    world = make_world()
    seqs = [world.add(make_request())[0] for _ in range(5)]
    assert list(in_turn(world.scheduler.waiting, world.scheduler.shares, 0.0, 10.0)) == seqs


def test_least_served_tenant_goes_first_and_its_start_counts_at_once() -> None:
    world = make_world(max_num_seqs=4, max_step_tokens=64)
    for _ in range(4):
        world.add(make_request(8, None, "x", max_tokens=8, ignore_eos=True))
    for _ in range(2):
        world.add(make_request(8, None, "y", max_tokens=8, ignore_eos=True))
    world.step()
    assert Counter(seq.tenant for seq in world.scheduler.running) == {"x": 2, "y": 2}


def test_priority_goes_before_shares_and_age_ends_it() -> None:
    world = make_world(aging_s=5.0)
    world.add(make_request(4, None, "x"))
    world.now = 4.0
    world.add(make_request(4, None, "y", priority=1))
    assert tenants_in_turn(world, 2) == ["y", "x"]
    world.now = 5.0
    assert tenants_in_turn(world, 2) == ["x", "y"], "who has waited long counts as of the highest priority"


def test_tenants_of_one_adapter_split_its_ranks_and_one_alone_pays_all() -> None:
    world = make_world(load_steps=0, max_step_tokens=64)
    for tenant, adapter in (("x", 0), ("y", 0), ("z", 1)):
        world.add(make_request(4, adapter, tenant, max_tokens=2, ignore_eos=True), adapter_rank=30.0)
    world.step()
    shares = world.scheduler.shares
    per_rank = world.scheduler.costs.model.tokens_per_rank
    base = 4 * INPUT_WEIGHT + OUTPUT_WEIGHT
    assert shares.served("x") == shares.served("y") == pytest.approx(base + 15 * per_rank)
    assert shares.served("z") == pytest.approx(base + 30 * per_rank)


def test_recomputation_after_preemption_is_free() -> None:
    world = make_world(num_pages=8, max_step_tokens=24, max_num_seqs=3)
    for first in (1, 2, 3):
        world.add(make_request(list(range(first, first + 7)), None, None, max_tokens=6, ignore_eos=True))
    world.drain()
    assert world.scheduler.num_preemptions > 0
    assert world.scheduler.shares.served(None) == 3 * (7 * INPUT_WEIGHT + 6 * OUTPUT_WEIGHT)


@pytest.mark.parametrize("seed", range(4))
def test_service_of_backlogged_tenants_stays_within_the_bound(seed: int) -> None:
    """The bound of VTC, 2 max(w_in L_in, w_out M), with M the tokens that a full batch holds; adapters aside."""
    rng = random.Random(seed)
    world = make_world(seed, num_pages=64, max_num_seqs=6, max_step_tokens=24)
    bound = 2 * max(INPUT_WEIGHT * 12, OUTPUT_WEIGHT * 64 * 4)
    worst = 0.0
    for _ in range(500):
        for tenant, length in (("x", 2), ("y", 12)):
            while sum(seq.tenant == tenant for seq in world.scheduler.waiting) < 6:
                prompt = [rng.randrange(13) for _ in range(length)]
                world.add(make_request(prompt, None, tenant, max_tokens=2 if tenant == "x" else 20, ignore_eos=True))
        world.step()
        shares = world.scheduler.shares
        worst = max(worst, abs(shares.served("x") - shares.served("y")))
    assert 0 < worst <= bound
    assert worst < 0.1 * shares.served("x"), "both were served alike"


def test_without_fair_shares_the_heavy_tenant_takes_what_it_asks() -> None:
    served = {}
    for fair in (True, False):
        world = make_world(fair_shares=fair, max_num_seqs=2)
        for _ in range(60):
            world.add(make_request(4, None, "heavy", max_tokens=4, ignore_eos=True))
        for _ in range(5):
            world.add(make_request(4, None, "light", max_tokens=4, ignore_eos=True))
        for _ in range(30):
            world.step()
        served[fair] = sum(seq.tenant == "light" for seq in world.ended.values())
    assert served == {True: 5, False: 0}


# ---------------------------------------------------------------------- deadlines, queue, retry
def test_overdue_sequences_are_named_once() -> None:
    world = make_world()
    (first,) = world.add(make_request(deadline_s=2.0, max_tokens=30, ignore_eos=True))
    (second,) = world.add(make_request(deadline_s=1.0, max_tokens=1))
    world.add(make_request())
    world.step()
    assert second.finish_reason is not None
    assert world.scheduler.overdue(1.9) == ()
    assert world.scheduler.overdue(2.0) == (first,)
    assert world.scheduler.overdue(9.0) == ()


@pytest.mark.parametrize(("field", "value"), [("deadline_s", 0.0), ("deadline_s", float("nan")), ("priority", 101)])
def test_request_fields_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=field):
        make_request(**{field: value})  # type: ignore[arg-type]


def test_queue_is_bounded_in_tokens_but_takes_one_of_any_size() -> None:
    world = make_world(max_waiting_tokens=10)
    world.scheduler.check_queue(30)
    world.add(make_request(8))
    world.scheduler.check_queue(2)
    with pytest.raises(Overloaded) as caught:
        world.scheduler.check_queue(3)
    assert caught.value.reason is OverloadReason.QUEUE_TOKENS
    for part in ("8 prompt tokens", "has 3", "holds 10", "--max-waiting-tokens"):
        assert part in caught.value.message
    world.step()
    world.scheduler.check_queue(10)


def test_retry_after_is_the_queue_over_the_rate_of_starts() -> None:
    rate = StartRate()
    assert rate.wait_s(50) == MIN_RETRY_S
    for second in range(200):
        rate.note(4, float(second), is_waiting=True)
    assert rate.wait_s(40) == pytest.approx(10.0, rel=0.1)
    rate.note(0, 500.0, is_waiting=False)
    assert rate.wait_s(40) == pytest.approx(10.0, rel=0.1), "time in which nothing waited says nothing"
    for second in range(501, 700):
        rate.note(0, float(second), is_waiting=True)
    assert rate.wait_s(40) == MAX_RETRY_S


def test_counts_of_tenants_agree_after_random_ends() -> None:
    rng, world = random.Random(1), make_world(load_steps=0)
    for _ in range(60):
        world.add(make_request(rng.randint(1, 9), None, rng.choice(("x", "y", None)), max_tokens=3))
        if rng.random() < 0.4:
            world.scheduler.finish(rng.choice(list(world.scheduler.sequences)), FinishReason.ABORT)
        world.step()  # checks invariants
    world.drain()
    assert all(not share.num_open for share in world.scheduler.shares._shares.values())
