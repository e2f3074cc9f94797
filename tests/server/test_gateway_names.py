"""Which names of loaded adapters a server with a registry tells to gateways, and of which weights."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from loraplex.core import AdapterDigest
from loraplex.registry import Registry, RegistryUnavailable
from loraplex.server import name_watch
from loraplex.server.known_names import KnownNames
from loraplex.server.name_watch import NameWatch
from loraplex.server.threads import WorkerThreads
from tests.registry.helpers import OPERATOR

from .registry_world import Site, ask

pytestmark = pytest.mark.anyio

PINNED, OTHER = "true", "false"  # adapters are told apart by that: a test pins one


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


async def use(site: Site, key: str, *models: str | None) -> None:
    """Complete with each model, which loads it."""
    async with site.client(key) as client:
        for model in models:
            response = await client.post("/v1/completions", json=ask(model))
            assert response.status_code == 200, response.text


async def listed(site: Site) -> set[str]:
    """Names of the adapters that operators see, with tenant and version."""
    async with site.client(site.operator_key("acme")) as client:
        rows = (await client.get("/admin/v1/residency")).json()["adapters"]
    return {name for row in rows for name in row["names"]}


async def told(site: Site) -> dict[str, str]:
    """`pinned` by name, of the adapters that the metrics call loaded."""
    async with site.client(site.operator_key("acme")) as client:
        text = (await client.get("/metrics")).text
    series = re.findall(r'^vllm:lora_adapter_loaded{adapter_name="(.*?)",level="gpu",pinned="(.*?)"} 1.0$', text, re.M)
    assert len(dict(series)) == len(series), "a name has two series"
    return dict(series)


async def test_a_name_is_told_of_the_version_that_it_stands_for(site: Site) -> None:
    key = site.tenant("acme", "one")
    await use(site, key, "one")
    site.engine.pin_adapter(AdapterDigest(site.digest("acme", "one", 1)))
    assert await told(site) == {"one": PINNED}
    site.world.active("acme", "one", 7)
    await use(site, key, "one")
    assert await told(site) == {"one": OTHER}, "version 1, which is pinned, is `one` no more"
    await use(site, key, "one@1", "acme/one@1")
    assert await told(site) == {"one": OTHER}, "a version that is asked for is not what the name stands for"
    site.registry.adapters.activate(OPERATOR, "acme", "one", 1, expected=2)
    await use(site, key, "acme/one")
    assert await told(site) == {"one": PINNED}


async def test_what_is_asked_for_by_version_alone_has_no_name(site: Site) -> None:
    await use(site, site.tenant("acme", "one", "two"), "one@1", "two")
    assert await told(site) == {"two": OTHER}


async def test_a_name_of_two_tenants_is_told_only_if_it_is_the_same_weights(site: Site) -> None:
    acme, globex = site.tenant("acme", "same", "mine"), site.tenant("globex", "same", "mine")
    site.world.active("globex", "mine", 7)
    assert site.digest("acme", "same") == site.digest("globex", "same")
    for key in (acme, globex):
        await use(site, key, "same", "mine")
    assert await told(site) == {"same": OTHER}
    site.world.active("globex", "same", 8)
    await use(site, globex, "same")
    assert await told(site) == {}
    site.registry.adapters.activate(OPERATOR, "globex", "mine", 1, expected=2)
    await use(site, globex, "mine")
    assert await told(site) == {"mine": OTHER}, "it is the same for both again"


async def test_granted_and_bound_adapters_are_told_by_their_owners_name(site: Site) -> None:
    key, _ = site.tenant("acme", "mine"), site.tenant("globex", "lent", first_seed=5)
    site.registry.adapters.grant(OPERATOR, "globex", "lent", "acme")
    await use(site, key, "globex/lent")
    await use(site, site.world.key("acme", bound_adapter="mine"), None)
    assert await told(site) == {"lent": OTHER, "mine": OTHER}


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_what_is_taken_away_is_told_no_more_whoever_takes_it(site: Site, is_elsewhere: bool) -> None:
    acme, globex = site.tenant("acme", "one", "two"), site.tenant("globex", "one", "three", first_seed=5)
    await use(site, acme, "one", "two")
    await use(site, globex, "one", "three")
    assert await told(site) == {"two": OTHER, "three": OTHER}
    assert await listed(site) == {"acme/one@1", "acme/two@1", "globex/one@1", "globex/three@1"}
    changing = site.world.reopen() if is_elsewhere else site.registry
    changing.adapters.delete(OPERATOR, "acme", "one")
    assert await told(site) == {"one": OTHER, "two": OTHER, "three": OTHER}, "of globex alone"
    assert await listed(site) == {"acme/two@1", "globex/one@1", "globex/three@1"}
    changing.tenants.disable(OPERATOR, "globex")
    assert await told(site) == {"two": OTHER}
    assert await listed(site) == {"acme/two@1"}
    if is_elsewhere:
        changing.close()


async def test_a_name_of_a_pinned_version_leaves_when_another_becomes_active(site: Site) -> None:
    await use(site, site.tenant("acme", "one"), "one")
    site.world.active("acme", "one", 7)
    assert await told(site) == {}, "nobody has asked for version 2"
    assert await listed(site) == {"acme/one@1"}, "which requests may still name"


async def test_names_stay_while_the_registry_does_not_answer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await use(site, site.tenant("acme", "one"), "one")
    catalog = site.app.state.service.catalog
    digest, release = AdapterDigest(site.digest("acme", "one")), threading.Event()

    def fail(since: int) -> None:
        raise RegistryUnavailable("no database")

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "changed_since", lambda self, since: fail(since))
        await catalog.refresh_names()
        patch.setattr(Registry, "changed_since", lambda self, since: release.wait(5))
        patch.setattr(name_watch, "_PATIENCE_S", 0.01)
        await catalog.refresh_names()
    assert catalog.names_of([digest]) == {digest: ("acme/one@1",)}
    release.set()


async def test_only_tenants_that_changed_are_looked_at_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, set[str]]] = []
    look = Registry.standing_versions
    monkeypatch.setattr(Registry, "standing_versions", lambda self, names: asked.append(names) or look(self, names))
    names, at = KnownNames(), SimpleNamespace(now=0.0)
    watch = NameWatch(site.registry, WorkerThreads(1, "test"), names, lambda: at.now)
    for tenant in ("acme", "globex"):
        site.tenant(tenant, "one")
        names.note_current(AdapterDigest(site.digest(tenant, "one")), f"{tenant}/one@1")
    for at.now in (20.0, 40.0, 60.0):
        await watch.refresh()
    assert asked == [{"acme": {"one"}, "globex": {"one"}}] * 2
    site.world.active("globex", "one", 9)
    for at.now in (61.0, 80.0, 100.0, 120.0):  # again for a while: a request may have been noted by what was so before
        await watch.refresh()
    assert asked[2:] == [{"globex": {"one"}}] * 3
