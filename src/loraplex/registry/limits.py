"""How much one tenant may keep in the registry."""

from dataclasses import dataclass, fields

from loraplex.core import ConfigError, InvalidRequest

MAX_PAGE = 1_000
MAX_FAILURE_CHARS = 300  # of what a verification says was wrong


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


def check_page(limit: int) -> None:
    """Raise InvalidRequest unless a page may have this many entries."""
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit must be between 1 and {MAX_PAGE}, got {limit}.", "limit")
