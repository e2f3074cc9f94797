"""Requests that wait for their adapters and tokens before the engine queues them: how many, for what, how long.

They count to the engine's queue (`--max-waiting`), so that a slow store cannot gather requests without a bound, and who
would find the queue full is refused before anything is read, or leaves host memory, for it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from loraplex.core import EngineClient


class Stage(StrEnum):
    """What a request waits for."""

    NAME = "name"  # what it asks for, in the registry
    PLACE = "place"  # room in host memory
    READ = "read"  # its adapter's bytes, from a packed file or the artifact store
    PACK = "pack"  # the check of these, and their way into pages
    TEXT = "text"  # its prompts' tokens


@dataclass(slots=True, eq=False)
class Progress:
    """How far one request is, or the load that several wait for."""

    stage: Stage


@dataclass(slots=True, eq=False)
class Waiter:
    """One request. Whoever brings its adapter sets `progress`, to one of its own or to that of a shared load."""

    num_sequences: int
    since_s: float
    progress: Progress = field(default_factory=lambda: Progress(Stage.NAME))


@dataclass(frozen=True, slots=True)
class StageFigures:
    """Sequences of the requests that wait in a stage, and how long the oldest of these has waited in all stages."""

    stage: Stage
    num_sequences: int = 0
    oldest_s: float = 0.0


class Waiters:
    """Belongs to one event loop."""

    def __init__(self, engine: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._waiting: dict[Waiter, None] = {}  # oldest first
        self._by_tenant: Counter[str] = Counter()  # sequences

    @contextmanager
    def enter(self, tenant: str, num_sequences: int) -> Iterator[Waiter]:
        """Wait while the block runs. Raises what `EngineClient.check_queue` does with those who wait here."""
        self._engine.check_queue(tenant, num_sequences, self._by_tenant.total(), self._by_tenant[tenant])
        waiter = Waiter(num_sequences, self._clock())
        self._waiting[waiter] = None
        self._by_tenant[tenant] += num_sequences
        try:
            yield waiter
        finally:
            del self._waiting[waiter]
            self._by_tenant[tenant] -= num_sequences
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]

    def figures(self) -> tuple[StageFigures, ...]:
        """Those of every stage."""
        now, found = self._clock(), {stage: StageFigures(stage) for stage in Stage}
        for waiter in self._waiting:
            stage = waiter.progress.stage
            before = found[stage]
            oldest_s = max(before.oldest_s, now - waiter.since_s)
            found[stage] = StageFigures(stage, before.num_sequences + waiter.num_sequences, oldest_s)
        return tuple(found.values())
