"""Cached prefixes: full pages of KV that sequences of one tenant on one adapter share.

A prefix is a path in a tree: a node is one page, known by its parent and by its tokens themselves, never by a hash, so
another text's KV cannot be taken for it. Every (tenant, adapter) has a tree of its own. A node counts the sequences
that use it; who uses a node uses those before it. A node without users can be evicted once none follows it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loraplex.core import AdapterDigest, PageId
from loraplex.pool.idle import IdlePages
from loraplex.pool.pool import Lease, PagePool

MAX_HITS = 32  # hits of a node that count for its worth
_FIRST_PAGES = 64  # pages that are taken to be used again before it is known
_REMEMBERED_PAGES = 2**14
_LEAST_SHARE = 1 / 64


@dataclass(frozen=True, slots=True)
class CacheSpace:
    """Who may share: requests of one tenant on one adapter version, or on the base (None)."""

    tenant: str
    digest: AdapterDigest | None

    @property
    def namespace(self) -> str:
        """Of the pages: no page is ever in two."""
        return f"prefix:{self.digest or 'base'}:{self.tenant}"


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One page of a prefix. Held by the cache; sequences count themselves in and out."""

    space: CacheSpace
    parent: "PrefixNode | None"
    tokens: tuple[int, ...]
    lease: Lease | None
    children: dict[tuple[int, ...], "PrefixNode"] = field(default_factory=dict)
    num_users: int = 0
    num_hits: int = 0

    @property
    def page(self) -> PageId:
        assert self.lease is not None, "the root has no page"
        return self.lease.pages[0]


class Reuse:
    """The share of pages that were used again, of those that were cached lately, as a power of two.

    Where it moved with every page, of two pages that nobody used again the younger would be worth less.
    """

    __slots__ = ("_num_pages", "_num_reused")

    def __init__(self) -> None:
        self._num_pages = self._num_reused = _FIRST_PAGES

    def cached(self) -> None:
        """A page was."""
        self._num_pages += 1
        if self._num_pages > _REMEMBERED_PAGES:
            self._num_pages //= 2
            self._num_reused //= 2

    def reused(self) -> None:
        """A page was used for the first time by a sequence that did not compute it."""
        self._num_reused = min(self._num_reused + 1, self._num_pages)

    @property
    def share(self) -> float:
        return 2.0 ** round(math.log2(max(self._num_reused / self._num_pages, _LEAST_SHARE)))


class PrefixCache:
    """All trees. `page_s`: seconds that computing a page again takes; 0 evicts least recently used first."""

    __slots__ = (
        "_absent",
        "_idle",
        "_page_tokens",
        "_pool",
        "_reuse",
        "_roots",
        "_spaces",
        "num_evictions",
        "num_pages",
        "on_evict",
        "page_s",
    )

    def __init__(self, pool: PagePool, idle: IdlePages, page_tokens: int, page_s: float = 0.0) -> None:
        self._pool = pool
        self._idle = idle
        self._page_tokens = page_tokens
        self._reuse = Reuse()
        self.page_s = page_s  # that nodes are valued by which become idle
        self._roots: dict[CacheSpace, PrefixNode] = {}
        self._spaces: dict[AdapterDigest | None, set[CacheSpace]] = {}
        self._absent: set[AdapterDigest] = set()  # adapters with cached prefixes that are not in the pool
        self.num_pages = 0
        self.num_evictions = 0
        self.on_evict: Callable[[], None] = lambda: None  # for each page that gave way

    # ------------------------------------------------------------------ look-ups
    def match(self, space: CacheSpace, tokens: Sequence[int], num_tokens: int) -> tuple[PrefixNode, ...]:
        """The longest cached prefix within the first `num_tokens` tokens; changes nothing."""
        node, found, size = self._roots.get(space), [], self._page_tokens
        for start in range(0, num_tokens - size + 1, size):
            node = node.children.get(tuple(tokens[start : start + size])) if node is not None else None
            if node is None:
                break
            found.append(node)
        return tuple(found)

    @staticmethod
    def num_unused(nodes: Sequence[PrefixNode]) -> int:
        """How many of these pages count as evictable now."""
        return sum(not node.num_users for node in nodes)

    # ------------------------------------------------------------------ use
    def acquire(self, nodes: Sequence[PrefixNode]) -> None:
        """One more sequence uses a prefix."""
        for node in nodes:
            if not node.num_users:
                self._leave_idle(node)
            if not node.num_hits:
                self._reuse.reused()
            node.num_users += 1
            node.num_hits += 1

    def release(self, nodes: Sequence[PrefixNode]) -> None:
        """One sequence less uses a prefix; the whole of it is kept until its pages are wanted."""
        for node in reversed(nodes):
            assert node.num_users > 0, "prefix released more often than acquired"
            node.num_users -= 1
            if not node.num_users:
                self._enter_idle(node)

    def extend(self, space: CacheSpace, nodes: Sequence[PrefixNode], tokens: Sequence[int], lease: Lease) -> PrefixNode:
        """Cache the first page of a sequence's lease, the KV of `tokens`, after `nodes`, which the sequence uses.

        If that prefix was cached meanwhile, the sequence goes on with the cached page and its own is freed.
        """
        assert len(tokens) == self._page_tokens
        parent, key = nodes[-1] if nodes else self._root(space), tuple(tokens)
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = PrefixNode(space, parent, key, lease.hand_on(space.namespace))
            self.num_pages += 1
            self._reuse.cached()
        else:
            lease.drop_first()
            if not node.num_users:
                self._leave_idle(node)
        node.num_users += 1
        return node

    def _root(self, space: CacheSpace) -> PrefixNode:
        root = self._roots.get(space)
        if root is None:
            root = self._roots[space] = PrefixNode(space, None, (), None)
            self._spaces.setdefault(space.digest, set()).add(space)
        return root

    # ------------------------------------------------------------------ eviction
    def _enter_idle(self, node: PrefixNode) -> None:
        if node.children:
            self._idle.num_covered += 1
        else:
            self._queue(node)

    def _leave_idle(self, node: PrefixNode) -> None:
        if node in self._idle:
            self._idle.remove(node)
        else:
            self._idle.num_covered -= 1

    def _queue(self, node: PrefixNode) -> None:
        is_lost = node.space.digest in self._absent
        worth = None if is_lost else min(node.num_hits + self._reuse.share, MAX_HITS) * self.page_s
        self._idle.add(node, 1, worth, lambda: self._make_room(node))

    def _make_room(self, node: PrefixNode) -> None:
        """Free a page because it is wanted."""
        self._evict(node)
        self.on_evict()

    def _evict(self, node: PrefixNode) -> None:
        """Free a page that nobody uses and that none follows."""
        assert not node.num_users
        assert not node.children
        assert node.lease is not None
        assert node.parent is not None
        self._idle.remove(node)
        node.lease.release()
        self.num_pages -= 1
        self.num_evictions += 1
        parent = node.parent
        del parent.children[node.tokens]
        if parent.children:
            return
        if parent.parent is None:
            self._forget(parent.space)
        elif not parent.num_users:
            self._idle.num_covered -= 1
            self._queue(parent)

    def _forget(self, space: CacheSpace) -> None:
        del self._roots[space]
        spaces = self._spaces[space.digest]
        spaces.discard(space)
        if not spaces:
            del self._spaces[space.digest]
            if space.digest is not None:
                self._absent.discard(space.digest)

    def adapter_left(self, digest: AdapterDigest) -> None:
        """An adapter left the pool: the prefixes computed with it go before everything else."""
        if digest not in self._spaces:
            return
        self._absent.add(digest)
        for node in self._idle_leaves(digest):
            self._idle.remove(node)
            self._queue(node)

    def adapter_came(self, digest: AdapterDigest) -> None:
        """An adapter is in the pool again: what is left of its prefixes is worth keeping again."""
        if digest in self._absent:
            self._absent.discard(digest)
            for node in self._idle_leaves(digest):
                self._idle.remove(node)
                self._queue(node)

    def drop(self, digest: AdapterDigest) -> None:
        """Free all that was computed with an adapter and is not in use: nobody may ask for it any more."""
        while leaves := self._idle_leaves(digest):
            for node in leaves:
                self._evict(node)

    def discard(self, nodes: Sequence[PrefixNode]) -> None:
        """Free a prefix from its end as far as nobody uses it."""
        for node in reversed(nodes):
            if node not in self._idle:
                return
            self._evict(node)

    def _idle_leaves(self, digest: AdapterDigest) -> list[PrefixNode]:
        nodes = [self._roots[space] for space in sorted(self._spaces.get(digest, ()), key=lambda space: space.tenant)]
        leaves = []
        for node in nodes:  # grows while it is read
            nodes.extend(node.children.values())
            if node in self._idle:
                leaves.append(node)
        return leaves

    def check_invariants(self) -> None:
        """Users, pages and idle entries agree; every page is in its own space."""
        nodes = list(self._roots.values())
        for node in nodes:  # grows while it is read
            nodes.extend(node.children.values())
        pages = [node for node in nodes if node.parent is not None]
        assert len(pages) == self.num_pages, "a cached page leaked"
        covered = 0
        for node in pages:
            assert node.parent is not None
            assert node.lease is not None
            assert node.lease.namespace == node.space.namespace == node.parent.space.namespace
            assert not node.lease.is_released
            assert node.parent.parent is None or node.parent.num_users >= node.num_users, (
                "a page is used without its own"
            )
            assert (node in self._idle) == (not node.num_users and not node.children)
            covered += not node.num_users and bool(node.children)
        assert covered == self._idle.num_covered
        assert all(root.children for root in self._roots.values()), "an empty tree was kept"
