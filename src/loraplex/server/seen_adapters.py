"""What each tenant may know of what is in host memory: what would be there if it were alone."""

from collections import OrderedDict
from dataclasses import dataclass, field

from loraplex.core import AdapterDigest

MAX_SEEN = 2**18  # weights that are remembered, those of each tenant counted apart; about 40 MB


@dataclass(slots=True, eq=False)
class _Seen:
    """Bytes by weights, the least recently leased first."""

    weights: OrderedDict[AdapterDigest, int] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def drop_oldest(self) -> None:
        self.num_bytes -= self.weights.popitem(last=False)[1]


class SeenAdapters:
    """For each tenant an LRU of the host memory's size. So nobody learns that another tenant has the same weights."""

    __slots__ = ("_max_adapters", "_max_bytes", "_num_seen", "_tenants")

    def __init__(self, max_adapters: int | None, max_bytes: int) -> None:
        """The bounds of host memory; None: only bytes are bounded."""
        self._max_adapters = MAX_SEEN if max_adapters is None else max_adapters
        self._max_bytes = max_bytes
        self._num_seen = 0
        self._tenants: OrderedDict[str, _Seen] = OrderedDict()  # the least recently active first

    def lease(self, tenant: str, digest: AdapterDigest, num_bytes: int) -> bool:
        """Book a lease; whether the tenant, if it were alone, would have found the weights there."""
        seen = self._tenants.setdefault(tenant, _Seen())
        self._tenants.move_to_end(tenant)
        was_there = digest in seen.weights
        if was_there:
            seen.weights.move_to_end(digest)
        else:
            seen.weights[digest] = num_bytes
            seen.num_bytes += num_bytes
            self._num_seen += 1
        while len(seen.weights) > self._max_adapters or seen.num_bytes > self._max_bytes:
            self._drop(tenant, seen)
        if self._num_seen > MAX_SEEN:
            self._drop(*next(iter(self._tenants.items())))
        return was_there

    def _drop(self, tenant: str, seen: _Seen) -> None:
        """Forget what a tenant leased the longest ago, and with its last weights the tenant."""
        seen.drop_oldest()
        self._num_seen -= 1
        if not seen.weights:
            del self._tenants[tenant]
