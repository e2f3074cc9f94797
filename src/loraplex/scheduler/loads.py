"""Which adapters are brought into the pool ahead of the sequences that wait for them."""

from collections.abc import Callable, Collection, Iterable
from itertools import islice

from loraplex.core import AdapterDigest
from loraplex.pool import AdapterResidency, AdapterState, PoolGeometry
from loraplex.scheduler.config import SchedulerConfig
from loraplex.scheduler.plan import AdapterLoad
from loraplex.scheduler.preloads import Preloads
from loraplex.scheduler.sequence import Sequence

_AHEAD = 4  # sequences beyond the free seats that adapters are loaded for: one in so many of all seats
_LEAST_AHEAD = 8


class LoadAhead:
    """Starts loads. Adapters come in the order in which their sequences will start, so the first in the queue is never
    held up by those behind it.
    """

    __slots__ = ("_config", "_geometry", "_preloads", "_residency")

    def __init__(
        self, config: SchedulerConfig, geometry: PoolGeometry, residency: AdapterResidency, preloads: Preloads
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._residency = residency
        self._preloads = preloads

    def start(
        self,
        in_turn: Iterable[Sequence],
        unplaced: Collection[AdapterDigest],
        spare_pages: Callable[[], int],
        num_running: int,
        now: float,
    ) -> tuple[AdapterLoad, ...]:
        """Lease pages for adapters of waiting sequences; the pages that are to be filled.

        `unplaced`: adapters that are waited for and have no pages. Loads are for those who would take the free seats
        and some behind them: who came far behind would lose its pages again to who goes before it. A load takes only
        what `spare_pages` and the sequences before it leave, and evicts no adapter that one of those waits for. The
        first that does not fit stops those behind it.
        """
        if not unplaced:
            return ()
        loads = []
        most = self._config.max_num_seqs
        most_ahead = most - num_running + max(_LEAST_AHEAD, most // _AHEAD)
        ahead, left = spare_pages(), set(unplaced)
        wanted: set[AdapterDigest] = set()
        for seq in islice(in_turn, most_ahead):
            ahead += self._geometry.pages_for_tokens(seq.num_tokens)
            if seq.adapter is None or seq.adapter in wanted:
                continue
            wanted.add(seq.adapter)
            left.discard(seq.adapter)
            if self._residency.state(seq.adapter, now) is AdapterState.ABSENT:
                if not self._begin(seq, seq.adapter, ahead, wanted, now):
                    break
                loads.append(AdapterLoad(seq.adapter, self._residency.pages(seq.adapter)))
                left = {digest for digest in unplaced if digest not in wanted}  # one may have been evicted for it
            if not left:
                break
        return tuple(loads)

    def _begin(self, seq: Sequence, digest: AdapterDigest, ahead: int, wanted: set[AdapterDigest], now: float) -> bool:
        """Lease its pages if they fit beside the `ahead` that those before it take, and into what may be on its way."""
        bound = self._config.max_load_pages
        loading = self._residency.num_loading_pages - self._preloads.num_loading_pages
        if bound is not None and loading and loading + seq.adapter_pages > bound:
            return False
        if not self._residency.can_make_room(ahead + seq.adapter_pages, wanted):
            return False
        return self._residency.begin_load(digest, seq.adapter_pages, wanted, now)

    def missing_pages(self, seq: Sequence) -> int:
        """Pages that a waiting sequence does not have yet, its adapter's included."""
        assert seq.adapter is not None
        is_placed = self._residency.state(seq.adapter) in (AdapterState.LOADING, AdapterState.RESIDENT)
        return self._geometry.pages_for_tokens(seq.num_tokens) + (0 if is_placed else seq.adapter_pages)
