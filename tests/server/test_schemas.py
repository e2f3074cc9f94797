"""Strict bodies (RELIABILITY.md, T02): unknown keys at every depth, wrong types, extremes; none of it is run."""

import copy
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import httpx
import pytest

from loraplex.server import ServerConfig, create_app
from loraplex.server import app as app_module
from loraplex.server.schema import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from loraplex.testing import FakeEngine

from .helpers import BASE, FakeCatalog

pytestmark = pytest.mark.anyio

JSON_HEADERS = {"Content-Type": "application/json"}
EVERYTHING = {
    "model": BASE,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logit_bias": {"5": 1.5},
    "stop": ["x"],
    "stop_token_ids": [5],
    "max_tokens": 4,
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "seed": 5,
    "metadata": {"a": {"b": 1}},
}
MESSAGES = [
    {"role": "system", "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}], "name": "z"},
]
# A body for each schema with every object that it can hold, and the key paths below which anything may stand.
BODIES: dict[type[Body], tuple[str, dict[str, Any]]] = {
    CompletionBody: ("/v1/completions", {**EVERYTHING, "prompt": ["x", "y"]}),
    ChatBody: ("/v1/chat/completions", {**EVERYTHING, "messages": MESSAGES}),
    TokenizeBody: ("/tokenize", {"model": BASE, "messages": MESSAGES}),
    DetokenizeBody: ("/detokenize", {"model": BASE, "tokens": [65]}),
    LoadAdapterBody: ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "nowhere", "load_inplace": False}),
    UnloadAdapterBody: ("/v1/unload_lora_adapter", {"lora_name": "x", "lora_int_id": 1}),
}
FREE = {"metadata"}  # any object of the client's own
ANSWERS = {LoadAdapterBody: 404, UnloadAdapterBody: 404}  # there is no such adapter; else 200

# Values that no field of a type may have. Every number has a limit far below these.
WRONG: dict[type, list[Any]] = {
    int: [2**63, -(2**63) - 1, 2**64, 10**40, 1.5, 1e300, "1", True, [], [1], {}, {"a": 1}],
    float: [1e39, -1e39, 10**40, "1", True, [], {}],
    bool: [0, 1, 2, -1, "true", "", [], {}],
    str: [0, 1, 1.5, True, [], [1], {}],
    list: [0, 1, True, {}, {"0": "x"}],
    dict: [0, 1, True, "x", [], ["x"]],
}
RAW = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "01", "+1", "1.", ".5", "0x10", "'x'", "undefined"]


def objects(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths to every object inside a body, the body itself included, but for what is free."""
    if path and path[0] in FREE:
        return
    if isinstance(value, dict):
        yield path
        for key, item in value.items():
            yield from objects(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from objects(item, (*path, index))


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        value = value[part]
    return value


def plain_types(annotation: Any) -> set[type]:
    """The JSON types that a field takes."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return plain_types(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(plain_types, get_args(annotation)))
    if origin is typing.Literal:
        return {type(item) for item in get_args(annotation)}
    if annotation is type(None) or annotation is object:
        return set()
    return {origin if origin in (list, dict) else dict if not isinstance(annotation, type) else annotation}


def wrong_values(schema: type[Body], name: str) -> list[Any]:
    """Values of no type that the field takes."""
    kinds = plain_types(schema.model_fields[name].annotation)
    kinds = {kind if kind in WRONG else dict for kind in kinds}
    if name == "stop":  # one text stands for a list of it
        kinds = {list}
    if len(kinds) != 1:
        return []
    (kind,) = kinds
    return WRONG[kind]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine, tmp_path: Path) -> typing.AsyncIterator[httpx.AsyncClient]:
    config = ServerConfig(adapter_roots=(tmp_path,), access_log=False)
    app = create_app(engine, FakeCatalog(), config)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


def test_every_body_of_ours_is_tried() -> None:
    ours = {cls for cls in Body.__subclasses__() if cls.__module__ == Body.__module__} - {GenerationBody}
    assert ours | set(GenerationBody.__subclasses__()) == set(BODIES)
    posts = {spec.path for spec in (*app_module.ROUTES, *app_module.RUNTIME_ROUTES) if spec.method == "POST"}
    assert posts == {path for path, _ in BODIES.values()}


@pytest.mark.parametrize("schema", BODIES)
async def test_the_whole_body_is_taken(client: httpx.AsyncClient, schema: type[Body]) -> None:
    """The positive control."""
    path, body = BODIES[schema]
    assert (await client.post(path, json=body)).status_code == ANSWERS.get(schema, 200)


@pytest.mark.parametrize("schema", BODIES)
async def test_unknown_keys_at_every_depth_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, schema: type[Body]
) -> None:
    path, body = BODIES[schema]
    places = list(objects(body))
    assert len(places) >= {CompletionBody: 3, ChatBody: 7, TokenizeBody: 5}.get(schema, 1)
    for place in places:
        for key in ("zzz", "", "__proto__", "__class__", "model_config", "api_base", "lora_path ", "Model", "x" * 500):
            for value in (None, 1, {"a": 1}):
                changed = copy.deepcopy(body)
                if key in at(changed, place):
                    continue
                at(changed, place)[key] = value
                if value is None and not place:  # null stands for an absent field, but only for one that there is
                    assert (await client.post(path, json=changed)).status_code == 400
                    continue
                assert (await client.post(path, json=changed)).status_code == 400, (place, key, value)
    assert engine.started == []


@pytest.mark.parametrize("schema", BODIES)
async def test_values_that_no_field_may_have_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, schema: type[Body]
) -> None:
    path, body = BODIES[schema]
    tried = 0
    for name in schema.model_fields:
        for value in wrong_values(schema, name):
            if value == [] and name in ("stop_token_ids", "stop"):
                continue
            response = await client.post(path, json={**body, name: value})
            assert response.status_code == 400, (name, value, response.text)
            error = response.json()["error"]
            assert len(error["message"]) < 500
            assert error["param"] is not None, (name, value)
            tried += 1
    assert tried >= 4 * len(schema.model_fields) - 8
    assert engine.started == []


async def test_fields_that_may_only_be_false_take_no_other_nothing(client: httpx.AsyncClient) -> None:
    path, body = BODIES[CompletionBody]
    for name in ("include_obfuscation", "continuous_usage_stats"):
        for value, status in ((False, 200), (0, 400), (True, 400), ("", 400), ([], 400)):
            options = {"stream_options": {name: value}}
            assert (await client.post(path, json={**body, **options})).status_code == status, (name, value)


@pytest.mark.parametrize("schema", BODIES)
async def test_what_is_no_json_and_keys_that_stand_twice_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, schema: type[Body]
) -> None:
    path, body = BODIES[schema]
    for place in objects(body):
        for raw in RAW:
            marked = copy.deepcopy(body)
            at(marked, place)["zzz-mark"] = "zzz-value"
            for text in (
                json.dumps(marked).replace('"zzz-value"', raw),
                json.dumps(marked).replace('"zzz-mark": "zzz-value"', '"k": 1, "k": 1'),
            ):
                response = await client.post(path, content=text, headers=JSON_HEADERS)
                assert response.status_code == 400, text
    assert engine.started == []


async def test_extremes_inside_what_is_free_are_carried_and_change_nothing(client: httpx.AsyncClient) -> None:
    path, body = BODIES[CompletionBody]
    for value in ({"a": 2**70}, {"a": ["x"] * 1000}, {"": None}):
        assert (await client.post(path, json={**body, "metadata": value})).status_code == 200


async def test_a_schema_that_ignores_what_it_does_not_know_is_seen(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: without the refusal, a body with an unknown key goes through."""
    from loraplex.server import bodies as body_module

    real = body_module.validate

    def lenient(value: dict[str, object], schema: type[Body]) -> Body:
        return real({name: item for name, item in value.items() if name in schema.model_fields}, schema)

    monkeypatch.setattr(body_module, "validate", lenient)
    path, body = BODIES[CompletionBody]
    assert (await client.post(path, json={**body, "zzz": 1})).status_code == 200
