"""What adapters were called in the requests of late, for operators who look at digests."""

from collections import OrderedDict
from collections.abc import Iterable

from loraplex.core import AdapterDigest

MAX_ADAPTERS = 16_384
MAX_NAMES = 4  # of each


class KnownNames:
    """Names by digest: of the adapters asked for last, the names that each was asked for by last."""

    __slots__ = ("_names",)

    def __init__(self) -> None:
        self._names: OrderedDict[AdapterDigest, OrderedDict[str, None]] = OrderedDict()

    def note(self, digest: AdapterDigest, name: str) -> None:
        """An adapter was asked for by a name."""
        names = self._names.setdefault(digest, OrderedDict())
        names[name] = None
        names.move_to_end(name)
        self._names.move_to_end(digest)
        if len(names) > MAX_NAMES:
            names.popitem(last=False)
        if len(self._names) > MAX_ADAPTERS:
            self._names.popitem(last=False)

    def of(self, digests: Iterable[AdapterDigest]) -> dict[AdapterDigest, tuple[str, ...]]:
        """Names of adapters, the last one first, without those that nobody asked for lately."""
        return {digest: tuple(reversed(self._names[digest])) for digest in digests if digest in self._names}
