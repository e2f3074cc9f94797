"""A source whose adapter could not be had is left alone for a while: twice as long each time, for each tenant apart."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from loraplex.core import AdapterRefused, LoraplexError, Overloaded, OverloadReason
from loraplex.core.registry_errors import StoreUnavailable

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 60.0
MAX_SOURCES = 4096  # remembered, of all tenants


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
        self._failed: OrderedDict[tuple[str, Hashable], _Failed] = OrderedDict()

    def check(self, tenant: str, key: Hashable) -> None:
        """Raise Overloaded, or what the source was refused for, while it is left alone."""
        failed = self._failed.get((tenant, key))
        if failed is None or (wait_s := failed.until_s - self._clock()) <= 0.0:
            return
        if failed.refusal is not None:
            old = failed.refusal
            raise AdapterRefused(old.reason, old.message, old.subject)
        message = f"The adapter's weights could not be read ({failed.code}); they are read again in {wait_s:.1f} s."
        raise Overloaded(message, wait_s, OverloadReason.ADAPTER_LOAD)

    def note(self, tenant: str, key: Hashable, error: Exception) -> float:
        """Book a failure, once for a read that still goes on; the seconds for which the source is left alone."""
        before = self._failed.pop((tenant, key), None)
        is_same = isinstance(error, StoreUnavailable) and error.goes_on
        count = 1 if before is None else before.count + (not is_same)
        wait_s = min(FIRST_BACKOFF_S * 2.0 ** min(count - 1, 16), LONGEST_BACKOFF_S)
        refusal = error if isinstance(error, AdapterRefused) else None
        code = error.code if isinstance(error, LoraplexError) else LoraplexError.code
        self._failed[tenant, key] = _Failed(count, self._clock() + wait_s, refusal, code)
        if len(self._failed) > MAX_SOURCES:
            self._failed.popitem(last=False)
        return wait_s

    def forget(self, tenant: str, key: Hashable) -> None:
        """The source is good."""
        self._failed.pop((tenant, key), None)
