"""A model whose tokens are a hash of (adapter, tokens so far), on a device that is played over the real page buffer.

What a token depends on is read back from the pages: a page that is used again too early, another adapter, or a prefix
of somebody else gives other tokens. Every KV cell also says whose it is, so that a mix-up is told where it happens.
"""

import random
import struct
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loraplex.core import AdapterDigest, PageId, SequenceId
from loraplex.engine.batch import PageBuffer
from loraplex.engine.host_arena import HostPages
from loraplex.engine.runner import LoadMark, Step, StepInFlight
from loraplex.model import Sampled
from loraplex.scheduler.sequence import UNKNOWN_TOKEN

VOCAB = 160
MAX_TOLD = 20
_COPY_SHARE = 0.2  # of the host's questions upon which the next copy runs: some steps later
_TAGS = 4  # of a cell: token, position, adapter, tenant; float32 holds them exactly


def _seed(digest: str | None) -> int:
    return zlib.crc32((digest or "base").encode())


def _token(crc: int) -> int:
    return (crc ^ (crc >> 15)) % VOCAB


def continuation(digest: str | None, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model continues a prompt with, by an adapter's digest or with None by the base."""
    crc = zlib.crc32(np.array(prompt, dtype="<i4").tobytes(), _seed(digest))
    tokens = []
    for _ in range(num_tokens):
        tokens.append(_token(crc))
        crc = zlib.crc32(struct.pack("<i", tokens[-1]), crc)
    return tokens


def image_crc(image: NDArray[np.float32]) -> int:
    """What an adapter's pages are recognised by. [num_pages, page_elems]."""
    return zlib.crc32(np.ascontiguousarray(image).data)


@dataclass(eq=False)
class Faults:
    """What goes wrong on the device. Copies fail at random, those of `broken` adapters always."""

    copy_share: float = 0.0
    broken: frozenset[int] = frozenset()  # by `first_crc`
    nonfinite: frozenset[AdapterDigest] = frozenset()


def first_crc(page: NDArray[np.float32]) -> int:
    """What an adapter is recognised by when its copy begins: its first page."""
    return zlib.crc32(np.ascontiguousarray(page).data)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk as the device gets it: what the host knew when the step was launched."""

    seq_id: SequenceId
    start: int
    tokens: tuple[int, ...]
    samples: bool
    adapter: AdapterDigest | None
    tenant: int
    pages: NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _InFlight:
    runner: "HashRunner"
    chunks: tuple[_Chunk, ...]
    adapters: tuple[tuple[AdapterDigest, tuple[PageId, ...]], ...]
    drawn: list[Sampled] | None = None

    def wait(self) -> list[Sampled]:
        while self.drawn is None:
            self.runner.run_next()
        return self.drawn


@dataclass(slots=True, eq=False)
class _Mark:
    """Copies are done when the device has got there, which it does now and then when it is asked."""

    runner: "HashRunner"
    num_copies: int
    is_held_up: bool = False

    def is_done(self) -> bool:
        if self.runner.num_copied < self.num_copies and self.runner.rng.random() < _COPY_SHARE:
            self.runner.copy_next()
        return self.runner.num_copied >= self.num_copies


@dataclass(eq=False)
class HashRunner:
    """A Runner. Steps and copies each run in the order they were asked for, as late as the host's questions allow.

    A copy runs after the steps that were launched before it. Steps launched later do not wait for it.

    `known` has the adapter of each image by `image_crc`. `check` is called between steps now and then.
    """

    buffer: PageBuffer
    known: Mapping[int, AdapterDigest]
    free_pages: Callable[[], Collection[PageId]]
    check: Callable[[], None]
    rng: random.Random
    overlaps: bool = False
    faults: Faults = field(default_factory=Faults)
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    num_run: int = 0  # of what `launch` asked for
    num_copied: int = 0
    copies_aside: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._rows = self.buffer.rows.numpy()
        self._cells = self.buffer.kv.numpy()[:, 0, 0, :, 0, :_TAGS]  # [num_pages, page_tokens, 4]
        self._page_tokens = self.buffer.geometry.page_tokens
        self._steps: deque[Callable[[], None]] = deque()
        self._copies: deque[tuple[int, Callable[[], None]]] = deque()  # each with the steps that it runs after
        self._last: dict[SequenceId, int] = {}  # what the last step drew
        self._tenants: dict[str | None, int] = {}
        self._numbers = {digest: number for number, digest in enumerate(self.known.values(), start=1)}

    # ------------------------------------------------------------------ asked by the host
    def load(self, pages: Sequence[PageId], image: HostPages) -> None:
        if self.rng.random() < self.faults.copy_share or self._is_broken(image):
            self.counts["failed copies"] += 1
            raise RuntimeError("the copy failed, as the test wants it")
        self._copies.append((self.num_run + len(self._steps), lambda: self.buffer.fill(pages, image)))

    def _is_broken(self, image: HostPages) -> bool:
        return bool(self.faults.broken) and first_crc(image[0].numpy()) in self.faults.broken

    def load_mark(self) -> LoadMark:
        return _Mark(self, self.num_copied + len(self._copies))

    def copy_s(self, num_bytes: int) -> float:
        return 0.0

    def follow(self, mark: LoadMark) -> None:
        raise AssertionError("no copies run aside")

    def launch(self, step: Step) -> StepInFlight:
        self.counts["steps"] += 1
        if self.counts["steps"] % 16 == 0:
            self.check()
            free = np.array(self.free_pages(), dtype=np.int64)
            self._steps.append(lambda: self._rows.__setitem__(free, np.nan))
        in_flight = _InFlight(self, tuple(self._chunks(step)), step.plan.adapters)
        self._steps.append(lambda: self._run(in_flight))
        return in_flight

    def _chunks(self, step: Step) -> list[_Chunk]:
        chunks = []
        for chunk in step.plan.chunks:
            sequence = step.sequences[chunk.seq_id]
            tokens = tuple(sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens])
            tenant = self._tenants.setdefault(sequence.tenant, len(self._tenants) + 1)
            pages = np.array(chunk.pages, dtype=np.int64)
            chunks.append(_Chunk(chunk.seq_id, chunk.start, tokens, chunk.samples, chunk.adapter, tenant, pages))
        return chunks

    # ------------------------------------------------------------------ done by the device
    def run_next(self) -> None:
        """Run the next step."""
        self._steps.popleft()()
        self.num_run += 1

    def copy_next(self) -> None:
        """Run the next copy, and the steps that it runs after."""
        num_steps, copy = self._copies.popleft()
        while self.num_run < num_steps:
            self.run_next()
        copy()
        self.num_copied += 1

    def tell(self, what: str) -> None:
        """Note that something is wrong."""
        self.counts["violations"] += 1
        if len(self.violations) < MAX_TOLD:
            self.violations.append(what)

    def _run(self, step: _InFlight) -> None:
        found = {digest: self._recognise(digest, pages) for digest, pages in step.adapters}
        drawn, last = [], dict[SequenceId, int]()
        for chunk in step.chunks:
            adapter = None if chunk.adapter is None else found[chunk.adapter]
            tokens = self._through_pages(chunk, adapter)
            if chunk.samples:
                last[chunk.seq_id] = _token(zlib.crc32(tokens.tobytes(), _seed(adapter)))
                drawn.append(Sampled(last[chunk.seq_id], is_finite=adapter not in self.faults.nonfinite))
        self._last, step.drawn = last, drawn

    def _recognise(self, digest: AdapterDigest, pages: tuple[PageId, ...]) -> AdapterDigest:
        """Which adapter really lies in the pages of a step."""
        crc = image_crc(self._rows[np.array(pages, dtype=np.int64)])
        found = self.known.get(crc, AdapterDigest(f"unknown {crc}"))
        if found != digest:
            self.tell(f"a step ran {digest[:12]} from pages that hold {found[:12]}")
        return found

    def _through_pages(self, chunk: _Chunk, adapter: AdapterDigest | None) -> NDArray[np.int32]:
        """Write a chunk's cells and read all cells of its sequence so far: their tokens."""
        stop, number = chunk.start + len(chunk.tokens), self._numbers.get(adapter or AdapterDigest(""), 0)
        positions = np.arange(chunk.start, stop)
        cells = np.empty((len(positions), _TAGS), dtype=np.float32)
        cells[:, 0] = [self._last.get(chunk.seq_id, -2) if one == UNKNOWN_TOKEN else one for one in chunk.tokens]
        cells[:, 1], cells[:, 2], cells[:, 3] = positions, number, chunk.tenant
        self._cells[chunk.pages[positions // self._page_tokens], positions % self._page_tokens] = cells
        got = self._cells[chunk.pages[: -(-stop // self._page_tokens)]].reshape(-1, _TAGS)[:stop]
        if not ((got[:, 1] == np.arange(stop)) & (got[:, 2] == number) & (got[:, 3] == chunk.tenant)).all():
            self.tell(
                f"sequence {chunk.seq_id} of tenant {chunk.tenant} and adapter {number} reads cells of others: "
                f"{np.unique(got[:, 2:], axis=0).tolist()}, positions {got[:, 1].tolist()}"
            )
        with np.errstate(invalid="ignore"):  # poison
            return got[:, 0].astype("<i4")
