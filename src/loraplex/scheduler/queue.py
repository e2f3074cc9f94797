"""Sequences that wait: by age, by tenant and priority, and by adapter. Sums are kept, never counted again.

A step looks only at what changed since the last: who came, whose adapter left the pool, who was passed over.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as AbstractSequence
from typing import TypeVar, overload

from loraplex.core import AdapterDigest, SequenceId
from loraplex.scheduler.sequence import Sequence, WaitReason, age

_K = TypeVar("_K", bound=Hashable)

Group = tuple[int, str | None]
"""Priority and tenant: of such a group the oldest comes first."""


class WaitingQueue(AbstractSequence[Sequence]):
    """Oldest first. `is_placed` says whether an adapter is in the pool or on its way there."""

    __slots__ = (
        "_by_adapter",
        "_calls",
        "_fresh",
        "_is_placed",
        "_left",
        "_noted",
        "_ordered",
        "_reasons",
        "_tenants",
        "groups",
        "num_prompt_tokens",
        "unplaced",
    )

    def __init__(self, is_placed: Callable[[AdapterDigest], bool]) -> None:
        self._is_placed = is_placed
        self._ordered: list[Sequence] = []
        self.groups: dict[Group, list[Sequence]] = {}  # each oldest first, none empty
        self._by_adapter: dict[AdapterDigest, dict[SequenceId, Sequence]] = {}
        self._fresh: dict[SequenceId, Sequence] = {}  # not looked at yet
        self._left: set[AdapterDigest] = set()  # adapters that left the pool since the last look
        self._noted: dict[SequenceId, Sequence] = {}  # those that wait for more than their turn
        self._reasons: Counter[WaitReason] = Counter()  # of those
        self.unplaced: set[AdapterDigest] = set()  # waited for, and neither in the pool nor on the way
        self.num_prompt_tokens = 0
        self._tenants: dict[str | None, tuple[int, int]] = {}  # sequences and prompt tokens of each; none is 0
        self._calls: dict[str, tuple[int, int]] = {}  # likewise

    # ------------------------------------------------------------------ a sequence of sequences
    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ordered)

    @overload
    def __getitem__(self, index: int) -> Sequence: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sequence]: ...

    def __getitem__(self, index: int | slice) -> Sequence | list[Sequence]:
        return self._ordered[index]

    # ------------------------------------------------------------------ comings and goings
    def add(self, seq: Sequence) -> None:
        """A sequence waits, at the place of its age."""
        insort(self._ordered, seq, key=age)
        insort(self.groups.setdefault(_group(seq), []), seq, key=age)
        self._count(seq, 1)
        self._fresh[seq.seq_id] = seq
        if seq.adapter is not None:
            self._by_adapter.setdefault(seq.adapter, {})[seq.seq_id] = seq
            if not self._is_placed(seq.adapter):
                self.unplaced.add(seq.adapter)

    def remove(self, seq: Sequence) -> None:
        """It waits no more: it starts, or has ended."""
        _remove(self._ordered, seq)
        group = self.groups[_group(seq)]
        _remove(group, seq)
        if not group:
            del self.groups[_group(seq)]
        self._count(seq, -1)
        self._fresh.pop(seq.seq_id, None)
        self._clear_note(seq)
        if seq.adapter is None:
            return
        same = self._by_adapter[seq.adapter]
        del same[seq.seq_id]
        if not same:
            del self._by_adapter[seq.adapter]
            self.unplaced.discard(seq.adapter)

    def _count(self, seq: Sequence, sign: int) -> None:
        self.num_prompt_tokens += sign * seq.prompt_len
        _book(self._tenants, seq.tenant, sign, sign * seq.prompt_len)
        if seq.call_id is not None:
            _book(self._calls, seq.call_id, sign, sign * seq.prompt_len)

    def held_by(self, tenant: str | None) -> tuple[int, int]:
        """Sequences and prompt tokens of a tenant that wait. From any thread."""
        return self._tenants.get(tenant, (0, 0))

    def held_by_call(self, call_id: str | None) -> tuple[int, int]:
        """As `held_by`, of the requests of one call; of none where it has no id."""
        return (0, 0) if call_id is None else self._calls.get(call_id, (0, 0))

    def of_adapter(self, digest: AdapterDigest) -> tuple[Sequence, ...]:
        """Those that wait with an adapter, oldest first."""
        return tuple(sorted(self._by_adapter.get(digest, {}).values(), key=age))

    # ------------------------------------------------------------------ adapters
    def adapter_placed(self, digest: AdapterDigest) -> None:
        """An adapter's pages are leased."""
        self.unplaced.discard(digest)

    def adapter_left(self, digest: AdapterDigest) -> None:
        """An adapter's pages were freed."""
        if digest in self._by_adapter:
            self._left.add(digest)
            self.unplaced.add(digest)

    def look(self, is_resident: Callable[[AdapterDigest], bool]) -> None:
        """Once a step: mark as cold whose adapter is not in the pool."""
        for seq in self._fresh.values():
            if seq.adapter is not None and not seq.is_cold:
                seq.is_cold = not is_resident(seq.adapter)
        self._fresh.clear()
        for digest in self._left:
            if not is_resident(digest):
                for seq in self._by_adapter.get(digest, {}).values():
                    seq.is_cold = True
        self._left.clear()

    # ------------------------------------------------------------------ what they wait for
    def note(self, seq: Sequence, reason: WaitReason) -> None:
        """A sequence waits for more than its turn."""
        if seq.wait is reason and seq.seq_id in self._noted:
            return
        self._clear_note(seq)
        seq.wait = reason
        self._noted[seq.seq_id] = seq
        self._reasons[reason] += 1

    def _clear_note(self, seq: Sequence) -> None:
        if self._noted.pop(seq.seq_id, None) is not None:
            self._reasons[seq.wait] -= 1
            seq.wait = WaitReason.BUDGET

    def clear_notes(self) -> None:
        """Before every pass: what each waits for is found out again."""
        for seq in self._noted.values():
            seq.wait = WaitReason.BUDGET
        self._noted.clear()
        self._reasons.clear()

    def num_by_reason(self) -> dict[WaitReason, int]:
        """How many wait for what."""
        counts = {reason: self._reasons[reason] for reason in WaitReason}
        return counts | {WaitReason.BUDGET: len(self._ordered) - len(self._noted)}

    def check_invariants(self) -> None:
        """Raises AssertionError unless every index and sum agrees with the queue itself."""
        seqs = self._ordered
        assert seqs == sorted(seqs, key=age)
        assert self.num_prompt_tokens == sum(seq.prompt_len for seq in seqs)
        tenants = {seq.tenant for seq in seqs}
        assert self._tenants.keys() == tenants
        for tenant in tenants:
            own = [seq.prompt_len for seq in seqs if seq.tenant == tenant]
            assert self.held_by(tenant) == (len(own), sum(own))
        calls = {seq.call_id for seq in seqs if seq.call_id is not None}
        assert self._calls.keys() == calls
        for call_id in calls:
            own = [seq.prompt_len for seq in seqs if seq.call_id == call_id]
            assert self.held_by_call(call_id) == (len(own), sum(own))
        groups: dict[Group, list[Sequence]] = {}
        for seq in seqs:
            groups.setdefault(_group(seq), []).append(seq)
        assert self.groups == groups
        adapters = {seq.adapter for seq in seqs if seq.adapter is not None}
        assert adapters == self._by_adapter.keys()
        assert sum(map(len, self._by_adapter.values())) == sum(seq.adapter is not None for seq in seqs)
        assert self.unplaced == {digest for digest in adapters if not self._is_placed(digest)}
        noted = [seq for seq in seqs if seq.wait is not WaitReason.BUDGET]
        assert {seq.seq_id for seq in noted} == self._noted.keys()
        assert Counter(seq.wait for seq in noted) == +self._reasons


def _group(seq: Sequence) -> Group:
    return (seq.priority, seq.tenant)


def _book(held: dict[_K, tuple[int, int]], who: _K, num_new: int, num_new_tokens: int) -> None:
    num, num_tokens = held.get(who, (0, 0))
    if num + num_new:
        held[who] = (num + num_new, num_tokens + num_new_tokens)
    else:
        del held[who]


def _remove(ordered: list[Sequence], seq: Sequence) -> None:
    place = bisect_left(ordered, age(seq), key=age)
    assert ordered[place] is seq, "a sequence is not at the place of its age"
    del ordered[place]
