"""A source whose adapter could not be had is left alone for a while: twice as long each time, for each tenant apart."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from loraplex.core import AdapterDigest, AdapterRefused, LoraplexError, Overloaded, OverloadReason
from loraplex.core.own_text import OwnText
from loraplex.core.registry_errors import StoreUnavailable

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 60.0
MAX_SOURCES = 4096  # remembered, of all tenants

_log = logging.getLogger(__name__)

SourceKey = tuple[AdapterDigest, Hashable]
"""An adapter and a place that it is read from."""


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why an adapter could not be read, as the code of an error, and after how many seconds that is tried again."""

    code: str
    retry_after_s: float


@dataclass(slots=True, eq=False)
class _Failed:
    count: int
    until_s: float
    refusal: AdapterRefused | None  # told again as it is: waiting does not mend it
    code: str


class LoadBackoff:
    """What failed lately, by tenant and source. A tenant learns nothing of others that have the same weights."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failed: OrderedDict[tuple[str, SourceKey], _Failed] = OrderedDict()

    def check(self, tenant: str, key: SourceKey) -> None:
        """Raise Overloaded, or what the source was refused for, while it is left alone."""
        failed = self._failed.get((tenant, key))
        if failed is None or (wait_s := failed.until_s - self._clock()) <= 0.0:
            return
        if failed.refusal is not None:
            old = failed.refusal
            raise AdapterRefused(old.reason, old.message, old.subject)
        message = f"The adapter's weights could not be read ({failed.code}); they are read again in {wait_s:.1f} s."
        raise Overloaded(message, wait_s, OverloadReason.ADAPTER_LOAD)

    def note(self, tenant: str, key: SourceKey, error: Exception) -> float:
        """Book a failure, once for a read that still goes on; the seconds for which the source is left alone.

        The log is told of the first one in a row.
        """
        before = self._failed.pop((tenant, key), None)
        is_same = isinstance(error, StoreUnavailable) and error.goes_on
        count = 1 if before is None else before.count + (not is_same)
        wait_s = min(FIRST_BACKOFF_S * 2.0 ** min(count - 1, 16), LONGEST_BACKOFF_S)
        refusal = error if isinstance(error, AdapterRefused) else None
        code = error.code if isinstance(error, LoraplexError) else LoraplexError.code
        self._failed[tenant, key] = _Failed(count, self._clock() + wait_s, refusal, code)
        if len(self._failed) > MAX_SOURCES:
            self._failed.popitem(last=False)
        if before is None:
            _log.warning(
                "adapter %s could not be read (%s); it is tried again after %.3g s, twice as long each time, up "
                "to %.3g s, and no line tells of it until it has been read",
                OwnText(key[0]),
                OwnText(code),
                wait_s,
                LONGEST_BACKOFF_S,
            )
        return wait_s

    def failures(self) -> dict[AdapterDigest, LoadFailure]:
        """The adapters that are left alone now; of several sources the one that is tried again first."""
        now, found = self._clock(), dict[AdapterDigest, LoadFailure]()
        for (_, (digest, _)), failed in self._failed.items():
            wait_s, known = failed.until_s - now, found.get(digest)
            if wait_s > 0.0 and (known is None or wait_s < known.retry_after_s):
                found[digest] = LoadFailure(failed.code, wait_s)
        return found

    def forget(self, tenant: str, key: SourceKey) -> None:
        """The source is good."""
        self._failed.pop((tenant, key), None)
