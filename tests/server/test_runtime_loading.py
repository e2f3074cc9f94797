"""vLLM's endpoints for loading and unloading adapters: its answers, our checks, and no way out of the roots."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters import AdapterLimits
from loraplex.core import AdapterDigest, AdapterRef, ModelNotFound
from loraplex.core.comparison import AdapterComparison
from loraplex.engine import AsyncEngine, Engine, EngineConfig, ServedModels, load_base
from loraplex.registry import Role
from loraplex.server import ServerConfig, adapter_roots, create_app
from loraplex.testing import FakeEngine
from tests.registry.helpers import BASE as REGISTRY_BASE
from tests.registry.helpers import OPERATOR, adapter_dir, bad_adapter_dir

from ..conftest import MakeAdapter, MakeBase
from .helpers import BASE, FakeCatalog, assert_error, until
from .registry_world import Site, ask

pytestmark = pytest.mark.anyio

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def vllm_error(response: httpx.Response, status: int, kind: str, message: str) -> None:
    """The answer that vLLM gives, in the one shape of errors."""
    assert_error(response, status)
    error = response.json()["error"]
    assert (error["type"], error["message"]) == (kind, message)


async def load(client: httpx.AsyncClient, name: str, path: Path | str, **fields: Any) -> httpx.Response:
    return await client.post(LOAD, json={"lora_name": name, "lora_path": str(path), **fields})


def test_the_routes_are_absent_unless_allowed() -> None:
    for roots, present in ((None, False), ((), True)):
        app = create_app(FakeEngine(), FakeCatalog(), ServerConfig(adapter_roots=roots))
        paths = {getattr(route, "path", None) for route in app.routes}
        assert ({LOAD, UNLOAD} <= paths) == present


# ---------------------------------------------------------------------- without a registry, on a real engine
class Local:
    """A tiny model with an app over it, and a root with adapters."""

    def __init__(self, base: Path, root: Path) -> None:
        config = EngineConfig(memory_bytes=2**23, num_threads=1)
        engine = Engine(load_base(base, config, name=BASE))
        self.models = ServedModels(engine, AdapterLimits())
        self.engine = AsyncEngine(engine)
        self.app = create_app(self.engine, self.models, ServerConfig(adapter_roots=(root,), access_log=False))
        self.root = root
        self.engine.start()


@pytest.fixture
def local(tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path) -> Iterator[Local]:
    base = tiny_base("llama")
    for seed in (1, 2):
        shutil.copytree(tiny_adapter(base, rank=2, seed=seed), tmp_path / "root" / f"a{seed}")
    local = Local(base, (tmp_path / "root").resolve())
    yield local
    local.engine.stop()


@pytest.fixture
async def client(local: Local) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(local.app), base_url="http://test") as client:
        yield client


async def served(client: httpx.AsyncClient, model: str, **fields: Any) -> AdapterRef:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    adapter = response.json()["x_loraplex"]["adapter"]
    return AdapterRef(adapter["name"], adapter["version"], adapter["digest"])


async def test_an_adapter_is_loaded_called_and_unloaded(client: httpx.AsyncClient, local: Local) -> None:
    response = await load(client, "sql", local.root / "a1")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert response.headers["content-type"].startswith("text/plain")
    assert (await served(client, "sql")).label == "sql@1"
    response = await client.post(UNLOAD, json={"lora_name": "sql"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    response = await client.post("/v1/completions", json={"model": "sql", "prompt": [5]})
    assert_error(response, 404, "model", "model_not_found")
    await load(client, "sql", local.root / "a1")
    assert (await served(client, "sql")).label == "sql@2"


async def test_what_vllm_refuses_is_refused_in_its_words(client: httpx.AsyncClient, local: Local) -> None:
    missing = "Both 'lora_name' and 'lora_path' must be provided."
    for body in ({}, {"lora_name": "", "lora_path": "x"}, {"lora_name": "x", "lora_path": ""}, {"lora_name": "x"}):
        vllm_error(await client.post(LOAD, json=body), 400, "InvalidUserInput", missing)
    gone = local.root / "gone"
    vllm_error(
        await load(client, "x", gone), 404, "NotFoundError", f"Loading lora x failed: No adapter found for {gone}"
    )
    await load(client, "sql", local.root / "a1")
    twice = (
        "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place, set 'load_inplace' "
        "to True."
    )
    vllm_error(await load(client, "sql", local.root / "a2"), 400, "InvalidUserInput", twice)
    neither = "either 'lora_name' and 'lora_int_id' needs to be provided."
    vllm_error(await client.post(UNLOAD, json={}), 400, "InvalidUserInput", neither)
    for body, name in (({"lora_name": "nope"}, "nope"), ({"lora_int_id": 1}, "")):
        absent = f"The lora adapter '{name}' cannot be found."
        vllm_error(await client.post(UNLOAD, json=body), 404, "NotFoundError", absent)


async def test_loading_in_place_makes_a_version_and_running_requests_keep_theirs(
    client: httpx.AsyncClient, local: Local
) -> None:
    await load(client, "sql", local.root / "a1")
    first = await served(client, "sql")
    held = local.models.acquire("sql")  # as a request that is on its way
    running = [asyncio.create_task(served(client, "sql", max_tokens=60)) for _ in range(4)]
    await until(lambda: local.engine.stats().num_running > 0)
    assert (await load(client, "sql", local.root / "a2", load_inplace=True)).status_code == 200
    second = await served(client, "sql")
    assert (second.version, second.digest != first.digest) == (2, True)
    assert {ref.digest for ref in await asyncio.gather(*running)} == {first.digest}
    assert first.digest in local.engine.engine.shelf.packed
    assert held == first
    local.models.release(held)
    await until(lambda: first.digest not in local.engine.engine.shelf.packed)
    assert (await served(client, "sql")) == second


async def test_no_request_fails_while_a_name_is_replaced_again_and_again(
    client: httpx.AsyncClient, local: Local
) -> None:
    await load(client, "sql", local.root / "a1")
    digests = [(await served(client, "sql")).digest]
    await load(client, "sql", local.root / "a2", load_inplace=True)
    digests.append((await served(client, "sql")).digest)
    done = asyncio.Event()
    seen: list[AdapterRef] = []

    async def keep_asking() -> None:
        while not done.is_set():
            seen.append(await served(client, "sql"))

    askers = [asyncio.create_task(keep_asking()) for _ in range(4)]
    for turn in range(10):
        assert (await load(client, "sql", local.root / f"a{turn % 2 + 1}", load_inplace=True)).status_code == 200
        await until(lambda: len(seen) > 2 * turn)  # noqa: B023  (awaited at once)
    done.set()
    await asyncio.gather(*askers)
    assert len(seen) >= 10
    assert {ref.version: ref.digest for ref in seen}.items() == {
        ref.version: digests[(ref.version - 1) % 2] for ref in seen
    }.items()


async def test_a_bad_adapter_is_400_with_its_code_and_changes_nothing(client: httpx.AsyncClient, local: Local) -> None:
    await load(client, "sql", local.root / "a1")
    bad = local.root / "bad"
    shutil.copytree(local.root / "a2", bad)
    path = bad / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 7}))
    for inplace in (True, False):
        response = await load(client, "sql" if inplace else "new", bad, load_inplace=inplace)
        assert_error(response, 400, code="adapter_refused")
        assert response.json()["error"]["reason"] == "RANK_MISMATCH"
    (bad / "adapter_config.json").unlink()
    response = await load(client, "new", bad)
    assert_error(response, 400, code="adapter_refused")
    assert response.json()["error"]["reason"] == "CONFIG_MISSING"
    assert (await served(client, "sql")).version == 1


async def test_another_base_is_refused_if_it_is_named(client: httpx.AsyncClient, local: Local) -> None:
    response = await load(client, "sql", local.root / "a1", base_fingerprint="0" * 64)
    assert_error(response, 400, code="adapter_refused")
    assert response.json()["error"]["reason"] == "BASE_MISMATCH"
    assert (
        await load(client, "sql", local.root / "a1", base_fingerprint=local.engine.base.fingerprint)
    ).status_code == 200
    assert_error(await load(client, "b", local.root / "a1", base_fingerprint="ABC"), 400, "base_fingerprint")


@pytest.mark.parametrize("name", ["base/../x", "a@1", "a b", "x" * 65, "ä", BASE])
async def test_names_that_no_request_could_use_are_refused(client: httpx.AsyncClient, local: Local, name: str) -> None:
    assert_error(await load(client, name, local.root / "a1"), 400, code="adapter_refused")


# ---------------------------------------------------------------------- paths (RELIABILITY.md, T06)
class Opened:
    """Paths that this process opens while it is watched."""

    watched: "list[str] | None" = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and Opened.watched is not None and isinstance(args[0], str | bytes):
        Opened.watched.append(os.fsdecode(args[0]))


sys.addaudithook(_audit)


class RecordingModels(FakeCatalog):
    """LocalModels that only notes what it was told to load."""

    def __init__(self) -> None:
        super().__init__()
        self.directories: list[Path] = []

    def load(self, name: str, directory: Path, *, created: float, replace: bool = False) -> AdapterRef:
        self.directories.append(directory)
        return AdapterRef(name, 1, AdapterDigest("c" * 64))


def hostile_paths(root: Path, outside: Path) -> list[str]:
    """Ways to name what is not below the root; `outside` is a real adapter."""
    (root / "to-outside").symlink_to(outside)
    (root / "to-parent").symlink_to("..")
    (root / "to-itself").symlink_to("to-itself")
    (root / "file").write_text("x")
    sibling = root.with_name(root.name + "-sibling")
    sibling.mkdir()
    up = os.path.relpath(outside, root)
    targets = [
        str(outside),
        str(sibling),
        str(root),
        f"{root}/",
        f"{root}/.",
        f"{root}/good/..",
        f"{root}/{up}",
        f"{root}/good/../{up}",
        f"{root}/to-outside",
        f"{root}/to-outside/.",
        f"{root}/to-parent/{outside.name}",
        f"{root}/to-itself",
        f"{root}/file",
        f"{root}/good/adapter_config.json",
        f"{root}/missing",
        "/",
        "/etc",
        "/etc/passwd",
        "/proc/self/cwd",
        "/proc/self/root",
        "/dev/fd/0",
        "/dev/zero",
        "..",
        ".",
        "../" * 40,
        "../" * 40 + str(outside).lstrip("/"),
        "~",
        "~root",
        "good",
        "\\\\server\\share",
        "C:\\adapters",
        "file:///etc/passwd",
        f"file://{root}/good",
        "http://127.0.0.1/x",
        "s3://bucket/x",
        "org/name",
        f"{root}/good\x00",
        f"{root}\x00/good",
        "\x00",
        f"{root}/%67ood",
        f"{root}/good%2f..%2f..",
        f"{root}/..%2f{outside.name}",
        f"{root}/%2e%2e/{outside.name}",
        f"{root}/‥/{outside.name}",
        f"{root}/．．/{outside.name}",
        f"{root}/..\\{outside.name}",
        f"{root}/good\n",
        f" {root}/good",
        f"{root}/good ",
        f"{root}/" + "a" * 300,
        f"{root}/" + "a/" * 1000,
        "x" * 4096,
        f"//{outside}",
        f"/../{outside}",
        "$HOME",
        "`id`",
        "$(id)",
        "-rf",
        "*",
        f"{root}/*",
        f"{root}/goo?",
        "con",
        "nul",
        "0" * 64,
    ]
    return [*targets, *(f"{target}/" for target in targets[:14]), *(f"/{target}" for target in targets[:9])]


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    root, outside = tmp_path.resolve() / "root", tmp_path.resolve() / "outside"
    (root / "good").mkdir(parents=True)
    (root / "good/adapter_config.json").write_text("{}")
    shutil.copytree(adapter_dir(tmp_path), outside)
    return root, outside


async def escapes(root: Path, outside: Path) -> list[str]:
    """The paths that did not get the answer of one that is not there, or that made something be opened outside."""
    models = RecordingModels()
    app = create_app(FakeEngine(), models, ServerConfig(adapter_roots=(root,), access_log=False))
    found = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for path in hostile_paths(root, outside):
            Opened.watched = []
            response = await load(client, "x", path)
            opened, Opened.watched = Opened.watched, None
            expected = f"Loading lora x failed: No adapter found for {path}"
            answered = response.status_code == 404 and response.json()["error"]["message"] == expected
            if not answered or models.directories or any(str(outside) in one or "/etc" in one for one in opened):
                found.append(path)
            models.directories.clear()
        for path in (f"{root}/good", f"{root}/good/", f"{root}//good", f"{root}/./good", f"{root}/good/../good"):
            assert (await load(client, "x", path)).status_code == 200, path  # the positive control
        assert {directory.resolve() for directory in models.directories} == {root / "good"}
    return found


async def test_no_path_leads_out_of_the_roots(roots: tuple[Path, Path]) -> None:
    assert await escapes(*roots) == []


async def test_without_resolving_links_paths_lead_out(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a comparison of the text alone."""

    def careless(text: str, allowed: tuple[Path, ...]) -> Path | None:
        return Path(text) if any(text.startswith(str(root) + "/") for root in allowed) and Path(text).is_dir() else None

    monkeypatch.setattr(adapter_roots, "find_directory", careless)
    monkeypatch.setattr("loraplex.server.runtime_routes.find_directory", careless)
    assert any("to-outside" in path for path in await escapes(*roots))


# ---------------------------------------------------------------------- with a registry
@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    root = tmp_path.resolve() / "root"
    root.mkdir()
    site = Site(tmp_path, config=ServerConfig(adapter_roots=(root,)))
    for seed in (1, 2):
        adapter_dir(tmp_path, seed).rename(root / f"a{seed}")
    bad_adapter_dir(tmp_path).rename(root / "bad")
    yield site
    site.close()


async def test_operators_publish_into_their_own_tenant_compared_and_activated(site: Site) -> None:
    key, root = site.tenant("acme"), site.folder / "root"
    async with site.client(site.operator_key("acme")) as operator:
        response = await load(operator, "sql", root / "a1")
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    (version,) = site.registry.adapters.show(OPERATOR, "acme", "sql").versions
    assert (version.state.value, version.base_verified) == ("verified", False)
    assert site.engine.compared == [site.digest("acme", "sql")]
    async with site.client(key) as client:
        response = await client.post("/v1/completions", json=ask("sql"))
        assert response.json()["x_loraplex"]["adapter"]["digest"] == site.digest("acme", "sql")
    actions = [entry.action for entry in site.registry.audit_entries(OPERATOR, "acme")]
    assert actions[-3:] == ["version.publish", "version.verify", "alias.activate"]


async def test_in_place_is_a_new_version_and_a_named_base_is_recorded(site: Site) -> None:
    site.tenant("acme")
    root = site.folder / "root"
    async with site.client(site.operator_key("acme")) as operator:
        await load(operator, "sql", root / "a1")
        assert_error(await load(operator, "sql", root / "a2"), 400)
        response = await load(
            operator, "sql", root / "a2", load_inplace=True, base_fingerprint=REGISTRY_BASE.fingerprint
        )
        assert response.status_code == 200
        info = site.registry.adapters.show(OPERATOR, "acme", "sql").info
        assert (info.alias.active, info.active and info.active.base_verified) == (2, True)


async def test_a_bad_adapter_is_400_and_the_name_goes_on_with_what_it_was(site: Site) -> None:
    site.tenant("acme")
    root = site.folder / "root"
    async with site.client(site.operator_key("acme")) as operator:
        await load(operator, "sql", root / "a1")
        response = await load(operator, "sql", root / "bad", load_inplace=True)
        assert_error(response, 400, code="adapter_refused")
        assert response.json()["error"]["reason"] == "NONFINITE"
        site.engine.comparison = AdapterComparison(max_logit_difference=9.0, kl=1.0, effect=9.0, tolerance=0.1)
        response = await load(operator, "sql", root / "a2", load_inplace=True)
        assert_error(response, 400, code="adapter_not_verified")
    assert site.registry.adapters.show(OPERATOR, "acme", "sql").info.alias.active == 1
    assert site.lines()[-1]["error_code"] == "adapter_not_verified"


async def test_unloading_deletes_and_loading_again_revives(site: Site) -> None:
    key, root = site.tenant("acme"), site.folder / "root"
    async with site.client(site.operator_key("acme")) as operator, site.client(key) as client:
        await load(operator, "sql", root / "a1")
        assert (await operator.post(UNLOAD, json={"lora_name": "sql"})).status_code == 200
        assert_error(await client.post("/v1/completions", json=ask("sql")), 404, "model", "adapter_deleted")
        absent = "The lora adapter 'sql' cannot be found."
        vllm_error(await operator.post(UNLOAD, json={"lora_name": "sql"}), 404, "NotFoundError", absent)
        await load(operator, "sql", root / "a1")
        assert (await client.post("/v1/completions", json=ask("sql"))).json()["model"] == "sql@2"


async def test_what_an_operator_loads_is_its_tenants_alone(site: Site) -> None:
    site.tenant("acme", "sql")
    other, root = site.tenant("globex"), site.folder / "root"
    async with site.client(site.operator_key("globex")) as operator:
        assert (await load(operator, "sql", root / "a1")).status_code == 200  # acme's is another one
        assert (await operator.post(UNLOAD, json={"lora_name": "sql"})).status_code == 200
        vllm_error(
            await operator.post(UNLOAD, json={"lora_name": "acme/sql"}),
            404,
            "NotFoundError",
            "The lora adapter 'acme/sql' cannot be found.",
        )
    with pytest.raises(ModelNotFound):
        site.registry.resolve(site.registry.authenticate(other), "sql", REGISTRY_BASE)
    assert site.registry.adapters.show(OPERATOR, "acme", "sql").info.alias.active == 1


@pytest.mark.parametrize("role", [Role.TENANT, Role.TENANT_ADMIN])
async def test_other_roles_may_not(site: Site, role: Role) -> None:
    site.tenant("acme", "sql")
    async with site.client(site.world.key("acme", role)) as client:
        for path, body in ((LOAD, {"lora_name": "x", "lora_path": "/etc"}), (UNLOAD, {"lora_name": "sql"})):
            assert_error(await client.post(path, json=body), 403, code="permission_denied")
    assert site.registry.adapters.show(OPERATOR, "acme", "sql").info.alias.active == 1
