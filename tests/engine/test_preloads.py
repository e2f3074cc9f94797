"""Adapters that come into the pool without a request, asked for from another thread."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loraplex.adapters import AdapterLimits
from loraplex.core import AdapterDigest, AdapterRef, EngineDead, InvalidRequest, ModelNotFound
from loraplex.engine import AsyncEngine, Engine, EngineConfig, ServedModels, async_engine, load_base

from ..conftest import MakeAdapter, MakeBase

MakeEngine = Callable[..., tuple[AsyncEngine, ServedModels]]


@pytest.fixture
def make_engine(tiny_base: MakeBase) -> Iterator[MakeEngine]:
    """Started engines, stopped at the end."""
    started: list[AsyncEngine] = []

    def make(**settings: Any) -> tuple[AsyncEngine, ServedModels]:
        settings = {"dtype": "float32", "memory_bytes": 2**23, "num_threads": 1} | settings
        engine = AsyncEngine(Engine(load_base(tiny_base("llama"), EngineConfig(**settings))))
        engine.start()
        started.append(engine)
        return engine, ServedModels(engine.engine, AdapterLimits())

    yield make
    for engine in started:
        engine.stop()


def states(engine: AsyncEngine) -> dict[AdapterDigest, tuple[str, bool]]:
    return {one.digest: (one.state, one.is_pinned) for one in engine.residency()}


def wait_for(engine: AsyncEngine, wanted: dict[AdapterDigest, tuple[str, bool]]) -> None:
    deadline = time.monotonic() + 10
    while states(engine) != wanted:
        assert time.monotonic() < deadline, states(engine)
        time.sleep(0.005)


def load_three(models: ServedModels, tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> list[AdapterRef]:
    return [
        models.load(name, tiny_adapter(tiny_base("llama"), rank=8, seed=seed), created=0.0)
        for seed, name in enumerate("abc")
    ]


def test_pins_and_preloads_come_without_a_request_and_pins_end(
    make_engine: MakeEngine, tiny_base: MakeBase, tiny_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come at once: an engine that rests does not wait for its next tick."""
    monkeypatch.setattr(async_engine, "_IDLE_TICK_S", 60.0)
    engine, models = make_engine()
    a, b, c = (ref.digest for ref in load_three(models, tiny_base, tiny_adapter))
    engine.pin_adapter(a)
    engine.preload_adapter(b)
    engine.preload_adapter(c, only_free=True)
    wait_for(engine, {a: ("resident", True), b: ("resident", False), c: ("resident", False)})
    assert engine.stats().num_adapter_loads == 3
    monkeypatch.undo()
    engine.unpin_adapter(a)
    assert states(engine)[a] == ("resident", False)
    models.unload("b")
    wait_for(engine, {a: ("resident", False), c: ("resident", False)})


def test_preloads_without_room_are_told_once(
    make_engine: MakeEngine, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    engine, models = make_engine(kv_pages=20)
    digests = [ref.digest for ref in load_three(models, tiny_base, tiny_adapter)]
    num_fitting = 20 // engine.engine.shelf.packed[digests[0]].num_pages
    assert 1 <= num_fitting < 3
    for digest in digests:
        engine.preload_adapter(digest)
    wait_for(engine, {one: ("resident" if idx < num_fitting else "absent", False) for idx, one in enumerate(digests)})
    deadline, dropped = time.monotonic() + 10, []
    while len(dropped) < 3 - num_fitting and time.monotonic() < deadline:
        dropped += engine.take_dropped_preloads()
    assert dropped == digests[num_fitting:]
    assert engine.take_dropped_preloads() == ()


def test_retired_adapter_is_pinned_no_more(
    make_engine: MakeEngine, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    engine, models = make_engine()
    a, b, c = (ref.digest for ref in load_three(models, tiny_base, tiny_adapter))
    engine.pin_adapter(a)
    wait_for(engine, {a: ("resident", True), b: ("absent", False), c: ("absent", False)})
    models.unload("a")
    wait_for(engine, {b: ("absent", False), c: ("absent", False)})
    assert engine.engine.scheduler.residency.num_pinned_pages == 0


def test_what_cannot_be_pinned_is_refused_to_who_asked(
    make_engine: MakeEngine, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    engine, models = make_engine(kv_pages=25)
    unknown = AdapterDigest("f" * 64)
    for call in (engine.pin_adapter, engine.preload_adapter):
        with pytest.raises(ModelNotFound):
            call(unknown)
    engine.unpin_adapter(unknown)
    a, b, _ = (ref.digest for ref in load_three(models, tiny_base, tiny_adapter))
    pages = engine.engine.shelf.packed[a].num_pages
    assert pages <= 12 < 2 * pages
    engine.pin_adapter(a)
    with pytest.raises(InvalidRequest, match=f"takes {pages} pages and {pages} are pinned.* 12 of 25 pages"):
        engine.pin_adapter(b)
    engine.stop()
    with pytest.raises(EngineDead):
        engine.pin_adapter(a)
