"""The administrator's operations on a data directory, as the local operator."""

from collections.abc import Callable
from pathlib import Path
from typing import Self

from loraplex.adapters import Adapter
from loraplex.cli.admin_client import LocalBase, Progress
from loraplex.core import BaseDescription, ConfigError
from loraplex.core.comparison import AdapterComparison
from loraplex.registry import Registry, RegistryConfig
from loraplex.registry.database import SQLITE_NAME
from loraplex.registry.master_secret import FILE_NAME as SECRET_NAME
from loraplex.server.admin_operations import AdminOperations, BaseClaim
from loraplex.server.admin_views import VerifiedView, VersionView


class LocalClient(AdminOperations):
    """An AdminClient. Use it in a `with` block, which closes the registry."""

    def __init__(self, data_dir: Path, database_url: str | None = None, artifacts_url: str | None = None) -> None:
        registry = Registry(RegistryConfig(data_dir, database_url=database_url, artifacts_url=artifacts_url))
        super().__init__(registry, registry.local_operator())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._registry.close()

    def add_version(
        self, tenant: str, name: str, directory: Path, claim: BaseClaim, base: LocalBase | None, progress: Progress
    ) -> VersionView:
        """See AdminClient. Raises BaseRefused."""
        return self.publish(tenant, name, directory, describe(_needed(base)), claim)

    def verify(self, tenant: str, name: str, version: int, base: LocalBase | None) -> VerifiedView:
        """See AdminClient. Loads the base. Raises BaseRefused."""
        base = _needed(base)
        self._registry.adapters.version(self._principal, tenant, name, version)  # before the base is loaded
        description, compare = load_comparer(base)
        return self.compare(tenant, name, version, description, compare)


def check_registry(data_dir: Path, database_url: str | None) -> None:
    """Raise ConfigError, naming the directory, where there is no registry. Creates nothing."""
    file = data_dir / (SQLITE_NAME if database_url is None else SECRET_NAME)
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        message = f"There is no registry in the data directory {str(data_dir)!r}: it has no {file.name}."
        raise ConfigError(f"{message} `loraplex tenant create` makes one, and `loraplex serve`.") from None
    except OSError as error:
        raise ConfigError(f"The data directory {str(data_dir)!r} cannot be read: {error.strerror}.") from None


def describe(base: LocalBase) -> BaseDescription:
    """The identity of a base, without loading its weights; hashes them if nobody did. Raises BaseRefused."""
    from loraplex.model import describe_base, open_checkpoint

    config, checkpoint = open_checkpoint(base.directory)
    return describe_base(base.name or base.directory.resolve().name, config, checkpoint)


def load_comparer(base: LocalBase) -> tuple[BaseDescription, Callable[[Adapter], AdapterComparison]]:
    """An engine for one comparison. Raises BaseRefused, ConfigError."""
    from loraplex.engine import Engine, EngineConfig, load_base

    loaded = load_base(base.directory, EngineConfig(device=base.device), name=base.name)
    return loaded.description, Engine(loaded).compare


def _needed(base: LocalBase | None) -> LocalBase:
    if base is None:
        raise ConfigError("On a data directory this needs the base model: --base DIR.")
    return base
