"""The handlers, and the table of routes. A route is behind the API key unless the table says that it is public."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loraplex.core import AdapterRef, EngineDead, InvalidRequest, ModelNotFound, limits
from loraplex.server import prompts
from loraplex.server.answers import ChatFormat, CompletionFormat
from loraplex.server.body import read_body
from loraplex.server.catalog import ModelEntry
from loraplex.server.context import context_of
from loraplex.server.generation import Job, answer
from loraplex.server.metrics import CONTENT_TYPE
from loraplex.server.schema import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from loraplex.server.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One route of the app."""

    method: str
    path: str
    handler: Handler
    public: bool = False


async def create_completion(service: Service, http: Request) -> Response:
    """POST /v1/completions."""
    body = await read_body(http, CompletionBody, service.config.body_timeout_s)
    adapter = _resolve(service, http, body.model)
    params = prompts.completion_params(body)
    params.check_vocabulary(service.engine.base.vocab_size)
    items = prompts.completion_items(body.prompt)
    given = await service.texts.run(
        prompts.num_chars(items), prompts.completion_prompts, service.engine, items, body.add_special_tokens, body.echo
    )
    for prompt in given:
        prompts.check_fits(service.engine, prompt, params, "prompt")
    wording = CompletionFormat(want_logprobs=params.logprobs is not None)
    job = Job(given, params, adapter, wording, body.stream, _include_usage(body), body.echo)
    return await answer(service, http, job)


async def create_chat_completion(service: Service, http: Request) -> Response:
    """POST /v1/chat/completions."""
    body = await read_body(http, ChatBody, service.config.body_timeout_s)
    adapter = _resolve(service, http, body.model)
    params = prompts.chat_params(body)
    params.check_vocabulary(service.engine.base.vocab_size)
    num_chars = prompts.num_message_chars(body.messages)
    prompt = await service.texts.run(num_chars, prompts.chat_prompt, service.engine, body)
    limit_param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    prompts.check_fits(service.engine, prompt, params, "messages", limit_param)
    wording = ChatFormat(want_logprobs=params.logprobs is not None)
    return await answer(service, http, Job((prompt,), params, adapter, wording, body.stream, _include_usage(body)))


def _include_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _resolve(service: Service, http: Request, model: str) -> AdapterRef | None:
    """The adapter a request named; None only where it named the base. Raises ModelNotFound."""
    context_of(http).requested_model = model
    return service.catalog.resolve(model)


async def list_models(service: Service, http: Request) -> Response:
    """GET /v1/models."""
    cards = [_card(service, service.engine.base.name, None)]
    cards.extend(_card(service, entry.ref.name, entry) for entry in service.catalog.list())
    return JSONResponse({"object": "list", "data": cards})


async def get_model(service: Service, http: Request) -> Response:
    """GET /v1/models/{model}."""
    model = str(http.path_params["model"])
    if not model.isprintable() or len(model) > limits.MAX_MODEL_NAME_CHARS:
        raise ModelNotFound(model[: limits.MAX_MODEL_NAME_CHARS])
    adapter = _resolve(service, http, model)
    if adapter is None:
        return JSONResponse(_card(service, model, None))
    entry = next((entry for entry in service.catalog.list() if entry.ref == adapter), None)
    if entry is None:  # unloaded since it was resolved
        raise ModelNotFound(model)
    return JSONResponse(_card(service, model, entry))


def _card(service: Service, model: str, entry: ModelEntry | None) -> Mapping[str, object]:
    """A model card. `root` identifies the weights; it is never a path of the server.

    `declared_base` is what the adapter's config says; nothing proves it, hence `base_verified`. Null for the base.
    """
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
        "base_verified": False if entry else None,
        "max_model_len": service.engine.max_model_len,
    }


async def tokenize(service: Service, http: Request) -> Response:
    """POST /tokenize, as vLLM has it."""
    body = await read_body(http, TokenizeBody, service.config.body_timeout_s)
    engine = service.engine
    if body.model is not None:
        _resolve(service, http, body.model)
    if body.prompt is not None and not body.messages:
        token_ids = await service.texts.run(len(body.prompt), engine.encode, body.prompt, body.add_special_tokens)
    elif body.messages and body.prompt is None:
        messages, num_chars = prompts.chat_messages(body.messages), prompts.num_message_chars(body.messages)
        token_ids = await service.texts.run(num_chars, engine.encode_chat, messages, body.add_generation_prompt)
    else:
        raise InvalidRequest("Give either prompt or messages, and not an empty list.", "prompt")
    strings = None
    if body.return_token_strs:
        strings = await service.texts.run(len(token_ids), prompts.token_texts, engine, token_ids)
    return JSONResponse(
        {
            "count": len(token_ids),
            "max_model_len": engine.max_model_len,
            "tokens": list(token_ids),
            "token_strs": strings,
        }
    )


async def detokenize(service: Service, http: Request) -> Response:
    """POST /detokenize, as vLLM has it."""
    body = await read_body(http, DetokenizeBody, service.config.body_timeout_s)
    if body.model is not None:
        _resolve(service, http, body.model)
    text = await service.texts.run(len(body.tokens), prompts.text_of, service.engine, body.tokens)
    return JSONResponse({"prompt": text})


async def health(service: Service, http: Request) -> Response:
    """GET /health: 200 only while the engine's step loop is alive."""
    if not service.engine.is_alive:
        raise EngineDead("The engine has stopped.")
    return JSONResponse({"status": "ok"})


async def ready(service: Service, http: Request) -> Response:
    """GET /ready: 200 while new requests are welcome."""
    if not service.engine.is_alive:
        raise EngineDead("The engine has stopped.")
    if service.lifecycle.draining:
        raise EngineDead("The server is shutting down.")
    return JSONResponse({"status": "ready"})


async def metrics(service: Service, http: Request) -> Response:
    """GET /metrics."""
    return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


ROUTES: tuple[RouteSpec, ...] = (
    RouteSpec("POST", "/v1/completions", create_completion),
    RouteSpec("POST", "/v1/chat/completions", create_chat_completion),
    RouteSpec("GET", "/v1/models", list_models),
    RouteSpec("GET", "/v1/models/{model:path}", get_model),
    RouteSpec("POST", "/tokenize", tokenize),
    RouteSpec("POST", "/detokenize", detokenize),
    RouteSpec("GET", "/health", health, public=True),
    RouteSpec("GET", "/ready", ready, public=True),
    RouteSpec("GET", "/metrics", metrics, public=True),
)
