"""GET /v1/models: what the caller may use, in pages as OpenAI has them."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loraplex.core import InvalidRequest, ModelNotFound, limits
from loraplex.server.catalog import ModelEntry
from loraplex.server.context import context_of
from loraplex.server.service import Service

MAX_PAGE = 1000


async def list_models(service: Service, http: Request) -> Response:
    """GET /v1/models: the base first, then adapters by name, from the one behind `after`."""
    caller, base = context_of(http).known_caller, service.engine.base.name
    after, limit = _after(http), _limit(http)
    cards: list[Mapping[str, object]] = []
    if not after and service.catalog.may_use_base(caller):
        cards.append(card(service, base, None))
    num_wanted = limit - len(cards)
    page = await service.catalog.page(caller, "" if after == base else after, max(1, num_wanted))
    cards.extend(card(service, entry.ref.name, entry) for entry in page.entries[:num_wanted])
    has_more = page.has_more or len(page.entries) > num_wanted
    ids = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": cards, **ids, "has_more": has_more})


async def get_model(service: Service, http: Request) -> Response:
    """GET /v1/models/{model}."""
    model = str(http.path_params["model"])
    if not model.isprintable() or len(model) > limits.MAX_MODEL_NAME_CHARS:
        raise ModelNotFound(model[: limits.MAX_MODEL_NAME_CHARS])
    context = context_of(http)
    context.requested_model = model
    return JSONResponse(card(service, model, await service.catalog.find(context.known_caller, model)))


def card(service: Service, model: str, entry: ModelEntry | None) -> Mapping[str, object]:
    """A model card; of the base where `entry` is None. `root` identifies the weights; it is never a path."""
    base_name = service.engine.base.name
    return {
        "id": model,
        "object": "model",
        "created": int(entry.created) if entry else service.created,
        "owned_by": "loraplex",
        "root": entry.ref.digest if entry else base_name,
        "parent": base_name if entry else None,
        "version": entry.ref.version if entry else None,
        "declared_base": entry.declared_base if entry else None,
        "base_verified": entry.base_verified if entry else None,
        "max_model_len": service.engine.max_model_len,
    }


def _after(http: Request) -> str:
    after = _single(http, "after") or ""
    if not after.isprintable() or len(after) > limits.MAX_MODEL_NAME_CHARS:
        raise InvalidRequest(f"after must be the id of a model, got {after!r:.80}.", "after")
    return after


def _limit(http: Request) -> int:
    text = _single(http, "limit")
    if text is None:
        return MAX_PAGE
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_PAGE)) and 1 <= int(text) <= MAX_PAGE):
        raise InvalidRequest(f"limit must be between 1 and {MAX_PAGE}, got {text!r:.80}.", "limit")
    return int(text)


def _single(http: Request, name: str) -> str | None:
    """A query parameter that may stand there once; others are ignored, as no other one selects models."""
    values = http.query_params.getlist(name)
    if len(values) > 1:
        raise InvalidRequest(f"{name} stands {len(values)} times in the query.", name)
    return values[0] if values else None
