"""Adapters that come without a request: pins follow names, preloads move weights and nobody's rights."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from structlog.testing import CapturingLogger

from loraplex.core import AdapterDigest, AdapterResidence, ConfigError, InvalidRequest, ModelNotFound
from loraplex.registry import AuditUnavailable
from loraplex.server import ServerConfig, preloading
from loraplex.server.adapter_names import NamedLease
from loraplex.server.popularity import Popularity, read_scores, write_text
from loraplex.server.preloading import PreloadConfig, Preloader
from loraplex.testing import FakeEngine
from tests.registry.helpers import OPERATOR

from .helpers import assert_error, until
from .registry_world import Site, ask, fake_engine

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "TICK_S", 0.01)
    monkeypatch.setattr(preloading, "_REFILL_S", 0.05)
    monkeypatch.setattr(preloading, "_NOTE_S", 0.05)


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Any]:
    """A site with the tenant acme and its adapters one and two."""
    made: list[Site] = []

    def make(engine: FakeEngine | None = None, **options: Any) -> Site:
        config = ServerConfig(preloads=PreloadConfig(**options))
        site = Site(tmp_path, engine or fake_engine(), config)
        site.tenant("acme", "one", "two")
        made.append(site)
        return site

    yield make
    for site in made:
        site.close()


@asynccontextmanager
async def running(site: Site) -> AsyncIterator[Preloader]:
    preloader: Preloader = site.app.state.service.preloader
    preloader.start()
    try:
        yield preloader
    finally:
        await preloader.close()


def replace_active(site: Site, name: str, seed: int) -> None:
    """A second version becomes the active one."""
    site.world.active("acme", name, seed)


# ---------------------------------------------------------------------- pins
async def test_pinned_names_are_pinned_at_start_and_follow_their_active_version(make_site: Any) -> None:
    site = make_site(pin=("acme/one",))
    first = site.digest("acme", "one")
    async with running(site) as preloader:
        await until(lambda: preloader.is_ready)
        assert site.engine.pinned == {first}
        replace_active(site, "one", 9)
        second = site.digest("acme", "one")
        assert second != first
        await until(lambda: site.engine.pinned == {second})
        site.registry.adapters.delete(OPERATOR, "acme", "one")
        await until(lambda: site.engine.pinned == set())
        assert preloader.pinned == ("acme/one",)
        await until(lambda: any(line["event"] == "pin_failed" for line in site.lines()))
    failures = [line for line in site.lines() if line["event"] == "pin_failed"]
    assert len(failures) == 1, "it is told once, not at every look"
    assert failures[0]["name"] == "acme/one"


async def test_pinned_adapter_keeps_its_place_in_host_memory(make_site: Any, tmp_path: Path) -> None:
    site = make_site(pin=("acme/one",))
    site.config = replace(site.config, max_host_adapters=2)
    site.app = preloading_app(site)
    site.tenant("beta", "three", "four", first_seed=5)
    async with running(site) as preloader:
        await until(lambda: preloader.is_ready)
        async with site.client(site.world.key("beta")) as client:
            for name in ("three", "four", "three"):
                assert (await client.post("/v1/completions", json=ask(name))).status_code == 200
        assert site.digest("acme", "one") in site.engine.held
        assert len(site.engine.retired) == 2


def preloading_app(site: Site) -> Any:
    from loraplex.server import create_app

    return create_app(site.engine, site.registry, site.config, site.log)


async def test_old_weights_go_first_where_both_are_too_many_pages(make_site: Any) -> None:
    site = make_site(pin=("acme/one",))
    refused = InvalidRequest("too many pages", "pin")
    calls: list[str] = []

    class OneAtATime(FakeEngine):
        def pin_adapter(self, digest: Any) -> None:
            calls.append("pin")
            self.pin_error = refused if self.pinned else None
            super().pin_adapter(digest)

        def unpin_adapter(self, digest: Any) -> None:
            calls.append("unpin")
            super().unpin_adapter(digest)

    site.engine = OneAtATime(description=site.engine.description, only_held=True)
    site.app = preloading_app(site)
    async with running(site):
        await until(lambda: site.engine.pinned != set())
        replace_active(site, "one", 9)
        await until(lambda: site.engine.pinned == {site.digest("acme", "one")})
    assert calls == ["pin", "pin", "unpin", "pin"]


async def test_operators_pin_and_unpin_at_run_time_and_it_is_on_record(make_site: Any) -> None:
    site = make_site()
    key = site.operator_key("acme")
    path = "/admin/v1/tenants/acme/adapters/one/pin"
    async with running(site), site.client(key) as client:
        for _ in range(2):
            response = await client.put(path)
            assert response.status_code == 200, response.text
        digest = site.digest("acme", "one")
        assert response.json() == {"tenant": "acme", "name": "one", "pinned": True, "digest": digest}
        assert site.engine.pinned == {digest}
        assert_error(await client.put("/admin/v1/tenants/acme/adapters/none/pin"), 404)
        assert_error(await client.put("/admin/v1/tenants/acme/adapters/one@1/pin"), 400, "name")
        for _ in range(2):
            response = await client.delete(path)
            assert response.json() == {"tenant": "acme", "name": "one", "pinned": False, "digest": None}
        assert site.engine.pinned == set()
        site.engine.pin_error = InvalidRequest("The adapter takes 40 pages", "pin")
        assert_error(await client.put(path), 400, "pin")
    actions = [entry.action for entry in site.registry.audit_entries(OPERATOR, "acme", limit=100)]
    assert [action for action in actions if "pin" in action] == ["adapter.pin", "adapter.pin", "adapter.unpin"]


async def test_deleted_adapter_is_unpinned_and_that_is_on_record(make_site: Any) -> None:
    site = make_site(pin=("acme/one",))
    path = "/admin/v1/tenants/acme/adapters/one/pin"
    async with running(site) as preloader, site.client(site.operator_key("acme")) as client:
        await until(lambda: preloader.is_ready)
        site.registry.adapters.delete(OPERATOR, "acme", "one")
        for _ in range(2):
            response = await client.delete(path)
            assert response.status_code == 200, response.text
            assert response.json() == {"tenant": "acme", "name": "one", "pinned": False, "digest": None}
        assert (preloader.pinned, site.engine.pinned) == ((), set())
        assert_error(await client.put(path), 404, code="adapter_deleted")
    actions = [entry.action for entry in site.registry.audit_entries(OPERATOR, "acme", limit=100)]
    assert [action for action in actions if "pin" in action] == ["adapter.unpin"]


async def test_what_cannot_be_put_on_record_stays_pinned(make_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site = make_site(pin=("acme/one",))
    path = "/admin/v1/tenants/acme/adapters/one/pin"

    def fail(*args: Any, **options: Any) -> None:
        raise AuditUnavailable("The heads file cannot be written.")

    async with running(site) as preloader, site.client(site.operator_key("acme")) as client:
        await until(lambda: preloader.is_ready)
        with monkeypatch.context() as patch:
            patch.setattr(type(site.registry.adapters), "record_pin", fail)
            assert_error(await client.delete(path), 503)
        assert (preloader.pinned, site.engine.pinned) == (("acme/one",), {site.digest("acme", "one")})
        assert (await client.delete(path)).status_code == 200
        assert site.engine.pinned == set()


async def test_two_names_of_the_same_weights_are_one_pin(make_site: Any) -> None:
    site = make_site(pin=("acme/one", "beta/one"))
    site.tenant("beta", "one")
    assert site.digest("acme", "one") == site.digest("beta", "one")
    async with running(site) as preloader:
        await until(lambda: preloader.is_ready)
        assert await preloader.unpin("acme/one")
        assert site.engine.pinned == {site.digest("acme", "one")}
        assert await preloader.unpin("beta/one")
        assert site.engine.pinned == set()


async def test_pinned_and_preloaded_adapters_have_their_names_before_anybody_asks(make_site: Any) -> None:
    site = make_site(pin=("acme/one",), preload=("acme/two@1",))
    async with running(site) as preloader, site.client(site.operator_key("acme")) as client:
        await until(lambda: preloader.is_ready)
        assert await told_names(client) == [["acme/one@1"], ["acme/two@1"]]
        assert 'adapter_name="one",level="gpu",pinned="true"' in await metrics_text(client)
        assert 'adapter_name="two"' not in await metrics_text(client), "a version is not what the name stands for"
        replace_active(site, "one", 9)
        await until(lambda: site.engine.pinned == {site.digest("acme", "one")})
        assert await told_names(client) == [["acme/one@1"], ["acme/one@2"], ["acme/two@1"]]
        assert 'adapter_name="one",level="gpu",pinned="true"' in await metrics_text(client)
        assert 'adapter_name="one",level="gpu",pinned="false"' not in await metrics_text(client)


async def told_names(client: httpx.AsyncClient) -> list[list[str]]:
    response = await client.get("/admin/v1/residency")
    return sorted(one["names"] for one in response.json()["adapters"])


async def metrics_text(client: httpx.AsyncClient) -> str:
    return (await client.get("/metrics")).text


# ---------------------------------------------------------------------- at start
@pytest.mark.parametrize(
    ("flag", "name"),
    [
        *((flag, name) for flag in ("pin", "preload") for name in ("acme/none", "nobody/one", "one", "acme/one/x")),
        ("preload", "acme/one@7"),
    ],
)
async def test_name_that_does_not_exist_at_start_is_an_error_that_names_it(
    make_site: Any, flag: str, name: str
) -> None:
    site = make_site(**{flag: (name,)})
    with pytest.raises(ConfigError, match=f"--{flag} {name}: "):
        site.app.state.service.preloader.check_start()


async def test_preloads_and_recent_ones_come_at_start_in_order(
    make_site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recent = tmp_path / "recent.json"
    write_text(recent, Popularity({"acme/two": 9.0, "acme/gone": 7.0, "acme/one": 5.0, "acme/other": 0.5}).text())
    monkeypatch.setattr(preloading, "MAX_AT_ONCE", 1)
    site = make_site(preload=("acme/one",), num_recent=3, recent_path=recent)
    async with running(site) as preloader:
        assert not preloader.is_ready
        await until(lambda: preloader.is_ready)
        digests = [digest for digest, _ in site.engine.preloaded]
        assert digests == [site.digest("acme", "one"), site.digest("acme", "two")]
    failures = [line for line in site.lines() if line["event"] == "preloading_failed"]
    assert [line["name"] for line in failures] == ["acme/gone"]


async def test_not_ready_while_adapters_come_but_no_longer_than_the_bound(
    make_site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(pin=("acme/one",))
    gate = asyncio.Event()

    async def slow(name: str) -> None:
        await gate.wait()

    async with site.client() as client:
        assert (await client.get("/ready")).status_code == 200, "nothing was started"
        monkeypatch.setattr(Preloader, "_keep", lambda self, name: slow(name))
        async with running(site):
            response = await client.get("/ready")
            assert_error(response, 503, code="overloaded")
            assert response.headers["retry-after"] == "1"
        monkeypatch.setattr(preloading, "READY_WAIT_S", 0.0)
        async with running(site):
            assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize("damage", [b"\xff{", b"[]"])
async def test_damaged_file_is_logged_and_ignored(make_site: Any, tmp_path: Path, damage: bytes) -> None:
    recent = tmp_path / "recent.json"
    recent.write_bytes(damage)
    site = make_site(num_recent=3, recent_path=recent)
    async with running(site) as preloader:
        await until(lambda: preloader.is_ready)
    assert [line["event"] for line in site.lines() if line["level"] == "warning"] == ["recent_adapters_damaged"]
    assert read_scores(recent) == {}, "it is written anew at the end"


def test_pin_at_start_has_no_version_as_it_follows_the_name() -> None:
    with pytest.raises(ConfigError, match=r"^A pin follows the name: --pin 'acme/one@1' has a version\.$"):
        PreloadConfig(pin=("acme/two", "acme/one@1"))
    assert PreloadConfig(preload=("acme/one@1",)).preload == ("acme/one@1",)


def test_recent_needs_a_place_and_a_count() -> None:
    with pytest.raises(ConfigError, match="--data-dir"):
        PreloadConfig(num_recent=1)
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        PreloadConfig(num_recent=-1)


# ---------------------------------------------------------------------- while it runs
async def test_what_is_used_is_kept_and_what_was_pushed_out_comes_back(make_site: Any, tmp_path: Path) -> None:
    class Small(FakeEngine):
        """The pool has room, and nothing is in it."""

        def residency(self) -> tuple[AdapterResidence, ...]:
            return tuple(replace(one, state="absent") for one in super().residency())

    site = make_site(
        Small(description=fake_engine().description, only_held=True), num_recent=1, recent_path=tmp_path / "r"
    )
    async with running(site), site.client(site.world.key("acme")) as client:
        for _ in range(3):
            assert (await client.post("/v1/completions", json=ask("one"))).status_code == 200
        await until(lambda: (site.digest("acme", "one"), True) in site.engine.preloaded)
    assert read_scores(tmp_path / "r").keys() == {"acme/one"}
    assert {digest for digest, _ in site.engine.preloaded} == {site.digest("acme", "one")}


async def test_every_start_counts_though_the_adapter_has_left_the_pool(
    make_site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Empty(FakeEngine):
        """What was started has been evicted whenever one looks."""

        def residency(self) -> tuple[AdapterResidence, ...]:
            return ()

    monkeypatch.setattr(preloading, "_NOTE_S", 60.0)
    path = tmp_path / "r"
    site = make_site(Empty(description=fake_engine().description, only_held=True), num_recent=1, recent_path=path)
    async with running(site), site.client(site.world.key("acme")) as client:
        for number in range(12):
            if number == 6:
                replace_active(site, "one", 9)  # which goes by the same name
            response = await client.post("/v1/completions", json=ask("one", stream=number % 2 == 0))
            assert response.status_code == 200
        assert (await client.post("/v1/completions", json=ask("two"))).status_code == 200
        assert (await client.post("/v1/completions", json=ask(fake_engine().base.name))).status_code == 200
        assert_error(await client.post("/v1/completions", json=ask("two", max_tokens=0)), 400)
    assert read_scores(path) == {"acme/one": 12.0, "acme/two": 1.0}


async def test_starts_are_not_kept_where_nobody_asks_for_them(make_site: Any) -> None:
    site = make_site()
    async with running(site) as preloader, site.client(site.world.key("acme")) as client:
        assert (await client.post("/v1/completions", json=ask("one"))).status_code == 200
        assert preloader._starts.drain() == {}


async def test_preloading_gives_nobody_a_right(make_site: Any) -> None:
    site = make_site(pin=("acme/one",), preload=("acme/two",))
    site.tenant("beta")
    async with running(site) as preloader, site.client(site.world.key("beta")) as client:
        await until(lambda: preloader.is_ready)
        for name in ("acme/one", "acme/two", "one"):
            response = await client.post("/v1/completions", json=ask(name))
            assert_error(response, 404, "model", "model_not_found")


async def test_bug_in_the_task_is_logged_and_the_rest_goes_on(make_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site, keep, num_bugs = make_site(pin=("acme/one",)), Preloader._keep, 0

    async def broken(self: Preloader, name: str, **options: Any) -> None:
        nonlocal num_bugs
        num_bugs += 1
        if num_bugs <= 3:
            raise RuntimeError(name)
        await keep(self, name, **options)

    monkeypatch.setattr(Preloader, "_keep", broken)
    async with running(site) as preloader:
        await until(lambda: preloader.is_ready)
        await until(lambda: site.engine.pinned == {site.digest("acme", "one")})
    assert [line["error"] for line in site.lines() if line["event"] == "preloading_bug"] == ["RuntimeError"] * 3


async def test_lease_is_given_back_though_unpinning_fails(make_site: Any) -> None:
    class Stubborn(FakeEngine):
        def unpin_adapter(self, digest: Any) -> None:
            raise RuntimeError(digest)

    site = make_site(Stubborn(description=fake_engine().description, only_held=True), pin=("acme/one",))
    async with running(site) as preloader:
        await until(lambda: preloader.is_ready)
        lease = preloader._pins["acme/one"].lease
        assert lease is not None
        released: list[str] = []
        preloader._pins["acme/one"].lease = NamedLease(lease.digest, partial(released.append, "once"))
        with pytest.raises(RuntimeError):
            await preloader.unpin("acme/one")
    assert released == ["once"]


async def test_unknown_name_is_not_found_at_run_time(make_site: Any) -> None:
    site = make_site()
    async with running(site) as preloader:
        with pytest.raises(ModelNotFound):
            await preloader.pin("acme/none")
        assert preloader.pinned == ()
        assert not await preloader.unpin("acme/none")


# ---------------------------------------------------------------------- slow stores
class SlowStore:
    """Names whose weights come when `gates[name]` opens, or at once; it counts reads at once and leases."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.gates: dict[str, asyncio.Event] = {}
        self.versions: dict[str, int] = {}
        self.num_reading = self.most_reading = 0
        self.num_leased = 0

    def check(self, name: str) -> AdapterDigest:
        return AdapterDigest(f"{name}@{self.versions.get(name, 1)}")

    async def find(self, name: str) -> AdapterDigest:
        return self.check(name)

    async def lease(self, name: str) -> NamedLease:
        digest = self.check(name)
        self.num_reading += 1
        self.most_reading = max(self.most_reading, self.num_reading)
        try:
            await asyncio.sleep(0.0)
            if name in self.gates:
                await self.gates[name].wait()
        finally:
            self.num_reading -= 1
        self.num_leased += 1
        adapter: Any = None
        self.engine.held[digest] = adapter
        return NamedLease(digest, self._release)

    def _release(self) -> None:
        self.num_leased -= 1


def over(store: SlowStore, log: Any = None, **options: Any) -> Preloader:
    config = PreloadConfig(**options)
    return Preloader(store.engine, store, lambda digests: {}, config, log or structlog.get_logger())


@pytest.fixture
def store() -> SlowStore:
    return SlowStore(FakeEngine())


async def test_other_pins_and_unpins_do_not_wait_for_a_store_that_hangs(store: SlowStore) -> None:
    preloader = over(store)
    store.gates["slow"] = asyncio.Event()
    await preloader.pin("old")
    slow = asyncio.create_task(preloader.pin("slow"))
    await until(lambda: store.num_reading == 1)
    async with asyncio.timeout(10.0):
        assert await preloader.pin("new") == "new@1"
        assert await preloader.unpin("old")
        assert not await preloader.unpin("old")
    assert store.engine.pinned == {"new@1"}
    store.gates["slow"].set()
    assert await slow == "slow@1"
    assert store.engine.pinned == {"new@1", "slow@1"}
    assert store.num_leased == 2


async def test_name_that_is_unpinned_while_it_is_read_is_not_pinned_afterwards(store: SlowStore) -> None:
    preloader = over(store)
    gate = store.gates["slow"] = asyncio.Event()
    first, second = (asyncio.create_task(preloader.pin("slow")) for _ in range(2))
    await until(lambda: store.num_reading == 2)
    async with asyncio.timeout(10.0):
        assert await preloader.unpin("slow")
    third = asyncio.create_task(preloader.pin("slow"))
    await until(lambda: store.num_reading == 3)
    gate.set()
    assert await asyncio.gather(first, second, third) == [None, None, "slow@1"]
    assert (preloader.pinned, store.num_leased) == (("slow",), 1)
    assert await preloader.unpin("slow")
    assert (store.engine.pinned, store.num_leased) == (set(), 0)


async def test_two_pins_of_one_name_at_once_are_one(store: SlowStore) -> None:
    preloader = over(store)
    gate = store.gates["slow"] = asyncio.Event()
    calls = [asyncio.create_task(preloader.pin("slow")) for _ in range(2)]
    await until(lambda: store.num_reading == 2)
    gate.set()
    assert await asyncio.gather(*calls) == ["slow@1", "slow@1"]
    assert store.num_leased == 1
    assert await preloader.unpin("slow")
    assert (store.engine.pinned, store.num_leased, preloader.pinned) == (set(), 0, ())


async def test_pinned_name_that_is_unpinned_while_its_new_version_is_read_stays_unpinned(store: SlowStore) -> None:
    preloader = over(store, pin=("a",))
    preloader.start()
    try:
        await until(lambda: store.engine.pinned == {"a@1"})
        gate = store.gates["a"] = asyncio.Event()
        store.versions["a"] = 2
        await until(lambda: store.num_reading == 1)
        async with asyncio.timeout(10.0):
            assert await preloader.unpin("a")
        gate.set()
        await until(lambda: store.num_reading == 0 and store.num_leased == 0)
        assert store.engine.pinned == set()
    finally:
        await preloader.close()


async def test_what_is_asked_for_at_start_is_read_several_at_once(
    store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preloading, "TURN_WAIT_S", 0.2)
    names = tuple(f"n{number}" for number in range(40))
    gate = asyncio.Event()
    store.gates.update(dict.fromkeys(names[17:20], gate))  # their store hangs
    preloader = over(store, pin=names[:20], preload=names[20:])
    preloader.start()
    try:
        await until(lambda: len(store.engine.pinned) == 17 and len(store.engine.preloaded) == 20)
        assert not preloader.is_ready
        assert store.most_reading == preloading.MAX_AT_ONCE
        gate.set()
        await until(lambda: preloader.is_ready)
        assert store.engine.pinned == {f"{name}@1" for name in names[:20]}
        assert store.num_leased == 20, "preloads are given back"
    finally:
        await preloader.close()


class HalfFull(FakeEngine):
    """Two adapters may be pinned."""

    def pin_adapter(self, digest: Any) -> None:
        self.pin_error = InvalidRequest("The adapter takes 9 pages", "pin") if len(self.pinned) >= 2 else None
        super().pin_adapter(digest)


async def test_names_that_come_first_are_pinned_whichever_is_read_first(store: SlowStore) -> None:
    log = CapturingLogger()
    store.engine = HalfFull()
    names = tuple(f"n{number}" for number in range(12))
    gates = store.gates = {name: asyncio.Event() for name in names[:5]}
    preloader = over(store, log, pin=names)
    preloader.start()
    try:
        await until(lambda: store.num_leased == 7)
        assert store.engine.pinned == set()
        for name in reversed(names[:5]):
            gates[name].set()
            await asyncio.sleep(0.01)
        await until(lambda: preloader.is_ready)
        assert store.engine.pinned == {"n0@1", "n1@1"}
        assert store.num_leased == 2
    finally:
        await preloader.close()
    (told,) = [call for call in log.calls if call.args == ("pins_missing",)]
    assert told.method_name == "error"
    assert told.kwargs == {
        "num_missing": 10,
        "num_pinned": 2,
        "names": [f"n{number}" for number in range(2, 10)],
        "message": "The adapter takes 9 pages",
    }
    assert len([call for call in log.calls if call.args == ("pin_failed",)]) == 10


async def test_pins_wait_only_a_while_for_a_store_that_hangs(store: SlowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "TURN_WAIT_S", 0.2)
    store.gates = {"slow": asyncio.Event(), "slower": asyncio.Event()}
    preloader = over(store, pin=("slow", "a", "slower", "b"))
    preloader.start()
    try:
        await until(lambda: store.num_leased == 2)
        await until(lambda: store.engine.pinned == {"a@1", "b@1"})
        store.gates["slow"].set()
        await until(lambda: store.engine.pinned == {"a@1", "b@1", "slow@1"})
    finally:
        await preloader.close()


async def test_pin_that_is_undone_before_its_turn_is_neither_pinned_nor_told_as_missing(store: SlowStore) -> None:
    log = CapturingLogger()
    store.gates["slow"] = asyncio.Event()
    preloader = over(store, log, pin=("slow", "a"))
    preloader.start()
    try:
        await until(lambda: store.num_leased == 1)
        assert await preloader.unpin("a")
        store.gates["slow"].set()
        await until(lambda: preloader.is_ready)
        assert (store.engine.pinned, store.num_leased) == ({"slow@1"}, 1)
    finally:
        await preloader.close()
    assert log.calls == []


async def test_preloads_are_handed_over_once_pins_are_taken_which_would_push_them_out(store: SlowStore) -> None:
    store.gates["slow"] = asyncio.Event()
    preloader = over(store, pin=("a", "slow"), preload=("b",))
    preloader.start()
    try:
        await until(lambda: store.engine.pinned == {"a@1"} and store.num_leased == 2)
        await asyncio.sleep(0.05)
        assert store.engine.preloaded == []
        store.gates["slow"].set()
        await until(lambda: preloader.is_ready)
        assert store.engine.preloaded == [("b@1", False)]
    finally:
        await preloader.close()


async def test_preloads_that_found_no_room_are_one_line_that_names_them(store: SlowStore) -> None:
    log = CapturingLogger()
    preloader = over(store, log, preload=tuple(f"n{number}" for number in range(20)))
    preloader.start()
    try:
        await until(lambda: len(store.engine.preloaded) == 20)
        store.engine.in_pool |= {AdapterDigest(f"n{number}@1") for number in range(10)}
        store.engine.dropped_preloads += [AdapterDigest(f"n{number}@1") for number in range(10, 20)]
        await until(lambda: bool(log.calls))
        await asyncio.sleep(0.2)
    finally:
        await preloader.close()
    (told,) = log.calls
    assert (told.method_name, told.args) == ("warning", ("preloads_not_kept",))
    assert (told.kwargs["num_missing"], told.kwargs["names"]) == (10, [f"n{number}" for number in range(10, 18)])
    for knob in ("--kv-pages", "--memory", "--cpu-lora-memory"):
        assert knob in told.kwargs["message"]


async def test_how_many_are_still_missing_is_told_once_when_ready_no_longer_waits(
    store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preloading, "READY_WAIT_S", 1.0)
    monkeypatch.setattr(preloading, "TURN_WAIT_S", 0.2)
    log = CapturingLogger()
    gate = asyncio.Event()
    store.gates.update({"a": gate, "b": gate})
    preloader = over(store, log, pin=("a", "c"), preload=("b", "d"))
    preloader.start()
    try:
        await until(lambda: bool(log.calls))
        assert preloader.is_ready
        await asyncio.sleep(0.2)
        (told,) = log.calls
        assert (told.method_name, told.args) == ("warning", ("preloads_late",))
        assert told.kwargs == {"after_s": 1.0, "num_missing": 2, "names": ["a", "b"]}
    finally:
        await preloader.close()
    log.calls.clear()
    store.gates.clear()
    again = over(store, log, pin=("a",))
    again.start()
    await until(lambda: again.is_ready)
    await asyncio.sleep(1.2)
    await again.close()
    assert log.calls == [], "nothing was missing"


async def test_pinned_names_follow_their_versions_while_the_store_of_others_hangs(store: SlowStore) -> None:
    names = tuple(f"n{number}" for number in range(preloading.MAX_AT_ONCE + 2))
    slow, (waiting, *_) = names[: preloading.MAX_AT_ONCE], names[preloading.MAX_AT_ONCE :]
    preloader = over(store, pin=names)
    preloader.start()
    try:
        await until(lambda: preloader.is_ready)
        store.gates["n0"] = asyncio.Event()
        store.versions["n0"] = 2
        await until(lambda: store.num_reading == 1)
        store.versions["n1"] = 2
        await until(lambda: "n1@2" in store.engine.pinned)
        store.versions["n1"] = 3
        await until(lambda: "n1@3" in store.engine.pinned)
        store.gates.update({name: asyncio.Event() for name in slow[1:]})
        store.versions.update(dict.fromkeys(slow[1:], 4))
        await until(lambda: store.num_reading == len(slow))
        store.versions[waiting] = 2
        await asyncio.sleep(0.05)
        assert store.num_reading == len(slow), "no more are read at once"
        store.gates["n0"].set()
        await until(lambda: f"{waiting}@2" in store.engine.pinned)
    finally:
        await preloader.close()


async def test_pinned_name_that_has_come_is_followed_while_others_still_come(store: SlowStore) -> None:
    store.gates["slow"] = asyncio.Event()
    preloader = over(store, pin=("a", "slow"), preload=("b",))
    preloader.start()
    try:
        await until(lambda: store.engine.pinned == {"a@1"})
        store.versions["a"] = 2
        await until(lambda: store.engine.pinned == {"a@2"})
        assert not preloader.is_ready
        store.gates["slow"].set()
        await until(lambda: preloader.is_ready)
        assert store.engine.pinned == {"a@2", "slow@1"}
    finally:
        await preloader.close()


async def test_what_is_popular_is_kept_while_a_store_hangs(store: SlowStore, tmp_path: Path) -> None:
    path = tmp_path / "recent.json"
    preloader = over(store, pin=("slow",), recent_path=path)
    preloader.start()
    try:
        await until(lambda: preloader.is_ready)
        store.gates["slow"] = asyncio.Event()
        store.versions["slow"] = 2
        await until(lambda: store.num_reading == 1)
        path.unlink(missing_ok=True)
        await until(path.exists)
    finally:
        await preloader.close()
