"""Over HTTP nobody reaches what is another's (RELIABILITY.md, T09): callers, owners, routes, key states, forms."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.core import ModelNotFound
from loraplex.registry import Principal, Role, resolver
from loraplex.registry.keys import _BASE32, _BASE62, _checksum
from loraplex.server import ServerConfig
from loraplex.server import app as app_module
from loraplex.server.callers import Access, Caller
from loraplex.testing import fake_text
from tests.registry.helpers import OPERATOR, Clock

from .helpers import assert_error
from .registry_world import BASE_NAME, Site, ask

pytestmark = pytest.mark.anyio

TENANTS = ("acme", "globex", "hooli", "initech", "umbrella")
KINDS = ("one", "two", "three")
ABSENT = "absent"
REQUEST_ID = {"X-Request-Id": "same"}
HELLO = (256, *b"Hello")
FORMS = ("{adapter}", "{owner}/{adapter}", "{owner}/{adapter}@1", "{owner}/{adapter}@7", "{digest}")

Call = Callable[[httpx.AsyncClient, str], Any]

# Every route that takes the name of a model. The route table must hold no other one.
MODEL_ROUTES: dict[tuple[str, str], list[Call]] = {
    ("POST", "/v1/completions"): [
        lambda c, m: c.post("/v1/completions", json=ask(m), headers=REQUEST_ID),
        lambda c, m: c.post("/v1/completions", json=ask(m, stream=True), headers=REQUEST_ID),
    ],
    ("POST", "/v1/chat/completions"): [
        lambda c, m: c.post(
            "/v1/chat/completions",
            json={"model": m, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
            headers=REQUEST_ID,
        )
    ],
    ("GET", "/v1/models/{model:path}"): [lambda c, m: c.get(f"/v1/models/{m}", headers=REQUEST_ID)],
    ("POST", "/tokenize"): [lambda c, m: c.post("/tokenize", json={"model": m, "prompt": "x"}, headers=REQUEST_ID)],
    ("POST", "/detokenize"): [
        lambda c, m: c.post("/detokenize", json={"model": m, "tokens": [65]}, headers=REQUEST_ID)
    ],
}
LIST_ROUTE = ("GET", "/v1/models")
NO_MODEL_ROUTES = {("GET", "/health"), ("GET", "/ready"), ("GET", "/metrics")}


def adapter_of(tenant: str, kind: str) -> str:
    """Names differ between tenants, so that a bare name of another's is a form of its own."""
    return f"{tenant}-{kind}"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def site(tmp_path: Path, clock: Clock) -> Iterator[Site]:
    """Five tenants with three active adapters each."""
    site = Site(tmp_path, config=ServerConfig(adapter_roots=()), clock=clock)
    for number, tenant in enumerate(TENANTS):
        site.tenant(tenant, *(adapter_of(tenant, kind) for kind in KINDS), first_seed=1 + len(KINDS) * number)
    yield site
    site.close()


def test_every_route_is_in_the_matrix(site: Site) -> None:
    table = {(spec.method, spec.path) for spec in app_module.route_table(site.app.state.service)}
    runtime = {("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")}
    admin = {entry for entry in table if entry[1].startswith("/admin/")}
    assert table == MODEL_ROUTES.keys() | {LIST_ROUTE} | NO_MODEL_ROUTES | runtime | admin


# ---------------------------------------------------------------------- callers x owners x adapters x routes x forms
@dataclass(frozen=True)
class Seen:
    """What a caller learns from an answer, without the name that it gave itself."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: str


def seen(response: httpx.Response, model: str) -> Seen:
    hidden = ("content-length", "date")
    headers = tuple(sorted((name, value) for name, value in response.headers.items() if name not in hidden))
    return Seen(response.status_code, headers, response.text.replace(model, "*"))


def forms(site: Site, owner: str, kind: str) -> dict[str, str]:
    adapter = adapter_of(owner, kind)
    digest = site.digest(owner, adapter) if owner != ABSENT else "0" * 64
    return {form: form.format(owner=owner, adapter=adapter, digest=digest) for form in FORMS}


async def count_leaks(site: Site) -> tuple[int, int]:
    """How often an answer about another's adapter differs from one about nothing; and how many were compared."""
    leaks = tried = 0
    calls = [call for route in MODEL_ROUTES.values() for call in route]
    for caller in TENANTS:
        async with site.client(site.world.key(caller)) as client:
            for call in calls:
                nothing = {form: seen(await call(client, m), m) for form, m in forms(site, ABSENT, "one").items()}
                for owner in TENANTS:
                    if owner == caller:
                        continue
                    for kind in KINDS:
                        for form, model in forms(site, owner, kind).items():
                            leaks += seen(await call(client, model), model) != nothing[form]
                            tried += 1
    return leaks, tried


async def test_models_of_others_look_exactly_like_none_on_every_route(site: Site) -> None:
    leaks, tried = await count_leaks(site)
    assert leaks == 0
    assert tried == 5 * 4 * 3 * 6 * len(FORMS)
    assert site.engine.started == []
    assert site.engine.held == {}


async def test_own_models_answer_on_every_route(site: Site) -> None:
    """The positive control: without it, refusing everything would pass."""
    served = 0
    for tenant in TENANTS:
        async with site.client(site.world.key(tenant)) as client:
            for kind in KINDS:
                adapter, digest = adapter_of(tenant, kind), site.digest(tenant, adapter_of(tenant, kind))
                for model in (adapter, f"{adapter}@1", f"{tenant}/{adapter}", f"{tenant}/{adapter}@1"):
                    for route in MODEL_ROUTES.values():
                        for call in route:
                            assert (await call(client, model)).status_code == 200
                            served += 1
                    answer = (await client.post("/v1/completions", json=ask(model))).json()
                    assert answer["choices"][0]["text"] == fake_text(digest, HELLO, 4)
            ids = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
            assert ids == [BASE_NAME, *sorted(adapter_of(tenant, kind) for kind in KINDS)]
    assert served == 5 * 3 * 4 * 6


async def test_without_the_check_of_grants_others_are_reached(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a granter who grants all."""
    ids = {tenant.name: tenant.tenant_id for tenant in site.registry.tenants.list(OPERATOR)}

    def granter(self: object, principal: Principal, model: str, address: Any, epoch: int) -> object:
        if address.tenant not in ids:
            raise ModelNotFound(model)
        return ids[address.tenant]

    monkeypatch.setattr(resolver.Resolver, "_granter", granter)
    assert (await count_leaks(site))[0] > 0


async def test_with_another_callers_principal_others_are_reached(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the server resolves for another caller than the one who asks."""
    globex = site.world.principal("globex")
    monkeypatch.setattr("loraplex.server.registry_catalog._principal", lambda caller: globex)
    assert (await count_leaks(site))[0] > 0


async def test_an_operator_calls_only_what_is_its_tenants(site: Site) -> None:
    async with site.client(site.operator_key("acme")) as client:
        for model, status in (("acme-one", 200), ("globex/globex-one", 404), ("globex-one", 404)):
            assert (await client.post("/v1/completions", json=ask(model))).status_code == status


# ---------------------------------------------------------------------- bound keys
def bound_key(site: Site, tenant: str, adapter: str) -> str:
    return site.world.key(tenant, bound_adapter=adapter)


async def count_bound_leaks(site: Site) -> tuple[int, int]:
    """How often an answer to a bound key about what it may not use differs from one about nothing."""
    leaks = tried = 0
    for tenant in TENANTS[:2]:
        mine = adapter_of(tenant, "one")
        others = [
            *(form for kind in KINDS[1:] for form in forms(site, tenant, kind).values()),  # of its own tenant
            *forms(site, "hooli", "one").values(),
            BASE_NAME,
            site.digest(tenant, mine),
            f"{tenant}/{mine}@7",
        ]
        async with site.client(bound_key(site, tenant, mine)) as client:
            for route in MODEL_ROUTES.values():
                for call in route:
                    nothing = seen(await call(client, "nothing"), "nothing")
                    assert nothing.status == 404
                    for model in others:
                        leaks += seen(await call(client, model), model) != nothing
                        tried += 1
    return leaks, tried


async def test_a_bound_key_sees_nothing_but_its_adapter(site: Site) -> None:
    leaks, tried = await count_bound_leaks(site)
    assert leaks == 0
    assert tried == 2 * 6 * (3 * len(FORMS) + 3)
    assert site.engine.started == []
    assert site.engine.held == {}


async def test_a_bound_key_reaches_its_adapter_by_every_name_and_by_none(site: Site) -> None:
    """The positive control."""
    digest = site.digest("acme", "acme-one")
    async with site.client(bound_key(site, "acme", "acme-one")) as client:
        for model in (None, "acme-one", "acme-one@1", "acme/acme-one", "acme/acme-one@1"):
            response = await client.post("/v1/completions", json=ask(model))
            assert response.status_code == 200
            assert response.json()["choices"][0]["text"] == fake_text(digest, HELLO, 4)
        cards = (await client.get("/v1/models")).json()
        assert [card["id"] for card in cards["data"]] == ["acme-one"]
        assert not cards["has_more"]


async def test_a_bound_key_manages_nothing(site: Site) -> None:
    async with site.client(bound_key(site, "acme", "acme-one")) as client:
        for spec in app_module.route_table(site.app.state.service):
            if spec.access in (Access.ADMIN, Access.OPERATOR):
                path = spec.path.replace("{tenant}", "acme").replace("{name}", "acme-one").replace("{version}", "1")
                path = path.replace("{key_id}", "a" * 12).replace("{grantee}", "globex")
                assert_error(await client.request(spec.method, path, json={}), 403, code="permission_denied")


async def test_a_key_bound_to_a_granted_adapter_loses_it_with_the_grant(site: Site) -> None:
    site.registry.adapters.grant(OPERATOR, "globex", "globex-one", "acme")
    async with site.client(bound_key(site, "acme", "globex/globex-one")) as client:
        for model in (None, "globex/globex-one"):
            assert (await client.post("/v1/completions", json=ask(model))).status_code == 200
        assert (await client.post("/v1/completions", json=ask("acme-one"))).status_code == 404
        site.registry.adapters.revoke_grant(OPERATOR, "globex", "globex-one", "acme")
        for model in (None, "globex/globex-one"):
            assert_error(await client.post("/v1/completions", json=ask(model)), 404, "model", "model_not_found")


async def test_without_the_check_of_bindings_a_bound_key_reaches_others(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a server that forgets what a key is bound to."""
    real = Caller.__init__

    def forgetful(self: Caller, principal: Principal | None, role: Role) -> None:
        real(self, None if principal is None else replace(principal, bound_adapter=None), role)

    monkeypatch.setattr(Caller, "__init__", forgetful)
    assert (await count_bound_leaks(site))[0] > 0


# ---------------------------------------------------------------------- key states x all routes
def other(char: str, alphabet: str = _BASE62) -> str:
    """Another character of the alphabet."""
    return alphabet[(alphabet.index(char) + 1) % len(alphabet)]


def resealed(prefix: str, key_id: str, secret: str) -> str:
    """A key of these parts with the checksum that it should have."""
    body = f"{prefix}{key_id}_{secret}"
    return body + _checksum(body)


def bad_keys(site: Site, clock: Clock) -> dict[str, str | None]:
    """A key in every state that is not good. `None` is no key."""
    good = site.world.key("acme")
    prefix, key_id, rest = good[:9], good[9:21], good[22:]
    secret = rest[:32]
    assert resealed(prefix, key_id, secret) == good
    revoked = site.world.key("acme")
    site.registry.keys.revoke(OPERATOR, "acme", revoked[9:21])
    expired = site.world.key("acme", expires_at=clock.now + 60)
    disabled = site.tenant("closed", "closed-one")
    site.registry.tenants.disable(OPERATOR, "closed")
    clock.now += 3600
    return {
        "none": None,
        "empty": "",
        "malformed": "sk-0123456789",
        "cut": good[:-1],
        "longer": good + "a",
        "upper": good.upper(),
        "bad checksum": good[:-1] + other(good[-1]),
        "unknown id": resealed(prefix, key_id[:-1] + other(key_id[-1], _BASE32), secret),
        "wrong secret": resealed(prefix, key_id, secret[:-1] + other(secret[-1])),
        "first secret character": resealed(prefix, key_id, other(secret[0]) + secret[1:]),
        "revoked": revoked,
        "expired": expired,
        "disabled tenant": disabled,
    }


async def test_every_bad_key_gets_one_answer_on_every_route(site: Site, clock: Clock) -> None:
    answers, tried = set(), 0
    site.registry.adapters.grant(OPERATOR, "globex", "globex-one", "acme")
    states = bad_keys(site, clock)
    for spec in app_module.route_table(site.app.state.service):
        if spec.public:
            continue
        path = spec.path.replace("{model:path}", "acme-one").replace("{tenant}", "acme").replace("{name}", "acme-one")
        path = path.replace("{version}", "1").replace("{key_id}", "a" * 12).replace("{grantee}", "globex")
        for state, key in states.items():
            async with site.client(key) as client:
                response = await client.request(spec.method, path, json={}, headers=REQUEST_ID)
            assert_error(response, 401, code="invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer", state
            answers.add((response.content, tuple(sorted(response.headers.items()))))
            tried += 1
    assert len(answers) == 1
    assert tried >= 28 * len(states)
    assert site.engine.started == []
    logged = [line for line in site.lines() if line["event"] == "request"]
    assert {(line["status"], line["error_code"], line["tenant"], line["key_id"]) for line in logged} == {
        (401, "invalid_api_key", None, None)
    }


async def test_other_schemes_and_repeated_headers_are_no_key(site: Site) -> None:
    good = site.world.key("acme")
    for headers in (
        [("Authorization", good)],
        [("Authorization", f"Basic {good}")],
        [("Authorization", f"Token {good}")],
        [("Authorization", f"Bearer {good}"), ("Authorization", f"Bearer {good}")],
        [("Authorization", f"Bearer {good}, Bearer {good}")],
        [("X-Api-Key", good)],
        [("Cookie", f"api_key={good}")],
    ):
        async with site.client() as client:
            response = await client.get("/v1/models", params={"api_key": good}, headers=headers)
            assert_error(response, 401, code="invalid_api_key")
    for value in (f"Bearer {good}", f"bearer {good}", f"BEARER   {good}  "):
        async with site.client() as client:
            assert (await client.get("/v1/models", headers={"Authorization": value})).status_code == 200


async def test_a_key_stops_working_as_soon_as_it_is_revoked_or_expired_or_its_tenant_is_off(
    site: Site, clock: Clock
) -> None:
    revoked = site.world.key("acme")
    expiring = site.world.key("acme", expires_at=clock.now + 10)
    switched = site.world.key("globex")
    keys = (revoked, expiring, switched)
    for expected in ((200, 200, 200), (401, 401, 401)):
        for key, status in zip(keys, expected, strict=True):
            async with site.client(key) as client:
                assert (await client.get("/v1/models")).status_code == status
        site.registry.keys.revoke(OPERATOR, "acme", revoked[9:21])
        clock.now += 10
        site.registry.tenants.disable(OPERATOR, "globex")
    site.registry.tenants.enable(OPERATOR, "globex")
    async with site.client(switched) as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_a_granted_adapter_is_gone_while_its_owner_is_off(site: Site) -> None:
    site.registry.adapters.grant(OPERATOR, "globex", "globex-one", "acme")
    async with site.client(site.world.key("acme", Role.TENANT)) as client:
        assert (await client.post("/v1/completions", json=ask("globex/globex-one"))).status_code == 200
        site.registry.tenants.disable(OPERATOR, "globex")
        response = await client.post("/v1/completions", json=ask("globex/globex-one"))
        assert_error(response, 404, "model", "model_not_found")
