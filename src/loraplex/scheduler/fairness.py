"""Fair shares: a virtual counter of what each tenant was served, and the order that follows from it.

Virtual token counter (Sheng et al., OSDI 2024, arXiv 2401.00588, algorithm 2): the tenant that was served least goes
first, and one that returns is lifted to the least of those at work, so that idling earns nothing. Here a step costs its
tenants the ranks of their adapters too: a tenant alone on an adapter pays them all, those on one adapter split them.
"""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from loraplex.core import SequenceId
from loraplex.scheduler.plan import StepPlan
from loraplex.scheduler.queue import WaitingQueue
from loraplex.scheduler.sequence import Sequence as SequenceState
from loraplex.scheduler.sequence import SequenceStatus

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
MAX_IDLE_TENANTS = 4096  # counters kept of tenants that have nothing here

Tenant = str | None


@dataclass(slots=True, eq=False)
class _Share:
    served: float = 0.0
    num_open: int = 0  # sequences that wait or run


class FairShares:
    """What each tenant was served, in tokens, divided by its weight."""

    __slots__ = ("_floor", "_queued", "_shares", "_weights")

    def __init__(self) -> None:
        self._shares: dict[Tenant, _Share] = {}
        self._queued: Counter[Tenant] = Counter()  # sequences that wait
        self._weights: dict[Tenant, float] = {}
        self._floor = 0.0  # of the tenant whose queue became empty last

    def set_weight(self, tenant: Tenant, weight: float) -> None:
        """A tenant of weight 2 is served twice as much as one of weight 1."""
        assert weight > 0.0, f"a tenant's weight must be above 0, got {weight}"
        if weight == 1.0:
            self._weights.pop(tenant, None)
        else:
            self._weights[tenant] = weight

    def served(self, tenant: Tenant) -> float:
        """A tenant's counter."""
        share = self._shares.get(tenant)
        return share.served if share is not None else 0.0

    def arrive(self, tenant: Tenant) -> None:
        """A sequence came. A tenant of whom none waited is lifted, so that what it did not ask for is not made up."""
        share = self._shares.setdefault(tenant, _Share())
        if tenant not in self._queued:
            least = min((self._shares[other].served for other in self._queued), default=self._floor)
            share.served = max(share.served, least)
        share.num_open += 1
        self._queued[tenant] += 1

    def start(self, tenant: Tenant) -> None:
        """A sequence waits no more."""
        assert self._queued[tenant] > 0, "more sequences started than waited"
        self._queued[tenant] -= 1
        if not self._queued[tenant]:
            del self._queued[tenant]
            self._floor = max(self._floor, self._shares[tenant].served)

    def requeue(self, tenant: Tenant) -> None:
        """A sequence that ran waits again."""
        self._queued[tenant] += 1

    def leave(self, tenant: Tenant, *, is_waiting: bool) -> None:
        """A sequence ended, from the queue or while it ran."""
        if is_waiting:
            self.start(tenant)
        share = self._shares[tenant]
        assert share.num_open > 0, "more sequences left than came"
        share.num_open -= 1
        if not share.num_open:
            self._forget_some()

    def _forget_some(self) -> None:
        """Those that were served least are lifted at their return anyway."""
        if len(self._shares) <= 2 * MAX_IDLE_TENANTS:
            return
        idle = sorted((share.served, str(tenant)) for tenant, share in self._shares.items() if not share.num_open)
        kept = {name for _, name in idle[-MAX_IDLE_TENANTS:]}
        self._shares = {t: share for t, share in self._shares.items() if share.num_open or str(t) in kept}

    def charge(self, tenant: Tenant, tokens: float) -> None:
        """Book what a tenant was served."""
        self._shares[tenant].served += tokens / self._weights.get(tenant, 1.0)

    def charge_step(
        self, plan: StepPlan, sequences: Mapping[SequenceId, SequenceState], tokens_per_rank: float
    ) -> None:
        """Book a step's output tokens, and every adapter's ranks in equal parts to the sequences that use it."""
        users = Counter([chunk.adapter for chunk in plan.chunks])
        for chunk in plan.chunks:
            seq = sequences.get(chunk.seq_id)
            if seq is not None:
                ranks = seq.adapter_rank / users[chunk.adapter]
                tokens = tokens_per_rank * ranks + (OUTPUT_WEIGHT if chunk.samples else 0.0)
                self._shares[seq.tenant].served += tokens / self._weights.get(seq.tenant, 1.0)

    def check_invariants(self, sequences: Iterable[SequenceState]) -> None:
        """Counts are those of the sequences."""
        counts, queued = Counter[Tenant](), Counter[Tenant]()
        for seq in sequences:
            counts[seq.tenant] += 1
            queued[seq.tenant] += seq.status is SequenceStatus.WAITING
        assert counts == {tenant: share.num_open for tenant, share in self._shares.items() if share.num_open}
        assert +queued == +self._queued


def in_turn(queue: WaitingQueue, shares: FairShares | None, now: float, aging_s: float) -> Iterator[SequenceState]:
    """Waiting sequences as their turn comes: priority, then served least, then age.

    Without `shares`, priority and age alone. Who has waited `aging_s` counts as of the highest priority that waits.
    What a tenant is charged between two of them counts for the next, and the one given last may leave the queue.
    """
    levels = {priority for priority, _ in queue.groups}
    if len(levels) < 2 and (shares is None or len(queue.groups) < 2):
        yield from tuple(queue)
        return

    def key(level: int, seq: SequenceState) -> tuple[int, float, float, int]:
        return (-level, shares.served(seq.tenant) if shares is not None else 0.0, seq.arrival_s, seq.seq_id)

    runs = _runs(queue, max(levels), now, aging_s) if len(levels) > 1 else _groups(queue)
    heap = [(key(level, seqs[0]), level, seqs, 0) for level, seqs in runs]
    heapq.heapify(heap)
    while heap:
        old, level, seqs, place = heap[0]
        seq = seqs[place]
        current = key(level, seq)
        if current != old:
            heapq.heapreplace(heap, (current, level, seqs, place))
            continue
        heapq.heappop(heap)
        rest = seqs if place else tuple(seqs)  # the queue's own list loses what starts
        yield seq
        if place + 1 < len(rest):
            heapq.heappush(heap, (key(level, rest[place + 1]), level, rest, place + 1))


_Run = tuple[int, Sequence[SequenceState]]


def _groups(queue: WaitingQueue) -> Iterator[_Run]:
    return ((priority, seqs) for (priority, _), seqs in queue.groups.items())


def _runs(queue: WaitingQueue, top: int, now: float, aging_s: float) -> Iterator[_Run]:
    """Parts of the queue in which only age counts: a group's sequences that have waited long, and the others."""
    for priority, seqs in _groups(queue):
        num_aged = bisect_left(seqs, True, key=lambda seq: now - seq.arrival_s < aging_s)
        if num_aged:
            yield top, seqs[:num_aged]
        if num_aged < len(seqs):
            yield priority, seqs[num_aged:]


def by_priority(running: Sequence[SequenceState], now: float, aging_s: float) -> list[SequenceState]:
    """Running sequences, given in order of age: the highest priority first, then the oldest.

    Who came `aging_s` ago counts as of the highest priority that runs, as in the queue.
    """
    if len({seq.priority for seq in running}) < 2:
        return list(running)
    top = max(seq.priority for seq in running)
    return sorted(running, key=lambda seq: -top if now - seq.arrival_s >= aging_s else -seq.priority)
