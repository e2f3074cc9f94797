"""What must hold of the scheduler's sequences between any two calls."""

from collections.abc import Mapping, Sequence

from loraplex.core import SequenceId
from loraplex.scheduler.fairness import age
from loraplex.scheduler.sequence import Sequence as SequenceState
from loraplex.scheduler.sequence import SequenceStatus


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
        assert all(node.num_users for node in seq.prefix), "a prefix in use counts as unused"
    for seq in waiting:
        assert seq.status is SequenceStatus.WAITING
        assert seq.lease is None
        assert not seq.prefix
        assert seq.num_computed == 0
