"""Who waits for a place in host memory: a short while each, and whoever uses least is next.

How many requests wait here is bounded by who lets them in (`Waiters`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from loraplex.core import AdapterDigest


@dataclass(frozen=True, slots=True)
class Wanted:
    """An adapter that a tenant wants to use, of `num_bytes`."""

    tenant: str
    digest: AdapterDigest
    num_bytes: int


class Outcome(Enum):
    """What came of a try to take a place."""

    TAKEN = "taken"
    OVER_SHARE = "over share"  # others may be served before
    FULL = "full"  # nobody who needs room is served before


@dataclass(slots=True, eq=False)
class _Waiting:
    wanted: Wanted
    turn: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class HostLine:
    """Belongs to one event loop. `take(wanted, may_make_room)` tries to take a place; `num_used` orders the tenants."""

    def __init__(
        self, take: Callable[[Wanted, bool], Outcome], num_used: Callable[[str], int], patience_s: float
    ) -> None:
        self._take = take
        self._num_used = num_used
        self._patience_s = patience_s
        self._waiting: list[_Waiting] = []

    def num_waiting(self, tenant: str | None = None) -> int:
        """Who waits, of one tenant or of all."""
        return sum(tenant is None or one.wanted.tenant == tenant for one in self._waiting)

    async def enter(self, wanted: Wanted) -> bool:
        """Take a place, at once or within the patience. False if there was none."""
        mine = _Waiting(wanted)
        self._waiting.append(mine)
        self.serve()
        if mine.turn.done():
            return True
        try:
            await asyncio.wait({mine.turn}, timeout=self._patience_s)
        except asyncio.CancelledError:
            if mine.turn.done():
                raise TakenTooLate from None
            raise
        finally:
            if not mine.turn.done():
                self._waiting.remove(mine)
        return mine.turn.done()

    def serve(self) -> None:
        """Let all in who can have a place now."""
        while self._waiting and self._serve_one():
            pass

    def _serve_one(self) -> bool:
        is_full = False
        for one in sorted(self._waiting, key=lambda one: self._num_used(one.wanted.tenant)):
            outcome = self._take(one.wanted, not is_full)
            if outcome is Outcome.TAKEN:
                self._waiting.remove(one)
                one.turn.set_result(None)
                return True
            is_full = is_full or outcome is Outcome.FULL
        return False


class TakenTooLate(asyncio.CancelledError):
    """The place came in the moment in which its request was cancelled: it must be given back."""
