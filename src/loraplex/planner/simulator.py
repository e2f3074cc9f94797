"""The engine's scheduler and pool on a virtual clock: steps take what the cost model says, loads what the link takes.

Nothing here decides: what starts, waits, is loaded, evicted or preempted is decided by `scheduler` and `pool`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from loraplex.core import AdapterDigest, AdapterRef, FinishReason, Request, RequestId, SamplingParams, SequenceId
from loraplex.planner.workload import SimRequest, Workload
from loraplex.pool import KvShape, PoolGeometry, ReloadCost
from loraplex.scheduler import H200_8B, CostModel, Scheduler, SchedulerConfig, Sequence, StepPlan

_TOKEN = 1  # what every step draws: lengths are given, so tokens say nothing
_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True)
class SimDevice:
    """A device: Llama-3-8B in bfloat16 on one H200 unless said otherwise. `rank_bytes`: a rank of all projections."""

    costs: CostModel = H200_8B
    num_pages: int = 40_000
    page_bytes: int = 2**21
    page_tokens: int = 16
    rank_bytes: int = 5_242_880
    load_bytes_per_s: float = 5.0e10
    load_fixed_s: float = 2.0e-4
    failure_share: float = 0.0  # of loads

    def adapter_pages(self, rank: int) -> int:
        """Pages of an adapter."""
        return -(-rank * self.rank_bytes // self.page_bytes)

    def load_s(self, num_pages: int) -> float:
        """Time on the link to the device."""
        return self.load_fixed_s + num_pages * self.page_bytes / self.load_bytes_per_s


@dataclass(frozen=True, slots=True)
class Policy:
    """What is compared. `by_value`: idle pages leave by value; else the least recently used first.

    Not `keeps_idle`: an adapter leaves the pool with its last sequence.
    """

    name: str
    load_ahead: bool = True
    fair_shares: bool = True
    by_value: bool = True
    keeps_idle: bool = True
    prefix_caching: bool = True
    tpot_target_ms: float | None = None


@dataclass(slots=True, eq=False)
class Outcome:
    """What became of one request. Times are of the virtual clock; None: it never came to that."""

    request: SimRequest
    started_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    is_cold: bool = False
    has_failed: bool = False
    longest_gap_s: float = 0.0  # between two of its tokens
    last_token_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token; infinite if there was none."""
        return float("inf") if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first."""
        if self.ended_s is None or self.first_token_s is None or self.num_tokens < 2:
            return None
        return (self.ended_s - self.first_token_s) / (self.num_tokens - 1)


@dataclass(slots=True, eq=False)
class Simulation:
    """One run, and what it left behind."""

    workload: Workload
    policy: Policy
    device: SimDevice
    scheduler: Scheduler
    draw: random.Random
    outcomes: list[Outcome] = field(default_factory=list)
    now: float = 0.0
    num_steps: int = 0
    num_loads: int = 0
    num_failures: int = 0
    stall_s: float = 0.0  # steps that waited for loads
    max_distinct: int = 0
    max_waiting: int = 0
    served: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # (time, cost in ms) of each tenant
    _loads: list[tuple[float, AdapterDigest]] = field(default_factory=list)  # in the order in which they end
    _retry_at_s: list[float] = field(default_factory=list)  # in order
    _link_free_s: float = 0.0
    _next: int = 0
    _open: dict[SequenceId, Outcome] = field(default_factory=dict)

    # ------------------------------------------------------------------ arrivals and loads
    def _arrive(self) -> None:
        requests = self.workload.requests
        while self._next < len(requests) and requests[self._next].arrival_s <= self.now:
            self._add(requests[self._next], self._next)
            self._next += 1
        self.max_waiting = max(self.max_waiting, len(self.scheduler.waiting))

    def _add(self, request: SimRequest, number: int) -> None:
        adapter = None if request.adapter is None else self.workload.adapters[request.adapter]
        ref = None if adapter is None else AdapterRef(f"a{request.adapter}", 1, adapter.digest)
        params = SamplingParams(max_tokens=request.output_len, ignore_eos=True)
        asked = Request(
            RequestId(str(number)),
            request.prompt(number),
            params,
            ref,
            request.tenant,
            request.priority,
            request.deadline_s,
        )
        (seq,) = self.scheduler.add(
            asked,
            0 if adapter is None else self.device.adapter_pages(adapter.rank),
            frozenset(),
            request.arrival_s,
            adapter_rank=0.0 if adapter is None else float(adapter.rank),
        )
        outcome = Outcome(request)
        self.outcomes.append(outcome)
        self._open[seq.seq_id] = outcome

    def _move_loads(self) -> None:
        while self._loads and self._loads[0][0] <= self.now:
            self._end_load(self._loads.pop(0)[1])
        for load in self.scheduler.start_loads(self.now):
            self._link_free_s = max(self._link_free_s, self.now) + self.device.load_s(len(load.pages))
            self._loads.append((self._link_free_s, load.digest))
            self.num_loads += 1

    def _end_load(self, digest: AdapterDigest) -> None:
        if self.draw.random() >= self.device.failure_share:
            self.scheduler.adapter_ready(digest)
            return
        self.num_failures += 1
        self._retry_at_s.append(self.now + _BACKOFF_S)
        for seq in self.scheduler.adapter_failed(digest, self.now + _BACKOFF_S):
            self._fail(seq)

    def _fail(self, seq: Sequence) -> None:
        self.scheduler.finish(seq.seq_id, FinishReason.ABORT)
        self._open.pop(seq.seq_id).has_failed = True

    # ------------------------------------------------------------------ steps
    def step(self) -> bool:
        """One step, or a leap to the next event. False when everything has ended."""
        self._arrive()
        self._move_loads()
        for seq in self.scheduler.overdue(self.now):
            self._fail(seq)
        plan = self.scheduler.schedule(self.now)
        if plan is None:
            return self._leap()
        self._run(plan)
        if not self.policy.keeps_idle:
            residency = self.scheduler.residency
            for digest in residency.resident:
                if not residency.num_users(digest):
                    residency.evict(digest)
        return True

    def _leap(self) -> bool:
        """To the next arrival, the end of a load, or the time in which one that failed is tried again."""
        events = [self._loads[0][0]] if self._loads else []
        if self.scheduler.waiting and self._retry_at_s:
            events.append(self._retry_at_s[0])
        if self._next < len(self.workload.requests):
            events.append(self.workload.requests[self._next].arrival_s)
        if not events:
            assert not self.scheduler.sequences, "sequences wait and nothing will ever happen"
            return False
        self.now = max(self.now, min(events))
        self._retry_at_s = [at_s for at_s in self._retry_at_s if at_s > self.now]
        return True

    def _run(self, plan: StepPlan) -> None:
        stall_s = sum(self.device.load_s(len(load.pages)) for load in plan.loads)
        self.num_loads += len(plan.loads)
        self.stall_s += stall_s
        step_ms = self.device.costs.step_ms(plan.shape)
        began_s = self.now
        self.now += stall_s + step_ms / 1e3
        self.num_steps += 1
        self.max_distinct = max(self.max_distinct, len(plan.adapters))
        self._note_service(plan, began_s)
        sequences = dict(self.scheduler.sequences)
        self.scheduler.advance(plan)
        self.scheduler.observe(plan, step_ms)
        drawn = {chunk.seq_id: _TOKEN for chunk in plan.chunks if chunk.samples}
        for entry in self.scheduler.commit(plan, drawn):
            self._take(sequences[entry.seq_id], is_last=entry.finish_reason is not None)

    def _note_service(self, plan: StepPlan, began_s: float) -> None:
        """Who used how much of the step: its tokens, and its part of its adapter's ranks, as BENCH 3.3 prices them."""
        costs, users = self.device.costs, dict[AdapterDigest | None, int]()
        for chunk in plan.chunks:
            users[chunk.adapter] = users.get(chunk.adapter, 0) + 1
        for chunk in plan.chunks:
            seq, outcome = self.scheduler.sequences[chunk.seq_id], self._open[chunk.seq_id]
            if outcome.started_s is None:
                outcome.started_s, outcome.is_cold = began_s, seq.is_cold
                outcome.num_cached_tokens = seq.num_cached_tokens or 0
            cost = costs.token_ms * chunk.num_tokens + costs.rank_ms * seq.adapter_rank / users[chunk.adapter]
            self.served.setdefault(outcome.request.tenant, []).append((self.now, cost))

    def _take(self, seq: Sequence, *, is_last: bool) -> None:
        outcome = self._open[seq.seq_id]
        if outcome.first_token_s is None:
            outcome.first_token_s = self.now
        else:
            outcome.longest_gap_s = max(outcome.longest_gap_s, self.now - outcome.last_token_s)
        outcome.last_token_s = self.now
        outcome.num_tokens += 1
        if is_last:
            outcome.ended_s = self.now
            del self._open[seq.seq_id]


def make_simulation(
    workload: Workload,
    policy: Policy,
    device: SimDevice = SimDevice(),
    seed: int = 0,
    **settings: int | float | None,
) -> Simulation:
    """A run that has not begun. `settings` are fields of `SchedulerConfig`."""
    by_value = policy.by_value
    options: dict[str, object] = {
        "max_model_len": 4096,
        "max_step_tokens": 2048,
        "max_num_seqs": 64,
        "load_ahead": policy.load_ahead,
        "max_load_pages": max(1, 2**29 // device.page_bytes),
        "fair_shares": policy.fair_shares,
        "prefix_caching": policy.prefix_caching,
        "tpot_target_ms": policy.tpot_target_ms,
        "reload": ReloadCost(device.load_fixed_s, device.page_bytes / device.load_bytes_per_s)
        if by_value
        else ReloadCost(),
        "prefix_page_s": device.page_tokens * device.costs.token_ms / 1e3 if by_value else 0.0,
    }
    config = SchedulerConfig(**(options | settings))  # type: ignore[arg-type]
    geometry = PoolGeometry(KvShape(32, 8, 128), device.num_pages, device.page_tokens, 16, 2)
    return Simulation(workload, policy, device, Scheduler(config, geometry), random.Random(seed))


def simulate(
    workload: Workload,
    policy: Policy,
    device: SimDevice = SimDevice(),
    seed: int = 0,
    after_step: Callable[[Simulation], None] = lambda simulation: None,
    **settings: int | float | None,
) -> Simulation:
    """Run a workload to its end. `after_step` is called after every step."""
    simulation = make_simulation(workload, policy, device, seed, **settings)
    while simulation.step():
        after_step(simulation)
    return simulation
