"""Where something fails, the answer and the log line still say which weights it was about."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.core import EngineDead, NonFiniteOutput, Overloaded, ServedBy
from loraplex.registry import Role
from loraplex.server import ServerConfig
from tests.registry.helpers import OPERATOR, adapter_dir

from .admin_site import form
from .helpers import ALPHA, BETA, completion
from .registry_world import BASE_NAME, Site, ask

pytestmark = pytest.mark.anyio


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "root").mkdir()
    site = Site(tmp_path, config=ServerConfig(adapter_roots=((tmp_path / "root").resolve(),)))
    yield site
    site.close()


def assert_identity(site: Site, response: httpx.Response, digest: str | None, *, ran: bool = False) -> dict[str, Any]:
    """The answer and the last line name these weights, of version 1 of acme's `one`, or the base."""
    label = f"name=one; version=1; digest={digest}" if digest is not None else "none"
    assert response.headers["x-loraplex-adapter"] == label
    assert response.headers["x-loraplex-base"] == site.engine.base.fingerprint
    line = site.lines()[-1]
    assert (line["tenant"], line["model"]) == ("acme", "one@1" if digest else BASE_NAME)
    assert (line["version"], line["adapter_digest"]) == ((1, digest) if digest else (None, None))
    assert (line["base_fingerprint"], line["ran"]) == (site.engine.base.fingerprint, ran)
    return line


@pytest.mark.parametrize(
    ("fields", "error", "code"),
    [
        ({}, Overloaded("full", 1.0), "overloaded"),
        ({}, EngineDead("dead"), "engine_dead"),
        ({}, RuntimeError("it broke"), "internal_error"),
        ({"stream": True}, RuntimeError("it broke"), "internal_error"),
        ({"prompt": [999]}, None, "invalid_request"),
        ({"max_tokens": 10_000}, None, "context_length_exceeded"),
    ],
)
async def test_a_request_that_fails_after_it_was_resolved_names_its_weights(
    site: Site, fields: dict[str, Any], error: Exception | None, code: str
) -> None:
    key, site.engine.error = site.tenant("acme", "one"), error
    async with site.client(key) as client:
        for model in ("one", BASE_NAME):
            response = await client.post("/v1/completions", json=ask(model, **fields))
            assert response.json()["error"]["code"] == code
            digest = site.digest("acme", "one") if model == "one" else None
            assert assert_identity(site, response, digest)["error_code"] == code


async def test_weights_that_cannot_be_read_are_named(site: Site) -> None:
    key = site.tenant("acme", "one")
    digest = site.digest("acme", "one")
    artifact = site.registry.adapters.version(OPERATOR, "acme", "one", 1).artifact
    assert artifact is not None
    next((site.folder / "data/artifacts/blobs").rglob(artifact.weights.key)).unlink()
    async with site.client(key) as client:
        response = await client.post("/v1/completions", json=ask("one"))
    assert assert_identity(site, response, digest)["error_code"] == "artifact_missing"


async def test_an_answer_that_went_well_says_that_weights_ran(site: Site) -> None:
    key = site.tenant("acme", "one")
    async with site.client(key) as client:
        response = await client.post("/v1/completions", json=ask("one"))
    assert_identity(site, response, site.digest("acme", "one"), ran=True)


async def test_non_finite_output_carries_what_ran(client: httpx.AsyncClient, engine: Any) -> None:
    served = ServedBy("fake-base", engine.base.fingerprint, BETA)
    engine.error = NonFiniteOutput("beta@1", served)
    response = await client.post("/v1/completions", json=completion(model=ALPHA.name))
    assert response.headers["x-loraplex-adapter"] == f"name=beta; version=1; digest={BETA.digest}"


async def test_what_was_not_resolved_is_not_named(site: Site) -> None:
    key = site.tenant("acme", "one")
    async with site.client(key) as client:
        response = await client.post("/v1/completions", json=ask("globex/two"))
    assert "x-loraplex-adapter" not in response.headers
    line = site.lines()[-1]
    assert [line[name] for name in ("model", "version", "adapter_digest", "base_fingerprint", "ran")] == [None] * 4 + [
        False
    ]


# ---------------------------------------------------------------------- administrators
def target(site: Site) -> tuple[Any, ...]:
    line = site.lines()[-1]
    return tuple(line[f"target_{name}"] for name in ("tenant", "adapter", "version", "digest"))


async def test_lines_of_the_admin_api_say_what_they_are_about(site: Site) -> None:
    site.tenant("acme", "one")
    digest = site.digest("acme", "one")
    folder = adapter_dir(site.folder, 9)
    files = [(folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")]
    path = "/admin/v1/tenants/acme/adapters/one"
    async with site.client(site.world.key("acme", Role.TENANT_ADMIN)) as client:
        await client.get("/admin/v1/tenants/acme/keys")
        assert target(site) == ("acme", None, None, None)
        assert (await client.post(f"{path}/versions/1/verify", json={})).status_code == 200
        assert target(site) == ("acme", "one", 1, digest)
        assert (await client.post(f"{path}/activate", json={"version": 1, "expected": 7})).status_code == 412
        assert target(site) == ("acme", "one", 1, digest)
        answer = await client.post(f"{path}/versions", **form(*files))
        assert answer.status_code == 201
        new = answer.json()["digest"]
        assert new != digest
        assert target(site) == ("acme", "one", 2, new)
        await client.post(f"{path}/versions/2/verify", json={})
        await client.post(f"{path}/activate", json={"version": 2, "expected": 1})
        assert target(site) == ("acme", "one", 2, new)
        await client.post(f"{path}/rollback", json={"expected": 2})
        assert target(site) == ("acme", "one", 1, digest)
        await client.delete(f"{path}/versions/2")
        assert target(site) == ("acme", "one", 2, new)
        await client.delete("/admin/v1/tenants/globex/adapters/two/versions/x")
        assert target(site) == ("globex", "two", None, None)


async def test_lines_of_runtime_loading_say_what_they_are_about(site: Site) -> None:
    site.world.tenant("acme")
    adapter_dir(site.folder, 8).rename(site.folder / "root" / "sql")
    async with site.client(site.operator_key("acme")) as client:
        body = {"lora_name": "sql", "lora_path": str(site.folder / "root" / "sql")}
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
        digest = site.digest("acme", "sql")
        assert target(site) == ("acme", "sql", 1, digest)
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 200
        assert target(site) == ("acme", "sql", 1, digest)
        await client.post("/v1/unload_lora_adapter", json={"lora_name": "nothing"})
        assert target(site) == ("acme", "nothing", None, None)
