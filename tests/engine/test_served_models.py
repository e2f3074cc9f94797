"""Names, versions and what the engine keeps of them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loraplex.core import AdapterRef, AdapterRefused, ModelNotFound, RefusalReason

from ..conftest import MakeAdapter, MakeBase
from ..oracle import Harness


@pytest.fixture
def harness(tiny_base: MakeBase) -> Harness:
    return Harness(tiny_base("llama"))


@pytest.fixture
def paths(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> list[Path]:
    return [tiny_adapter(tiny_base("llama"), rank=2, seed=seed) for seed in (1, 2, 3)]


def kept(harness: Harness) -> set[str]:
    """Digests in host memory, after the engine has had a moment to forget."""
    harness.step()
    return set(harness.engine.shelf.packed)


def test_load_registers_and_names(harness: Harness, paths: list[Path]) -> None:
    ref = harness.load("a", paths[0])
    assert (ref.name, ref.version) == ("a", 1)
    assert harness.models.catalog.resolve("a") == ref
    assert kept(harness) == {ref.digest}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("base", RefusalReason.NAME_CONFLICT),
        ("", RefusalReason.NAME_INVALID),
        ("a/b", RefusalReason.NAME_INVALID),
        ("a@1", RefusalReason.NAME_INVALID),
    ],
)
def test_bad_name_is_refused_before_the_files_are_read(harness: Harness, name: str, reason: RefusalReason) -> None:
    with pytest.raises(AdapterRefused) as caught:
        harness.load(name, Path("/does/not/exist"))
    assert caught.value.reason is reason


def test_taken_name_needs_replace(harness: Harness, paths: list[Path]) -> None:
    first = harness.load("a", paths[0])
    with pytest.raises(AdapterRefused) as caught:
        harness.load("a", paths[1])
    assert caught.value.reason is RefusalReason.NAME_CONFLICT
    assert kept(harness) == {first.digest}
    second = harness.models.load("a", paths[1], created=0.0, replace=True)
    assert (second.version, kept(harness)) == (2, {second.digest})


def test_refused_replacement_leaves_what_was_there(harness: Harness, paths: list[Path], tmp_path: Path) -> None:
    first = harness.load("a", paths[0])
    with pytest.raises(AdapterRefused):
        harness.models.load("a", tmp_path, created=0.0, replace=True)
    assert harness.models.catalog.resolve("a") == first
    assert harness.answer((1,), adapter=first).tokens


def test_two_names_for_the_same_weights_keep_one_copy(harness: Harness, paths: list[Path]) -> None:
    one, two = harness.load("one", paths[0]), harness.load("two", paths[0])
    assert one.digest == two.digest
    harness.models.unload("one")
    assert kept(harness) == {two.digest}
    assert harness.answer((1,), adapter=two).tokens
    harness.models.unload("two")
    assert kept(harness) == set()


def test_replacing_with_the_same_weights_keeps_them(harness: Harness, paths: list[Path]) -> None:
    first = harness.load("a", paths[0])
    second = harness.models.load("a", paths[0], created=0.0, replace=True)
    assert (second.version, second.digest) == (2, first.digest)
    assert kept(harness) == {first.digest}
    assert harness.answer((1,), adapter=second).tokens


def test_unload_forgets_the_name_at_once(harness: Harness, paths: list[Path]) -> None:
    ref = harness.load("a", paths[0])
    assert harness.models.unload("a") == ref
    with pytest.raises(ModelNotFound):
        harness.models.catalog.resolve("a")
    with pytest.raises(AdapterRefused) as caught:
        harness.models.unload("a")
    assert caught.value.reason is RefusalReason.NOT_FOUND


def test_weights_reloaded_before_they_were_forgotten_stay(harness: Harness, paths: list[Path]) -> None:
    ref = harness.load("a", paths[0])
    harness.models.unload("a")
    again = harness.load("b", paths[0])
    assert kept(harness) == {ref.digest}
    assert harness.answer((1,), adapter=again).tokens


def test_running_request_keeps_unloaded_weights_until_it_ends(harness: Harness, paths: list[Path]) -> None:
    expected = harness.answer((1, 2), adapter=harness.load("first", paths[0])).tokens
    harness.models.unload("first")
    ref = harness.load("a", paths[0])
    request_id = harness.add((1, 2), adapter=ref)  # queued, not yet run
    harness.models.unload("a")
    assert ref.digest in kept(harness)
    harness.run()
    assert harness.trace(request_id).tokens == expected
    assert kept(harness) == set()
    assert harness.engine.scheduler.residency.resident == ()


def during_sweep(harness: Harness, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Forget retired adapters while another thread does something; it may have to wait until that is done."""
    other = threading.Thread(target=action)
    uses = harness.engine.scheduler.uses_adapter

    def slow_uses(self: object, digest: str) -> bool:
        if other.ident is None:
            other.start()
        other.join(0.2)
        return uses(digest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(type(harness.engine.scheduler), "uses_adapter", slow_uses)
        harness.step()
    other.join()


def test_unloading_while_the_engine_forgets_another_is_safe(
    harness: Harness, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, 1):
        harness.load(f"a{number}", paths[number])
    harness.models.unload("a0")
    during_sweep(harness, monkeypatch, lambda: harness.models.unload("a1"))
    assert kept(harness) == set()


def test_loading_while_the_engine_forgets_the_same_weights_keeps_them(
    harness: Harness, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.load("a", paths[0])
    harness.models.unload("a")
    during_sweep(harness, monkeypatch, lambda: harness.load("b", paths[0]))
    ref = harness.models.catalog.resolve("b")
    assert ref is not None
    assert harness.answer((1,), adapter=ref).tokens


def test_weights_that_are_held_outlive_their_name(harness: Harness, paths: list[Path]) -> None:
    first = harness.load("a", paths[0])
    assert harness.models.acquire("a") == first
    assert harness.models.acquire("a@1") == first
    harness.models.unload("a")
    with pytest.raises(ModelNotFound):
        harness.models.acquire("a")
    assert kept(harness) == {first.digest}
    harness.models.release(first)
    assert kept(harness) == {first.digest}
    harness.models.release(first)
    assert kept(harness) == set()


def test_weights_that_a_name_stands_for_outlive_their_last_lease(harness: Harness, paths: list[Path]) -> None:
    first = harness.load("a", paths[0])
    assert harness.models.acquire("a") == first
    second = harness.models.load("a", paths[1], created=0.0, replace=True)
    assert kept(harness) == {first.digest, second.digest}
    harness.models.release(first)
    assert kept(harness) == {second.digest}
    assert harness.models.acquire("base") is None


# ---------------------------------------------------------------------- loads at once
class Load(threading.Thread):
    """A load in its own thread; `outcome` is what it gave or raised."""

    def __init__(self, harness: Harness, name: str, path: Path, *, replace: bool = False) -> None:
        super().__init__(daemon=True)
        self.outcome: AdapterRef | Exception | None = None
        self._call = lambda: harness.models.load(name, path, created=0.0, replace=replace)
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._call()
        except Exception as error:
            self.outcome = error

    def ended(self) -> AdapterRef | Exception | None:
        self.join(10.0)
        assert not self.is_alive()
        return self.outcome


class Gate:
    """Packing waits at it; `num_waiting` do, and `fail` is raised behind it."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.num_waiting = 0
        self.fail: Exception | None = None

    def wait(self) -> None:
        self.num_waiting += 1
        assert self.opened.wait(10.0)
        if self.fail is not None:
            raise self.fail

    def await_waiting(self, count: int) -> None:
        until = time.monotonic() + 10.0
        while self.num_waiting < count:
            assert time.monotonic() < until
            time.sleep(0.001)


@contextmanager
def packing_stopped(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Packing stops at a gate, which is open at the end."""
    gate, pack = Gate(), harness.engine.shelf._pack

    def slow(*args: Any) -> Any:
        gate.wait()
        return pack(*args)

    with monkeypatch.context() as patch:
        patch.setattr(harness.engine.shelf, "_pack", slow)
        try:
            yield gate
        finally:
            gate.opened.set()


def test_names_are_leased_given_back_and_taken_away_while_another_adapter_is_packed(
    harness: Harness, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = harness.load("a", paths[0])
    with packing_stopped(harness, monkeypatch) as gate:
        load = Load(harness, "b", paths[1])
        gate.await_waiting(1)

        def serve() -> None:
            assert harness.models.acquire("a") == first
            harness.models.release(first)
            harness.models.unload("a")

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        server.join(5.0)
        assert not server.is_alive(), "requests wait for a pack"
        with pytest.raises(ModelNotFound):
            harness.models.acquire("b")
        gate.opened.set()
        second = load.ended()
    assert isinstance(second, AdapterRef)
    assert kept(harness) == {second.digest}
    assert harness.answer((1,), adapter=second).tokens


def test_two_loads_of_one_name_at_once_give_it_to_one_of_them(
    harness: Harness, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with packing_stopped(harness, monkeypatch) as gate:
        loads = [Load(harness, "a", path) for path in paths[:2]]
        gate.await_waiting(2)
        gate.opened.set()
        outcomes = [load.ended() for load in loads]
    (ref,) = (outcome for outcome in outcomes if isinstance(outcome, AdapterRef))
    (error,) = (outcome for outcome in outcomes if isinstance(outcome, AdapterRefused))
    assert error.reason is RefusalReason.NAME_CONFLICT
    assert harness.models.resolve("a") == ref
    assert kept(harness) == {ref.digest}, "the weights that got no name leave"


def test_two_replacements_at_once_leave_the_weights_of_the_last_version(
    harness: Harness, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.load("a", paths[0])
    with packing_stopped(harness, monkeypatch) as gate:
        loads = [Load(harness, "a", path, replace=True) for path in paths[1:]]
        gate.await_waiting(2)
        gate.opened.set()
        refs = [load.ended() for load in loads]
    assert sorted(ref.version for ref in refs if isinstance(ref, AdapterRef)) == [2, 3]
    last = harness.models.resolve("a")
    assert last is not None
    assert (last.version, kept(harness)) == (3, {last.digest})


@pytest.mark.parametrize("is_failing", [False, True])
def test_name_that_is_unloaded_while_its_replacement_is_packed(
    harness: Harness, paths: list[Path], monkeypatch: pytest.MonkeyPatch, is_failing: bool
) -> None:
    harness.load("a", paths[0])
    with packing_stopped(harness, monkeypatch) as gate:
        load = Load(harness, "a", paths[1], replace=True)
        gate.await_waiting(1)
        harness.models.unload("a")
        assert kept(harness) == set()
        gate.fail = AdapterRefused(RefusalReason.TOO_LARGE, "no room") if is_failing else None
        gate.opened.set()
        outcome = load.ended()
    if is_failing:
        assert outcome is gate.fail
        assert (harness.models.list(), kept(harness)) == ((), set())
    else:
        assert isinstance(outcome, AdapterRef)
        assert (outcome.version, kept(harness)) == (2, {outcome.digest})


def test_weights_that_are_being_named_outlive_the_end_of_their_other_name(
    harness: Harness, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, add = harness.load("one", paths[0]), harness.engine.add_adapter

    def add_then_unload(adapter: Any) -> None:
        add(adapter)  # already here
        harness.models.unload("one")
        assert kept(harness) == {ref.digest}

    monkeypatch.setattr(harness.engine, "add_adapter", add_then_unload)
    two = harness.load("two", paths[0])
    assert (two.digest, kept(harness)) == (ref.digest, {ref.digest})
    assert harness.answer((1,), adapter=two).tokens


def test_failed_pack_changes_no_name_and_leaves_no_use(
    harness: Harness, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = harness.load("a", paths[0])
    with packing_stopped(harness, monkeypatch) as gate:
        gate.fail = AdapterRefused(RefusalReason.TOO_LARGE, "no room")
        gate.opened.set()
        with pytest.raises(AdapterRefused):
            harness.models.load("a", paths[1], created=0.0, replace=True)
    assert harness.models.resolve("a") == first
    assert kept(harness) == {first.digest}
    second = harness.models.load("a", paths[1], created=0.0, replace=True)
    assert kept(harness) == {second.digest}
