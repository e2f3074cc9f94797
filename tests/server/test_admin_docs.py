"""docs/admin-api.md names every route with its key, every field of a body, an upload and an object."""

import json
import re
from pathlib import Path

import pytest

from loraplex.server import admin_schema, admin_views
from loraplex.server.admin_openapi import OPERATIONS, describe
from loraplex.server.admin_routes import ADMIN_ROUTES
from loraplex.server.admin_uploads import FIELDS
from loraplex.server.admin_views import View
from loraplex.server.schema import Body

TEXT = (Path(__file__).parents[2] / "docs" / "admin-api.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")]


def test_every_route_is_documented_with_its_key() -> None:
    documented = {cells[0].strip("`"): cells[1] for cells in ROWS if cells[0].startswith(("`GET", "`P", "`DELETE"))}
    assert documented == {f"{spec.method} {spec.path}": spec.access.value for spec in ADMIN_ROUTES}


VIEWS = [view for view in vars(admin_views).values() if isinstance(view, type) and issubclass(view, View)]
BODIES = [body for body in vars(admin_schema).values() if isinstance(body, type) and issubclass(body, Body)]


@pytest.mark.parametrize("model", [*VIEWS, *BODIES], ids=lambda model: model.__name__)
def test_every_field_is_documented(model: type[View]) -> None:
    known = set(re.findall(r"[`\"]([a-z0-9_]+)[`\"]", TEXT))
    assert set(model.model_fields) <= known


def test_the_openapi_document_holds_every_route_and_every_object_that_it_names() -> None:
    document = describe(ADMIN_ROUTES)
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(spec.method, spec.path) for spec in ADMIN_ROUTES}
    text = json.dumps(document)
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= document["components"]["schemas"].keys()
    used = {operation.answer for operation in OPERATIONS.values()} | {one.body for one in OPERATIONS.values()}
    assert {body for body in BODIES if body is not Body} <= used
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert sorted(ids) == sorted(OPERATIONS)


def test_the_openapi_document_says_that_bodies_take_nothing_else() -> None:
    schemas = describe(ADMIN_ROUTES)["components"]["schemas"]
    for body in BODIES:
        if body is not Body:
            assert schemas[body.__name__]["additionalProperties"] is False


def test_every_part_of_an_upload_is_documented() -> None:
    parts = {cells[0].strip("`") for cells in ROWS if len(cells) == 2}
    assert {"config", "weights", *FIELDS} <= parts
