"""A registry in front of a real engine: exact weights for each caller in one mixed batch, loaded when asked for."""

import asyncio
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.engine import AsyncEngine, Engine, EngineConfig, load_base
from loraplex.registry import Registry, RegistryConfig, Role
from loraplex.server import ServerConfig, create_app

from ..conftest import MakeAdapter, MakeBase
from .helpers import assert_error

pytestmark = pytest.mark.anyio

PROMPTS = ([5, 6, 7], [8, 9], [10, 11, 12, 13], [14])


class Real:
    """A tiny model, a registry with the default validator, and an app over both."""

    def __init__(self, base: Path, folder: Path, adapters: list[Path], **options: Any) -> None:
        config = EngineConfig(dtype="float32", memory_bytes=2**23, num_threads=1, **options)
        self.root = folder / "root"
        for number, adapter in enumerate(adapters):
            shutil.copytree(adapter, self.root / f"a{number}")
        self.engine = AsyncEngine(Engine(load_base(base, config)))
        self.registry = Registry(RegistryConfig(folder / "data"))
        self.operator = self.registry.local_operator()
        self.log = io.StringIO()
        settings = ServerConfig(adapter_roots=(self.root.resolve(),), max_host_adapters=2)
        self.app = create_app(self.engine, self.registry, settings, self.log)
        self.engine.start()

    def tenant(self, name: str) -> tuple[str, str]:
        """A new tenant; a key of it, and one of an operator."""
        self.registry.tenants.create(self.operator, name)
        roles = (Role.TENANT, Role.OPERATOR)
        first, second = (self.registry.keys.create(self.operator, name, role).key.reveal() for role in roles)
        return first, second

    def client(self, key: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test", headers=headers)

    def close(self) -> None:
        self.engine.stop()
        self.registry.close()


@pytest.fixture
def real(tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path) -> Iterator[Real]:
    base = tiny_base("llama")
    real = Real(base, tmp_path, [tiny_adapter(base, rank=rank, seed=rank) for rank in (2, 4, 3)])
    yield real
    real.close()


async def tokens(client: httpx.AsyncClient, model: str, prompt: list[int]) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def key_figures(answer: dict[str, Any]) -> tuple[Any, ...]:
    choice = answer["choices"][0]
    return choice["text"], tuple(choice["logprobs"]["token_logprobs"]), answer["x_loraplex"]["adapter"]


async def test_callers_with_one_name_get_their_own_weights_alone_and_in_a_mixed_batch(real: Real) -> None:
    keys = {}
    for number, tenant in enumerate(("acme", "globex", "hooli")):
        keys[tenant], operator = real.tenant(tenant)
        async with real.client(operator) as client:
            body = {"lora_name": "sup", "lora_path": str(real.root / f"a{number}")}
            response = await client.post("/v1/load_lora_adapter", json=body)
            assert response.status_code == 200, response.text
        (version,) = real.registry.adapters.show(real.operator, tenant, "sup").versions
        assert version.state.value == "verified"
        (attempt,) = real.registry.adapters.show(real.operator, tenant, "sup").verifications[1]
        assert attempt.result is not None
        assert attempt.result.effect > attempt.result.tolerance > attempt.result.max_logit_difference
    base = real.engine.base.name
    jobs = [(tenant, model, prompt) for tenant in keys for model in ("sup", base) for prompt in PROMPTS]
    clients = {tenant: real.client(key) for tenant, key in keys.items()}
    alone = [key_figures(await tokens(clients[tenant], model, prompt)) for tenant, model, prompt in jobs]
    assert len({figures[:2] for figures in alone}) == 4 * len(PROMPTS)  # three adapters and the base

    # Host memory holds two of the three adapters, so the mixed batch runs in turns; no answer may change by it.
    async def patiently(tenant: str, model: str, prompt: list[int]) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        while (response := await clients[tenant].post("/v1/completions", json=body)).status_code == 503:
            await asyncio.sleep(0.02)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    mixed = await asyncio.gather(*(patiently(*job) for job in jobs))
    for one, other in zip(alone, map(key_figures, mixed), strict=True):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], abs=1e-4)
        assert one[2] == other[2]
    for client in clients.values():
        await client.aclose()
    lines = [json.loads(line) for line in real.log.getvalue().splitlines()]
    served = [line for line in lines if line["status"] == 200 and line["requested_model"] == "sup" and line["tenant"]]
    digests = {tenant: {line["adapter_digest"] for line in served if line["tenant"] == tenant} for tenant in keys}
    assert all(len(found - {None}) == 1 for found in digests.values())


async def test_a_version_that_is_rolled_back_leaves_the_engine_and_comes_back(real: Real) -> None:
    key, operator = real.tenant("acme")
    async with real.client(operator) as client:
        for number in (0, 1, 2):
            body = {"lora_name": "sup", "lora_path": str(real.root / f"a{number}"), "load_inplace": True}
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
    async with real.client(key) as client:
        first = {}
        for version in (1, 2, 3):
            first[version] = key_figures(await tokens(client, f"sup@{version}", PROMPTS[0]))
        async with asyncio.timeout(10):  # the engine lets go of the oldest at its next step
            while len(real.engine.engine.shelf.packed) > 2:
                await asyncio.sleep(0.05)
        for version in (3, 2, 1):
            assert key_figures(await tokens(client, f"sup@{version}", PROMPTS[0])) == first[version]
        real.registry.adapters.rollback(real.operator, "acme", "sup", expected=3)
        assert (await tokens(client, "sup", PROMPTS[0]))["model"] == "sup@2"


async def test_another_tenants_adapter_is_not_there_although_the_engine_holds_it(real: Real) -> None:
    key, operator = real.tenant("acme")
    other, _ = real.tenant("globex")
    async with real.client(operator) as client:
        await client.post("/v1/load_lora_adapter", json={"lora_name": "sup", "lora_path": str(real.root / "a0")})
    async with real.client(key) as client:
        held = (await tokens(client, "sup", PROMPTS[0]))["x_loraplex"]["adapter"]["digest"]
    assert held in real.engine.engine.shelf.packed
    async with real.client(other) as client:
        for model in ("sup", "sup@1", "acme/sup", "acme/sup@1", held):
            response = await client.post("/v1/completions", json={"model": model, "prompt": [5]})
            assert_error(response, 404, "model", "model_not_found")
