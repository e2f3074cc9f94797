"""Continuous batching with chunked prefill: `schedule(now)` plans a step, `advance` books its start, `commit` its end.

Between the last two the next step may be planned, with tokens not known yet; steps are committed in order.

One token budget serves prefill and decode: a step gives each running sequence its next tokens, one where the prompt is
done, a chunk of the prompt where it is not. Who waits starts in the order of `fairness.in_turn`; with one tenant and
one priority that is first come, first served. When pages run out, idle adapters and cached prefixes go first, then the
youngest running sequence is preempted and later recomputed; the oldest always proceeds, so every request ends.

A sequence whose adapter would be one too many, by number or by ranks, is passed over. Once its patience has ended it is
`aged`: none behind it starts on an adapter that runs, so no slot is held any longer than by those that hold it now. The
base goes on, as it holds no slot, but leaves free the pages that the aged one needs. It cannot starve: a slot comes
free when a sequence ends or is preempted, so a seat does too; from then on it is simply the first in the queue, and
what does not fit stops the queue behind it.

With `load_ahead`, `start_loads(now)` leases pages for adapters of waiting sequences in their order, and `adapter_ready`
or `adapter_failed` ends each load; until then its sequences are passed over. One that is still passed over when its
patience has ended is `starved`: those behind it leave free the pages that it needs.
"""

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from loraplex.core import AdapterDigest, FinishReason, Overloaded, OverloadReason, Request, SequenceId
from loraplex.pool import (
    AdapterResidency,
    AdapterState,
    CacheSpace,
    EvictionReason,
    IdlePages,
    PagePool,
    PoolGeometry,
    PrefixCache,
)
from loraplex.scheduler.config import SchedulerConfig
from loraplex.scheduler.cost import Calibrator
from loraplex.scheduler.fairness import INPUT_WEIGHT, FairShares, age, in_turn
from loraplex.scheduler.invariants import check_sequences
from loraplex.scheduler.limits import StartRate, longest_length
from loraplex.scheduler.loads import LoadAhead
from loraplex.scheduler.plan import AdapterLoad, Committed, ScheduledChunk, StepPlan
from loraplex.scheduler.sequence import UNKNOWN_TOKEN, Sequence, SequenceStatus, WaitReason, finish_reason, new_sequence


@dataclass(slots=True, eq=False)
class _Admission:
    """What one pass over the queue has left, and whom it must spare pages for."""

    now: float
    budget: int
    chunks: list[ScheduledChunk]
    loads: list[AdapterLoad]
    active: dict[AdapterDigest, float]  # adapters of running sequences and their ranks
    max_ranks: float | None
    aged: Sequence | None = None
    starved: Sequence | None = None
    num_started: int = 0


class Scheduler:
    """Queues and budgets of one engine. Knows no clock, no tensors and no threads."""

    def __init__(self, config: SchedulerConfig, geometry: PoolGeometry) -> None:
        self.config = config
        self.geometry = geometry
        self.pool = PagePool(geometry.num_pages)
        idle = IdlePages()
        self.residency = AdapterResidency(self.pool, idle, config.reload)
        self.cache = PrefixCache(self.pool, idle, geometry.page_tokens, config.prefix_page_s)
        self.residency.on_evict = self.cache.adapter_left
        self._load_ahead = LoadAhead(config, geometry, self.residency)
        self.shares = FairShares()
        self.costs = Calibrator()
        self.sequences: dict[SequenceId, Sequence] = {}
        self.waiting: list[Sequence] = []  # oldest first
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of sequences that may use the prefix cache, at their first start
        self.num_cached_tokens = 0  # of those, taken from it
        self.num_warm_starts = 0  # of sequences whose adapter was in the pool all the time they waited
        self.num_cold_starts = 0
        self._start_rate = StartRate()
        self._deadlines: list[tuple[float, SequenceId]] = []
        self._next_id = 0

    # ------------------------------------------------------------------ arrivals and departures
    def check_fits(self, prompt_len: int, max_tokens: int | None, adapter_pages: int) -> int:
        """Longest length such a sequence may reach. Raises ContextTooLong if it could never run."""
        return longest_length(self.geometry, self.config.max_model_len, prompt_len, max_tokens, adapter_pages)

    def check_queue(self, num_tokens: int) -> None:
        """Raise Overloaded if so many more prompt tokens are too many for the queue. An empty queue takes any."""
        limit = self.config.max_waiting_tokens
        waiting = sum(seq.prompt_len for seq in tuple(self.waiting)) if limit is not None else 0
        if limit is not None and waiting and waiting + num_tokens > limit:
            raise Overloaded(
                f"{waiting} prompt tokens wait and the request has {num_tokens}; the queue holds {limit} "
                "(--max-waiting-tokens).",
                self.retry_after_s,
                OverloadReason.QUEUE_TOKENS,
            )

    @property
    def retry_after_s(self) -> float:
        """Seconds until what waits now has started, at the rate of the last starts."""
        return self._start_rate.wait_s(len(self.waiting))

    def add(
        self,
        request: Request,
        adapter_pages: int,
        eos_token_ids: frozenset[int],
        now: float,
        *,
        adapter_rank: float = 0.0,
        may_share: bool = True,
    ) -> tuple[Sequence, ...]:
        """Queue the `n` sequences of a request. Raises ContextTooLong; then nothing is queued.

        `adapter_rank`: ranks of all projections that weigh as much as the adapter. Not `may_share`: it computes its
        prompt itself, and nobody takes a part of it.
        """
        max_len = self.check_fits(len(request.prompt_token_ids), request.params.max_tokens, adapter_pages)
        space = self._space(request) if may_share else None
        added = []
        for _ in range(request.params.n):
            seq = new_sequence(SequenceId(self._next_id), request, max_len, eos_token_ids, now)
            seq.adapter_pages, seq.adapter_rank, seq.space = adapter_pages, adapter_rank, space
            self._enqueue(seq)
            added.append(seq)
        return tuple(added)

    def _space(self, request: Request) -> CacheSpace | None:
        """Where a request's prefix may be shared: with its tenant's requests on the same weights."""
        if not self.config.prefix_caching or request.tenant is None:
            return None
        return CacheSpace(request.tenant, request.adapter.digest if request.adapter else None)

    def _enqueue(self, seq: Sequence) -> None:
        self._next_id += 1
        self.sequences[seq.seq_id] = seq
        self.shares.arrive(seq.tenant)
        if seq.deadline_at_s is not None:
            heapq.heappush(self._deadlines, (seq.deadline_at_s, seq.seq_id))
        insort(self.waiting, seq, key=age)

    def finish(self, seq_id: SequenceId, reason: FinishReason, *, keep_prefix: bool = True) -> None:
        """End a sequence from outside (stop string, cancellation). Unknown or finished ids are ignored.

        Without `keep_prefix` what it computed is not kept for others.
        """
        seq = self.sequences.get(seq_id)
        if seq is not None:
            nodes = () if keep_prefix else tuple(seq.prefix)
            self._end(seq, reason)
            self.cache.discard(nodes)

    def overdue(self, now: float) -> tuple[Sequence, ...]:
        """Sequences whose deadline has passed; each is named once, and goes on until it is ended from outside."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            seq = self.sequences.get(heapq.heappop(self._deadlines)[1])
            if seq is not None:
                found.append(seq)
        return tuple(found)

    def uses_adapter(self, digest: AdapterDigest) -> bool:
        """Whether a queued or running sequence still needs the adapter."""
        return any(seq.adapter == digest for seq in self.sequences.values())

    # ------------------------------------------------------------------ adapters
    def start_loads(self, now: float) -> tuple[AdapterLoad, ...]:
        """Lease pages for adapters of waiting sequences, as their turn comes; the pages that are to be filled."""
        if not self.config.load_ahead:
            return ()
        self._look_at_waiting()
        return self._load_ahead.start(self._in_turn(now), sum(self._can_grow(seq) for seq in self.running), now)

    def adapter_ready(self, digest: AdapterDigest) -> None:
        """The pages of a load are filled: its sequences may start."""
        self.residency.ready(digest)
        self.cache.adapter_came(digest)

    def adapter_failed(self, digest: AdapterDigest, until: float) -> tuple[Sequence, ...]:
        """A load went wrong and is not tried again before `until`; the sequences that wait for it, all to be ended."""
        self.residency.fail(digest, until)
        return tuple(seq for seq in self.waiting if seq.adapter == digest)

    def retire_adapter(self, digest: AdapterDigest) -> bool:
        """Free the pages of an adapter that nobody uses, and of prefixes computed with it. False while it is loaded."""
        state = self.residency.state(digest)
        if state is AdapterState.LOADING:
            return False
        if state is AdapterState.RESIDENT:
            self.residency.evict(digest)
        self.cache.drop(digest)
        return True

    # ------------------------------------------------------------------ one step
    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or None when there is nothing to run."""
        before = self.num_preemptions
        chunks: list[ScheduledChunk] = []
        loads: list[AdapterLoad] = []
        if not self.config.load_ahead:
            self._look_at_waiting()
        budget = self._schedule_running(chunks)
        num_started = 0
        if self.num_preemptions == before:
            active = {seq.adapter: seq.adapter_rank for seq in self.running if seq.adapter is not None}
            admission = _Admission(now, budget, chunks, loads, active, self._max_ranks())
            self._admit(admission)
            num_started = admission.num_started
        self._start_rate.note(num_started, now, is_waiting=bool(self.waiting or num_started))
        return self._plan(chunks, loads, self.num_preemptions - before) if chunks else None

    def _look_at_waiting(self) -> None:
        """Once a step: what each waits for is found out again."""
        for seq in self.waiting:
            seq.wait = WaitReason.BUDGET
            if seq.adapter is not None and not seq.is_cold:
                seq.is_cold = not self.residency.is_resident(seq.adapter)

    def _in_turn(self, now: float) -> Iterator[Sequence]:
        return in_turn(self.waiting, self.shares if self.config.fair_shares else None, now, self.config.aging_s)

    def _max_ranks(self) -> float | None:
        """Sum of ranks that a decoding step of those that run may have to keep to the target."""
        target = self.config.tpot_target_ms
        if target is None or not self.costs.is_ready:
            return None
        return self.costs.model.max_ranks(target, len(self.running), sum(seq.num_tokens for seq in self.running))

    def observe(self, plan: StepPlan, step_ms: float) -> None:
        """Tell how long a step took."""
        self.costs.add(plan.shape, step_ms)

    def advance(self, plan: StepPlan) -> None:
        """Book a step as started: its tokens count as computed, and one more stands, unknown, where a chunk samples.

        The next step may be planned on that before this one's tokens are known.
        """
        self.shares.charge_step(plan, self.sequences, self.costs.model.tokens_per_rank)
        for chunk in plan.chunks:
            seq = self.sequences.get(chunk.seq_id)
            if seq is None or seq.status is not SequenceStatus.RUNNING:
                continue  # cancelled since it was planned
            seq.num_computed = chunk.start + chunk.num_tokens
            if chunk.samples:
                seq.token_ids.append(UNKNOWN_TOKEN)
            if seq.space is not None:
                self._share_prefix(seq)

    def _share_prefix(self, seq: Sequence) -> None:
        """Hand full pages whose tokens are known to the cache."""
        size = self.geometry.page_tokens
        assert seq.space is not None
        assert seq.lease is not None
        while (start := len(seq.prefix) * size) + size <= seq.num_computed:
            tokens = seq.token_ids[start : start + size]
            if UNKNOWN_TOKEN in tokens:
                return
            seq.prefix.append(self.cache.extend(seq.space, seq.prefix, tokens, seq.lease))

    def commit(self, plan: StepPlan, tokens: Mapping[SequenceId, int]) -> tuple[Committed, ...]:
        """Book what a step that was advanced drew: `tokens` has one token for each chunk that samples.

        A sequence that ended before, also by its last token, takes no more: what later steps draw for it is dropped.
        """
        committed = []
        for chunk in plan.chunks:
            seq = self.sequences.get(chunk.seq_id)
            if seq is None or not chunk.samples:
                continue
            place = chunk.start + chunk.num_tokens
            token = tokens[chunk.seq_id]
            assert seq.token_ids[place] == UNKNOWN_TOKEN, f"sequence {seq.seq_id} drew token {place} twice"
            seq.token_ids[place] = token
            reason = finish_reason(seq, token, place + 1)
            committed.append(Committed(seq.seq_id, token, reason))
            if reason is not None:
                del seq.token_ids[place + 1 :]
                self._end(seq, reason)
        return tuple(committed)

    def _schedule_running(self, chunks: list[ScheduledChunk]) -> int:
        """Next tokens of the running sequences, oldest first; the tokens left in the budget."""
        budget = self.config.max_step_tokens
        decodes = [seq for seq in self.running if seq.num_tokens - seq.num_computed == 1]
        prefills = [seq for seq in self.running if seq.num_tokens - seq.num_computed > 1]
        for seq in decodes + prefills:
            if budget == 0:
                break
            if seq.num_tokens >= seq.max_len:
                continue  # its last token is being drawn
            if seq.status is not SequenceStatus.RUNNING or not self._grow(seq):
                continue  # preempted, by an older one or for itself
            chunk = self._chunk(seq, budget)
            chunks.append(chunk)
            budget -= chunk.num_tokens
        return budget

    def _chunk(self, seq: Sequence, budget: int) -> ScheduledChunk:
        num_tokens = min(seq.num_tokens - seq.num_computed, budget)
        samples = seq.num_computed + num_tokens == seq.num_tokens
        return ScheduledChunk(seq.seq_id, seq.num_computed, num_tokens, samples, seq.adapter, seq.pages)

    def _grow(self, seq: Sequence) -> bool:
        """Get pages for all its tokens, preempting the youngest until they are there; False if that is itself.

        Only decodes grow, oldest first, and a prompt's pages are all there from its start. So a victim, which is
        younger, has no chunk in this step yet.
        """
        assert seq.lease is not None
        missing = self.geometry.pages_for_tokens(seq.num_tokens) - seq.num_pages
        while missing > 0:
            if self.residency.make_room(missing, reason=EvictionReason.GROWTH):
                extended = seq.lease.extend(missing)
                assert extended, "make_room promised the pages"
                return True
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _admit(self, admission: _Admission) -> None:
        """Start waiting sequences, as their turn comes, while budgets last."""
        most = self.config.max_num_seqs
        for seq in self._in_turn(admission.now) if len(self.running) < most else ():
            if admission.budget == 0 or len(self.running) >= most:
                return
            reason = self._blocked_by(seq, admission)
            if reason is not None:
                self._pass_over(seq, reason, admission)
            elif admission.aged is not None and seq.adapter is not None:
                seq.wait = WaitReason.SLOT  # it would hold its adapter's slot longer
            elif self._start(seq, admission):
                chunk = self._chunk(seq, admission.budget)
                admission.chunks.append(chunk)
                admission.budget -= chunk.num_tokens
            else:
                seq.wait = WaitReason.PAGES
                return

    def _blocked_by(self, seq: Sequence, admission: _Admission) -> WaitReason | None:
        """Why a sequence is passed over whatever pages there are."""
        active = admission.active
        if seq.adapter is None or seq.adapter in active:
            return None
        if len(active) >= self.config.max_loras:
            return WaitReason.SLOT
        limit = admission.max_ranks
        if limit is not None and active and sum(active.values()) + seq.adapter_rank > limit:
            return WaitReason.RANKS
        if self.config.load_ahead and not self.residency.is_resident(seq.adapter):
            return WaitReason.LOAD
        return None

    def _pass_over(self, seq: Sequence, reason: WaitReason, admission: _Admission) -> None:
        seq.wait = reason
        if self._is_patient(seq, admission.now):
            return
        if reason is WaitReason.LOAD:
            admission.starved = admission.starved or seq
        else:
            admission.aged = admission.aged or seq

    def _spare_pages(self, admission: _Admission) -> int:
        """Pages that a start must leave free: one for each running sequence that may grow, and what those need who are
        passed over and out of patience.

        Without the first, what starts on the last page is preempted by the next step's growth, and recomputed.
        """
        spare = sum(self._can_grow(seq) for seq in self.running)
        if admission.aged is not None:
            spare += self.geometry.pages_for_tokens(admission.aged.num_tokens) + admission.aged.adapter_pages
        if admission.starved is not None and admission.starved is not admission.aged:
            spare += self._load_ahead.missing_pages(admission.starved)
        return spare

    def _can_grow(self, seq: Sequence) -> bool:
        return self.geometry.pages_for_tokens(seq.max_len - 1) > seq.num_pages  # its last token is never computed

    def _is_patient(self, seq: Sequence, now: float) -> bool:
        if seq.blocked_since_s is None:
            seq.blocked_since_s = now
        return now - seq.blocked_since_s < self.config.adapter_patience_s

    def _start(self, seq: Sequence, admission: _Admission) -> bool:
        """Lease pages for the adapter and the tokens so far; False, and nothing changed, when they do not fit.

        They fit if the pages to spare could be made free beside them. Of what is cached, all but the last token is
        taken: one must be computed to draw the next.
        """
        nodes = self.cache.match(seq.space, seq.token_ids, seq.num_tokens - 1) if seq.space is not None else ()
        kv_pages = self.geometry.pages_for_tokens(seq.num_tokens) - len(nodes)
        is_cold = seq.adapter is not None and not self.residency.is_resident(seq.adapter)
        needed = kv_pages + (seq.adapter_pages if is_cold else 0)
        taken = self.cache.num_unused(nodes)
        if not self.residency.can_make_room(needed + taken + self._spare_pages(admission), keep=seq.adapter):
            return False
        self.cache.acquire(nodes)
        self.residency.make_room(needed, keep=seq.adapter)
        if seq.adapter is not None:
            self._pin(seq, seq.adapter, admission)
        seq.lease = self.pool.allocate(kv_pages, seq.namespace)
        assert seq.lease is not None, "make_room promised the pages"
        seq.prefix = list(nodes)
        seq.num_computed = len(nodes) * self.geometry.page_tokens
        self.shares.start(seq.tenant)
        self._count_start(seq, admission)
        seq.status = SequenceStatus.RUNNING
        seq.blocked_since_s = None
        self.waiting.remove(seq)
        insort(self.running, seq, key=age)
        return True

    def _pin(self, seq: Sequence, digest: AdapterDigest, admission: _Admission) -> None:
        acquired = self.residency.acquire(digest, seq.adapter_pages, admission.now)
        assert acquired is not None, "make_room promised the pages"
        if acquired.is_cold:
            admission.loads.append(AdapterLoad(acquired.digest, acquired.pages))
            self.cache.adapter_came(digest)
        admission.active[digest] = seq.adapter_rank

    def _count_start(self, seq: Sequence, admission: _Admission) -> None:
        """Book a first start: the tenant pays for the tokens that are computed. A recomputation is free."""
        if seq.num_cached_tokens is not None:
            return
        seq.num_cached_tokens = seq.num_computed
        admission.num_started += 1
        if seq.adapter is not None:
            self.num_cold_starts += seq.is_cold
            self.num_warm_starts += not seq.is_cold
        self.shares.charge(seq.tenant, INPUT_WEIGHT * (seq.prompt_len - seq.num_computed))
        if seq.space is not None:
            self.num_prompt_tokens += seq.prompt_len
            self.num_cached_tokens += seq.num_cached_tokens

    def _plan(self, chunks: list[ScheduledChunk], loads: list[AdapterLoad], num_preempted: int) -> StepPlan:
        order: dict[AdapterDigest | None, int] = {None: -1}
        for chunk in chunks:
            order.setdefault(chunk.adapter, len(order))
        chunks.sort(key=lambda chunk: order[chunk.adapter])
        adapters = tuple((digest, self.residency.pages(digest)) for digest in order if digest is not None)
        ranks = {chunk.adapter: self.sequences[chunk.seq_id].adapter_rank for chunk in chunks if chunk.adapter}
        return StepPlan(tuple(chunks), adapters, tuple(loads), num_preempted, sum(ranks.values()))

    # ------------------------------------------------------------------ life cycle
    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue without pages; its tokens are kept and recomputed later."""
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_computed = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.running.remove(seq)
        self.shares.requeue(seq.tenant)
        insort(self.waiting, seq, key=age)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        is_waiting = seq.status is SequenceStatus.WAITING
        if is_waiting:
            self.waiting.remove(seq)
        else:
            self._release(seq)
            self.running.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        del self.sequences[seq.seq_id]
        self.shares.leave(seq.tenant, is_waiting=is_waiting)

    def _release(self, seq: Sequence) -> None:
        assert seq.lease is not None
        seq.lease.release()
        seq.lease = None
        self.cache.release(seq.prefix)
        seq.prefix = []
        if seq.adapter is not None:
            self.residency.release(seq.adapter)

    def check_invariants(self) -> None:
        """Raises AssertionError unless queues, leases and pins agree."""
        self.residency.check_invariants()
        self.cache.check_invariants()
        self.shares.check_invariants(self.sequences.values())
        assert len(self.running) <= self.config.max_num_seqs
        check_sequences(self.sequences, self.waiting, self.running)
        pins = Counter(seq.adapter for seq in self.running if seq.adapter is not None)
        assert len(pins) <= self.config.max_loras
        for digest in self.residency.resident:
            assert self.residency.num_pins(digest) == pins[digest]
        own = sum(seq.lease.num_pages for seq in self.running if seq.lease)
        held = own + self.residency.num_pages + self.cache.num_pages
        assert held + self.pool.num_free == self.pool.num_pages
