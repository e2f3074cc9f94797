"""One adapter name as a sequential model, and a search for one order of a concurrent history that the model allows.

The search is that of Wing and Gong ("Testing and Verifying Concurrent Objects", 1993) with Lowe's memory of
configurations that were seen: (how far each client is, state of the model).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

Operation = tuple[object, ...]  # name and arguments
Result = tuple[object, ...]  # "ok" and what was given, or the class of the error


@dataclass(frozen=True, slots=True)
class Event:
    """An operation as its client saw it; times from one monotonic clock."""

    start: float
    end: float
    operation: Operation
    result: Result


@dataclass(frozen=True, slots=True)
class Name:
    """An adapter name. `versions` holds "validated", "verified" or "deleted"; `stack` what rollbacks go through."""

    versions: tuple[str, ...] = ()
    active: int | None = None
    revision: int = 0
    stack: tuple[int, ...] = ()
    deleted: bool = False

    def step(self, operation: Operation) -> tuple["Name", Result]:
        """The state after an operation, and what it answers."""
        kind = operation[0]
        if kind == "register":
            return replace(self, versions=(*self.versions, "validated"), deleted=False), ("ok", len(self.versions) + 1)
        if kind == "list":
            last = self.versions[-1] if self.versions else None
            return self, ("ok", self.active, self.revision, self.deleted, len(self.versions), last)
        if not self.versions:
            return self, ("ModelNotFound",)
        if self.deleted:
            return self, ("AdapterDeleted",)
        if kind == "delete":
            revision = self.revision + (self.active is not None)
            return Name(("deleted",) * len(self.versions), None, revision, (), True), ("ok",)
        if kind == "verify":
            return self._verify(operation[1])
        if operation[-1] != self.active:
            return self, ("VersionConflict", self.active)
        return self._activate(operation[1]) if kind == "activate" else self._rollback()

    def _state_of(self, number: object) -> str | None:
        return self.versions[number - 1] if isinstance(number, int) and number <= len(self.versions) else None

    def _verify(self, number: object) -> tuple["Name", Result]:
        state = self._state_of(number)
        if state in (None, "deleted"):
            return self, ("ModelNotFound",) if state is None else ("AdapterDeleted",)
        versions = tuple("verified" if at == number else old for at, old in enumerate(self.versions, 1))
        return replace(self, versions=versions), ("ok",)

    def _activate(self, number: object) -> tuple["Name", Result]:
        state = self._state_of(number)
        if not isinstance(number, int) or state is None:
            return self, ("ModelNotFound",)
        if state != "verified":
            return self, ("AdapterDeleted",) if state == "deleted" else ("AdapterNotVerified",)
        stack = self.stack if self.stack[-1:] == (number,) else (*self.stack, number)
        after = replace(self, active=number, revision=self.revision + 1, stack=stack)
        return after, ("ok", number, after.revision)

    def _rollback(self) -> tuple["Name", Result]:
        usable = [at for at in range(len(self.stack) - 1) if self.stack[at] != self.stack[-1]]
        usable = [at for at in usable if self._state_of(self.stack[at]) == "verified"]
        if not usable:
            return self, ("VersionStateError",)
        target = self.stack[usable[-1]]
        after = replace(self, active=target, revision=self.revision + 1, stack=self.stack[: usable[-1] + 1])
        return after, ("ok", target, after.revision)


def illegal(clients: Sequence[Sequence[Event]], initial: Name) -> str | None:
    """None if the events have one order that respects time and the model; otherwise how far the best attempt came."""
    start = (0,) * len(clients)
    seen, waiting, best = {(start, initial)}, [(start, initial)], (start, initial)
    while waiting:
        places, state = waiting.pop()
        ahead = [events[at] if at < len(events) else None for events, at in zip(clients, places, strict=True)]
        first_end = min((event.end for event in ahead if event is not None), default=None)
        if first_end is None:
            return None
        if sum(places) > sum(best[0]):
            best = (places, state)
        for client, event in enumerate(ahead):
            if event is None or event.start > first_end:
                continue
            after, result = state.step(event.operation)
            moved = (*places[:client], places[client] + 1, *places[client + 1 :])
            if result == event.result and (moved, after) not in seen:
                seen.add((moved, after))
                waiting.append((moved, after))
    ahead = [events[at] for events, at in zip(clients, best[0], strict=True) if at < len(events)]
    wrong = [f"{event.operation} -> {event.result}, not {best[1].step(event.operation)[1]}" for event in ahead]
    return f"after {sum(best[0])} of {sum(map(len, clients))} events in {best[1]}: " + "; ".join(wrong)
