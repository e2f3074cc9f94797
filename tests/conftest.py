"""Tiny bases and adapters that several files of tests use; made once."""

import os

# Triton kernels run in its interpreter where there is no GPU; it reads this when a kernel is defined.
if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loraplex  # noqa: F401  (before anything imports torch: it sets how OpenMP waits)

MakeBase = Callable[..., Path]
MakeAdapter = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> MakeBase:
    """`tiny_base(family, **overrides)`: the directory of a tiny model, made at the first call. Do not change it."""
    from tests import oracle

    made: dict[str, Path] = {}

    def make(family: str = "llama", **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            made[key] = oracle.make_base(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_adapter(tmp_path_factory: pytest.TempPathFactory) -> MakeAdapter:
    """`tiny_adapter(base, **options)`: the directory of a random adapter, made at the first call. Do not change it."""
    from tests import oracle

    made: dict[str, Path] = {}

    def make(base: Path, **options: Any) -> Path:
        key = repr((base, sorted(options.items())))
        if key not in made:
            made[key] = oracle.make_adapter(tmp_path_factory.mktemp("adapter"), base, **options)
        return made[key]

    return make
