"""Starting what waits: who may start now, who is passed over and for how long, and what must be left free for whom.

A pass over the queue in which nobody could start is not repeated until something changes that could let one start.
"""

import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from loraplex.core import AdapterDigest
from loraplex.pool import AdapterResidency, PagePool, PoolGeometry, PrefixCache
from loraplex.scheduler.config import SchedulerConfig
from loraplex.scheduler.fairness import INPUT_WEIGHT, FairShares, in_turn
from loraplex.scheduler.loads import LoadAhead
from loraplex.scheduler.plan import AdapterLoad, ScheduledChunk
from loraplex.scheduler.preloads import Preloads
from loraplex.scheduler.queue import WaitingQueue
from loraplex.scheduler.sequence import Sequence, SequenceStatus, WaitReason, age


@dataclass(slots=True, eq=False)
class Parts:
    """What the scheduler and its parts work on together. Both queues have their oldest first."""

    config: SchedulerConfig
    geometry: PoolGeometry
    pool: PagePool
    residency: AdapterResidency
    cache: PrefixCache
    waiting: WaitingQueue
    preloads: Preloads
    shares: FairShares = field(default_factory=FairShares)
    running: list[Sequence] = field(default_factory=list)

    def can_grow(self, seq: Sequence) -> bool:
        """Whether a running sequence may need more pages. Its last token is never computed."""
        return self.geometry.pages_for_tokens(seq.max_len - 1) > len(seq.pages)

    def num_growing(self) -> int:
        """Running sequences that may need a page more."""
        return sum(map(self.can_grow, self.running))

    def spare_pages(self) -> int:
        """Pages that loads must leave free: one for each sequence that may grow, and what pinned adapters lack."""
        return self.num_growing() + self.preloads.num_missing_pages

    def adapter_placed(self, digest: AdapterDigest) -> None:
        """An adapter's pages are leased."""
        self.waiting.adapter_placed(digest)
        self.preloads.placed(digest)

    def in_turn(self, now: float) -> Iterator[Sequence]:
        """The queue as its turn comes."""
        return in_turn(self.waiting, self.shares if self.config.fair_shares else None, now, self.config.aging_s)


@dataclass(slots=True, eq=False)
class StartCounts:
    """Figures of first starts; they only grow."""

    num_prompt_tokens: int = 0  # of sequences that may use the prefix cache
    num_cached_tokens: int = 0  # of those, taken from it
    num_warm: int = 0  # of sequences whose adapter was in the pool all the time they waited
    num_cold: int = 0


@dataclass(slots=True, eq=False)
class Pass:
    """What one pass over the queue has left, and whom it must spare pages for."""

    now: float
    budget: int
    chunks: list[ScheduledChunk]
    active: dict[AdapterDigest, float]  # adapters of running sequences and their ranks
    max_ranks: float | None
    loads: list[AdapterLoad] = field(default_factory=list)
    aged: Sequence | None = None
    starved: Sequence | None = None
    num_started: int = 0

    def leaves_ranks(self, rank: float) -> bool:
        """Whether one more adapter, of this rank, keeps to the target."""
        return self.max_ranks is None or sum(self.active.values()) + rank <= self.max_ranks

    def begin(self) -> None:
        """From the front of the queue."""
        self.aged = self.starved = None


class Admission:
    """Moves sequences from the queue into a step."""

    __slots__ = (
        "_arrived",
        "_config",
        "_held_back",
        "_least_refused",
        "_load_ahead",
        "_parts",
        "_since",
        "_stuck",
        "counts",
    )

    def __init__(self, parts: Parts, load_ahead: LoadAhead) -> None:
        self._parts = parts
        self._config = parts.config
        self._load_ahead = load_ahead
        self._stuck: frozenset[AdapterDigest] | None = None  # adapters that ran when a pass found nobody to start
        self._held_back = False  # whether it found one that only an aged one in front of it kept from starting
        self._least_refused = math.inf  # rank of those that it passed over for their ranks
        self._since: dict[AdapterDigest, float] = {}  # seconds at which adapters that run, and some others, began to
        self._arrived: list[Sequence] = []  # since that pass
        self.counts = StartCounts()

    def arrived(self, seq: Sequence) -> None:
        """A sequence was queued."""
        if self._stuck is not None:
            self._arrived.append(seq)

    def look_again(self) -> None:
        """Who could not start may now: one in front left, or an adapter came."""
        self._stuck = None
        self._least_refused = math.inf
        self._arrived.clear()

    def admit(self, turn: Pass) -> None:
        """Start waiting sequences, as their turn comes, while budgets last."""
        if not turn.budget or len(self._parts.running) >= self._config.max_num_seqs:
            self._parts.waiting.clear_notes()
            self.look_again()
        elif not self._is_still_stuck(turn):
            self._parts.waiting.clear_notes()
            self.look_again()
            turn.begin()
            before = len(turn.chunks)
            if self._walk(turn) and len(turn.chunks) == before:
                self._stuck = frozenset(turn.active)

    def _is_still_stuck(self, turn: Pass) -> bool:
        """Whether what a pass found without a start still holds, also for those that arrived since.

        Nobody waits with the base then and every adapter's turn is over, so behind one that is aged nobody starts; in
        front of it the order may change.
        """
        if self._stuck is None or self._stuck != turn.active.keys():
            return False
        if self._least_refused < math.inf and turn.leaves_ranks(self._least_refused):
            return False
        for seq in self._arrived:
            if not self._is_blocked(seq, turn):
                return False
        self._arrived.clear()
        turn.begin()
        for seq in self._parts.in_turn(turn.now) if self._held_back else ():
            if not self._is_blocked(seq, turn):
                return False
            if turn.aged is not None:
                break
        return True

    def _walk(self, turn: Pass) -> bool:
        """One pass; whether it came to the end of the queue."""
        most = self._config.max_num_seqs
        self._held_back = False
        for seq in self._parts.in_turn(turn.now):
            if turn.budget == 0 or len(self._parts.running) >= most:
                return False
            if self._is_blocked(seq, turn):
                continue
            if turn.aged is not None and seq.adapter is not None and not self._may_join(seq.adapter, turn):
                self._parts.waiting.note(seq, WaitReason.SLOT)  # it would hold its adapter's slot longer
                self._held_back = True
            elif self._start(seq, turn):
                chunk = next_chunk(seq, turn.budget)
                turn.chunks.append(chunk)
                turn.budget -= chunk.num_tokens
            else:
                self._parts.waiting.note(seq, WaitReason.PAGES)
                return False
        return True

    def _is_blocked(self, seq: Sequence, turn: Pass) -> bool:
        """Whether a sequence is passed over whatever pages there are."""
        reason = self._blocked_by(seq, turn)
        if reason is not None:
            self._pass_over(seq, reason, turn)
        return reason is not None

    def _blocked_by(self, seq: Sequence, turn: Pass) -> WaitReason | None:
        active = turn.active
        if seq.adapter is None or seq.adapter in active:
            return None
        if len(active) >= self._config.max_distinct:
            return WaitReason.SLOT
        if active and not turn.leaves_ranks(seq.adapter_rank):
            self._least_refused = min(self._least_refused, seq.adapter_rank)
            return WaitReason.RANKS
        if self._config.load_ahead and not self._parts.residency.is_resident(seq.adapter):
            return WaitReason.LOAD
        return None

    def _pass_over(self, seq: Sequence, reason: WaitReason, turn: Pass) -> None:
        self._parts.waiting.note(seq, reason)
        if self._is_patient(seq, turn.now):
            return
        if reason is WaitReason.LOAD:
            turn.starved = turn.starved or seq
        else:
            turn.aged = turn.aged or seq

    def _may_join(self, adapter: AdapterDigest, turn: Pass) -> bool:
        """Whether an adapter that runs began so lately that more may start on it, whoever waits for an adapter's end.

        So those that waited for it start together, not one in each of its turns.
        """
        return adapter in turn.active and turn.now - self._since[adapter] < self._config.adapter_patience_s

    def _is_patient(self, seq: Sequence, now: float) -> bool:
        if seq.blocked_since_s is None:
            seq.blocked_since_s = now
        return now - seq.blocked_since_s < self._config.adapter_patience_s

    def _spare_pages(self, turn: Pass) -> int:
        """Pages that a start must leave free: one for each running sequence that may grow, what pinned adapters lack,
        and what those need who are passed over and out of patience.

        Without the first, what starts on the last page is preempted by the next step's growth, and recomputed.
        """
        spare = self._parts.spare_pages()
        if turn.aged is not None:
            spare += self._parts.geometry.pages_for_tokens(turn.aged.num_tokens) + turn.aged.adapter_pages
        if turn.starved is not None and turn.starved is not turn.aged:
            spare += self._load_ahead.missing_pages(turn.starved)
        return spare

    def _start(self, seq: Sequence, turn: Pass) -> bool:
        """Lease pages for the adapter and the tokens so far; False, and nothing changed, when they do not fit.

        They fit if the pages to spare could be made free beside them. Of what is cached, all but the last token is
        taken: one must be computed to draw the next.
        """
        parts = self._parts
        nodes = parts.cache.match(seq.space, seq.token_ids, seq.num_tokens - 1) if seq.space is not None else ()
        kv_pages = parts.geometry.pages_for_tokens(seq.num_tokens) - len(nodes)
        is_cold = seq.adapter is not None and not parts.residency.is_resident(seq.adapter)
        needed = kv_pages + (seq.adapter_pages if is_cold else 0)
        taken = parts.cache.num_unused(nodes)
        if not parts.residency.can_make_room(needed + taken + self._spare_pages(turn), keep=seq.adapter):
            return False
        parts.cache.acquire(nodes)
        parts.residency.make_room(needed, keep=seq.adapter)
        if seq.adapter is not None:
            self._acquire(seq, seq.adapter, turn)
        seq.lease = parts.pool.allocate(kv_pages, seq.namespace)
        assert seq.lease is not None, "make_room promised the pages"
        seq.prefix = list(nodes)
        seq.pages = (*(node.page for node in nodes), *seq.lease.pages)
        seq.num_computed = len(nodes) * parts.geometry.page_tokens
        parts.shares.start(seq.tenant)
        self._count_start(seq, turn)
        parts.waiting.remove(seq)
        seq.status = SequenceStatus.RUNNING
        seq.blocked_since_s = None
        insort(parts.running, seq, key=age)
        return True

    def _acquire(self, seq: Sequence, digest: AdapterDigest, turn: Pass) -> None:
        acquired = self._parts.residency.acquire(digest, seq.adapter_pages, turn.now)
        assert acquired is not None, "make_room promised the pages"
        if acquired.is_cold:
            turn.loads.append(AdapterLoad(acquired.digest, acquired.pages))
            self._parts.cache.adapter_came(digest)
            self._parts.adapter_placed(digest)
        if digest not in turn.active:
            if len(self._since) > 2 * len(turn.active):
                self._since = {adapter: self._since[adapter] for adapter in turn.active}
            self._since[digest] = turn.now
        turn.active[digest] = seq.adapter_rank

    def _count_start(self, seq: Sequence, turn: Pass) -> None:
        """Book a first start: the tenant pays for the tokens that are computed. A recomputation is free."""
        if seq.num_cached_tokens is not None:
            return
        seq.num_cached_tokens = seq.num_computed
        turn.num_started += 1
        counts = self.counts
        if seq.adapter is not None:
            counts.num_cold += seq.is_cold
            counts.num_warm += not seq.is_cold
        self._parts.shares.charge(seq.tenant, INPUT_WEIGHT * (seq.prompt_len - seq.num_computed))
        if seq.space is not None:
            counts.num_prompt_tokens += seq.prompt_len
            counts.num_cached_tokens += seq.num_cached_tokens


def next_chunk(seq: Sequence, budget: int) -> ScheduledChunk:
    """The next tokens of a running sequence, at most `budget`."""
    start, end = seq.num_computed, len(seq.token_ids)
    num_tokens = min(end - start, budget)
    return ScheduledChunk(seq.seq_id, start, num_tokens, start + num_tokens == end, seq.adapter, seq.pages)
