"""Requests of many tenants as they arrive: skewed popularity, bursts, long tails. A pure function of a seed."""

import math
import random
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from loraplex.core import AdapterDigest

_TOKENS = 50_000  # vocabulary of the made-up prompts


@dataclass(frozen=True, slots=True)
class SimAdapter:
    """An adapter of all projections."""

    digest: AdapterDigest
    rank: int


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. `shared_len`: tokens at the prompt's start that all requests of its adapter have."""

    arrival_s: float
    tenant: str
    adapter: int | None  # index into the workload's adapters
    prompt_len: int
    output_len: int
    shared_len: int = 0
    priority: int = 0
    deadline_s: float | None = None

    def prompt(self, number: int) -> tuple[int, ...]:
        """Token ids: those shared by the adapter's requests, then some that only request `number` has."""
        first = 0 if self.adapter is None else 7919 * (self.adapter + 1)
        shared = tuple((first + i) % _TOKENS for i in range(self.shared_len))
        return shared + tuple(_TOKENS + number for _ in range(self.prompt_len - self.shared_len))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival."""

    adapters: tuple[SimAdapter, ...]
    requests: tuple[SimRequest, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What arrives. `rate`: requests a second on average. `cv`: of the times between them (Gamma; 1 is Poisson).

    `burst`: requests a second in the first half of every `period_s`, times the average; the second half gets the rest.
    `alpha`: popularity of the adapter at place k is k^-alpha; every adapter is its own tenant. Lengths are lognormal
    with this median and sigma, cut to [1, max]. `ranks` are dealt out in turn.
    """

    rate: float = 20.0
    duration_s: float = 60.0
    num_adapters: int = 1000
    alpha: float = 1.0
    cv: float = 1.0
    burst: float = 1.0
    period_s: float = 20.0
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    base_share: float = 0.05
    prompt_median: float = 180.0
    prompt_sigma: float = 0.8
    output_median: float = 120.0
    output_sigma: float = 0.7
    max_prompt: int = 2000
    max_output: int = 600
    shared_len: int = 0


def adapter_digest(number: int) -> AdapterDigest:
    """A digest for a made-up adapter."""
    return AdapterDigest(f"{number:064x}")


def make_workload(traffic: Traffic, seed: int) -> Workload:
    """The same for the same seed."""
    draw = random.Random(seed)
    ranks = traffic.ranks
    adapters = tuple(SimAdapter(adapter_digest(i), ranks[i % len(ranks)]) for i in range(traffic.num_adapters))
    places = list(range(traffic.num_adapters))
    draw.shuffle(places)  # so that rank says nothing about popularity
    weights = list(accumulate((k + 1) ** -traffic.alpha for k in range(traffic.num_adapters)))
    requests: list[SimRequest] = []
    now = 0.0
    while True:
        now = _next_arrival(traffic, draw, now)
        if now >= traffic.duration_s:
            return Workload(adapters, tuple(requests))
        adapter = None
        if draw.random() >= traffic.base_share:
            adapter = places[bisect_left(weights, draw.random() * weights[-1])]
        own = _length(draw, traffic.prompt_median, traffic.prompt_sigma, traffic.max_prompt - traffic.shared_len)
        requests.append(
            SimRequest(
                arrival_s=now,
                tenant="base" if adapter is None else f"t{adapter}",
                adapter=adapter,
                prompt_len=own + traffic.shared_len,
                output_len=_length(draw, traffic.output_median, traffic.output_sigma, traffic.max_output),
                shared_len=traffic.shared_len,
            )
        )


def _next_arrival(traffic: Traffic, draw: random.Random, now: float) -> float:
    is_burst = now % traffic.period_s < traffic.period_s / 2
    factor = traffic.burst if is_burst else max(2.0 - traffic.burst, 0.05)
    shape = 1.0 / traffic.cv**2
    return now + draw.gammavariate(shape, 1.0 / (shape * traffic.rate * factor))


def _length(draw: random.Random, median: float, sigma: float, most: int) -> int:
    return min(max(1, round(median * math.exp(draw.gauss(0.0, sigma)))), most)
