"""Requests that arrive in real time: one process offers them to an engine at their times and steps it.

A request that is due while a step runs is added after it, as a server's step loop does; its wait counts from the time
at which it was due. What existed before a run is taken out of Python's garbage collection, as `loraplex serve` does.
"""

import gc
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch

from engine_runs import percentile
from loraplex.core import AdapterRef, Request, RequestId, SamplingParams
from loraplex.engine import Engine, RequestFailed
from loraplex.pool import Lease

_IDLE_S = 5e-5  # between two looks at the clock while nothing runs
STALL_S = 60.0  # after the last arrival, an end that does not come is an error
_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it comes, in seconds from the start of a run."""

    at_s: float
    request: Request


@dataclass(slots=True)
class Record:
    """What became of one request. Times in seconds from the start of the run."""

    at_s: float
    prompt_len: int
    num_running: int = 0  # sequences that ran when it was added
    num_waiting: int = 0
    is_cold: bool = False
    load_s: float = 0.0
    is_done: bool = False
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.token_s[0] - self.at_s

    @property
    def latency_s(self) -> float:
        """Until the last token."""
        return self.token_s[-1] - self.at_s

    @property
    def tpot_s(self) -> float:
        """Mean time between two tokens."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)


@dataclass(slots=True)
class Run:
    """Records in the order in which requests came, and the queue's length at the end of each step."""

    records: dict[RequestId, Record]
    seconds: float = 0.0
    queue: list[tuple[float, int]] = field(default_factory=list)
    num_loads: int = 0
    num_evictions: int = 0
    num_preemptions: int = 0
    num_steps: int = 0

    @property
    def started(self) -> list[Record]:
        """Those that have a token."""
        return [record for record in self.records.values() if record.token_s]


def make_request(prompt: Sequence[int], output_len: int, adapter: AdapterRef | None) -> Request:
    """A greedy request of fixed lengths, of no tenant: it shares no prefix."""
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    return Request(RequestId(f"open-{next(_ids)}"), tuple(prompt), params, adapter)


def random_prompt(rng: random.Random, length: int, vocab: int) -> list[int]:
    return [int(rng.random() * vocab) for _ in range(length)]


# ---------------------------------------------------------------------- runs
class _Driver:
    """One run."""

    def __init__(self, engine: Engine, arrivals: Iterable[Arrival], running: Iterable[Request]) -> None:
        self._engine = engine
        self._due = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))
        self._records = {r.request_id: Record(0.0, len(r.prompt_token_ids)) for r in running}
        self._open = set(self._records)
        self._run = Run(self._records)
        self._started = time.perf_counter()

    def run(self, end_s: float, after_step: Callable[[float], None]) -> Run:
        before, last_s = self._engine.stats(), max((arrival.at_s for arrival in self._due), default=0.0) + STALL_S
        while (self._due or self._open) and self._now() < end_s:
            self._add_due()
            if self._engine.has_work:
                self._step()
            else:
                time.sleep(_IDLE_S)
            after_step(self._now())
            assert self._now() < last_s, f"{len(self._open)} requests have not ended {STALL_S:g} s after the last came"
        after, run = self._engine.stats(), self._run
        run.seconds = min(self._now(), end_s)
        run.num_loads = after.num_adapter_loads - before.num_adapter_loads
        run.num_evictions = after.num_adapter_evictions - before.num_adapter_evictions
        run.num_preemptions = after.num_preemptions - before.num_preemptions
        run.num_steps = after.num_steps - before.num_steps
        for request_id in self._open:
            self._engine.abort(request_id)
        return run

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _add_due(self) -> None:
        scheduler = self._engine.scheduler
        while self._due and self._due[0].at_s <= self._now():
            arrival = self._due.popleft()
            request = arrival.request
            record = Record(arrival.at_s, len(request.prompt_token_ids))
            record.num_running, record.num_waiting = len(scheduler.running), len(scheduler.waiting)
            self._records[request.request_id] = record
            self._open.add(request.request_id)
            self._engine.add_request(request, time.monotonic())

    def _step(self) -> None:
        results = self._engine.step(time.monotonic())
        now = self._now()
        self._run.queue.append((now, len(self._engine.scheduler.waiting)))
        for result in results:
            if isinstance(result, RequestFailed):
                raise result.error
            record = self._records[result.request_id]
            if not record.token_s:
                record.is_cold, record.load_s = result.served_by.cold, result.served_by.load_s
            record.token_s.append(now)
            if result.finished:
                record.is_done = True
                self._open.remove(result.request_id)


def drive(
    engine: Engine,
    arrivals: Iterable[Arrival],
    *,
    running: Iterable[Request] = (),
    end_s: float = float("inf"),
    after_step: Callable[[float], None] = lambda now_s: None,
) -> Run:
    """Offer requests at their times until all have ended; at `end_s` the rest is cancelled.

    `running` were added before. `after_step` is called between steps with the seconds since the start.
    """
    if engine._decoder.device.type == "cuda":
        torch.cuda.synchronize()
    gc.collect()
    gc.freeze()
    try:
        return _Driver(engine, arrivals, running).run(end_s, after_step)
    finally:
        gc.unfreeze()
        finish(engine)


def finish(engine: Engine) -> None:
    """Step until nothing is left."""
    while engine.has_work:
        engine.step(time.monotonic())


def run_all(engine: Engine, requests: Sequence[Request], at_once: int = 256) -> None:
    """Run requests to their ends, `at_once` in the queue."""
    for first in range(0, len(requests), at_once):
        for request in requests[first : first + at_once]:
            engine.add_request(request, time.monotonic())
        finish(engine)


def touch(engine: Engine, refs: Sequence[AdapterRef]) -> None:
    """Bring adapters into the pool, by a request of one token for each."""
    run_all(engine, [make_request([1] * 16, 1, ref) for ref in refs])


# ---------------------------------------------------------------------- the pool
def evict_all(engine: Engine) -> None:
    """Empty the pool of adapters. Nothing may run."""
    for digest in engine.scheduler.residency.resident:
        engine.scheduler.residency.evict(digest)


def cap_pool(engine: Engine, num_pages: int) -> Lease:
    """Leave `num_pages` pages of an empty pool, for adapters and KV; release the lease to have the others back."""
    pool = engine.scheduler.pool
    assert num_pages < pool.num_free, f"the pool has {pool.num_free} pages; it cannot be cut to {num_pages}"
    lease = pool.allocate(pool.num_free - num_pages, "bench:cap")
    assert lease is not None
    return lease


# ---------------------------------------------------------------------- figures
def zipf_shares(count: int, exponent: float) -> Any:
    """Popularity of `count` adapters, the first the most wanted [count]; they add up to 1."""
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    return weights / weights.sum()


def spread_ms(values: Sequence[float]) -> dict[str, Any]:
    """Mean and percentiles of seconds, as milliseconds."""
    if not values:
        return {"count": 0}
    return {
        "count": len(values),
        "mean": 1e3 * fmean(values),
        "p50": 1e3 * percentile(values, 0.5),
        "p90": 1e3 * percentile(values, 0.9),
        "p99": 1e3 * percentile(values, 0.99),
        "max": 1e3 * max(values),
    }


def apart_ms(mine: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """By how much percentiles of seconds differ, as milliseconds."""
    return {
        f"p{percent}_ms": 1e3 * (percentile(mine, percent / 100) - percentile(other, percent / 100))
        for percent in (50, 99)
    }
