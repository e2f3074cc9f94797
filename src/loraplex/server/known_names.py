"""What adapters were called of late, for operators who look at digests and for gateways.

They are asked for by requests, and by the server itself where they are pinned or preloaded.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from loraplex.core import AdapterDigest

MAX_ADAPTERS = 16_384  # digests, and names asked for without a version
MAX_NAMES = 4  # of each


class KnownNames:
    """Labels by digest, of the adapters asked for last, and what names without a version stood for last.

    A label is `tenant/name@version`. Both memories are bounded; what was asked for longest ago is forgotten first.
    """

    __slots__ = ("_current", "_labels", "_meanings")

    def __init__(self) -> None:
        self._labels: OrderedDict[AdapterDigest, OrderedDict[str, None]] = OrderedDict()
        self._current: OrderedDict[str, AdapterDigest] = OrderedDict()  # by `tenant/name`
        self._meanings: dict[str, Counter[AdapterDigest]] = {}  # by `name`: for how many tenants it stands for each

    def note(self, digest: AdapterDigest, label: str) -> None:
        """An adapter was asked for by a label."""
        labels = self._labels.setdefault(digest, OrderedDict())
        labels[label] = None
        labels.move_to_end(label)
        self._labels.move_to_end(digest)
        if len(labels) > MAX_NAMES:
            labels.popitem(last=False)
        if len(self._labels) > MAX_ADAPTERS:
            self._labels.popitem(last=False)

    def note_current(self, digest: AdapterDigest, label: str) -> None:
        """As `note`, where the request named no version: from now on the name stands for this adapter."""
        self.note(digest, label)
        path = _path(label)
        before = self._current.pop(path, None)
        if before is not None:
            self._forget(path, before)
        self._current[path] = digest
        self._meanings.setdefault(_name(path), Counter())[digest] += 1
        if len(self._current) > MAX_ADAPTERS:
            self._forget(*self._current.popitem(last=False))

    def of(self, digests: Iterable[AdapterDigest]) -> dict[AdapterDigest, tuple[str, ...]]:
        """Labels of adapters, the last one first, without adapters that nobody asked for lately."""
        return {digest: tuple(reversed(self._labels[digest])) for digest in digests if digest in self._labels}

    def current(self, digests: Iterable[AdapterDigest]) -> dict[AdapterDigest, tuple[str, ...]]:
        """Names, without tenant and version, that stand for these adapters, and for no other with any tenant."""
        return {digest: self._names(digest, labels) for digest, labels in self.of(digests).items()}

    def of_tenants(self, tenants: Collection[str]) -> dict[str, set[str]]:
        """Names by tenant, of those tenants that have any here."""
        found: dict[str, set[str]] = {}
        paths = chain((_path(label) for labels in self._labels.values() for label in labels), self._current)
        for path in paths if tenants else ():
            tenant = path.partition("/")[0]
            if tenant in tenants:
                found.setdefault(tenant, set()).add(_name(path))
        return found

    def keep(self, asked: Mapping[str, Collection[str]], standing: Iterable[tuple[str, AdapterDigest, bool]]) -> None:
        """Of the names `asked`, by tenant, forget labels that are not `standing`: label, digest, whether active."""
        labels, active = set[tuple[str, AdapterDigest]](), set[tuple[str, AdapterDigest]]()
        for label, digest, is_active in standing:
            labels.add((label, digest))
            if is_active:
                active.add((_path(label), digest))

        def is_asked(path: str) -> bool:
            tenant, _, name = path.partition("/")
            return name in asked.get(tenant, ())

        for digest, known in list(self._labels.items()):
            for label in [one for one in known if (one, digest) not in labels and is_asked(_path(one))]:
                del known[label]
            if not known:
                del self._labels[digest]
        for path, digest in list(self._current.items()):
            if (path, digest) not in active and is_asked(path):
                del self._current[path]
                self._forget(path, digest)

    def _names(self, digest: AdapterDigest, labels: tuple[str, ...]) -> tuple[str, ...]:
        names = dict.fromkeys(_name(_path(label)) for label in labels)
        return tuple(name for name in names if self._meanings.get(name, {}).keys() == {digest})

    def _forget(self, path: str, digest: AdapterDigest) -> None:
        """A tenant's name stands for this adapter no more."""
        meanings = self._meanings[_name(path)]
        meanings[digest] -= 1
        if not meanings[digest]:
            del meanings[digest]
        if not meanings:
            del self._meanings[_name(path)]


def _path(label: str) -> str:
    """`tenant/name` of `tenant/name@version`."""
    return label.rpartition("@")[0]


def _name(path: str) -> str:
    """`name` of `tenant/name`."""
    return path.rpartition("/")[2]
