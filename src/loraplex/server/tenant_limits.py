"""What operators let a tenant take of this server: requests at once, tokens a minute, a weight, and a first priority.

`TenantMeters` counts and knows no clock. `TenantGate` asks it for each request of a registry's tenant. The limits come
with the caller's Principal, so that they are as new as its key. What was admitted is never cut off.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from loraplex.core import CallerLimitReached, InvalidRequest, OverloadReason
from loraplex.registry import TenantLimits
from loraplex.server.callers import Caller
from loraplex.server.engine_port import ServingEngine

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0  # where it is an estimate
_MEAN_OVER = 8  # requests, of the time that a tenant's take
_MIN_SWEEP = 1024  # tenants


@dataclass(slots=True, eq=False)
class TokenBucket:
    """A minute's tokens at most; below zero where answers took more than there was."""

    per_minute: int
    level: float
    at: float

    def refill(self, per_minute: int, now: float) -> None:
        """Add what has come since the last time, at the rate of until now; `per_minute` holds from here on."""
        self.level = min(self.level + (now - self.at) * self.per_minute / 60.0, float(self.per_minute), per_minute)
        self.per_minute, self.at = per_minute, now

    def wait_s(self, num_tokens: int) -> float:
        """Seconds until so many are there; for more than a minute's, until the bucket is full."""
        return max(0.0, (min(num_tokens, self.per_minute) - self.level) * 60.0 / self.per_minute)


@dataclass(slots=True, eq=False)
class _Meter:
    """One tenant. `starts` are its open bodies, oldest first, by their number."""

    num_requests: int = 0
    starts: dict[int, float] = field(default_factory=dict)
    mean_s: float = 0.0  # that its bodies took
    bucket: TokenBucket | None = None

    def is_idle(self, now: float) -> bool:
        """Whether nothing is lost with it."""
        return not self.starts and (
            self.bucket is None or self.bucket.wait_s(self.bucket.per_minute) <= now - self.bucket.at
        )

    def next_end_s(self, now: float) -> float:
        """An estimate of the seconds until one of its bodies ends, from how long the last took."""
        oldest = next(iter(self.starts.values()), now)
        return min(max(self.mean_s - (now - oldest), MIN_RETRY_S), MAX_RETRY_S)


class TenantMeters:
    """What each tenant has at work and has used. `now` are seconds of any clock that never goes back."""

    def __init__(self) -> None:
        self._meters: dict[str, _Meter] = {}
        self._next_number = 0
        self._sweep_at = _MIN_SWEEP

    def __len__(self) -> int:
        return len(self._meters)

    def enter(self, tenant: str, limits: TenantLimits, num_requests: int, now: float) -> int:
        """A body that stands for so many requests came; its number. Raises CallerLimitReached and InvalidRequest."""
        meter = self._meter(tenant, now)
        self._set_rate(meter, limits.tokens_per_minute, now)
        most = limits.max_requests
        if most is not None and num_requests > most:
            message = f"The body stands for {num_requests} requests (prompts times n); the tenant {tenant!r} may have"
            raise InvalidRequest(f"{message} {most} at once (max_requests).", "n")
        if most is not None and meter.num_requests + num_requests > most:
            message = f"The tenant {tenant!r} has {meter.num_requests} requests at work and the body stands for"
            raise CallerLimitReached(
                f"{message} {num_requests}; it may have {most} at once (max_requests).",
                meter.next_end_s(now),
                OverloadReason.TENANT_REQUESTS,
            )
        self._check_tokens(tenant, meter, 1)
        meter.num_requests += num_requests
        self._next_number += 1
        meter.starts[self._next_number] = now
        return self._next_number

    def charge_prompts(self, tenant: str, num_tokens: int, now: float) -> None:
        """Take the tokens of a body's prompts. Raises CallerLimitReached, with the seconds until there are as many."""
        meter = self._meters[tenant]
        if meter.bucket is not None:
            meter.bucket.refill(meter.bucket.per_minute, now)
        self._check_tokens(tenant, meter, num_tokens)
        self.charge(tenant, num_tokens)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Take tokens of answers, however many there are; fewer than none gives some back."""
        bucket = self._meters[tenant].bucket
        if bucket is not None:
            bucket.level -= num_tokens

    def leave(self, tenant: str, number: int, num_requests: int, now: float) -> None:
        """A body's answer has ended."""
        meter = self._meters[tenant]
        took = now - meter.starts.pop(number)
        meter.mean_s = took if not meter.mean_s else meter.mean_s + (took - meter.mean_s) / _MEAN_OVER
        meter.num_requests -= num_requests

    def _meter(self, tenant: str, now: float) -> _Meter:
        if tenant not in self._meters and len(self._meters) >= self._sweep_at:
            self._meters = {name: meter for name, meter in self._meters.items() if not meter.is_idle(now)}
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._meters))
        return self._meters.setdefault(tenant, _Meter())

    def _set_rate(self, meter: _Meter, per_minute: int | None, now: float) -> None:
        if per_minute is None:
            meter.bucket = None
        elif meter.bucket is None:
            meter.bucket = TokenBucket(per_minute, float(per_minute), now)
        else:
            meter.bucket.refill(per_minute, now)

    def _check_tokens(self, tenant: str, meter: _Meter, num_tokens: int) -> None:
        bucket = meter.bucket
        wait_s = bucket.wait_s(num_tokens) if bucket is not None else 0.0
        if bucket is not None and wait_s > 0.0:
            message = (
                f"The tenant {tenant!r} has {max(0, int(bucket.level))} tokens left and the request needs {num_tokens};"
            )
            message = f"{message} it may have {bucket.per_minute} a minute (tokens_per_minute)."
            raise CallerLimitReached(message, wait_s, OverloadReason.TENANT_TOKENS)


class TenantPlace:
    """One body's place among its tenant's. `leave` it once."""

    __slots__ = ("_clock", "_meters", "_num_prompt_tokens", "_num_requests", "_number", "_tenant")

    def __init__(
        self, meters: TenantMeters, tenant: str, number: int, num_requests: int, clock: Callable[[], float]
    ) -> None:
        self._meters = meters
        self._tenant = tenant
        self._number = number
        self._num_requests = num_requests
        self._clock = clock
        self._num_prompt_tokens = 0

    def charge_prompts(self, num_tokens: int) -> None:
        """Take the tokens of the prompts. Raises CallerLimitReached."""
        self._meters.charge_prompts(self._tenant, num_tokens, self._clock())
        self._num_prompt_tokens = num_tokens

    def charge(self, num_tokens: int) -> None:
        """Take tokens of the answer."""
        self._meters.charge(self._tenant, num_tokens)

    def leave(self, num_begun_tokens: int) -> None:
        """The answer has ended. Tokens come back of prompts whose computation had not begun."""
        self._meters.charge(self._tenant, num_begun_tokens - self._num_prompt_tokens)
        self._meters.leave(self._tenant, self._number, self._num_requests, self._clock())


class TenantGate:
    """Admission of a registry's tenants to one engine. Belongs to one event loop."""

    def __init__(self, engine: ServingEngine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._clock = clock
        self._meters = TenantMeters()
        self._weights: dict[str, float] = {}  # that the engine has, other than 1

    def enter(self, caller: Caller, num_requests: int) -> TenantPlace | None:
        """A place for a body that stands for so many requests; None for a caller who is no tenant.

        Raises CallerLimitReached, and InvalidRequest for a body that could never have one.
        """
        if caller.principal is None:
            return None
        tenant, limits = caller.account, caller.principal.limits
        number = self._meters.enter(tenant, limits, num_requests, self._clock())
        self._tell_weight(tenant, limits.weight)
        return TenantPlace(self._meters, tenant, number, num_requests, self._clock)

    def _tell_weight(self, tenant: str, weight: float) -> None:
        if self._weights.get(tenant, 1.0) == weight:
            return
        self._engine.set_tenant_weight(tenant, weight)
        self._weights[tenant] = weight
        if weight == 1.0:
            del self._weights[tenant]


def engine_priority(caller: Caller, asked: int | None) -> int:
    """The engine's priority, higher first, of a body's, lower first. None: 0, or as early as the tenant may.

    Raises InvalidRequest for an earlier one than operators allow the tenant. Without a registry any may be asked for.
    """
    if caller.principal is None:
        return -(asked or 0)
    first = caller.principal.limits.priority
    if asked is None:
        return -max(0, first)
    if asked < first:
        message = (
            f"priority is {asked}; requests of the tenant {caller.account!r} may have {first} or a later, higher one"
        )
        raise InvalidRequest(f"{message} (an operator's `loraplex tenant limits`).", "priority")
    return -asked
