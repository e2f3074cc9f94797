"""The admin API: the whole life of an adapter, who may do what, and what is refused."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from loraplex.core import BaseFingerprint, EngineDead
from loraplex.core.comparison import AdapterComparison
from loraplex.registry import Role
from loraplex.server.admin_routes import ADMIN_ROUTES
from loraplex.server.callers import Access
from tests.cli.hostile import GOOD_CONFIG, GOOD_WEIGHTS
from tests.registry.conftest import make_world  # noqa: F401  (a fixture)
from tests.registry.helpers import OPERATOR, MakeWorld, adapter_dir

from .admin_site import AdminSite, form
from .helpers import assert_error

pytestmark = pytest.mark.anyio


@pytest.fixture
def site(make_world: MakeWorld) -> Iterator[AdminSite]:  # noqa: F811
    yield AdminSite(make_world())


async def good(response: httpx.Response, status: int = 200) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body: dict[str, Any] = response.json()
    return body


async def upload(client: httpx.AsyncClient, folder: Path, name: str = "support", seed: int = 0) -> dict[str, Any]:
    directory = adapter_dir(folder, seed)
    config = (directory / "adapter_config.json").read_bytes()
    weights = (directory / "adapter_model.safetensors").read_bytes()
    return await good(await client.post(f"tenants/acme/adapters/{name}/versions", **form(config, weights)), 201)


# ---------------------------------------------------------------------- the whole life
async def test_an_operator_makes_tenants_and_keys_that_work(site: AdminSite) -> None:
    async with site.client(site.operator) as client:
        made = await good(await client.post("tenants", json={"tenant": "gamma"}), 201)
        assert made["tenant"] == "gamma"
        created = await good(await client.post("tenants/gamma/keys", json={"role": "tenant_admin"}), 201)
        names = [tenant["tenant"] for tenant in (await good(await client.get("tenants")))["tenants"]]
    assert names == ["acme", "beta", "gamma"]
    async with site.client(created["api_key"]) as client:
        caller = await good(await client.get("caller"))
        keys = await good(await client.get("tenants/gamma/keys"))
    assert (caller["tenant"], caller["role"], caller["key_id"]) == ("gamma", "tenant_admin", created["key"]["key_id"])
    assert keys["keys"] == [created["key"]]
    assert created["api_key"] not in site.log.getvalue()


async def test_operators_set_limits_and_a_tenants_admin_sees_its_own(site: AdminSite) -> None:
    limits = {"weight": 3.0, "priority": 5, "max_requests": 2, "tokens_per_minute": 600}
    async with site.client(site.operator) as operator, site.client(site.admin) as admin:
        changed = await good(await operator.patch("tenants/acme/limits", json=limits))
        assert changed["limits"] == limits
        assert await good(await admin.get("tenants/acme")) == changed
        fewer = await good(await operator.patch("tenants/acme/limits", json={"tokens_per_minute": "none"}))
        assert fewer["limits"] == {**limits, "tokens_per_minute": None}
        listed = (await good(await operator.get("tenants")))["tenants"]
        assert [one["limits"]["weight"] for one in listed] == [3.0, 1.0]
        assert_error(await admin.patch("tenants/acme/limits", json=limits), 403, code="permission_denied")
        assert_error(await admin.get("tenants/beta"), 404, code="tenant_not_found")
        assert_error(await operator.patch("tenants/absent/limits", json=limits), 404, code="tenant_not_found")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"weight": 1001}, "weight"),
        ({"weight": "none"}, "weight"),
        ({"priority": None}, None),  # left out, as everywhere
        ({"weight": 2.0, "priority": -101}, "priority"),
        ({"max_requests": 1.5}, "max_requests"),
        ({"max_requests": True}, "max_requests"),
        ({"tokens_per_minute": 0}, "tokens_per_minute"),
        ({"tokens_per_hour": 1}, "tokens_per_hour"),
        ({}, None),
    ],
)
async def test_limits_that_cannot_be_name_their_field(site: AdminSite, body: dict[str, Any], param: str | None) -> None:
    async with site.client(site.operator) as client:
        refused = await client.patch("tenants/acme/limits", json=body)
        assert_error(refused, 400, code="invalid_request")
        assert refused.json()["error"]["param"] == param
        assert (await good(await client.get("tenants/acme")))["limits"]["weight"] == 1.0


async def test_a_key_is_never_kept_by_caches(site: AdminSite) -> None:
    async with site.client(site.operator) as client:
        response = await client.post("tenants/acme/keys", json={})
    assert response.headers["cache-control"] == "no-store"


async def test_a_revoked_key_and_those_of_a_disabled_tenant_are_refused(site: AdminSite) -> None:
    async with site.client(site.operator) as operator, site.client(site.admin) as admin:
        second = await good(await operator.post("tenants/acme/keys", json={"role": "tenant_admin"}), 201)
        await good(await operator.delete(f"tenants/acme/keys/{second['key']['key_id']}"))
        async with site.client(second["api_key"]) as gone:
            assert_error(await gone.get("caller"), 401, code="invalid_api_key")
        disabled = await good(await operator.post("tenants/acme/disable", json={}))
        assert disabled["disabled_at"] is not None
        assert_error(await admin.get("caller"), 401, code="invalid_api_key")
        await good(await operator.post("tenants/acme/enable", json={}))
        await good(await admin.get("caller"))


async def test_an_adapter_is_uploaded_verified_activated_rolled_back_and_deleted(
    site: AdminSite, tmp_path: Path
) -> None:
    at = "tenants/acme/adapters/support"
    async with site.client(site.admin) as client:
        for seed in (1, 2):
            version = await upload(client, tmp_path, seed=seed)
            assert (version["version"], version["state"], version["rank"]) == (seed, "validated", 2)
            assert version["targets"] == ["q_proj", "v_proj"]
            assert version["base_verified"] is True
            refused = await client.post(f"{at}/activate", json={"version": seed, "expected": seed - 1 or None})
            assert_error(refused, 409, code="adapter_not_verified")
            verified = await good(await client.post(f"{at}/versions/{seed}/verify", json={}))
            assert (verified["version"]["state"], verified["verification"]["passed"]) == ("verified", True)
            body = {"version": seed, "expected": seed - 1 or None}
            assert (await good(await client.post(f"{at}/activate", json=body)))["active"] == seed
        assert_error(await client.post(f"{at}/rollback", json={}), 412, code="version_conflict")
        assert (await good(await client.post(f"{at}/rollback", json={"expected": 2})))["active"] == 1
        assert_error(await client.delete(f"{at}/versions/1"), 412, code="version_conflict")
        await good(await client.delete(f"{at}/versions/2"))
        detail = await good(await client.get(at))
        assert [version["state"] for version in detail["versions"]] == ["verified", "deleted"]
        assert [move["action"] for move in detail["moves"]] == ["activate", "activate", "rollback"]
        await good(await client.delete(at))
        assert_error(await client.post(f"{at}/rollback", json={}), 404, code="adapter_deleted")
        trail = await good(await client.get("tenants/acme/audit"))
    actions = [entry["action"] for entry in trail["entries"] if entry["action"].startswith(("version", "alias", "ad"))]
    assert actions == [
        *("version.publish", "version.verify", "alias.activate") * 2,
        *("alias.rollback", "version.delete", "adapter.delete"),
    ]
    assert len(site.engine.compared) == 2


async def test_figures_are_recorded_as_asked_for_by_the_admin_and_cannot_come_from_a_client(
    site: AdminSite, tmp_path: Path
) -> None:
    async with site.client(site.admin) as client:
        await upload(client, tmp_path)
        path = "tenants/acme/adapters/support/versions/1/verify"
        assert_error(await client.post(path, json={"passed": True}), 400, code="invalid_request", param="passed")
        verified = await good(await client.post(path, json={}))
        me = (await good(await client.get("caller")))["key_id"]
    assert verified["verification"]["by"] == me


async def test_a_failed_comparison_is_kept_and_bars_activation(site: AdminSite, tmp_path: Path) -> None:
    site.engine.comparison = AdapterComparison(3.0, 0.4, 5.0, 0.01, "the pages hold other weights")
    at = "tenants/acme/adapters/support"
    async with site.client(site.admin) as client:
        await upload(client, tmp_path)
        verified = await good(await client.post(f"{at}/versions/1/verify", json={}))
        assert (verified["version"]["state"], verified["verification"]["passed"]) == ("validated", False)
        assert verified["verification"]["max_logit_difference"] == 3.0
        assert verified["verification"]["failure"] == "the pages hold other weights"
        refused = await client.post(f"{at}/activate", json={"version": 1})
    assert_error(refused, 409, code="adapter_not_verified")


async def test_an_engine_that_cannot_compare_leaves_the_version_as_it_was(site: AdminSite, tmp_path: Path) -> None:
    site.engine.comparison = EngineDead("It stopped.")
    async with site.client(site.admin) as client:
        await upload(client, tmp_path)
        assert_error(await client.post("tenants/acme/adapters/support/versions/1/verify", json={}), 503)
        detail = await good(await client.get("tenants/acme/adapters/support"))
    assert (detail["versions"][0]["state"], detail["verifications"]) == ("validated", [])


async def test_only_an_operator_may_skip_the_comparison_and_that_is_on_record(site: AdminSite, tmp_path: Path) -> None:
    path = "tenants/acme/adapters/support/versions/1/verify"
    async with site.client(site.admin) as admin, site.client(site.operator) as operator:
        await upload(admin, tmp_path)
        assert_error(await admin.post(path, json={"skip": True}), 403, code="permission_denied")
        skipped = await good(await operator.post(path, json={"skip": True}))
        who = (await good(await operator.get("caller")))["key_id"]
    assert skipped["version"]["state"] == "skipped"
    assert (skipped["verification"]["skipped"], skipped["verification"]["by"]) == (True, who)
    assert site.engine.compared == []


async def test_a_version_of_another_base_is_not_compared(site: AdminSite, tmp_path: Path) -> None:
    async with site.client(site.admin) as client:
        await upload(client, tmp_path)
        site.engine.description = replace(site.engine.base, fingerprint=BaseFingerprint("1" * 64))
        assert_error(
            await client.post("tenants/acme/adapters/support/versions/1/verify", json={}), 409, code="wrong_base"
        )
    assert site.engine.compared == []


async def test_grants_are_given_and_taken_by_operators(site: AdminSite, tmp_path: Path) -> None:
    path = "tenants/acme/adapters/support/grants/beta"
    async with site.client(site.admin) as admin, site.client(site.operator) as operator:
        await upload(admin, tmp_path)
        assert_error(await admin.put(path), 403, code="permission_denied")
        assert (await good(await operator.put(path)))["granted"] is True
        assert (await good(await admin.get("tenants/acme/adapters/support")))["grantees"] == ["beta"]
        assert (await good(await operator.delete(path)))["granted"] is False
        assert_error(await operator.delete(path), 404, code="tenant_not_found")


async def test_audit_is_listed_in_pages_and_verified(site: AdminSite) -> None:
    async with site.client(site.operator) as client:
        first = await good(await client.get("tenants/acme/audit", params={"limit": 1}))
        rest = await good(await client.get("tenants/acme/audit", params={"after": first["next_after"]}))
        assert [entry["seq"] for entry in (*first["entries"], *rest["entries"])] == list(
            range(1, len(rest["entries"]) + 2)
        )
        report = await good(await client.get("audit/verify"))
        own = await good(await client.get("tenants/acme/audit/verify"))
    assert (report["ok"], own["ok"], own["chains"]) == (True, True, 1)


async def test_a_broken_audit_log_is_reported(make_world: MakeWorld, tmp_path: Path) -> None:  # noqa: F811
    site = AdminSite(make_world())
    heads = tmp_path / "data" / "audit-heads.jsonl"
    heads.write_text(heads.read_text().replace('"seq":1', '"seq":7', 1))
    async with site.client(site.operator) as client:
        report = await good(await client.get("audit/verify"))
    assert report["ok"] is False
    assert report["findings"][0]["kind"] == "head_forged"


async def test_lists_come_in_pages(site: AdminSite, tmp_path: Path) -> None:
    async with site.client(site.admin) as client:
        for name in ("a", "b", "c"):
            await upload(client, tmp_path, name)
        page = await good(await client.get("tenants/acme/adapters", params={"limit": 2}))
        rest = await good(await client.get("tenants/acme/adapters", params={"after": page["next_after"]}))
    assert [one["name"] for one in (*page["adapters"], *rest["adapters"])] == ["a", "b", "c"]
    assert rest["next_after"] is None


async def test_answers_are_what_the_openapi_document_says(site: AdminSite, tmp_path: Path) -> None:
    """Every field that it requires is there, and no other one."""
    async with site.client(site.operator) as client:
        await upload(client, tmp_path)
        document = await good(await client.get("openapi.json"))
        for path, methods in document["paths"].items():
            if "get" in methods and not path.endswith("openapi.json"):
                answer = await good(await client.get(f"http://test{_filled(path, 'acme')}"))
                schema = methods["get"]["responses"]["200"]["content"]["application/json"]["schema"]
                name = schema["$ref"].rpartition("/")[2]
                assert answer.keys() == document["components"]["schemas"][name]["properties"].keys()


# ---------------------------------------------------------------------- who may
def _filled(path: str, tenant: str) -> str:
    values = {"tenant": tenant, "name": "support", "version": "1", "key_id": "a" * 12, "grantee": "beta"}
    return path.format(**values)


async def _call(client: httpx.AsyncClient, method: str, path: str) -> httpx.Response:
    options: dict[str, Any] = {}
    if path.endswith("/versions"):
        options = form(GOOD_CONFIG, GOOD_WEIGHTS)
    elif method == "POST":
        options = {"json": {"version": 1} if path.endswith("activate") else {}}
    if path.endswith("tenants") and method == "POST":
        options = {"json": {"tenant": "delta"}}
    return await client.request(method, f"http://test{path}", **options)


ROUTE_IDS = [f"{spec.method} {spec.path}" for spec in ADMIN_ROUTES]


@pytest.mark.parametrize("spec", ADMIN_ROUTES, ids=ROUTE_IDS)
async def test_a_tenants_key_is_refused_on_every_route(site: AdminSite, tmp_path: Path, spec: Any) -> None:
    site.world.active("acme", "support", 1)
    async with site.client(site.world.key("acme")) as client:
        assert_error(await _call(client, spec.method, _filled(spec.path, "acme")), 403, code="permission_denied")
    async with site.client(None) as client:
        assert_error(await _call(client, spec.method, _filled(spec.path, "acme")), 401, code="invalid_api_key")


@pytest.mark.parametrize("spec", ADMIN_ROUTES, ids=ROUTE_IDS)
async def test_a_tenant_admin_meets_the_same_answer_for_others_as_for_nobody(site: AdminSite, spec: Any) -> None:
    """And 403 where the route is an operator's; and nothing is changed."""
    site.world.active("acme", "support", 1)
    before = site.world.registry.audit_entries(OPERATOR, "acme")
    stranger = site.world.key("beta", Role.TENANT_ADMIN)
    async with site.client(stranger) as client:
        other = await _call(client, spec.method, _filled(spec.path, "acme"))
        nobody = await _call(client, spec.method, _filled(spec.path, "nobo"))
    if spec.access is Access.OPERATOR:
        assert_error(other, 403, code="permission_denied")
    elif "{tenant}" in spec.path:
        assert_error(other, 404, code="tenant_not_found")
        assert other.text.replace("acme", "nobo") == nobody.text
        assert other.status_code == nobody.status_code
        assert dict(other.headers) | {"x-request-id": ""} == dict(nobody.headers) | {"x-request-id": ""}
    assert site.world.registry.audit_entries(OPERATOR, "acme") == before


@pytest.mark.parametrize("spec", ADMIN_ROUTES, ids=ROUTE_IDS)
async def test_every_route_is_for_administrators(spec: Any) -> None:
    assert spec.access in (Access.ADMIN, Access.OPERATOR)
    assert spec.path.startswith("/admin/v1/")


async def test_a_tenant_admin_makes_no_operator(site: AdminSite) -> None:
    async with site.client(site.admin) as client:
        response = await client.post("tenants/acme/keys", json={"role": "operator"})
    assert_error(response, 403, code="permission_denied")


# ---------------------------------------------------------------------- strictness
BODIES = [
    ("POST", "tenants", {"tenant": "x"}),
    ("POST", "tenants/acme/disable", {}),
    ("POST", "tenants/acme/enable", {}),
    ("POST", "tenants/acme/keys", {"role": "tenant"}),
    ("POST", "tenants/acme/adapters/support/activate", {"version": 1, "expected": None}),
    ("POST", "tenants/acme/adapters/support/rollback", {"expected": 1}),
    ("POST", "tenants/acme/adapters/support/versions/1/verify", {"skip": False}),
]
WRONG = [-1, 0, 2**31, 2**63, 1.5, True, "x", "", [], {}, ["a"], "\x00", "é" * 500]


@pytest.mark.parametrize(("method", "path", "body"), BODIES, ids=[path for _, path, _ in BODIES])
async def test_bodies_are_strict(site: AdminSite, method: str, path: str, body: dict[str, Any]) -> None:
    site.world.active("acme", "support", 1)
    before = site.world.registry.audit_entries(OPERATOR, "acme")
    async with site.client(site.operator) as client:
        for unknown in ("tenant_id", "digest", "active", "scopes", "__proto__"):
            assert_error(await client.request(method, path, json={**body, unknown: 1}), 400, code="invalid_request")
        texts = ["", "[]", "null", "{", '{"a": NaN}', json.dumps(body)[:-1] + ', "x": 1, "x": 1}']
        for text in texts:
            response = await client.request(method, path, content=text, headers={"Content-Type": "application/json"})
            assert_error(response, 400, code="invalid_request")
        assert_error(await client.request(method, path, content="x=1"), 415)
        for name in body:
            for value in WRONG:
                response = await client.request(method, path, json={**body, name: value})
                if not (name == "skip" and value is True) and not (name == "tenant" and value == "x"):
                    assert 400 <= response.status_code < 500, (name, value, response.text)
    after = site.world.registry.audit_entries(OPERATOR, "acme")
    assert after[len(before) :] == () or [entry.action for entry in after[len(before) :]] == [
        "version.skip_verification"
    ]


@pytest.mark.parametrize("value", ["0", "-1", "1001", "1e9", "99999999999999999999", "x", "", "١"])
async def test_page_sizes_have_limits(site: AdminSite, value: str) -> None:
    async with site.client(site.operator) as client:
        for path in ("tenants", "tenants/acme/keys", "tenants/acme/adapters", "tenants/acme/audit"):
            response = await client.get(path, params={"limit": value})
            assert_error(response, 400, code="invalid_request", param="limit")


async def test_unknown_query_parameters_and_bad_places_are_refused(site: AdminSite) -> None:
    async with site.client(site.operator) as client:
        assert_error(await client.get("tenants", params={"offset": "1"}), 400, param="offset")
        assert_error(await client.get("tenants", params={"after": "\x00"}), 400, param="after")
        assert_error(await client.get("tenants", params={"after": "a" * 500}), 400, param="after")
        assert_error(await client.get("tenants/acme/audit", params={"after": "-1"}), 400, param="after")


@pytest.mark.parametrize("text", ["..", ".", "\x00", "a/b", "A" * 5000, "ü", "%00", "acme\n", "' OR 1=1", "\ud83d"])
async def test_odd_names_in_a_path_are_not_found(site: AdminSite, text: str) -> None:
    name = quote(text.encode("utf-8", "surrogatepass"), safe="").replace(".", "%2E")
    async with site.client(site.operator) as client:
        for path in (
            f"tenants/{name}/keys",
            f"tenants/{name}/adapters",
            f"tenants/acme/adapters/{name}",
            f"tenants/acme/adapters/x/versions/{name}",
        ):
            method = "DELETE" if "versions" in path else "GET"
            assert_error(await client.request(method, path), 404)
        assert_error(await client.delete(f"tenants/acme/keys/{name}"), 404)


@pytest.mark.parametrize("version", ["0", "00", "-1", "9999999999", "1.0", "x", "٣"])
async def test_versions_that_cannot_be_are_not_found(site: AdminSite, version: str) -> None:
    site.world.active("acme", "support", 1)
    async with site.client(site.admin) as client:
        path = f"tenants/acme/adapters/support/versions/{quote(version)}"
        assert_error(await client.delete(path), 404, code="model_not_found")
        assert_error(await client.post(f"{path}/verify", json={}), 404, code="model_not_found")


async def test_a_slow_comparison_holds_up_no_other_request(site: AdminSite, tmp_path: Path) -> None:
    site.engine.compare_s = 0.5
    async with site.client(site.admin) as client:
        await upload(client, tmp_path)
        pending = asyncio.create_task(client.post("tenants/acme/adapters/support/versions/1/verify", json={}))
        await asyncio.sleep(0.05)
        started = asyncio.get_running_loop().time()
        await good(await client.get("caller"))
        took = asyncio.get_running_loop().time() - started
        assert not pending.done()
        await good(await pending)
    assert took < 0.4
