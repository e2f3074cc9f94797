"""The life cycle of a version: one table and one transition function."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from loraplex.core.registry_errors import VersionStateError
from loraplex.registry.types import VersionState


class VersionEvent(StrEnum):
    """What can happen to a version; the value continues "it cannot be"."""

    VALIDATE = "validated"
    REFUSE = "refused"
    VERIFY = "verified"
    FAIL = "marked as failed"
    SKIP = "used without verification"
    DELETE = "deleted"


_RECEIVED, _VALIDATED, _VERIFIED = VersionState.RECEIVED, VersionState.VALIDATED, VersionState.VERIFIED
_SKIPPED, _REFUSED, _DELETED = VersionState.SKIPPED, VersionState.REFUSED, VersionState.DELETED

_NEXT: Mapping[tuple[VersionState, VersionEvent], VersionState] = MappingProxyType(
    {
        (_RECEIVED, VersionEvent.VALIDATE): _VALIDATED,
        (_RECEIVED, VersionEvent.REFUSE): _REFUSED,
        (_VALIDATED, VersionEvent.VERIFY): _VERIFIED,
        (_VALIDATED, VersionEvent.FAIL): _VALIDATED,
        (_VALIDATED, VersionEvent.SKIP): _SKIPPED,
        (_VERIFIED, VersionEvent.VERIFY): _VERIFIED,
        (_VERIFIED, VersionEvent.FAIL): _VALIDATED,
        (_SKIPPED, VersionEvent.VERIFY): _VERIFIED,
        (_SKIPPED, VersionEvent.FAIL): _VALIDATED,
        (_VALIDATED, VersionEvent.DELETE): _DELETED,
        (_VERIFIED, VersionEvent.DELETE): _DELETED,
        (_SKIPPED, VersionEvent.DELETE): _DELETED,
        (_REFUSED, VersionEvent.DELETE): _DELETED,
    }
)


def advance(state: VersionState, event: VersionEvent, label: str) -> VersionState:
    """The state after an event. Raises VersionStateError, which names the version, where it cannot happen."""
    following = _NEXT.get((state, event))
    if following is None:
        raise VersionStateError(f"Version {label} is {state.value}; it cannot be {event.value}.")
    return following
