"""Factories, a sampler whose tokens depend on the sequence alone, and a driver that plays the engine's device."""

import zlib
from collections.abc import Iterable
from typing import Any

from loraplex.core import (
    AdapterDigest,
    AdapterRef,
    FinishReason,
    PageId,
    Request,
    RequestId,
    SamplingParams,
    SequenceId,
)
from loraplex.pool import KvShape, PoolGeometry
from loraplex.scheduler import Committed, ScheduledChunk, Scheduler, SchedulerConfig, Sequence, SequenceStatus, StepPlan

VOCAB_SIZE = 13
EOS = frozenset({0})
A, B, C, D = (AdapterDigest(name * 64) for name in "abcd")


def make_scheduler(num_pages: int = 64, page_tokens: int = 4, **config: Any) -> Scheduler:
    settings = {"max_model_len": 32, "max_step_tokens": 16, "max_num_seqs": 8} | config
    return Scheduler(SchedulerConfig(**settings), PoolGeometry(KvShape(1, 1, 8), num_pages, page_tokens, 8, 4))


def make_request(
    prompt: int | Iterable[int] = 4,
    adapter: AdapterDigest | None = None,
    name: str = "r",
    priority: int = 0,
    **params: Any,
) -> Request:
    tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
    ref = AdapterRef(adapter[:1], 1, adapter) if adapter else None
    return Request(RequestId(name), tokens, SamplingParams(**params), ref, priority=priority)


def next_token(token_ids: Iterable[int], adapter: AdapterDigest | None) -> int:
    """The fake sampler: a pure function of the sequence, so batching and preemption may not change it."""
    return zlib.crc32(repr((tuple(token_ids), adapter)).encode()) % VOCAB_SIZE


def run_alone(request: Request, max_len: int) -> tuple[list[int], FinishReason]:
    """What a sequence of the request must end as, whatever else runs."""
    params, adapter = request.params, request.adapter.digest if request.adapter else None
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else EOS)
    tokens = list(request.prompt_token_ids)
    while True:
        tokens.append(next_token(tokens, adapter))
        num_output = len(tokens) - len(request.prompt_token_ids)
        if num_output >= params.min_tokens and tokens[-1] in stops:
            return tokens, FinishReason.STOP
        if len(tokens) >= max_len:
            return tokens, FinishReason.LENGTH


class Driver:
    """Runs steps, checks every plan, and keeps what the device's pages would hold.

    A KV cell holds (sequence, position, token); an adapter page holds (digest, index). Both are checked when read, so
    a page that was handed on too early, or an adapter used before its load, shows.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.has_failed = False
        self.adapter_pages: dict[AdapterDigest, int] = {}
        self.pages: dict[PageId, dict[int, tuple[Any, ...]]] = {}
        self.finished: dict[SequenceId, Committed] = {}
        self.overtaken_since: dict[SequenceId, float] = {}
        self.began_s: dict[AdapterDigest, float] = {}  # when adapters that run, or did, began to
        self.plans: list[StepPlan] = []

    def add(self, request: Request, adapter_pages: int = 1) -> tuple[Sequence, ...]:
        digest = request.adapter.digest if request.adapter else None
        if digest is not None:
            self.adapter_pages[digest] = adapter_pages
        seqs = self.scheduler.add(request, adapter_pages if digest else 0, EOS, self.now)
        self.scheduler.check_invariants()
        return seqs

    def add_one(self, *args: Any, adapter_pages: int = 1, **kwargs: Any) -> Sequence:
        return self.add(make_request(*args, **kwargs), adapter_pages)[0]

    def plan(self) -> StepPlan | None:
        """Plan a step and check it."""
        scheduler = self.scheduler
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        evictions, resident = scheduler.residency.num_evictions, set(scheduler.residency.resident)
        self.has_failed = True
        plan = scheduler.schedule(self.now)
        scheduler.check_invariants()
        assert (plan is None) == (not scheduler.sequences), "work waits, but no step was planned"
        if plan is not None:
            self.plans.append(plan)
            self._check_budgets(plan)
            self._check_segments(plan)
            self._check_choices(plan, running, waiting)
            self._load(plan, resident if scheduler.residency.num_evictions == evictions else set())
            self._run(plan)
        self.has_failed = False
        return plan

    def commit(self, plan: StepPlan) -> tuple[Committed, ...]:
        """Sample and book a planned step."""
        tokens = {}
        for chunk in plan.chunks:
            seq = self.scheduler.sequences.get(chunk.seq_id)
            if chunk.samples and seq is not None:
                tokens[chunk.seq_id] = next_token(seq.token_ids, chunk.adapter)
        self.scheduler.advance(plan)
        committed = self.scheduler.commit(plan, tokens)
        self.scheduler.check_invariants()
        assert [(entry.seq_id, entry.token_id) for entry in committed] == list(tokens.items())
        for entry in committed:
            if entry.finish_reason is not None:
                assert entry.seq_id not in self.finished, "a sequence finished twice"
                self.finished[entry.seq_id] = entry
        return committed

    def step(self, seconds: float = 1.0) -> StepPlan | None:
        plan = self.plan()
        if plan is not None:
            self.commit(plan)
        self.now += seconds
        return plan

    def drain(self) -> int:
        """Step until nothing is left; the number of steps, which is bounded."""
        seqs = self.scheduler.sequences.values()
        limit = sum(seq.max_len + 1 for seq in seqs) * (len(seqs) + 1)
        for num_steps in range(limit + 1):
            if self.step() is None:
                return num_steps
        raise AssertionError(f"not done after {limit} steps")

    # ------------------------------------------------------------------ checks of a plan
    def _check_budgets(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        assert 1 <= plan.num_tokens <= config.max_step_tokens
        assert len(plan.adapters) <= config.max_distinct
        assert len(plan.chunks) <= len(self.scheduler.running) <= config.max_num_seqs
        assert len({chunk.seq_id for chunk in plan.chunks}) == len(plan.chunks)
        sequences = self.scheduler.sequences
        assert all(sequences[chunk.seq_id].status is SequenceStatus.RUNNING for chunk in plan.chunks)

    def _check_segments(self, plan: StepPlan) -> None:
        """Rows are contiguous by adapter, base first, in the order of `plan.adapters`."""
        segments: list[AdapterDigest | None] = []
        for chunk in plan.chunks:
            if not segments or segments[-1] != chunk.adapter:
                segments.append(chunk.adapter)
        order = [digest for digest, _ in plan.adapters]
        assert segments in (order, [None, *order])

    def _check_choices(self, plan: StepPlan, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Who was preempted, who was let in, and who was passed over."""
        now_running = self.scheduler.running
        preempted = [seq for seq in running if seq.status is SequenceStatus.WAITING]
        admitted = [seq for seq in waiting if seq.status is SequenceStatus.RUNNING]
        assert len(preempted) == plan.num_preempted
        for seq in preempted:
            assert all(self._rank(other, running) < self._rank(seq, running) for other in now_running), (
                "another than the youngest of the lowest priority was preempted"
            )
        assert not (preempted and admitted)
        ran = {seq.adapter for seq in now_running if seq not in admitted}
        self.began_s.update({seq.adapter: self.now for seq in admitted if seq.adapter and seq.adapter not in ran})
        scheduled = {chunk.seq_id for chunk in plan.chunks}
        assert all(seq.seq_id in scheduled for seq in admitted)
        decoding = [seq for seq in now_running if seq.num_tokens - seq.num_computed == 1]
        assert all(seq.seq_id in scheduled for seq in decoding), "a decoding sequence missed a step"
        self._check_overtaking(admitted, waiting)

    def _rank(self, seq: Sequence, among: list[Sequence]) -> tuple[int, float, int]:
        """Priority, then age; who is old enough counts as of the highest priority."""
        is_old = self.now - seq.arrival_s >= self.scheduler.config.aging_s
        return (-max(other.priority for other in among) if is_old else -seq.priority, *_age(seq))

    def _check_overtaking(self, admitted: list[Sequence], waiting: list[Sequence]) -> None:
        """Only one that waits for an adapter's turn is passed over.

        After its patience it is by the base alone, and by those on adapters that began to run less than a patience ago.
        """
        config = self.scheduler.config
        active = {seq.adapter for seq in self.scheduler.running} - {None}
        for seq in admitted:
            assert seq.blocked_since_s is None
            self.overtaken_since.pop(seq.seq_id, None)
        rank = {seq.seq_id: self._rank(seq, waiting) for seq in waiting}
        for seq in self.scheduler.waiting if admitted else ():
            behind = [other for other in admitted if rank[seq.seq_id] < rank[other.seq_id]]
            if not behind:
                continue
            assert seq.adapter is not None
            assert len(active) == config.max_distinct
            if seq.adapter in active:  # an aged one in front keeps it from holding its slot longer
                in_front = [other for other in self.scheduler.waiting if rank[other.seq_id] < rank[seq.seq_id]]
                assert any(other.adapter not in active for other in in_front)
                is_aged = True
            else:
                first = self.overtaken_since.setdefault(seq.seq_id, self.now)
                is_aged = self.now - first >= config.adapter_patience_s
            assert not is_aged or all(other.adapter is None or self._is_in_turn(other.adapter) for other in behind)

    def _is_in_turn(self, adapter: AdapterDigest) -> bool:
        return self.now - self.began_s[adapter] < self.scheduler.config.adapter_patience_s

    # ------------------------------------------------------------------ the device
    def _load(self, plan: StepPlan, resident: set[AdapterDigest]) -> None:
        assert len({load.digest for load in plan.loads}) == len(plan.loads)
        tables = dict(plan.adapters)
        for load in plan.loads:
            assert load.digest not in resident, "a resident adapter was loaded again"
            assert tables[load.digest] == load.pages
            for idx, page in enumerate(load.pages):
                self.pages[page] = {-1: (load.digest, idx)}
        for digest, pages in plan.adapters:
            assert len(pages) == self.adapter_pages[digest]
            for idx, page in enumerate(pages):
                assert self.pages.get(page) == {-1: (digest, idx)}, "an adapter is used whose pages hold other data"

    def _run(self, plan: StepPlan) -> None:
        used = [page for _, pages in plan.adapters for page in pages]
        for chunk in plan.chunks:
            used += chunk.pages
        assert len(set(used)) == len(used), "a page has two users in one step"
        for chunk in plan.chunks:
            self._run_chunk(chunk)

    def _run_chunk(self, chunk: ScheduledChunk) -> None:
        """Write the chunk's KV and read everything before its end."""
        seq, page_tokens = self.scheduler.sequences[chunk.seq_id], self.scheduler.geometry.page_tokens
        end = chunk.start + chunk.num_tokens
        assert chunk.num_tokens >= 1
        assert chunk.start == seq.num_computed
        assert chunk.adapter == seq.adapter
        assert chunk.samples == (end == seq.num_tokens)
        assert len(chunk.pages) * page_tokens >= end
        for position in range(end):
            page, cell = chunk.pages[position // page_tokens], (seq.seq_id, position, seq.token_ids[position])
            if position >= chunk.start:
                self.pages.setdefault(page, {}).pop(-1, None)
                self.pages[page][position % page_tokens] = cell
            assert self.pages[page][position % page_tokens] == cell, "KV of another sequence is read"


def _age(seq: Sequence) -> tuple[float, int]:
    return (seq.arrival_s, seq.seq_id)
