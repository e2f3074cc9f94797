"""The life of an adapter in the pool: a state and one transition function."""

from enum import Enum


class AdapterState(Enum):
    """ABSENT: no pages. LOADING: pages being filled. RESIDENT: ready for steps. FAILED: no load before a time."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    FAILED = "failed"


class AdapterEvent(Enum):
    """What happens to an adapter. PLACED: its pages are leased and filled before the next step runs."""

    BEGIN = "begin"
    PLACED = "placed"
    READY = "ready"
    FAIL = "fail"
    RETRY = "retry"
    EVICT = "evict"


_NEXT = {
    (AdapterState.ABSENT, AdapterEvent.BEGIN): AdapterState.LOADING,
    (AdapterState.ABSENT, AdapterEvent.PLACED): AdapterState.RESIDENT,
    (AdapterState.LOADING, AdapterEvent.READY): AdapterState.RESIDENT,
    (AdapterState.LOADING, AdapterEvent.FAIL): AdapterState.FAILED,
    (AdapterState.FAILED, AdapterEvent.RETRY): AdapterState.ABSENT,
    (AdapterState.RESIDENT, AdapterEvent.EVICT): AdapterState.ABSENT,
}


def next_state(state: AdapterState, event: AdapterEvent) -> AdapterState:
    """The state after an event. One that cannot happen in this state is a bug."""
    after = _NEXT.get((state, event))
    assert after is not None, f"an adapter that is {state.value} cannot {event.value}"
    return after
