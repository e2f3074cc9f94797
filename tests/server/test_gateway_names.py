"""Which names of loaded adapters a server with a registry tells to gateways, and of which weights."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.core import AdapterDigest
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
