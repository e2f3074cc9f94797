"""A device that is played: loads take steps and fail, tenants share prefixes, every page is checked when read."""

import random
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from loraplex.core import (
    AdapterDigest,
    AdapterRef,
    FinishReason,
    PageId,
    Request,
    RequestId,
    SamplingParams,
    SequenceId,
)
from loraplex.pool import AdapterState, KvShape, PoolGeometry, ReloadCost
from loraplex.scheduler import (
    ScheduledChunk,
    Scheduler,
    SchedulerConfig,
    Sequence,
    SequenceStatus,
    StepPlan,
    WaitReason,
)

from .helpers import EOS, VOCAB_SIZE, next_token, run_alone

TENANTS = (None, "x", "y", "z")


def digest_of(number: int) -> AdapterDigest:
    return AdapterDigest(f"{number:064x}")


def adapter_pages(digest: AdapterDigest) -> int:
    return 1 + int(digest, 16) % 3


def cell(space: tuple[Any, ...], tokens: list[int]) -> tuple[Any, ...]:
    """What a KV cell holds: it depends on who computed it and on every token so far."""
    return (*space, zlib.crc32(repr(tokens).encode()))


@dataclass(eq=False)
class World:
    """A scheduler with `load_ahead`, stepped as the engine does it."""

    scheduler: Scheduler
    rng: random.Random
    load_steps: int = 2
    failure_share: float = 0.0
    depth: int = 0  # steps whose results are not read yet when the next one is planned
    now: float = 0.0
    pages: dict[PageId, Any] = field(default_factory=dict)
    loading: dict[AdapterDigest, int] = field(default_factory=dict)  # steps left
    requests: dict[SequenceId, Request] = field(default_factory=dict)
    ended: dict[SequenceId, Sequence] = field(default_factory=dict)
    failed: set[SequenceId] = field(default_factory=set)
    tokens: dict[SequenceId, list[int]] = field(default_factory=dict)  # as the device has them
    in_flight: deque[tuple[StepPlan, dict[SequenceId, int]]] = field(default_factory=deque)
    num_failures: int = 0
    num_loads: int = 0
    trace: list[Any] = field(default_factory=list)
    waits: list[list[WaitReason | None]] = field(default_factory=list)  # of who waits, if the test notes them

    def add(self, request: Request, **options: Any) -> tuple[Sequence, ...]:
        digest = request.adapter.digest if request.adapter else None
        pages = adapter_pages(digest) if digest else 0
        options = {"adapter_rank": float(8 * pages)} | options
        added = self.scheduler.add(request, pages, EOS, self.now, **options)
        self.requests |= dict.fromkeys((seq.seq_id for seq in added), request)
        self.tokens |= {seq.seq_id: list(request.prompt_token_ids) for seq in added}
        return added

    # ------------------------------------------------------------------ loads
    def _loads(self) -> None:
        for load in self.scheduler.start_loads(self.now):
            assert load.digest not in self.loading, "a load was begun twice"
            self.loading[load.digest] = self.load_steps
            self.num_loads += 1
            for page in load.pages:
                self.pages[page] = None  # half filled
        for digest in list(self.loading):
            self.loading[digest] -= 1
            if self.loading[digest] < 0:
                del self.loading[digest]
                self._end_load(digest)
        self.scheduler.check_invariants()

    def _end_load(self, digest: AdapterDigest) -> None:
        assert self.scheduler.residency.state(digest) is AdapterState.LOADING
        if self.rng.random() < self.failure_share:
            self.num_failures += 1
            for seq in self.scheduler.adapter_failed(digest, self.now + 2.0):
                assert seq.adapter == digest
                assert seq.status is SequenceStatus.WAITING
                self.failed.add(seq.seq_id)
                self.scheduler.finish(seq.seq_id, FinishReason.ABORT)
            return
        for idx, page in enumerate(self.scheduler.residency.pages(digest)):
            self.pages[page] = (digest, idx)
        self.scheduler.adapter_ready(digest)

    # ------------------------------------------------------------------ a step
    def step(self, seconds: float = 0.1) -> StepPlan | None:
        self._loads()
        scheduler = self.scheduler
        plan = scheduler.schedule(self.now)
        scheduler.check_invariants()
        self.now += seconds
        if plan is None:
            self._read(0)
            return None
        self._check(plan)
        drawn = {}
        for chunk in plan.chunks:
            self._run_chunk(chunk, scheduler.sequences[chunk.seq_id])
            if chunk.samples:
                drawn[chunk.seq_id] = self._draw(chunk)
        self.in_flight.append((plan, drawn))
        scheduler.advance(plan)
        scheduler.check_invariants()
        self._read(self.depth)
        self.trace.append((plan.chunks, plan.adapters))
        return plan

    def _draw(self, chunk: ScheduledChunk) -> int:
        """The device draws from its own tokens: the host may not know the last one yet."""
        tokens, place = self.tokens[chunk.seq_id], chunk.start + chunk.num_tokens
        token = next_token(tokens[:place], chunk.adapter)
        self.tokens[chunk.seq_id] = [*tokens[:place], token]
        return token

    def _read(self, num_left: int) -> None:
        """Take the results of all but the last steps."""
        while len(self.in_flight) > num_left:
            plan, drawn = self.in_flight.popleft()
            sequences = dict(self.scheduler.sequences)
            for entry in self.scheduler.commit(plan, drawn):
                if entry.finish_reason is not None:
                    self._end(sequences[entry.seq_id])
            self.scheduler.check_invariants()

    def _check(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        assert plan.loads == ()
        assert 1 <= plan.num_tokens <= config.max_step_tokens
        assert len(plan.adapters) <= config.max_distinct
        for digest, pages in plan.adapters:
            assert [self.pages.get(page) for page in pages] == [(digest, idx) for idx in range(adapter_pages(digest))]
        writers = [page for chunk in plan.chunks for page in self._written(chunk)]
        assert len(writers) == len(set(writers)), "a page is written by two"
        readers = {page for chunk in plan.chunks for page in chunk.pages}
        assert not readers & {page for _, pages in plan.adapters for page in pages}

    def _written(self, chunk: ScheduledChunk) -> list[PageId]:
        size = self.scheduler.geometry.page_tokens
        return list(chunk.pages[chunk.start // size : (chunk.start + chunk.num_tokens - 1) // size + 1])

    def _run_chunk(self, chunk: ScheduledChunk, seq: Sequence) -> None:
        size, end = self.scheduler.geometry.page_tokens, chunk.start + chunk.num_tokens
        assert chunk.start == seq.num_computed
        assert len(set(chunk.pages)) == len(chunk.pages)
        own = (seq.tenant, seq.adapter) if seq.space is not None else (seq.seq_id, seq.adapter)
        for position in range(end):
            page = chunk.pages[position // size]
            wanted = cell(own, self.tokens[seq.seq_id][: position + 1])
            if position >= chunk.start:
                cells = self.pages.get(page)
                if not isinstance(cells, dict):
                    cells = self.pages[page] = {}
                cells[position % size] = wanted
            assert self.pages[page][position % size] == wanted, "KV of other tokens, weights or tenants is read"

    def _end(self, seq: Sequence) -> None:
        assert seq.seq_id not in self.ended
        self.ended[seq.seq_id] = seq
        request = self.requests[seq.seq_id]
        assert (seq.token_ids, seq.finish_reason) == run_alone(request, seq.max_len)
        assert seq.num_cached_tokens is not None
        assert seq.num_cached_tokens < seq.prompt_len

    def drain(self, limit: int = 5000) -> int:
        """Step until nothing is left; how many steps that took, which is bounded."""
        for count in range(limit):
            if not self.scheduler.sequences and not self.loading and not self.in_flight:
                return count
            self.step()
        raise AssertionError(f"{len(self.scheduler.sequences)} sequences have not ended after {limit} steps")


def make_world(seed: int = 0, num_pages: int = 24, page_tokens: int = 4, **settings: Any) -> World:
    options = {key: settings.pop(key) for key in ("load_steps", "failure_share", "depth") if key in settings}
    config = {"max_model_len": 40, "max_step_tokens": 16, "max_num_seqs": 6, "load_ahead": True} | settings
    config.setdefault("reload", ReloadCost(0.001, 0.002))
    config.setdefault("prefix_page_s", 0.003)
    geometry = PoolGeometry(KvShape(1, 1, 8), num_pages, page_tokens, 8, 4)
    return World(Scheduler(SchedulerConfig(**config), geometry), random.Random(seed), **options)


def make_request(
    prompt: int | list[int] = 4,
    adapter: int | None = None,
    tenant: str | None = "x",
    name: str = "r",
    priority: int = 0,
    deadline_s: float | None = None,
    **params: Any,
) -> Request:
    tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
    digest = digest_of(adapter) if adapter is not None else None
    ref = AdapterRef(f"a{adapter}", 1, digest) if digest else None
    return Request(RequestId(name), tokens, SamplingParams(**params), ref, tenant, priority, deadline_s)


def random_request(rng: random.Random, num_adapters: int) -> Request:
    """Prompts with common beginnings, so that prefixes are found."""
    topic = rng.randrange(3)
    prompt = [topic] * rng.choice((0, 4, 8, 11)) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 8))]
    return make_request(
        prompt,
        rng.choice([None, *range(num_adapters)]),
        rng.choice(TENANTS),
        priority=rng.choice((0, 0, 0, 1)),
        max_tokens=rng.randint(1, rng.choice((4, 12, 24))),
        ignore_eos=rng.random() < 0.5,
        n=rng.choice((1, 1, 2)),
    )
