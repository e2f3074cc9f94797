"""Registering, verifying, activating, rolling back, deleting and listing at once (RELIABILITY.md, T29)."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from loraplex.core import LoraplexError
from loraplex.registry import Adapters, Registry, VersionConflict, adapter_admin

from .helpers import BASE, OPERATOR, PASSED, MakeWorld, World, adapter_dir
from .linearizability import Event, Name, Operation, Result, illegal

NUM_CLIENTS = 8
DECK = {"register": 3, "verify": 2, "activate": 8, "rollback": 8, "list": 3, "delete": 1}  # of one client in turn


class Client:
    """Does random operations on acme/sup and notes what it saw."""

    def __init__(self, world: World, registry: Registry, seed: int) -> None:
        self.world = world
        self.registry = registry
        self.rng = Random(seed)
        self.deck = [kind for kind, count in DECK.items() for _ in range(count) if kind != "delete" or seed % 2]
        self.events: list[Event] = []
        self.active: int | None = None  # as it last heard
        self.latest = 0

    def run(self, num_ops: int, start: threading.Barrier) -> list[Event]:
        start.wait()
        kinds = self.deck * (num_ops // len(self.deck) + 1)
        self.rng.shuffle(kinds)
        for kind in kinds[:num_ops]:
            if kind in ("activate", "rollback") and self.rng.random() < 0.7:
                self.do("list")  # what is expected is seldom right otherwise
            number = self.rng.randint(max(1, self.latest - 2), max(1, self.latest))
            arguments = {"verify": (self.latest or 1,), "activate": (number, self.active), "rollback": (self.active,)}
            self.do(kind, *arguments.get(kind, ()))
            if kind == "register":
                self.do("verify", self.latest)
        return self.events

    def do(self, kind: str, *arguments: int | None) -> None:
        operation: Operation = (kind, *arguments)
        began = time.monotonic()
        try:
            result: Result = ("ok", *perform(self.world, self.registry, kind, arguments))
        except VersionConflict as conflict:
            result = ("VersionConflict", conflict.current)
        except LoraplexError as error:
            result = (type(error).__name__,)
        self.events.append(Event(began, time.monotonic(), operation, result))
        self.learn(kind, result)

    def learn(self, kind: str, result: Result) -> None:
        told = result[1] if len(result) > 1 else None
        if kind == "register" and isinstance(told, int):
            self.latest = told
        elif kind in ("activate", "rollback", "list") and (told is None or isinstance(told, int)):
            self.active = told
        if kind == "list" and isinstance(result[4], int):
            self.latest = result[4]


def perform(world: World, registry: Registry, kind: str, arguments: Sequence[int | None]) -> Result:
    """One operation on the registry; gives what the model's "ok" gives."""
    adapters = registry.adapters
    if kind == "register":
        fingerprint, directory = BASE.fingerprint, adapter_dir(world.folder, 1)
        return (registry.publish(OPERATOR, "acme", "sup", directory, BASE, base_fingerprint=fingerprint).number,)
    if kind == "verify":
        adapters.record_verification(OPERATOR, "acme", "sup", arguments[0] or 0, PASSED)
        return ()
    if kind == "delete":
        adapters.delete(OPERATOR, "acme", "sup")
        return ()
    if kind == "list":
        (info,) = adapters.list(OPERATOR, "acme")
        active = info.active.number if info.active is not None else None
        assert active == info.alias.active
        assert info.latest is not None
        return active, info.alias.revision, info.deleted, info.latest.number, info.latest.state.value
    if kind == "activate":
        alias = adapters.activate(OPERATOR, "acme", "sup", arguments[0] or 0, expected=arguments[1])
    else:
        alias = adapters.rollback(OPERATOR, "acme", "sup", expected=arguments[0])
    return alias.active, alias.revision


def history(world: World, registries: Sequence[Registry], num_ops: int, seed: int) -> tuple[list[list[Event]], Name]:
    """What all clients saw at once, and a list at the end; the state that they began with."""
    adapter_dir(world.folder, 1)
    world.tenant("acme")
    for _ in range(2):
        world.verified("acme", "sup", seed=1)
    start = threading.Barrier(NUM_CLIENTS)
    clients = [Client(world, registries[i % len(registries)], 100 * seed + i) for i in range(NUM_CLIENTS)]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        events = list(pool.map(lambda client: client.run(num_ops, start), clients))
    last = Client(world, world.registry, 0)
    last.do("list")
    return [*events, last.events], Name(("verified", "verified"))


def outcomes(events: Sequence[Sequence[Event]]) -> Counter[tuple[object, object]]:
    """How often each operation had each outcome."""
    return Counter((event.operation[0], event.result[0]) for client in events for event in client)


def check_history(make_world: MakeWorld, num_ops: int, seed: int, rate_floor: float) -> Counter[tuple[object, object]]:
    world = make_world()
    with world.reopen() as other:
        began = time.monotonic()
        events, initial = history(world, [world.registry, other], num_ops, seed)
        rate = sum(map(len, events)) / (time.monotonic() - began)
    assert illegal(events, initial) is None
    assert rate > rate_floor
    assert world.registry.verify_audit(OPERATOR).ok
    return outcomes(events)


def check_floor(seen: Counter[tuple[object, object]], least: int) -> None:
    """Every operation happened, and the clients were in each other's way."""
    for kind in DECK:
        assert seen[kind, "ok"] >= (least if kind != "delete" else 1), (kind, seen)
    lost = sum(count for (_, outcome), count in seen.items() if outcome != "ok")
    assert seen["activate", "VersionConflict"] + seen["rollback", "VersionConflict"] >= least, seen
    assert lost >= 3 * least, seen


def test_a_history_of_everything_has_one_order(make_world: MakeWorld) -> None:
    check_floor(check_history(make_world, 24, seed=1, rate_floor=5), 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_longer_histories_have_one_order(make_world: MakeWorld, seed: int) -> None:
    check_floor(check_history(make_world, 100, seed, rate_floor=50), 10)


def test_without_the_comparison_there_is_no_order(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a set without its compare."""
    monkeypatch.setattr(adapter_admin, "_check_expected", lambda subject, expected: None)
    world = make_world()
    events, initial = history(world, [world.registry], 12, seed=1)
    assert illegal(events, initial) is not None


def test_a_list_that_is_late_has_no_order(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a list from a memory that nobody tells of changes."""
    real, kept = Adapters.list, {}

    def late(self: Adapters, *args: object) -> object:
        if "list" not in kept or kept["count"] % 4 == 0:
            kept["list"] = real(self, *args)  # type: ignore[arg-type]
        kept["count"] = kept.get("count", 0) + 1
        return kept["list"]

    monkeypatch.setattr(Adapters, "list", late)
    world = make_world()
    events, initial = history(world, [world.registry], 12, seed=1)
    assert illegal(events, initial) is not None


def at(start: float, end: float, operation: Operation, *result: object) -> Event:
    return Event(start, end, operation, result)


TWO = Name(("verified", "verified"))
ACTIVATE_1, ACTIVATE_2 = ("activate", 1, None), ("activate", 2, None)
FIRST, SECOND = ("ok", 1, 1), ("ok", 2, 1)
LIST_1, LIST_0 = ("ok", 1, 1, False, 2, "verified"), ("ok", None, 0, False, 2, "verified")
HISTORIES: dict[str, tuple[bool, list[list[Event]]]] = {
    "nothing": (True, [[], []]),
    "one wins": (True, [[at(0, 2, ACTIVATE_1, *FIRST)], [at(1, 3, ACTIVATE_2, "VersionConflict", 1)]]),
    "two win": (False, [[at(0, 2, ACTIVATE_1, *FIRST)], [at(1, 3, ACTIVATE_2, *SECOND)]]),
    "the later wins, at once": (True, [[at(0, 2, ACTIVATE_1, "VersionConflict", 2)], [at(1, 3, ACTIVATE_2, *SECOND)]]),
    "the later wins, apart": (False, [[at(0, 1, ACTIVATE_1, "VersionConflict", 2)], [at(2, 3, ACTIVATE_2, *SECOND)]]),
    "a list in between": (
        True,
        [[at(0, 3, ACTIVATE_1, *FIRST)], [at(1, 1.5, ("list",), *LIST_0), at(2, 2.5, ("list",), *LIST_1)]],
    ),
    "a list goes back": (
        False,
        [[at(0, 3, ACTIVATE_1, *FIRST)], [at(1, 1.5, ("list",), *LIST_1), at(2, 2.5, ("list",), *LIST_0)]],
    ),
    "deleted twice": (False, [[at(0, 2, ("delete",), "ok")], [at(1, 3, ("delete",), "ok")]]),
    "one number twice": (False, [[at(0, 2, ("register",), "ok", 3)], [at(1, 3, ("register",), "ok", 3)]]),
    "a life after": (True, [[at(0, 1, ("delete",), "ok"), at(2, 3, ("register",), "ok", 3)]]),
    "a number again": (False, [[at(0, 1, ("delete",), "ok"), at(2, 3, ("register",), "ok", 1)]]),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_the_search_tells_legal_from_illegal(name: str) -> None:
    legal, clients = HISTORIES[name]
    assert (illegal(clients, TWO) is None) is legal


def test_the_model_rolls_back_as_documented() -> None:
    state, told = TWO, []
    steps: list[Operation] = [("activate", 1, None), ("activate", 2, 1), ("rollback", 2), ("rollback", 1)]
    for step in steps:
        state, result = state.step(step)
        told.append(result)
    assert told == [("ok", 1, 1), ("ok", 2, 2), ("ok", 1, 3), ("VersionStateError",)]
