"""The handlers, and the table of routes. A route is behind an API key unless the table says that it is public."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loraplex.core import AdapterRef, EngineDead, InvalidRequest, Overloaded, OverloadReason
from loraplex.server import prompts
from loraplex.server.answers import ChatFormat, CompletionFormat
from loraplex.server.callers import Access
from loraplex.server.context import context_of
from loraplex.server.deadlines import Deadline
from loraplex.server.generation import Job, answer
from loraplex.server.metrics import CONTENT_TYPE
from loraplex.server.model_routes import get_model, list_models
from loraplex.server.routing import RouteSpec
from loraplex.server.schema import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from loraplex.server.service import Service
from loraplex.server.tenant_limits import engine_priority
from loraplex.server.waiters import Progress, Stage, Waiter

Prepare = Callable[[Waiter], Awaitable[Job]]
"""Gets a request's adapter and makes a job of its body; the waiter is kept told what is waited for."""


async def create_completion(service: Service, http: Request) -> Response:
    """POST /v1/completions."""
    body = await service.bodies.read(http, CompletionBody)
    params = prompts.completion_params(body)
    params.check_vocabulary(service.engine.base.vocab_size)
    deadline = _deadline(http, body)
    items = prompts.completion_items(body.prompt)
    priority = _enter(service, http, body, len(items))

    async def prepare(waiter: Waiter) -> Job:
        adapter = await _acquire(service, http, body, waiter)
        num_chars, add_special_tokens = prompts.num_chars(items), body.add_special_tokens
        given = await service.texts.run(
            num_chars, prompts.completion_prompts, service.engine, items, add_special_tokens, body.echo
        )
        for prompt in given:
            prompts.check_fits(service.engine, prompt, params, "prompt")
        wording = CompletionFormat(want_logprobs=params.logprobs is not None)
        tenant, with_usage = _charge_prompts(http, given), _include_usage(body)
        return Job(given, params, adapter, tenant, priority, deadline, wording, body.stream, with_usage, body.echo)

    return await answer(service, http, partial(_admitted, service, http, len(items) * body.n, deadline, prepare))


async def create_chat_completion(service: Service, http: Request) -> Response:
    """POST /v1/chat/completions."""
    body = await service.bodies.read(http, ChatBody)
    params = prompts.chat_params(body)
    params.check_vocabulary(service.engine.base.vocab_size)
    deadline = _deadline(http, body)
    priority = _enter(service, http, body, 1)

    async def prepare(waiter: Waiter) -> Job:
        adapter = await _acquire(service, http, body, waiter)
        num_chars = prompts.num_message_chars(body.messages)
        prompt = await service.texts.run(num_chars, prompts.chat_prompt, service.engine, body)
        limit_param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        prompts.check_fits(service.engine, prompt, params, "messages", limit_param)
        wording = ChatFormat(want_logprobs=params.logprobs is not None)
        tenant = _charge_prompts(http, (prompt,))
        return Job((prompt,), params, adapter, tenant, priority, deadline, wording, body.stream, _include_usage(body))

    return await answer(service, http, partial(_admitted, service, http, body.n, deadline, prepare))


def _include_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _deadline(http: Request, body: GenerationBody) -> Deadline | None:
    return None if body.deadline_s is None else Deadline(body.deadline_s, context_of(http).started_at)


def _enter(service: Service, http: Request, body: GenerationBody, num_prompts: int) -> int:
    """Take the tenant's place for a body before anything is done for it; the engine's priority.

    Raises CallerLimitReached and InvalidRequest.
    """
    context = context_of(http)
    context.requested_model = body.model
    priority = engine_priority(context.known_caller, body.priority)
    context.tally.place = service.tenants.enter(context.known_caller, num_prompts * body.n)
    return priority


def _charge_prompts(http: Request, given: Sequence[prompts.Prompt]) -> str:
    """Have the tenant pay for its prompts; whose share the request counts to. Raises CallerLimitReached."""
    context = context_of(http)
    if context.tally.place is not None:
        context.tally.place.charge_prompts(sum(len(prompt.token_ids) for prompt in given))
    return context.known_caller.account


async def _admitted(
    service: Service, http: Request, num_sequences: int, deadline: Deadline | None, prepare: Prepare
) -> Job:
    """The job that `prepare` makes. Meanwhile it counts to the engine's queue, which is to have it at once.

    Raises what `Waiters.enter` and `prepare` do, and DeadlinePassed.
    """
    with service.waiters.enter(context_of(http).known_caller.account, num_sequences) as waiter:
        work = prepare(waiter)
        return await (work if deadline is None else deadline.bound(work))


async def _acquire(service: Service, http: Request, body: GenerationBody, waiter: Waiter) -> AdapterRef | None:
    """The adapter a request runs on, ready and kept until the answer has ended; None only for the base.

    Raises what `ModelCatalog.acquire` does.
    """
    context = context_of(http)
    on_resolved = partial(context.pin, service.engine.base)
    adapter = context.hold(await service.catalog.acquire(context.known_caller, body.model, on_resolved, waiter))
    waiter.progress = Progress(Stage.TEXT)
    return adapter


async def _check_model(service: Service, http: Request, model: str | None) -> None:
    """Raise ModelNotFound if a model is named that the caller may not use; for routes that run no weights."""
    if model is not None:
        context = context_of(http)
        context.requested_model = model
        await service.catalog.find(context.known_caller, model)


async def tokenize(service: Service, http: Request) -> Response:
    """POST /tokenize, as vLLM has it."""
    body = await service.bodies.read(http, TokenizeBody)
    engine = service.engine
    await _check_model(service, http, body.model)
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
    body = await service.bodies.read(http, DetokenizeBody)
    await _check_model(service, http, body.model)
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
    if not service.preloader.is_ready:
        message = "Adapters are being brought in (--pin, --preload, --preload-recent)."
        raise Overloaded(message, 1.0, OverloadReason.ADAPTER_LOAD)
    if service.registry is not None:
        await service.queries.run(service.registry.check_ready)
    return JSONResponse({"status": "ready"})


async def metrics(service: Service, http: Request) -> Response:
    """GET /metrics. With a registry it is for operators: it names the adapters at work, whoever owns them."""
    await service.catalog.refresh_names()
    return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


ROUTES: tuple[RouteSpec, ...] = (  # `app.route_table` adds to it what a server's settings ask for
    RouteSpec("POST", "/v1/completions", create_completion),
    RouteSpec("POST", "/v1/chat/completions", create_chat_completion),
    RouteSpec("GET", "/v1/models", list_models),
    RouteSpec("GET", "/v1/models/{model:path}", get_model),
    RouteSpec("POST", "/tokenize", tokenize),
    RouteSpec("POST", "/detokenize", detokenize),
    RouteSpec("GET", "/health", health, Access.PUBLIC),
    RouteSpec("GET", "/ready", ready, Access.PUBLIC),
    RouteSpec("GET", "/metrics", metrics, Access.PUBLIC),
)
