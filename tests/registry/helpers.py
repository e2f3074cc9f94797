"""A registry with everything a test does not care about, checked in this process so that it is quick."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import create_engine, make_url, text

from loraplex.adapters import AdapterLimits, Artifact, check_artifact
from loraplex.core import BaseDescription
from loraplex.registry import AdapterFacts, Principal, Registry, RegistryConfig, Role, VerificationResult, VersionInfo
from loraplex.registry.blobs import StagedBlob
from loraplex.registry.sandbox_child import names_the_base
from tests.adapters.factories import make_base, make_config, make_tensors, tensor, write_adapter

BASE = make_base()
OPERATOR = Registry.local_operator()
PASSED = VerificationResult(passed=True, max_logit_difference=1e-4, kl=1e-6, effect=0.5, tolerance=1e-2)
FAILED = VerificationResult(passed=False, max_logit_difference=2.0, kl=0.3, effect=0.5, tolerance=1e-2)
POSTGRES_URL = os.environ.get("LORAPLEX_TEST_POSTGRES_URL")
BACKENDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


def check_here(config: StagedBlob, weights: StagedBlob, base: BaseDescription) -> AdapterFacts:
    """A Validator without a child process."""
    artifact = Artifact(config.path.read_bytes(), memoryview(weights.path.read_bytes()))
    names_base = names_the_base(artifact.weights, base)
    adapter = check_artifact(artifact, base, AdapterLimits())
    declared = adapter.declared_base
    return AdapterFacts(adapter.digest, adapter.max_rank, adapter.num_bytes, adapter.targets, declared, names_base)


class Clock:
    """A wall clock that stands still until it is moved."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def adapter_dir(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A valid adapter directory; each seed has other weights."""
    directory = folder / f"adapter-{seed}"
    if not directory.exists():
        tensors = {
            name: tensor(shape, dtype, seed=1000 * seed + index)
            for index, (name, (dtype, shape, _)) in enumerate(make_tensors().items())
        }
        write_adapter(directory, make_config(**config), tensors)
    return directory


def bad_adapter_dir(folder: Path) -> Path:
    """A directory that validation refuses: a weight is NaN."""
    tensors = make_tensors()
    name, (dtype, shape, data) = next(iter(tensors.items()))
    values = np.frombuffer(data, "<f4").copy()
    values[0] = np.nan
    return write_adapter(folder / "bad", tensors={**tensors, name: (dtype, shape, values.tobytes())})


class World:
    """A registry on a backend, with the shortest ways to fill it."""

    def __init__(self, registry: Registry, folder: Path, config: RegistryConfig, **options: Any) -> None:
        self.registry = registry
        self.folder = folder
        self.config = config
        self.options = options

    def reopen(self) -> Registry:
        """A second registry on the same data, as another process would have it."""
        return Registry(self.config, **self.options)

    def tenant(self, name: str) -> Principal:
        """A new tenant and a tenant admin of it."""
        self.registry.tenants.create(OPERATOR, name)
        return self.principal(name, Role.TENANT_ADMIN)

    def key(self, tenant: str, role: Role = Role.TENANT, **options: Any) -> str:
        return self.registry.keys.create(OPERATOR, tenant, role, **options).key.reveal()

    def principal(self, tenant: str, role: Role = Role.TENANT, **options: Any) -> Principal:
        return self.registry.authenticate(self.key(tenant, role, **options))

    def publish(self, tenant: str, name: str, seed: int = 0, base: BaseDescription = BASE) -> VersionInfo:
        """A validated version."""
        directory = adapter_dir(self.folder, seed)
        fingerprint = base.fingerprint
        return self.registry.publish(OPERATOR, tenant, name, directory, base, base_fingerprint=fingerprint)

    def verified(self, tenant: str, name: str, seed: int = 0) -> VersionInfo:
        """A verified version that is not active."""
        version = self.publish(tenant, name, seed)
        return self.registry.adapters.record_verification(OPERATOR, tenant, name, version.number, PASSED)

    def active(self, tenant: str, name: str, seed: int = 0) -> VersionInfo:
        """A version that the name stands for."""
        version = self.verified(tenant, name, seed)
        current = self.registry.adapters.show(OPERATOR, tenant, name).info.alias.active
        self.registry.adapters.activate(OPERATOR, tenant, name, version.number, expected=current)
        return version


@contextmanager
def postgres_database() -> Iterator[str]:
    """The URL of a fresh database, dropped at the end; skips where there is no server."""
    if POSTGRES_URL is None:
        pytest.skip("LORAPLEX_TEST_POSTGRES_URL is not set")
    server = make_url(POSTGRES_URL).set(drivername="postgresql+psycopg")
    name = f"loraplex_{uuid.uuid4().hex}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    try:
        yield server.set(database=name).render_as_string(hide_password=False)
    finally:
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
        engine.dispose()


MakeWorld = Callable[..., World]
