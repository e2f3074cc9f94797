"""Continuous batching with chunked prefill: `schedule(now)` plans a step, `advance` books its start, `commit` its end.

Between the last two the next step may be planned, with tokens not known yet; steps are committed in order.

One token budget serves prefill and decode: a step gives each running sequence its next tokens, one where the prompt is
done, a chunk of the prompt where it is not. Who waits starts in the order of `fairness.in_turn`; with one tenant and
one priority that is first come, first served. When pages run out, idle adapters and cached prefixes go first, then the
last running sequence in the order of `fairness.by_priority` is preempted and later recomputed: the youngest of the
lowest priority. The first always proceeds, so every request ends.

A sequence whose adapter would be one too many, by number or by ranks, is passed over. Once its patience has ended it is
`aged`: those behind it start only on an adapter that began to run less than a patience ago. So those that waited for an
adapter start together when it comes to run, and after that no slot is held any longer than by those that hold it. The
base goes on, as it holds no slot, but leaves free the pages that the aged one needs. It cannot starve: a slot comes
free when a sequence ends or is preempted, so a seat does too; from then on it is simply the first in the queue, and
what does not fit stops the queue behind it.

With `load_ahead`, `start_loads(now)` leases pages for adapters of waiting sequences in their order, and `adapter_ready`
or `adapter_failed` ends each load; until then its sequences are passed over. One that is still passed over when its
patience has ended is `starved`: those behind it leave free the pages that it needs.
"""

import heapq
from collections import Counter
from collections.abc import Mapping
from itertools import chain

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
from loraplex.scheduler.admission import Admission, Parts, Pass, next_chunk
from loraplex.scheduler.config import SchedulerConfig
from loraplex.scheduler.cost import Calibrator
from loraplex.scheduler.fairness import by_priority
from loraplex.scheduler.invariants import check_pages, check_sequences
from loraplex.scheduler.limits import StartRate, check_pin, longest_length
from loraplex.scheduler.loads import LoadAhead
from loraplex.scheduler.plan import AdapterLoad, Committed, ScheduledChunk, StepPlan
from loraplex.scheduler.preloads import Preloads
from loraplex.scheduler.queue import WaitingQueue
from loraplex.scheduler.sequence import UNKNOWN_TOKEN, Sequence, SequenceStatus, finish_reason, new_sequence

_SPARE_DEADLINES = 64


class Scheduler:
    """Queues and budgets of one engine. Knows no clock, no tensors and no threads."""

    def __init__(self, config: SchedulerConfig, geometry: PoolGeometry) -> None:
        self.config = config
        self.geometry = geometry
        self.pool = PagePool(geometry.num_pages)
        idle = IdlePages()
        self.residency = AdapterResidency(self.pool, idle, config.reload)
        self.cache = PrefixCache(self.pool, idle, geometry.page_tokens, config.prefix_page_s)
        self.residency.on_evict = self._adapter_left
        self.cache.on_evict = lambda: self.residency.reloads.also_evicted(1)
        self.waiting = WaitingQueue(self.residency.is_placed)  # oldest first
        self.preloads = Preloads(config, self.pool, self.residency)
        self._parts = Parts(config, geometry, self.pool, self.residency, self.cache, self.waiting, self.preloads)
        self.shares = self._parts.shares
        self.running = self._parts.running  # oldest first
        self._load_ahead = LoadAhead(config, geometry, self.residency, self.preloads)
        self._admission = Admission(self._parts, self._load_ahead)
        self.starts = self._admission.counts
        self.costs = Calibrator()
        self.sequences: dict[SequenceId, Sequence] = {}
        self.num_preemptions = 0
        self._num_users: Counter[AdapterDigest] = Counter()  # sequences of each adapter
        self._start_rate = StartRate()
        self._deadlines: list[tuple[float, SequenceId]] = []
        self._next_id = 0

    # ------------------------------------------------------------------ arrivals and departures
    def check_fits(
        self, prompt_len: int, max_tokens: int | None, adapter_pages: int, digest: AdapterDigest | None = None
    ) -> int:
        """Longest length such a sequence may reach. Raises ContextTooLong if it could never run.

        `adapter_pages` are those of the adapter `digest`, which may be pinned.
        """
        pinned = self.residency.num_pinned_pages
        if digest is not None:
            pinned -= self.residency.pinned_pages(digest)
        return longest_length(self.geometry, self.config.max_model_len, prompt_len, max_tokens, adapter_pages, pinned)

    def check_queue(self, num_tokens: int, call_id: str | None = None) -> None:
        """Raise Overloaded if so many more prompt tokens are too many for the queue.

        A queue in which nothing waits but what is of the same call takes any.
        """
        limit = self.config.max_waiting_tokens
        waiting = self.waiting.num_prompt_tokens
        is_empty = waiting == self.waiting.held_by_call(call_id)[1]
        if limit is not None and not is_empty and waiting + num_tokens > limit:
            raise Overloaded(
                f"{waiting} prompt tokens wait and the request has {num_tokens}; the queue holds {limit} "
                "(--max-waiting-tokens).",
                self.retry_after_s,
                OverloadReason.QUEUE_TOKENS,
            )

    @property
    def retry_after_s(self) -> float:
        """Seconds until what waits now has started, at the rate of the last starts."""
        return self.retry_after_with(0)

    def retry_after_with(self, num_more: int) -> float:
        """As `retry_after_s`, with so many sequences more that are about to be queued. From any thread."""
        return self._start_rate.wait_s(len(self.waiting) + num_more)

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
        digest = request.adapter.digest if request.adapter is not None else None
        max_len = self.check_fits(len(request.prompt_token_ids), request.params.max_tokens, adapter_pages, digest)
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
        if seq.adapter is not None:
            self._num_users[seq.adapter] += 1
        self.shares.arrive(seq.tenant)
        if seq.deadline_at_s is not None:
            heapq.heappush(self._deadlines, (seq.deadline_at_s, seq.seq_id))
            if len(self._deadlines) > 2 * len(self.sequences) + _SPARE_DEADLINES:  # most are of sequences that ended
                self._deadlines = [one for one in self._deadlines if one[1] in self.sequences]
                heapq.heapify(self._deadlines)
        self._queue(seq)

    def _queue(self, seq: Sequence) -> None:
        self.waiting.add(seq)
        self._admission.arrived(seq)

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
        return digest in self._num_users

    # ------------------------------------------------------------------ adapters
    def start_loads(self, now: float) -> tuple[AdapterLoad, ...]:
        """Lease pages for adapters of waiting sequences, as their turn comes; the pages that are to be filled."""
        if not self.config.load_ahead:
            return ()
        self.waiting.look(self.residency.is_resident)
        parts = self._parts
        pinned = self._placed(self.preloads.start_pinned(parts.num_growing, now))  # before it is seen what is left
        ahead = parts.in_turn(now), self.waiting.unplaced, parts.spare_pages
        others = [*self._load_ahead.start(*ahead, len(self.running), now)]
        if not self.waiting:
            others += self.preloads.start_next(parts.spare_pages, now)
        return (*pinned, *self._placed(others))

    def _placed(self, loads: list[AdapterLoad]) -> list[AdapterLoad]:
        """Loads whose pages were leased a moment ago, once that is booked."""
        for load in loads:
            self._parts.adapter_placed(load.digest)
        return loads

    def adapter_ready(self, digest: AdapterDigest) -> None:
        """The pages of a load are filled: its sequences may start."""
        self.residency.ready(digest)
        self.cache.adapter_came(digest)
        self.preloads.ended(digest)
        self._admission.look_again()

    def adapter_failed(self, digest: AdapterDigest, until: float) -> tuple[Sequence, ...]:
        """A load went wrong and is not tried again before `until`; the sequences that wait for it, all to be ended."""
        self.residency.fail(digest, until)
        self.waiting.adapter_left(digest)
        self.preloads.ended(digest)
        return self.waiting.of_adapter(digest)

    def pin_adapter(self, digest: AdapterDigest, num_pages: int) -> None:
        """Bring an adapter into the pool and keep it there. Pinning again changes nothing.

        Raises InvalidRequest beyond `AdapterResidency.max_pinned_pages`, and Overloaded while a sequence is here that
        could not end beside what would be pinned.
        """
        if not self.residency.is_pinned(digest):
            sequences = self.sequences.values()
            check_pin(self.geometry, self.residency, sequences, digest, num_pages, self.retry_after_s)
        self.residency.pin(digest, num_pages)
        self.preloads.pinned(digest, num_pages)

    def unpin_adapter(self, digest: AdapterDigest) -> None:
        """Let a pinned adapter be evicted like others. One that is not pinned is ignored."""
        if self.residency.is_pinned(digest):
            self.residency.unpin(digest)
            self.preloads.drop(digest)
            self._admission.look_again()

    def preload_adapter(self, digest: AdapterDigest, num_pages: int, *, only_free: bool = False) -> None:
        """Load an adapter while nothing waits, if there is room; `only_free`: in pages that nothing is cached in."""
        self.preloads.want(digest, num_pages, only_free=only_free)

    def _adapter_left(self, digest: AdapterDigest) -> None:
        self.cache.adapter_left(digest)
        self.waiting.adapter_left(digest)

    def retire_adapter(self, digest: AdapterDigest, reason: EvictionReason = EvictionReason.RETIRED) -> bool:
        """Free the pages of an adapter that nobody uses, and of prefixes computed with it; it is pinned no more.

        False while it is loaded.
        """
        self.unpin_adapter(digest)
        self.preloads.drop(digest)
        state = self.residency.state(digest)
        if state is AdapterState.LOADING:
            return False
        if state is AdapterState.RESIDENT:
            self.residency.evict(digest, reason)
        self.cache.drop(digest)
        return True

    # ------------------------------------------------------------------ one step
    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or None when there is nothing to run."""
        before = self.num_preemptions
        chunks: list[ScheduledChunk] = []
        if not self.config.load_ahead:
            self.waiting.look(self.residency.is_resident)
        budget = self._schedule_running(chunks, now)
        if self.num_preemptions != before:
            budget = 0  # nobody starts on pages that others had to give
        active = {seq.adapter: seq.adapter_rank for seq in self.running if seq.adapter is not None}
        turn = Pass(now, budget, chunks, active, self._max_ranks())
        self._admission.admit(turn)
        self._start_rate.note(turn.num_started, now, is_waiting=bool(self.waiting or turn.num_started))
        return self._plan(chunks, turn.loads, self.num_preemptions - before) if chunks else None

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
        sequences, running, page_tokens = self.sequences, SequenceStatus.RUNNING, self.geometry.page_tokens
        for chunk in plan.chunks:
            seq = sequences.get(chunk.seq_id)
            if seq is None or seq.status is not running:
                continue  # cancelled since it was planned
            seq.num_computed = end = chunk.start + chunk.num_tokens
            if chunk.samples:
                seq.token_ids.append(UNKNOWN_TOKEN)
            if seq.space is not None and end - len(seq.prefix) * page_tokens >= page_tokens:
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
            place = len(seq.prefix)
            node = self.cache.extend(seq.space, seq.prefix, tokens, seq.lease)
            seq.prefix.append(node)
            if node.page != seq.pages[place]:  # another sequence cached it first
                seq.pages = (*seq.pages[:place], node.page, *seq.pages[place + 1 :])

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

    def _schedule_running(self, chunks: list[ScheduledChunk], now: float) -> int:
        """Next tokens of the running sequences, by priority and age; the tokens left in the budget."""
        budget, page_tokens = self.config.max_step_tokens, self.geometry.page_tokens
        order = by_priority(self.running, now, self.config.aging_s)
        decodes, prefills = [], []
        for seq in order:
            missing = len(seq.token_ids) - seq.num_computed
            if missing == 1:
                decodes.append(seq)
            elif missing > 1:
                prefills.append(seq)
        if decodes:
            budget = min(budget, self._max_mixed_tokens(len(decodes)))
        for seq in decodes + prefills:
            num_tokens = len(seq.token_ids)
            if budget == 0:
                break
            if num_tokens >= seq.max_len:
                continue  # its last token is being drawn
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted by one before it
            if num_tokens > len(seq.pages) * page_tokens and not self._grow(seq, order):
                continue  # preempted for itself
            chunk = next_chunk(seq, budget)
            chunks.append(chunk)
            budget -= chunk.num_tokens
        return budget

    def _max_mixed_tokens(self, num_decodes: int) -> int:
        """Tokens of a step in which so many sequences decode and wait for it; a page of a prompt always fits."""
        target, most = self.config.tpot_target_ms, self.config.max_mixed_tokens or self.config.max_step_tokens
        if target is None or not self.costs.is_ready:
            return most
        ranks = {seq.adapter: seq.adapter_rank for seq in self.running}
        num_kv_tokens = sum(seq.num_tokens for seq in self.running)
        within_target = self.costs.model.max_tokens(target, num_kv_tokens, sum(ranks.values()))
        return min(most, max(within_target, num_decodes + self.geometry.page_tokens))

    def _grow(self, seq: Sequence, order: list[Sequence]) -> bool:
        """Get pages for all its tokens, preempting the last in `order` until they are there; False if that is itself.

        Only decodes grow, in this order, and a prompt's pages are all there from its start. So a victim, which is
        behind, has no chunk in this step yet.
        """
        assert seq.lease is not None
        missing = self.geometry.pages_for_tokens(seq.num_tokens) - len(seq.pages)
        while missing > 0:
            if self.residency.make_room(missing, reason=EvictionReason.GROWTH):
                extended = seq.lease.extend(missing)
                assert extended, "make_room promised the pages"
                seq.pages += seq.lease.pages[-missing:]
                return True
            victim = order.pop()
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _plan(self, chunks: list[ScheduledChunk], loads: list[AdapterLoad], num_preempted: int) -> StepPlan:
        of_adapter: dict[AdapterDigest | None, list[ScheduledChunk]] = {None: []}
        for chunk in chunks:
            of_adapter.setdefault(chunk.adapter, []).append(chunk)
        ordered = tuple(chain.from_iterable(of_adapter.values()))
        adapters, sum_ranks = [], 0.0
        for digest, own in of_adapter.items():
            if digest is not None:
                adapters.append((digest, self.residency.pages(digest)))
                sum_ranks += self.sequences[own[-1].seq_id].adapter_rank
        return StepPlan(ordered, tuple(adapters), tuple(loads), num_preempted, sum_ranks)

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
        self._queue(seq)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        is_waiting = seq.status is SequenceStatus.WAITING
        if is_waiting:
            self.waiting.remove(seq)
            self._admission.look_again()
        else:
            self._release(seq)
            self.running.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        del self.sequences[seq.seq_id]
        if seq.adapter is not None:
            self._num_users[seq.adapter] -= 1
            if not self._num_users[seq.adapter]:
                del self._num_users[seq.adapter]
        self.shares.leave(seq.tenant, is_waiting=is_waiting)

    def _release(self, seq: Sequence) -> None:
        assert seq.lease is not None
        seq.lease.release()
        seq.lease = None
        seq.pages = ()
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
        self.waiting.check_invariants()
        self.preloads.check_invariants()
        assert self._num_users == Counter(seq.adapter for seq in self.sequences.values() if seq.adapter is not None)
        check_pages(self._parts)
