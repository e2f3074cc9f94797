"""Thousands of adapters for one engine that share a few page images in host memory.

A host of 128 GiB cannot hold 2000 adapters of the production mix. Each of these has its own digest and its own pages in
the pool; copied from are a few images a rank, packed as the engine packs every adapter.
"""

import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench_mixed_ranks import production_ranks
from engine_runs import say
from llama8b import make_adapter, make_buffers
from loraplex.core import AdapterDigest, AdapterRef
from loraplex.engine import Engine
from loraplex.engine.packing import PackedAdapter
from open_loop import cap_pool, evict_all, touch

SMALL_RANK = 32  # what is asked of cold adapters is asked up to here


class LogicalAdapters:
    """Adapters of one engine. `modules` are those adapted, None all; `images`: physical ones a rank, fewer above 32."""

    def __init__(self, engine: Engine, images: int, modules: Sequence[str] | None = None) -> None:
        self._engine = engine
        self._most_images = images
        self._modules = tuple(modules or sorted({site.module for site in engine.base.sites}))
        self._images: dict[int, list[PackedAdapter]] = {}
        self._rank: dict[AdapterDigest, int] = {}

    def add(self, name: str, rank: int) -> AdapterRef:
        """Make an adapter known to the engine."""
        images = self._images.get(rank) or self._make_images(rank)
        digest = AdapterDigest(hashlib.sha256(f"{name} of rank {rank}".encode()).hexdigest())
        self._engine.shelf.packed[digest] = images[len(self._rank) % len(images)]
        self._rank[digest] = rank
        return AdapterRef(name, 1, digest)

    def _make_images(self, rank: int) -> list[PackedAdapter]:
        """Fewer of large ranks: their bytes are as many."""
        sites, packed = self._engine.base.sites, self._engine.shelf.packed
        buffers = make_buffers(sites, rank)
        images = self._images[rank] = []
        for number in range(min(self._most_images, max(2, self._most_images * 32 // rank))):
            adapter = make_adapter(sites, dict.fromkeys(self._modules, rank), 1000 * rank + number, buffers)
            self._engine.add_adapter(adapter)
            images.append(packed[adapter.digest])
        return images

    def rank(self, ref: AdapterRef) -> int:
        return self._rank[ref.digest]

    def num_pages(self, ref: AdapterRef) -> int:
        """Pages that an adapter takes in the pool."""
        return self._engine.shelf.packed[ref.digest].num_pages

    def begin_load(self, ref: AdapterRef) -> bool:
        """Have an adapter loaded that no request waits for, as `scheduler.start_loads` would; False without room."""
        residency, pages = self._engine.scheduler.residency, self.num_pages(ref)
        if not residency.begin_load(ref.digest, pages, (), time.monotonic()):
            return False
        image = self._engine.shelf.packed[ref.digest].image
        self._engine.shelf._loader.begin(ref.digest, residency.pages(ref.digest), image)
        return True

    @property
    def host_bytes(self) -> int:
        """Of all images."""
        pages = sum(one.num_pages for images in self._images.values() for one in images)
        return pages * self._engine._geometry.page_bytes


# ---------------------------------------------------------------------- a fleet
@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything registered: adapters from the most to the least wanted, and what the pool is cut to."""

    engine: Engine
    adapters: LogicalAdapters
    refs: list[AdapterRef]
    pool_pages: int

    def rank(self, ref: AdapterRef) -> int:
        return self.adapters.rank(ref)

    def of_ranks(self, ranks: Sequence[int], spared: Sequence[AdapterRef] = ()) -> list[AdapterRef]:
        """The most wanted adapters of these ranks, each another one, without `spared`."""
        kept = set(spared)
        left = {rank: iter([r for r in self.refs if self.rank(r) == rank and r not in kept]) for rank in set(ranks)}
        return [next(left[rank]) for rank in ranks]

    def cold(self, count: int, spared: Sequence[AdapterRef] = ()) -> list[AdapterRef]:
        """Adapters of small ranks that are not in the pool, the least wanted last."""
        resident, kept = set(self.engine.scheduler.residency.resident), set(spared)
        small = (r for r in self.refs if self.rank(r) <= SMALL_RANK and r.digest not in resident and r not in kept)
        found = [ref for ref, _ in zip(small, range(count), strict=False)]
        assert len(found) == count, f"{len(found)} adapters of ranks up to {SMALL_RANK} are cold, {count} are wanted"
        return found


def make_fleet(engine: Engine, count: int, images: int, pool_share: float, seed: int) -> Fleet:
    """Register adapters of ranks as in production on all linears; who is wanted most has nothing to do with ranks."""
    ranks = production_ranks(count)
    random.Random(seed).shuffle(ranks)
    adapters = LogicalAdapters(engine, images)
    refs = [adapters.add(f"tenant-{number}", rank) for number, rank in enumerate(ranks)]
    pages = sum(adapters.num_pages(ref) for ref in refs)
    say(f"{count} adapters of {pages} pages; {adapters.host_bytes / 1e9:.1f} GB of images in host memory")
    return Fleet(engine, adapters, refs, int(pool_share * pages))


@contextmanager
def pinned(fleet: Fleet, refs: Sequence[AdapterRef]) -> Iterator[None]:
    """Adapters in the pool that are not evicted meanwhile."""
    residency = fleet.engine.scheduler.residency
    touch(fleet.engine, refs)
    for ref in refs:
        assert residency.acquire(ref.digest, fleet.adapters.num_pages(ref), time.monotonic()), "no room to pin adapters"
    try:
        yield
    finally:
        for ref in refs:
            residency.release(ref.digest)


@contextmanager
def full_pool(fleet: Fleet) -> Iterator[None]:
    """The pool cut to its share, and full of idle adapters of small ranks, so that every load evicts."""
    evict_all(fleet.engine)
    lease = cap_pool(fleet.engine, fleet.pool_pages)
    left, chosen = fleet.pool_pages, []
    for ref in reversed(fleet.refs):
        left -= fleet.adapters.num_pages(ref) if fleet.rank(ref) <= SMALL_RANK else 0
        if left <= 0:
            break
        chosen += [ref] if fleet.rank(ref) <= SMALL_RANK else []
    try:
        touch(fleet.engine, chosen)
        yield
    finally:
        evict_all(fleet.engine)
        lease.release()
