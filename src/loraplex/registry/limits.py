"""How much one tenant may keep in the registry, and how much of a server it may take."""

import math
from dataclasses import dataclass, fields
from typing import TypedDict

from loraplex.core import ConfigError, InvalidRequest
from loraplex.core.request import MAX_PRIORITY

MAX_PAGE = 1_000
MAX_FAILURE_CHARS = 300  # of what a verification says was wrong
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
MAX_TENANT_REQUESTS = 1_000_000
MAX_TOKENS_PER_MINUTE = 10**12


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """Numbers for each tenant; past one, RegistryLimitReached. Raises ConfigError if a limit cannot work."""

    max_keys: int = 1_000  # that are neither revoked nor expired
    max_adapters: int = 10_000  # names, deleted ones included
    max_versions: int = 10_000  # of one name, refused and deleted ones included
    max_bytes: int = 2**40  # of stored files that its versions need, deleted ones aside; 10,000 adapters of 100 MB
    max_verifications: int = 1_000  # of one version

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name} must be at least 1, got {getattr(self, field.name)}.")


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """A tenant's part of each server. The defaults are those of a tenant for whom nothing was set."""

    weight: float = 1.0  # of its share where tenants compete
    priority: int = 0  # the first class that its requests may ask for; lower is earlier
    max_requests: int | None = None  # at once
    tokens_per_minute: int | None = None  # of prompts and answers


class LimitChanges(TypedDict, total=False):
    """New values of some of a tenant's limits. What is left out stays; None takes a bound away."""

    weight: float
    priority: int
    max_requests: int | None
    tokens_per_minute: int | None


def check_tenant_limits(limits: TenantLimits) -> None:
    """Raise InvalidRequest for the first value that cannot be set."""
    _check_range("weight", limits.weight, MIN_WEIGHT, MAX_WEIGHT)
    _check_range("priority", limits.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if limits.max_requests is not None:
        _check_range("max_requests", limits.max_requests, 1, MAX_TENANT_REQUESTS)
    if limits.tokens_per_minute is not None:
        _check_range("tokens_per_minute", limits.tokens_per_minute, 1, MAX_TOKENS_PER_MINUTE)


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not math.isfinite(value) or not least <= value <= most:
        raise InvalidRequest(f"{name} is {value}; it must be from {least:.15g} to {most:.15g}.", name)


def check_page(limit: int) -> None:
    """Raise InvalidRequest unless a page may have this many entries."""
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit must be between 1 and {MAX_PAGE}, got {limit}.", "limit")
