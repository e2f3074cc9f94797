"""What must hold of the scheduler's sequences between any two calls."""

from collections import Counter
from collections.abc import Mapping, Sequence

from loraplex.core import SequenceId
from loraplex.scheduler.admission import Parts
from loraplex.scheduler.sequence import Sequence as SequenceState
from loraplex.scheduler.sequence import SequenceStatus, age


def check_sequences(
    sequences: Mapping[SequenceId, SequenceState], waiting: Sequence[SequenceState], running: Sequence[SequenceState]
) -> None:
    """Raises AssertionError unless both queues are in order, complete, and hold what their sequences may hold."""
    assert list(waiting) == sorted(waiting, key=age)
    assert list(running) == sorted(running, key=age)
    assert {id(seq) for seq in (*waiting, *running)} == {id(seq) for seq in sequences.values()}
    for seq in running:
        assert seq.status is SequenceStatus.RUNNING
        assert seq.lease is not None
        assert seq.lease.namespace == seq.namespace
        assert all(node.space == seq.space for node in seq.prefix), "a prefix of another tenant or adapter"
        assert seq.pages == (*(node.page for node in seq.prefix), *seq.lease.pages)
        assert all(node.num_users for node in seq.prefix), "a prefix in use counts as unused"
    for seq in waiting:
        assert seq.status is SequenceStatus.WAITING
        assert seq.lease is None
        assert not seq.prefix
        assert seq.num_computed == 0


def check_pages(parts: Parts) -> None:
    """Raises AssertionError unless adapters are in use by what runs, and every page is free or somebody's."""
    pins = Counter(seq.adapter for seq in parts.running if seq.adapter is not None)
    assert len(pins) <= parts.config.max_distinct
    for digest in parts.residency.resident:
        assert parts.residency.num_users(digest) == pins[digest]
    own = sum(seq.lease.num_pages for seq in parts.running if seq.lease)
    held = own + parts.residency.num_pages + parts.cache.num_pages
    assert held + parts.pool.num_free == parts.pool.num_pages
