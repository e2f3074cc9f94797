"""The transitions of a version."""

import itertools

import pytest

from loraplex.registry import VersionState, VersionStateError
from loraplex.registry.lifecycle import VersionEvent, advance


def reachable() -> set[VersionState]:
    """Every state that some sequence of events leads to."""
    found = {VersionState.RECEIVED}
    for _ in VersionState:
        for state, event in itertools.product(sorted(found), VersionEvent):
            try:
                found.add(advance(state, event, "x@1"))
            except VersionStateError:
                continue
    return found


def test_every_state_can_be_reached() -> None:
    assert reachable() == set(VersionState)


def test_only_verification_or_a_decision_makes_a_version_usable() -> None:
    for state, event in itertools.product(VersionState, VersionEvent):
        try:
            after = advance(state, event, "x@1")
        except VersionStateError:
            continue
        if after.usable:
            assert event in (VersionEvent.VERIFY, VersionEvent.SKIP)
            assert state in (VersionState.VALIDATED, VersionState.VERIFIED, VersionState.SKIPPED)


@pytest.mark.parametrize("state", [VersionState.REFUSED, VersionState.DELETED])
def test_refused_and_deleted_versions_stay_so(state: VersionState) -> None:
    for event in VersionEvent:
        if (state, event) != (VersionState.REFUSED, VersionEvent.DELETE):
            with pytest.raises(VersionStateError, match=f"x@1 is {state.value}"):
                advance(state, event, "x@1")
