"""Where adapters are, as operators see it; and where a request's time went, as its caller does."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, Timings
from loraplex.registry import Role
from loraplex.server.known_names import MAX_NAMES, KnownNames
from loraplex.server.residency_routes import MAX_PAGE
from loraplex.testing import FakeEngine
from tests.registry.helpers import OPERATOR

from .helpers import ALPHA, BETA, assert_error, chunks, completion
from .registry_world import Site, ask

pytestmark = pytest.mark.anyio

PATH = "/admin/v1/residency"


def hold(engine: FakeEngine, *digests: AdapterDigest) -> None:
    for digest in digests:
        engine.add_adapter(Adapter(digest, (), 1, 0, (), None))


# ---------------------------------------------------------------------- residency
async def test_without_a_registry_adapters_are_told_with_their_names(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    other = AdapterDigest("c" * 64)
    hold(engine, ALPHA.digest, BETA.digest, other)
    body = (await client.get(PATH)).json()
    assert body["next_after"] is None
    assert [(one["digest"], one["names"]) for one in body["adapters"]] == [
        (ALPHA.digest, ["acme/alpha@3"]),
        (BETA.digest, ["beta@1"]),
        (other, []),
    ]
    assert {one["state"] for one in body["adapters"]} == {"resident"}


async def test_pages_hold_every_adapter_once(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    digests = [AdapterDigest(f"{idx:064x}") for idx in range(25)]
    hold(engine, *digests)
    found, after, num_pages = [], "", 0
    while after is not None:
        body = (await client.get(PATH, params={"limit": 10, "after": after})).json()
        found += [one["digest"] for one in body["adapters"]]
        after, num_pages = body["next_after"], num_pages + 1
    assert (found, num_pages) == (digests, 3)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": MAX_PAGE + 1}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"after": "X/"}, "after"),
        ({"zzz": 1}, "zzz"),
    ],
)
async def test_odd_queries_are_refused(client: httpx.AsyncClient, query: dict[str, Any], param: str) -> None:
    assert_error(await client.get(PATH, params=query), 400, param)


async def test_with_a_registry_it_is_for_operators_and_knows_what_was_asked_for(tmp_path: Path) -> None:
    site = Site(tmp_path)
    key = site.tenant("acme", "one", "two")
    async with site.client(key) as client:
        assert (await client.post("/v1/completions", json=ask("one"))).status_code == 200
        assert_error(await client.get(PATH), 403)
    async with site.client(site.world.key("acme", Role.TENANT_ADMIN)) as client:
        assert_error(await client.get(PATH), 403)
    async with site.client() as client:
        assert_error(await client.get(PATH), 401)
    async with site.client(site.operator_key("acme")) as client:
        (one,) = (await client.get(PATH)).json()["adapters"]
    assert (one["digest"], one["names"], one["in_host_memory"]) == (site.digest("acme", "one"), ["acme/one@1"], True)
    site.close()


async def test_what_cannot_be_read_is_failed_with_its_name_and_counted_until_it_is_tried_again(tmp_path: Path) -> None:
    site = Site(tmp_path)
    key, operator = site.tenant("acme", "bad", "good"), site.operator_key("acme")
    artifact = site.registry.adapters.version(OPERATOR, "acme", "bad", 1).artifact
    assert artifact is not None
    blob = next(path for path in (tmp_path / "data/artifacts/blobs").rglob(artifact.weights.key))
    whole = blob.read_bytes()
    blob.unlink()
    async with site.client(key) as client:
        assert (await client.post("/v1/completions", json=ask("good"))).status_code == 200
        assert_error(await client.post("/v1/completions", json=ask("bad")), 500, code="artifact_missing")
    async with site.client(operator) as client:
        rows = {one["digest"]: one for one in (await client.get(PATH)).json()["adapters"]}
        assert list(rows) == sorted(rows)
        row, good = rows[site.digest("acme", "bad")], rows[site.digest("acme", "good")]
        assert (row["state"], row["names"], row["error_code"]) == ("failed", ["acme/bad@1"], "artifact_missing")
        assert 0.0 < row["retry_after_s"] <= 0.5
        assert (row["in_host_memory"], row["num_pages"], row["num_running"]) == (False, 0, 0)
        assert (good["state"], good["error_code"], good["retry_after_s"]) == ("resident", None, None)
        page = (await client.get(PATH, params={"limit": 1, "after": min(rows)})).json()
        assert [one["digest"] for one in page["adapters"]] == [max(rows)]
        assert "loraplex_adapters_failed 1.0" in (await client.get("/metrics")).text
    blob.write_bytes(whole)
    await asyncio.sleep(0.55)
    async with site.client(key) as client:
        assert (await client.post("/v1/completions", json=ask("bad"))).status_code == 200
    async with site.client(operator) as client:
        states = {one["state"] for one in (await client.get(PATH)).json()["adapters"]}
        assert states == {"resident"}
        assert "loraplex_adapters_failed 0.0" in (await client.get("/metrics")).text
    site.close()


def test_known_names_are_the_last_few_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.known_names.MAX_ADAPTERS", 2)
    names, digests = KnownNames(), [AdapterDigest(name * 64) for name in "abc"]
    for idx in range(MAX_NAMES + 2):
        names.note(digests[0], f"t/x@{idx}")
    names.note(digests[1], "t/y@1")
    assert names.of(digests) == {
        digests[0]: tuple(f"t/x@{idx}" for idx in range(MAX_NAMES + 1, 1, -1)),
        digests[1]: ("t/y@1",),
    }
    names.note(digests[2], "t/z@1")
    assert names.of(digests).keys() == {digests[1], digests[2]}


def test_what_names_stand_for_is_bounded_and_forgotten_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.known_names.MAX_ADAPTERS", 2)
    names, (a, b) = KnownNames(), (AdapterDigest(name * 64) for name in "ab")
    names.note_current(a, "t/x@1")
    names.note_current(b, "u/x@1")
    assert names.current((a, b)) == {a: (), b: ()}
    names.note_current(b, "u/y@1")  # the third name; t's is forgotten
    assert names.current((a, b)) == {a: (), b: ("y", "x")}
    for idx in range(10):
        names.note_current((a, b)[idx % 2], f"v/z{idx}@1")
        names.note_current((b, a)[idx % 2], f"v/z{idx}@2")
    assert names.current((a, b)) == {a: ("z9",), b: ("z8",)}
    assert (len(names._current), len(names._meanings)) == (2, 2)


# ---------------------------------------------------------------------- timings
@pytest.mark.parametrize("stream", [False, True])
async def test_timings_add_up_to_the_time_of_the_answer(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.delay_s, engine.load_s, engine.cold = 0.02, 0.004 + 1e-9, True
    engine.timings = Timings(queue_s=9.0, prefill_s=0.005, decode_s=9.0)
    response = await client.post("/v1/completions", json=completion(model="beta", max_tokens=4, stream=stream))
    bodies = chunks(response) if stream else [response.json()]
    first, last = (body["x_loraplex"]["timings"] for body in (bodies[0], bodies[-1]))
    assert (last["prefill_s"], last["load_s"]) == (0.005, 0.004)
    assert last["queue_s"] >= 0.02 - 0.005 - 0.004 - 1e-6, "the time to the first token, less these"
    assert last["decode_s"] >= 3 * 0.02 - 1e-3
    assert sum(last.values()) < response.elapsed.total_seconds() + 0.02
    assert bodies[-1]["x_loraplex"]["load_s"] == 0.004, "in whole microseconds"
    assert first["queue_s"] == last["queue_s"]
    assert first["decode_s"] == 0.0 or not stream


async def test_timings_do_not_tell_what_others_loads_left(tmp_path: Path) -> None:
    """What the engine's pool did is a part of `queue_s`, in whole milliseconds; the log has it all."""
    site = Site(tmp_path)
    key = site.tenant("acme", "one")
    site.engine.delay_s = 0.03
    seen = []
    async with site.client(key) as client:
        await client.post("/v1/completions", json=ask("one"))
        for cold in (True, False):
            site.engine.cold, site.engine.load_s = cold, (0.02 + 1e-9) * cold
            seen.append((await client.post("/v1/completions", json=ask("one"))).json()["x_loraplex"]["timings"])
    assert [timings["load_s"] for timings in seen] == [0.0, 0.0]
    for timings in seen:
        assert timings["queue_s"] >= 0.029, "nothing is taken off for a load that is not told"
        assert timings["queue_s"] == round(timings["queue_s"], 3)
    logged = site.lines()[1]
    assert logged["load_s"] == 0.02
    assert all(logged[name] == round(logged[name], 6) for name in ("queue_s", "prefill_s", "decode_s"))
    assert logged["queue_s"] < seen[0]["queue_s"] - 0.015
    site.close()
