"""What the registry's names stood for and when, as its clients can know it."""

import asyncio
import math
import time
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Span:
    version: int | None
    begin_s: float
    end_s: float = math.inf


@dataclass(eq=False)
class Name:
    """One adapter's name. A change lasts from when it was asked for to when it was answered: both hold meanwhile.

    `lock` is held during changes. `kind` says what is wrong with the name's weights, if anything.
    """

    tenant: str
    name: str
    kind: str = "healthy"
    digests: dict[int, str] = field(default_factory=dict)  # by version, deleted ones too
    usable: set[int] = field(default_factory=set)  # not deleted
    deleted_s: dict[int, float] = field(default_factory=dict)  # when that was asked for
    gone_s: dict[int, float] = field(default_factory=dict)  # when it was answered
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _spans: list[_Span] = field(default_factory=list)

    @property
    def active(self) -> int | None:
        """What it stands for, as far as is known."""
        return self._spans[-1].version if self._spans else None

    def moves(self, version: int | None, at_s: float) -> None:
        """A change to a version was asked for; None: to none."""
        self._spans.append(_Span(version, at_s))

    def moved(self) -> None:
        """The last change was answered."""
        now = time.monotonic()
        for span in self._spans[:-1]:
            span.end_s = min(span.end_s, now)
        del self._spans[:-64]

    def may_be(self, version: int | None, begin_s: float, end_s: float) -> bool:
        """Whether it may have stood for a version at some time between."""
        return any(one.version == version and one.begin_s <= end_s and one.end_s >= begin_s for one in self._spans)

    def delete(self, versions: set[int], at_s: float) -> None:
        """Deleting these was asked for."""
        self.usable -= versions
        self.deleted_s |= dict.fromkeys(versions, at_s)

    def deleted(self, versions: set[int]) -> None:
        """Deleting these was answered."""
        self.gone_s |= dict.fromkeys(versions, time.monotonic())
