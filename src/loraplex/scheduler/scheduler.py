"""Continuous batching with chunked prefill: `schedule(now)` plans a step, `advance` books its start, `commit` its end.

Between the last two the next step may be planned, with tokens not known yet; steps are committed in order.

One token budget serves prefill and decode: a step gives each running sequence its next tokens, one where the prompt is
done, a chunk of the prompt where it is not. Order is first come, first served. When pages run out, idle adapters go
first, then the youngest running sequence is preempted and later recomputed; the oldest always proceeds, so every
request ends.

A sequence whose adapter would be one too many is passed over. Once its patience has ended it is `aged`: none behind it
starts on an adapter that runs, so no slot is held any longer than by those that hold it now. The base goes on, as it
holds no slot, but leaves free the pages that the aged one needs. It cannot starve: a slot comes free when a sequence
ends or is preempted, so a seat does too; from then on it is simply the first in the queue, and what does not fit stops
the queue behind it.
"""

from bisect import insort
from collections.abc import Mapping

from loraplex.core import AdapterDigest, ContextTooLong, FinishReason, Request, SequenceId
from loraplex.pool import AdapterResidency, PagePool, PoolGeometry
from loraplex.scheduler.config import SchedulerConfig
from loraplex.scheduler.plan import AdapterLoad, Committed, ScheduledChunk, StepPlan
from loraplex.scheduler.sequence import UNKNOWN_TOKEN, Sequence, SequenceStatus


def _age(seq: Sequence) -> tuple[float, int]:
    return (seq.arrival_s, seq.seq_id)


class Scheduler:
    """Queues and budgets of one engine. Knows no clock, no tensors and no threads."""

    def __init__(self, config: SchedulerConfig, geometry: PoolGeometry) -> None:
        self.config = config
        self.geometry = geometry
        self.pool = PagePool(geometry.num_pages)
        self.residency = AdapterResidency(self.pool)
        self.sequences: dict[SequenceId, Sequence] = {}
        self.waiting: list[Sequence] = []  # oldest first
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self._next_id = 0

    # ------------------------------------------------------------------ arrivals and departures
    def check_fits(self, prompt_len: int, max_tokens: int | None, adapter_pages: int) -> int:
        """Longest length such a sequence may reach. Raises ContextTooLong if it could never run."""
        limit = self.config.max_model_len
        if prompt_len < 1:
            raise ContextTooLong("The prompt is empty; at least 1 token is needed.", "prompt")
        if prompt_len >= limit:
            raise ContextTooLong(
                f"The prompt has {prompt_len} tokens; the model's context is {limit} tokens and must leave room for "
                "at least one more (--max-model-len).",
                "prompt",
            )
        max_len = limit if max_tokens is None else min(limit, prompt_len + max_tokens)
        capacity = (self.geometry.num_pages - adapter_pages) * self.geometry.page_tokens
        if max_tokens is None:
            max_len = min(max_len, capacity)
        needed = max(max_len, prompt_len + 1)
        if needed > capacity:
            raise ContextTooLong(
                f"The request needs {needed} tokens of KV beside {adapter_pages} pages for its adapter; the pool of "
                f"{self.geometry.num_pages} pages holds {max(capacity, 0)} (--kv-pages, --memory).",
                "max_tokens",
            )
        return max_len

    def add(
        self, request: Request, adapter_pages: int, eos_token_ids: frozenset[int], now: float
    ) -> tuple[Sequence, ...]:
        """Queue the `n` sequences of a request. Raises ContextTooLong; then nothing is queued."""
        params = request.params
        max_len = self.check_fits(len(request.prompt_token_ids), params.max_tokens, adapter_pages)
        added = []
        for _ in range(params.n):
            seq = Sequence(
                seq_id=SequenceId(self._next_id),
                request_id=request.request_id,
                params=params,
                adapter=request.adapter.digest if request.adapter else None,
                adapter_pages=adapter_pages,
                token_ids=list(request.prompt_token_ids),
                prompt_len=len(request.prompt_token_ids),
                max_len=max_len,
                eos_token_ids=frozenset() if params.ignore_eos else eos_token_ids,
                arrival_s=now,
            )
            self._next_id += 1
            self.sequences[seq.seq_id] = seq
            insort(self.waiting, seq, key=_age)
            added.append(seq)
        return tuple(added)

    def finish(self, seq_id: SequenceId, reason: FinishReason) -> None:
        """End a sequence from outside (stop string, cancellation). Unknown or finished ids are ignored."""
        seq = self.sequences.get(seq_id)
        if seq is not None:
            self._end(seq, reason)

    def uses_adapter(self, digest: AdapterDigest) -> bool:
        """Whether a queued or running sequence still needs the adapter."""
        return any(seq.adapter == digest for seq in self.sequences.values())

    # ------------------------------------------------------------------ one step
    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or None when there is nothing to run."""
        before = self.num_preemptions
        chunks: list[ScheduledChunk] = []
        loads: list[AdapterLoad] = []
        budget = self._schedule_running(chunks)
        if self.num_preemptions == before:
            self._admit(budget, chunks, loads, now)
        return self._plan(chunks, loads, self.num_preemptions - before) if chunks else None

    def advance(self, plan: StepPlan) -> None:
        """Book a step as started: its tokens count as computed, and one more stands, unknown, where a chunk samples.

        The next step may be planned on that before this one's tokens are known.
        """
        for chunk in plan.chunks:
            seq = self.sequences.get(chunk.seq_id)
            if seq is None or seq.status is not SequenceStatus.RUNNING:
                continue  # cancelled since it was planned
            seq.num_computed = chunk.start + chunk.num_tokens
            if chunk.samples:
                seq.token_ids.append(UNKNOWN_TOKEN)

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
            reason = self._finish_reason(seq, token, place + 1)
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
        assert seq.lease is not None
        samples = seq.num_computed + num_tokens == seq.num_tokens
        return ScheduledChunk(seq.seq_id, seq.num_computed, num_tokens, samples, seq.adapter, seq.lease.pages)

    def _grow(self, seq: Sequence) -> bool:
        """Get pages for all its tokens, preempting the youngest until they are there; False if that is itself.

        Only decodes grow, oldest first, and a prompt's pages are all there from its start. So a victim, which is
        younger, has no chunk in this step yet.
        """
        assert seq.lease is not None
        missing = self.geometry.pages_for_tokens(seq.num_tokens) - seq.lease.num_pages
        while missing > 0:
            if self.residency.make_room(missing):
                extended = seq.lease.extend(missing)
                assert extended, "make_room promised the pages"
                return True
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _admit(self, budget: int, chunks: list[ScheduledChunk], loads: list[AdapterLoad], now: float) -> None:
        """Start waiting sequences, oldest first, while budgets last."""
        active = {seq.adapter for seq in self.running if seq.adapter is not None}
        aged: Sequence | None = None
        for seq in list(self.waiting):
            if budget == 0 or len(self.running) >= self.config.max_num_seqs:
                return
            if seq.adapter is not None and seq.adapter not in active and len(active) >= self.config.max_loras:
                if not self._is_patient(seq, now):
                    aged = aged or seq
                continue
            if aged is not None and seq.adapter is not None:
                continue  # it would hold its adapter's slot longer
            if not self._start(seq, loads, self._spare_pages(aged)):
                return
            if seq.adapter is not None:
                active.add(seq.adapter)
            chunk = self._chunk(seq, budget)
            chunks.append(chunk)
            budget -= chunk.num_tokens

    def _spare_pages(self, aged: Sequence | None) -> int:
        """Pages that a start must leave free: one for each running sequence that may grow, and those that `aged` needs.

        Without the first, what starts on the last page is preempted by the next step's growth, and recomputed.
        """
        growing = sum(self._can_grow(seq) for seq in self.running)
        if aged is None:
            return growing
        return growing + self.geometry.pages_for_tokens(aged.num_tokens) + aged.adapter_pages

    def _can_grow(self, seq: Sequence) -> bool:
        assert seq.lease is not None
        return self.geometry.pages_for_tokens(seq.max_len - 1) > seq.lease.num_pages  # its last token is never computed

    def _is_patient(self, seq: Sequence, now: float) -> bool:
        if seq.blocked_since_s is None:
            seq.blocked_since_s = now
        return now - seq.blocked_since_s < self.config.adapter_patience_s

    def _start(self, seq: Sequence, loads: list[AdapterLoad], spare_pages: int) -> bool:
        """Lease pages for the adapter and the tokens so far; False, and nothing changed, when they do not fit.

        They fit if `spare_pages` more could be made free beside them.
        """
        kv_pages = self.geometry.pages_for_tokens(seq.num_tokens)
        is_cold = seq.adapter is not None and not self.residency.is_resident(seq.adapter)
        needed = kv_pages + (seq.adapter_pages if is_cold else 0)
        if not self.residency.can_make_room(needed + spare_pages, keep=seq.adapter):
            return False
        self.residency.make_room(needed, keep=seq.adapter)
        if seq.adapter is not None:
            acquired = self.residency.acquire(seq.adapter, seq.adapter_pages)
            assert acquired is not None, "make_room promised the pages"
            if acquired.is_cold:
                loads.append(AdapterLoad(acquired.digest, acquired.pages))
        seq.lease = self.pool.allocate(kv_pages, seq.namespace)
        assert seq.lease is not None, "make_room promised the pages"
        seq.status = SequenceStatus.RUNNING
        seq.blocked_since_s = None
        self.waiting.remove(seq)
        insort(self.running, seq, key=_age)
        return True

    def _plan(self, chunks: list[ScheduledChunk], loads: list[AdapterLoad], num_preempted: int) -> StepPlan:
        order: dict[AdapterDigest | None, int] = {None: -1}
        for chunk in chunks:
            order.setdefault(chunk.adapter, len(order))
        chunks.sort(key=lambda chunk: order[chunk.adapter])
        adapters = tuple((digest, self.residency.pages(digest)) for digest in order if digest is not None)
        return StepPlan(tuple(chunks), adapters, tuple(loads), num_preempted)

    # ------------------------------------------------------------------ life cycle
    def _finish_reason(self, seq: Sequence, token: int, length: int) -> FinishReason | None:
        """Why a sequence ends with its token number `length`, if it does."""
        if length - seq.prompt_len >= seq.params.min_tokens:
            if token in seq.params.stop_token_ids:
                seq.stop_token_id = token
                return FinishReason.STOP
            if token in seq.eos_token_ids:
                return FinishReason.STOP
        return FinishReason.LENGTH if length >= seq.max_len else None

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue without pages; its tokens are kept and recomputed later."""
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_computed = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.running.remove(seq)
        insort(self.waiting, seq, key=_age)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self._release(seq)
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        del self.sequences[seq.seq_id]

    def _release(self, seq: Sequence) -> None:
        assert seq.lease is not None
        seq.lease.release()
        seq.lease = None
        if seq.adapter is not None:
            self.residency.release(seq.adapter)

    def check_invariants(self) -> None:
        """Raises AssertionError unless queues, leases and pins agree."""
        self.residency.check_invariants()
        assert len(self.running) <= self.config.max_num_seqs
        assert self.waiting == sorted(self.waiting, key=_age)
        assert self.running == sorted(self.running, key=_age)
        assert {id(s) for s in self.waiting + self.running} == {id(s) for s in self.sequences.values()}
        pins: dict[AdapterDigest, int] = {}
        for seq in self.running:
            assert seq.status is SequenceStatus.RUNNING
            assert seq.lease is not None
            assert seq.lease.namespace == seq.namespace
            if seq.adapter is not None:
                pins[seq.adapter] = pins.get(seq.adapter, 0) + 1
        for seq in self.waiting:
            assert seq.status is SequenceStatus.WAITING
            assert seq.lease is None
            assert seq.num_computed == 0
        assert len(pins) <= self.config.max_loras
        for digest in self.residency.resident:
            assert self.residency.num_pins(digest) == pins.get(digest, 0)
        held = sum(seq.lease.num_pages for seq in self.running if seq.lease) + self.residency.num_pages
        assert held + self.pool.num_free == self.pool.num_pages
