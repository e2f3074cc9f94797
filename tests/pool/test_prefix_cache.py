"""Cached prefixes: verified by their tokens, apart by tenant and adapter, shared while used, evicted from the end."""

import pytest

from loraplex.core import AdapterDigest
from loraplex.pool import AdapterResidency, CacheSpace, IdlePages, PagePool, PrefixCache, PrefixNode, ReloadCost

A, B = (AdapterDigest(name * 64) for name in "ab")
X, Y = CacheSpace("x", A), CacheSpace("y", A)
TEXT = list(range(12))


class Cache:
    """A cache of pages of 4 tokens, and sequences that fill it."""

    def __init__(self, num_pages: int = 12, page_s: float = 1.0, reload: ReloadCost | None = None) -> None:
        self.pool, idle = PagePool(num_pages), IdlePages()
        self.cache = PrefixCache(self.pool, idle, 4, page_s)
        self.residency = AdapterResidency(self.pool, idle, reload)
        self.residency.on_evict = self.cache.adapter_left

    def fill(self, space: CacheSpace, tokens: list[int]) -> list[PrefixNode]:
        """A sequence computes its tokens and hands its full pages over; it goes on using them."""
        nodes = list(self.cache.match(space, tokens, len(tokens)))
        self.cache.acquire(nodes)
        lease = self.pool.allocate(len(tokens) // 4 - len(nodes), "kv:own")
        assert lease is not None
        for start in range(4 * len(nodes), len(tokens) - 3, 4):
            nodes.append(self.cache.extend(space, nodes, tokens[start : start + 4], lease))
        lease.release()
        self.check()
        return nodes

    def leave(self, *holdings: list[PrefixNode]) -> None:
        for nodes in holdings:
            self.cache.release(nodes)
        self.check()

    def check(self) -> None:
        self.cache.check_invariants()
        self.residency.check_invariants()
        assert self.pool.num_free + self.cache.num_pages + self.residency.num_pages == self.pool.num_pages

    def found(self, space: CacheSpace, tokens: list[int], limit: int | None = None) -> int:
        return len(self.cache.match(space, tokens, len(tokens) if limit is None else limit))


def test_prefix_is_found_page_by_page_as_far_as_tokens_agree() -> None:
    cache = Cache()
    cache.leave(cache.fill(X, TEXT))
    assert cache.found(X, TEXT) == 3
    assert cache.found(X, [*TEXT[:8], 99, 9, 10, 11]) == 2
    assert cache.found(X, [99, *TEXT[1:]]) == 0
    assert [cache.found(X, TEXT, limit) for limit in (3, 4, 11, 12)] == [0, 1, 2, 3], "never beyond the limit"


def test_the_same_tokens_after_another_beginning_are_another_prefix() -> None:
    cache = Cache()
    cache.leave(cache.fill(X, [1, 1, 1, 1, *TEXT[:4]]))
    assert cache.found(X, [2, 2, 2, 2, *TEXT[:4]]) == 0
    assert cache.found(X, TEXT[:4]) == 0


@pytest.mark.parametrize("other", [Y, CacheSpace("x", B), CacheSpace("x", None)])
def test_nothing_is_shared_with_another_tenant_adapter_or_the_base(other: CacheSpace) -> None:
    cache = Cache()
    cache.leave(cache.fill(X, TEXT))
    assert cache.found(other, TEXT) == 0
    cache.leave(cache.fill(other, TEXT))
    assert cache.cache.num_pages == 6
    assert cache.found(X, TEXT) == cache.found(other, TEXT) == 3


def test_two_who_compute_the_same_go_on_with_one_page() -> None:
    cache = Cache()
    first = cache.fill(X, TEXT[:4])
    lease = cache.pool.allocate(1, "kv:own")
    assert lease is not None
    again = cache.cache.extend(X, [], TEXT[:4], lease)
    assert again is first[0]
    assert (lease.num_pages, again.num_users, cache.cache.num_pages) == (0, 2, 1)
    lease.release()
    cache.leave(first, [again])


def test_a_prefix_in_use_is_never_evicted() -> None:
    cache = Cache(num_pages=3)
    nodes = cache.fill(X, TEXT)
    assert not cache.residency.can_make_room(1)
    cache.leave(nodes[1:])
    assert cache.residency.can_make_room(2)
    assert not cache.residency.can_make_room(3)
    assert cache.residency.make_room(2)
    assert cache.found(X, TEXT) == 1
    cache.leave(nodes[:1])


def test_pages_go_from_the_end_of_a_prefix() -> None:
    cache = Cache(num_pages=3)
    cache.leave(cache.fill(X, TEXT))
    for left in (2, 1, 0):
        assert cache.residency.make_room(3 - left)
        assert cache.found(X, TEXT) == left
        cache.check()


def test_prefix_that_is_hit_outlives_one_that_is_not() -> None:
    cache = Cache(num_pages=4)
    cache.leave(cache.fill(X, TEXT[:4]))
    cache.leave(cache.fill(X, [7] * 4))
    for _ in range(3):
        nodes = list(cache.cache.match(X, TEXT[:4], 4))
        cache.cache.acquire(nodes)
        cache.leave(nodes)
    cache.leave(cache.fill(X, [8] * 4))
    assert cache.residency.make_room(3)
    assert cache.found(X, TEXT[:4]) == 1


def test_pages_that_are_never_used_again_count_little() -> None:
    """A reload of an adapter's page takes a tenth of computing a prefix's: it goes first while reuse is likely."""
    for num_before, kept in ((0, 1), (2000, 0)):
        cache = Cache(num_pages=6, reload=ReloadCost(page_s=0.1))
        for number in range(num_before):
            cache.leave(cache.fill(X, [100 + number] * 4))
            cache.cache.discard(list(cache.cache.match(X, [100 + number] * 4, 4)))
        cache.residency.acquire(B, 2)
        cache.residency.release(B)
        for number in range(4):
            cache.leave(cache.fill(X, [number] * 4))
        assert cache.residency.make_room(2)
        assert cache.residency.is_resident(B) == (not kept)
        found = [cache.found(X, [number] * 4) for number in range(4)]
        assert found == ([1, 1, 1, 1] if kept else [0, 0, 1, 1]), "of the prefixes the least recently used goes first"
        cache.check()


def test_prefix_whose_adapter_left_goes_first() -> None:
    cache = Cache(num_pages=5, reload=ReloadCost(page_s=0.01))
    cache.residency.acquire(A, 1)
    cache.residency.release(A)
    cache.leave(cache.fill(X, TEXT[:8]))
    cache.leave(cache.fill(CacheSpace("x", B), TEXT[:4]))
    assert cache.residency.make_room(2), "the adapter is worth less than any page"
    assert not cache.residency.is_resident(A)
    assert cache.residency.make_room(4)
    assert (cache.found(X, TEXT), cache.found(CacheSpace("x", B), TEXT)) == (0, 1)
    cache.check()


def test_adapter_that_came_back_makes_its_prefixes_worth_keeping() -> None:
    cache = Cache(num_pages=5)
    other = CacheSpace("x", B)
    cache.leave(cache.fill(other, TEXT[:4]))
    cache.leave(cache.fill(X, TEXT[:8]))
    cache.cache.adapter_left(A)
    cache.cache.adapter_came(A)
    assert cache.residency.make_room(3)
    assert (cache.found(X, TEXT), cache.found(other, TEXT)) == (2, 0), "least recently used first again"


def test_drop_frees_all_that_is_not_in_use() -> None:
    cache = Cache()
    used = cache.fill(X, TEXT[:4])
    cache.leave(cache.fill(X, TEXT))
    cache.leave(cache.fill(Y, TEXT))
    cache.cache.drop(A)
    cache.check()
    assert (cache.cache.num_pages, cache.found(X, TEXT), cache.found(Y, TEXT)) == (1, 1, 0)
    cache.leave(used)
    cache.cache.drop(A)
    assert cache.pool.num_free == 12


def test_discard_stops_at_what_others_use_or_follow() -> None:
    cache = Cache()
    mine, other = cache.fill(X, TEXT), cache.fill(X, TEXT[:4])
    cache.leave(mine)
    cache.cache.discard(mine)
    assert cache.found(X, TEXT) == 1
    cache.leave(other)
    cache.cache.discard(other)
    assert cache.pool.num_free == 12


def test_release_without_acquire_raises() -> None:
    cache = Cache()
    nodes = cache.fill(X, TEXT[:4])
    cache.leave(nodes)
    with pytest.raises(AssertionError, match="more often"):
        cache.cache.release(nodes)


@pytest.mark.parametrize("harm", ["users", "pages", "idle", "space"])
def test_check_invariants_finds(harm: str) -> None:
    cache = Cache()
    nodes = cache.fill(X, TEXT)
    cache.cache.check_invariants()
    if harm == "users":
        nodes[0].num_users = 0
    elif harm == "pages":
        cache.cache.num_pages += 1
    elif harm == "idle":
        cache.cache._idle.num_covered += 1
    else:
        nodes[1].space = Y
    with pytest.raises(AssertionError):
        cache.cache.check_invariants()
